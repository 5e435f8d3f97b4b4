"""Linear layers by oneDNN equal those of torch, with gradients, and are used only where that is meant."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from laconic.models.ops import linear as module
from laconic.models.ops.linear import apply_linear, can_use_onednn, linear


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN whatever the processor is."""
    monkeypatch.setattr(module, "is_onednn_faster", lambda: True)


def build_layer(*, bias: bool) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(0)
    return torch.randn(3, 5, 24), nn.Linear(24, 40, bias=bias)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", ["x", "weights", "both"])
def test_linear_by_onednn_has_torchs_values_and_gradients(bias: bool, trained: str) -> None:
    x, layer = build_layer(bias=bias)
    layer.requires_grad_(trained != "x")
    ours, theirs = (x.clone().requires_grad_(trained != "weights") for _ in range(2))
    parameters = list(layer.parameters()) if trained != "x" else []
    y, expected = apply_linear(layer, ours), layer(theirs)
    torch.testing.assert_close(y, expected)
    assert y.requires_grad
    weights = torch.randn_like(y)
    inputs = lambda z: [z, *parameters] if z.requires_grad else parameters  # noqa: E731
    got = torch.autograd.grad((y * weights).sum(), inputs(ours))
    for a, b in zip(got, torch.autograd.grad((expected * weights).sum(), inputs(theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("onednn")
def test_linear_by_onednn_has_gradients_of_gradients() -> None:
    x, layer = build_layer(bias=True)
    results = list[Tensor]()
    for compute in (lambda z: linear(z, layer.weight, layer.bias), layer):
        z = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(compute(z).square().sum(), z, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), layer.weight)[0])
    torch.testing.assert_close(*results)


@pytest.mark.usefixtures("onednn")
def test_linear_by_onednn_takes_expanded_gradients() -> None:
    x, layer = build_layer(bias=True)
    linear(x, layer.weight, layer.bias).sum().backward()
    ours = layer.weight.grad
    assert ours is not None
    layer.zero_grad()
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(ours, layer.weight.grad)


@pytest.mark.usefixtures("onednn")
def test_linear_uses_onednn_only_for_plain_float32_tensors() -> None:
    x, layer = build_layer(bias=False)
    weight = layer.weight
    assert can_use_onednn(x, weight)
    assert not can_use_onednn(x.double(), weight.double())
    assert not can_use_onednn(x.bfloat16(), weight.bfloat16())
    assert not can_use_onednn(x[:1, :2], weight)
    assert not can_use_onednn(x[:0], weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_use_onednn(x, weight)
    with torch._subclasses.FakeTensorMode() as mode:
        assert not can_use_onednn(mode.from_tensor(x), weight)
    hooked = nn.Linear(24, 40)
    calls = list[object]()
    hooked.register_forward_hook(lambda *_: calls.append(None))
    torch.testing.assert_close(apply_linear(hooked, x), F.linear(x, hooked.weight, hooked.bias))
    assert len(calls) == 1


@pytest.mark.usefixtures("onednn")
def test_linear_layers_run_what_users_attach_to_them() -> None:
    x, layer = build_layer(bias=True)
    calls = list[object]()
    layer.register_full_backward_hook(lambda *_: calls.append(None))
    apply_linear(layer, x.clone().requires_grad_()).sum().backward()
    assert len(calls) == 1
    handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(None))
    apply_linear(nn.Linear(24, 40), x)
    handle.remove()
    assert len(calls) == 2
    replaced = nn.Linear(24, 40)
    replaced.forward = lambda input: torch.zeros(1)
    assert apply_linear(replaced, x).tolist() == [0]


@pytest.mark.usefixtures("onednn")
def test_linear_is_seen_by_dispatch_modes() -> None:
    x, layer = build_layer(bias=False)
    with FlopCounterMode(display=False) as counter:
        apply_linear(layer, x)
    assert counter.get_total_flops() == 2 * 15 * 24 * 40


class Passing(TorchDispatchMode):
    """A mode that runs every operator as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("onednn")
def test_linear_is_recomputed_outside_the_mode_of_its_forward_pass() -> None:
    x, layer = build_layer(bias=False)
    with Passing():
        y = checkpoint(partial(apply_linear, layer), x.requires_grad_(), use_reentrant=False)
    y.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    ("info", "capability", "expected"),
    [
        ("vendor_id\t: AuthenticAMD\n", "AVX512", True),
        ("vendor_id\t: AuthenticAMD\n", "AVX2", False),
        ("vendor_id\t: GenuineIntel\nmodel name\t: not AuthenticAMD\n", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_linear_uses_onednn_on_amd_processors_with_avx512(
    info: str | None, capability: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    if info is not None:
        path.write_text(info)
    monkeypatch.setattr(module, "CPU_INFO", path)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert module.is_onednn_faster.__wrapped__() is expected
