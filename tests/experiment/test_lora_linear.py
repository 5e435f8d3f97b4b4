"""The faster forward of plain LoRA layers, compared with peft's own forward and with float64."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.experiment.lora import lora
from tests.conftest import needs
from tests.models.fixtures import fresh
from tests.tolerances import LOW_RATIO_MEDIAN, ORACLE, error

needs("peft")
from peft import LoraConfig  # noqa: E402
from peft.tuners.lora.layer import Linear as PeftLinear  # noqa: E402

from laconic.experiment.lora.lora_linear import define_lora_linear, use_fast_forward  # noqa: E402

IDS = torch.tensor([[5, 17, 3, 60, 22, 9], [3, 3, 80, 41, 2, 17]])
pytestmark = pytest.mark.usefixtures("unchecked")


def build_model(family: str, dtype: torch.dtype, **options: Any) -> Any:
    """Return a decoder with an adapter whose B is not 0."""
    settings = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options})
    model = lora.add_adapter(fresh(family).to(dtype), settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    return model.to(dtype) if dtype == torch.float64 else model


def use_peft_forward(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is define_lora_linear():
            module.__class__ = PeftLinear


def train_step(model: Any) -> dict[str, Tensor]:
    """Return the logits and the gradients of a training step."""
    model.zero_grad()
    logits = model.logits(model(model.embed(IDS)).hidden_states)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), IDS[:, 1:].flatten()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def compare(model: Any, step: Callable[[Any], dict[str, Tensor]] = train_step) -> tuple[dict[str, Tensor], ...]:
    """Return what a step computes with the faster forward, and with peft's."""
    fast = step(model)
    use_peft_forward(model)
    slow = step(model)
    use_fast_forward(model)
    assert fast.keys() == slow.keys()
    assert {name: t.dtype for name, t in fast.items()} == {name: t.dtype for name, t in slow.items()}
    return fast, slow


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_lora_linear_equals_peft(family: str) -> None:
    model = build_model(family, torch.float64)
    fast, slow = compare(model)
    assert (
        sum("lora_A" in name for name in fast)
        == sum(type(module) is define_lora_linear() for module in model.modules())
        > 0
    )
    assert max(error(fast[name], slow[name]) for name in fast) <= ORACLE


@pytest.mark.parametrize("autocast", [False, True])
def test_lora_linear_in_bfloat16_is_as_exact_as_peft(autocast: bool) -> None:
    def step(model: Any) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, autocast):
            return train_step(model)

    model = build_model("llama", torch.float32 if autocast else torch.bfloat16)
    fast, slow = compare(model, step)
    exact = train_step(build_model("llama", torch.float64))
    ours, theirs = ([error(t[name], exact[name]) for name in exact] for t in (fast, slow))
    assert sum(ours) <= LOW_RATIO_MEDIAN * sum(theirs)
    assert fast["logits"].dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"lora_dropout": 0.5}], ids=str)
def test_lora_linear_leaves_variants_to_peft(options: dict[str, Any]) -> None:
    model = build_model("llama", torch.float32, **options).train()

    def step(model: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return train_step(model)

    fast, slow = compare(model, step)
    assert all(torch.equal(fast[name], slow[name]) for name in fast)


def test_lora_linear_without_active_adapter_is_the_base_layer() -> None:
    model, base = build_model("llama", torch.float32), fresh("llama")
    plain = base.logits(base(base.embed(IDS)).hidden_states)

    def logits() -> Tensor:
        return model.logits(model(model.embed(IDS)).hidden_states)

    before = logits()
    assert error(before, plain) > 1e-2
    with model.disable_adapter():
        assert torch.equal(logits(), plain)
    model.merge_adapter()
    assert error(logits(), before) < 1e-5
    model.unmerge_adapter()
    assert error(logits(), before) < 1e-5


def test_lora_linear_can_be_pickled() -> None:
    model = build_model("llama", torch.float32)
    copied = pickle.loads(pickle.dumps(model))
    expected, ours = (m.logits(m(m.embed(IDS)).hidden_states) for m in (model, copied))
    assert torch.equal(ours, expected)


def test_lora_linear_trains_an_unfrozen_base_by_peft() -> None:
    model = build_model("llama", torch.float64).requires_grad_()
    fast, slow = compare(model)
    assert any("base_layer" in name for name in fast)
    assert all(torch.equal(fast[name], slow[name]) for name in fast)
