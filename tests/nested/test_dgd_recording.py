"""DGD: recorded gradients follow .grad, frozen weights, copies of model and optimizer, invalid settings."""

import copy
import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import UsageError
from laconic.nested.optim.dgd import DGD
from laconic.nested.optim.input_recording import RecordedLinear, record_inputs
from tests.models.fixtures import fresh, noise
from tests.tolerances import FLOAT32, ORACLE, largest

X, Y = noise(1, 12, 4), noise(2, 12, 3)


def build_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def compute_loss(model: nn.Module) -> Tensor:
    return (model(X.to(next(model.parameters()).dtype)) - Y).square().mean()


def flatten(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> Tensor:
    """Return the parameters after some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        compute_loss(model).backward()
        optimizer.step()
    return flatten(model)


def step_after(change: Callable[[nn.Module], object], scale: float = 1.0, **settings: Any) -> Tensor:
    """Return the parameters after a step whose gradients are changed before it."""
    model = record_inputs(build_model())
    optimizer = DGD(model.parameters(), 0.3, **settings)
    (scale * compute_loss(model)).backward()
    change(model)
    optimizer.step()
    return flatten(model)


def multiply_gradients(model: nn.Module, factor: float) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad *= factor


def test_dgd_follows_unscaling_and_clipping_of_gradients() -> None:
    plain = step_after(lambda model: None)
    for scale in (2.0**16, 1e-3):
        unscaled = step_after(partial(multiply_gradients, factor=1 / scale), scale)
        assert largest(unscaled, plain) <= ORACLE
    half = step_after(lambda model: None, 0.5)
    assert largest(half, plain) > 1e-4
    clipped = step_after(partial(multiply_gradients, factor=0.5))
    assert largest(clipped, half) <= ORACLE
    erased = step_after(partial(multiply_gradients, factor=0.0))
    assert erased.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dgd_update_does_not_depend_on_the_loss_scale(dtype: torch.dtype) -> None:
    results = []
    for is_enabled in (False, True):
        model = record_inputs(build_model().float())
        optimizer = DGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_enabled)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = compute_loss(model)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        results.append(flatten(model))
    assert largest(*results) <= (FLOAT32 if dtype == torch.float32 else 1e-2)


def build_pair(**settings: Any) -> tuple[nn.Module, DGD]:
    model = record_inputs(build_model())
    return model, DGD(model.named_parameters(), 0.3, **settings)


def test_dgd_follows_any_change_of_gradients() -> None:
    """Here by the value, which no factor gives."""
    clipped = step_after(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.02))
    assert largest(clipped, step_after(lambda model: None)) > 1e-4


def test_dgd_leaves_maps_that_a_step_does_not_use() -> None:
    """Their gradients are zeros after `zero_grad(set_to_none=False)`, as in a model with several heads."""
    model = record_inputs(nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]))
    optimizer = DGD(model.parameters(), 0.1)
    for used in (0, 1, 0):
        unused = model[1 - used].weight.detach().clone()
        optimizer.zero_grad(set_to_none=False)
        model[used](torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        assert torch.equal(model[1 - used].weight, unused)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_dgd_trains_the_bias_of_a_frozen_weight(set_to_none: bool) -> None:
    """Frozen before the optimizer is built, or after a step; under a schedule that halves the learning rate."""
    for steps_before in (0, 1):
        model = record_inputs(build_model())
        model[0].weight.requires_grad_(steps_before > 0)
        optimizer = DGD(model.parameters(), 0.3, adam_lr=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5)
        train(model, optimizer, steps_before)
        model[0].weight.requires_grad_(False)
        weight, before = model[0].weight.detach().clone(), model[0].bias.detach().clone()
        optimizer.zero_grad(set_to_none)
        compute_loss(model).backward()
        gradient = model[0].bias.grad
        optimizer.step()
        schedule.step()
        assert torch.equal(model[0].weight, weight)
        change = -0.01 * gradient.sign()  # AdamW's first step
        assert largest(model[0].bias.detach() - before, change) <= FLOAT32


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_dgd_trains_decoders_with_every_kind_of_layer(family: str) -> None:
    decoder = record_inputs(fresh(family))
    optimizer = DGD(DGD.build_param_groups(decoder), lr=0.1)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    decoder.logits(decoder(decoder.embed(torch.tensor([[5, 6, 7]]))).hidden_states).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in decoder.named_parameters() if p.grad.abs().any())


def test_dgd_build_param_groups_gives_other_matrices_to_adamw() -> None:
    model = build_model()
    model.table = nn.Parameter(torch.ones(3, 3).double())
    groups = DGD.build_param_groups(record_inputs(model))
    assert [(group["rule"], [name for name, _ in group["params"]]) for group in groups] == [
        ("dgd", ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("adamw", ["table"]),
    ]


def test_dgd_leaves_a_bias_that_is_frozen_later() -> None:
    model, optimizer = build_pair(momentum=0.5)
    train(model, optimizer)
    model[0].bias.requires_grad_(False)
    before = model[0].bias.detach().clone()
    train(model, optimizer)
    assert torch.equal(model[0].bias, before)


def pickle_copy(pair: tuple[nn.Module, DGD]) -> tuple[nn.Module, DGD]:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copy_reversed(pair: tuple[nn.Module, DGD]) -> tuple[nn.Module, DGD]:
    """Copy the optimizer before its model."""
    optimizer, model = copy.deepcopy(pair[::-1])
    return model, optimizer


@pytest.mark.parametrize("copy_pair", [copy.deepcopy, copy_reversed, pickle_copy])
def test_dgd_copied_with_its_model_trains_like_the_original(copy_pair: Any) -> None:
    model, optimizer = build_pair(inputs="raw", momentum=0.5)
    train(model, optimizer)
    compute_loss(model).backward()  # is not copied, as gradients are not
    other, copied = copy_pair((model, optimizer))
    assert torch.equal(train(other, copied), train(model, optimizer))
    assert not torch.equal(flatten(other), train(model, optimizer))
    copied.add_param_group({"params": [("new", nn.Parameter(torch.ones(2)))]})
    assert copied.param_groups[-1]["lr"] == optimizer.adamw_settings["lr"]


def test_dgd_copied_without_its_model_is_refused() -> None:
    _, optimizer = build_pair()
    with pytest.raises(UsageError, match=r"no longer recorded.*deepcopy\(\(model, optimizer\)\)"):
        copy.deepcopy(optimizer).step()


def test_dgd_is_not_disturbed_by_a_copy_that_shares_its_parameters() -> None:
    model, optimizer = build_pair()
    shared = {id(p): p for p in model.parameters()}
    assert copy.deepcopy(model, dict[int, Any](shared))[0].weight is model[0].weight
    assert torch.equal(train(model, optimizer), train(*build_pair()))


def test_record_inputs_of_a_second_model_with_the_same_parameters() -> None:
    """Such as a `HopeAttention` on a decoder that is recorded."""
    model, optimizer = build_pair()
    second = build_model()
    second.load_state_dict(dict(model.named_parameters()), assign=True)
    assert torch.equal(train(record_inputs(second), optimizer), train(*build_pair()))


def test_record_inputs_leaves_a_weight_that_another_model_shares_between_two_maps() -> None:
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    record_inputs(nn.Sequential(embedding, nn.Linear(4, 4), head))
    untied = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    untied[0].weight = embedding.weight
    optimizer = DGD(DGD.build_param_groups(record_inputs(untied)), 0.3)
    untied(torch.randint(7, (2, 3))).square().mean().backward()
    optimizer.step()
    assert (type(untied[0]), type(untied[1])) == (nn.Embedding, RecordedLinear)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "settings",
    [
        {"inputs": "short"}, {"value": "y"}, {"lr": -0.1}, {"lr": math.inf},
        {"lr": "0.1"}, {"lr": None}, {"momentum": 1.0},
        {"adam_lr": -1.0},
        {"adam_weight_decay": -1.0}, {"adam_betas": (1.5, 2.0)}, {"adam_betas": (0.9,)}, {"momentum": math.nan},
    ],
    ids=str,
)  # fmt: skip
def test_dgd_refuses_invalid_settings(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(UsageError, match=name):
        DGD(record_inputs(build_model()).parameters(), **settings)
    if name in ("lr", "adam_betas", "momentum"):
        model, optimizer = build_pair()
        with pytest.raises(UsageError, match=rf"DGD: {name}"):
            DGD([{"params": list(model.parameters()), **settings}])
        groups = list(optimizer.param_groups)
        with pytest.raises(UsageError, match=rf"DGD: {name}"):
            optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(2)))], **settings})
        assert optimizer.param_groups == groups
