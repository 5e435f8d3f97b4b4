"""DGD: steps are minimisers and bounded; recorded inputs give the step of the equations; resume and DDP."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.errors import NonFiniteError, UsageError
from laconic.nested.optim.dgd import DGD
from laconic.nested.optim.dgd_equations import dgd, dgd_embedding, dgd_joint
from laconic.nested.optim.dgd_reference import dgd_training_step
from laconic.nested.optim.input_recording import get_statistics, record_inputs, stop_recording
from tests.conftest import needs
from tests.models.fixtures import noise
from tests.reference.delta_gradient_descent import dgd_printed, dgd_row, dgd_short, ggd, objective
from tests.tolerances import ORACLE, largest
from tests.training.multi_rank import run_ranks_ok

LENGTHS = st.floats(1e-3, 30.0)
STEPS = st.floats(1e-3, 1e3)


def random_pairs(seed: int, N: int, i: int, o: int, length: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight, inputs of one length, and output gradients."""
    X = noise(seed, N, i)
    return noise(seed + 1, o, i), length * X / X.norm(dim=1, keepdim=True), noise(seed + 2, N, o)


def max_derivative(function: Callable[[Tensor], Tensor], W: Tensor) -> float:
    W = W.detach().requires_grad_()
    (grad,) = torch.autograd.grad(function(W), W)
    return grad.abs().max().item()


def cancellation(W: Tensor, D: Tensor, length: float, eta: float) -> float:
    """Return the size of the terms that cancel in the derivative of the objective."""
    return max(1.0, length**2, 1 / eta) * (1 + W.abs().max().item() + D.abs().max().item()) ** 2


@given(st.integers(0, 10**6), LENGTHS, STEPS)
def test_dgd_step_is_the_minimiser_for_any_input(seed: int, length: float, eta: float) -> None:
    W, X, D = random_pairs(seed, 1, 5, 3, length)
    for new in (dgd(W, X[0], D[0], eta), dgd_joint(W, X, D, eta)):
        derivative = max_derivative(lambda V: objective(V, W, X, D, eta), new)
        assert derivative <= 10 * ORACLE * cancellation(W, D, length, eta)
    rows = torch.stack([dgd_row(w, X[0], d, eta) for w, d in zip(W, D[0], strict=True)])
    assert largest(rows, dgd(W, X[0], D[0], eta)) <= ORACLE


@given(st.integers(0, 10**6), st.floats(1e-3, 10.0), st.floats(1e-3, 10.0), st.integers(1, 9))
def test_dgd_joint_is_the_minimiser_of_a_batch_in_any_order(seed: int, length: float, eta: float, N: int) -> None:
    W, X, D = random_pairs(seed, N, 5, 3, length)
    new = dgd_joint(W, X, D, eta)
    derivative = max_derivative(lambda V: objective(V, W, X, D, eta), new)
    assert derivative <= 10 * ORACLE * cancellation(W, D, length, eta)
    tolerance = 10 * ORACLE * (1 + eta * length**2)  # the condition number of the system
    assert largest(dgd_joint(W, X.flip(0), D.flip(0), eta), new) <= tolerance
    stacked = dgd_joint(torch.stack([W, 2 * W]), torch.stack([X, X]), torch.stack([D, D]), eta)
    assert largest(stacked[0], new) <= ORACLE
    valid = torch.cat([torch.ones(N), torch.zeros(3)]).bool()
    padded = [torch.cat([T, noise(seed, 3, T.shape[1])]) for T in (X, D)]
    assert largest(dgd_joint(W, *padded, eta, valid=valid), new) <= tolerance


@given(st.integers(0, 10**6), LENGTHS, st.floats(0.0, 1e6))
def test_dgd_step_without_errors_never_expands(seed: int, length: float, eta: float) -> None:
    W, X, D = random_pairs(seed, 4, 5, 3, length)
    norm = torch.linalg.matrix_norm(W, 2) * (1 + ORACLE)
    assert torch.linalg.matrix_norm(dgd_joint(W, X, 0 * D, eta), 2) <= norm
    assert torch.linalg.matrix_norm(dgd(W, X[0], 0 * D[0], eta), 2) <= norm


def test_dgd_embedding_equals_a_map_of_one_hot_inputs() -> None:
    e, ids, D = noise(1, 6, 4), torch.tensor([0, 2, 2, 5]), noise(2, 4, 4)
    G = torch.zeros(6, 4).double().index_add_(0, ids, D) / 4
    actual = dgd_embedding(e, G, torch.bincount(ids, minlength=6), 4, 0.7)
    assert largest(actual, dgd_joint(e.mT, F.one_hot(ids, 6).double(), D, 0.7).mT) <= ORACLE


def test_dgd_sums_in_float32_under_autocast() -> None:
    W, X, D = (t.float() for t in random_pairs(0, 6, 4, 3, 2.0))
    with torch.autocast("cpu", torch.bfloat16):
        autocast = dgd_joint(W, X, D, 0.7)
    assert torch.equal(autocast, dgd_joint(W, X, D, 0.7))
    assert dgd_joint(W.bfloat16(), X.bfloat16(), D.bfloat16(), 0.7).dtype == torch.bfloat16


def test_dgd_refuses_nonfinite_inputs() -> None:
    W, X, D = random_pairs(0, 6, 4, 3, 2.0)
    with pytest.raises(NonFiniteError, match="Cholesky"):
        dgd_joint(W, X * math.nan, D, 0.7)


def test_ggd_with_equal_window_is_dgd() -> None:
    W, X, D = random_pairs(0, 1, 4, 3, 2.0)
    assert largest(ggd(W, X[0], D[0], 0.7, window=torch.stack([W, W])), dgd(W, X[0], D[0], 0.7)) <= ORACLE


def correlated_stream(seed: int = 0, n: int = 2000) -> tuple[Tensor, Tensor]:
    """Return inputs with correlation .9 and norms .3 to 3, and the outputs of a fixed map 16 -> 8."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    target, X = draw(8, 16) / 4, draw(n, 16)
    for t in range(1, n):
        X[t] = 0.9 * X[t - 1] + math.sqrt(0.19) * X[t]
    lengths = 0.3 * 10 ** torch.rand(n, 1, generator=generator, dtype=torch.float64)
    X = lengths * X / X.norm(dim=1, keepdim=True)
    return X, X @ target.mT


def online_loss(X: Tensor, Y: Tensor, step: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """Return the mean of 1/2 |W x - y|^2 over the last 500, each before its step; infinite if it exceeds 1e6."""
    W, losses = torch.zeros(Y.shape[1], X.shape[1], dtype=X.dtype), []
    for x, y in zip(X, Y, strict=True):
        delta = W @ x - y
        losses.append(0.5 * delta.square().sum().item())
        if not losses[-1] < 1e6:
            return math.inf
        W = step(W, x, delta)
    return sum(losses[-500:]) / 500


@pytest.mark.slow  # examples/dgd.py shows the same, and is run
@pytest.mark.usefixtures("unchecked")
def test_dgd_online_regression_settles_at_half_the_target() -> None:
    """The printed forms and plain descent diverge for large step sizes."""
    etas = (1e-3, 1e-2, 0.1, 1.0, 10.0)
    X, Y = correlated_stream()
    quarter = 0.25 * 0.5 * Y[-500:].square().sum(1).mean().item()
    forms = {
        "minimiser": dgd, "target": partial(ggd, value="target"), "plain": partial(ggd, objective="dot"),
        "printed": dgd_printed, "short": dgd_short,
    }  # fmt: skip
    losses = {
        name: [online_loss(X, Y, lambda W, x, d, f=form, e=eta: f(W, x, d, e)) for eta in etas]
        for name, form in forms.items()
    }
    assert all(map(math.isfinite, (*losses["minimiser"], *losses["target"])))
    assert all(loss == pytest.approx(quarter, rel=0.01) for loss in losses["minimiser"][2:])
    assert all(loss < 1e-4 for loss in losses["target"][2:])
    assert losses["plain"][3:] == losses["printed"][3:] == [math.inf] * 2
    assert losses["short"] == [math.inf] * 5
    assert max(*losses["plain"][:3], *losses["printed"][:3]) < 0.4


# The optimizer.

IDS = torch.tensor([[1, 2, 3, 4], [5, 2, 7, 8], [0, 1, 3, 3]])
TARGETS = torch.tensor([[2, 3, 4, 5], [2, 7, 8, 0], [1, 3, 3, 2]])


def build_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, 9)
    ).double()


def compute_loss(model: nn.Module, ids: Tensor = IDS, targets: Tensor = TARGETS) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def test_dgd_equals_its_reference() -> None:
    """One training step with the default options; the reference leaves out the layer norm."""
    model, expected = record_inputs(build_model()), build_model()
    optimizer = DGD(model.named_parameters(), 0.8)
    compute_loss(model).backward()
    optimizer.step()
    dgd_training_step(expected, lambda: compute_loss(expected), 0.8)
    parameters = dict(expected.named_parameters())
    for name, p in model.named_parameters():
        if not name.startswith("2."):
            assert largest(p, parameters[name]) <= ORACLE, name


def test_record_inputs_changes_no_bit_and_can_be_undone() -> None:
    plain, recorded = build_model(), record_inputs(build_model())
    assert record_inputs(recorded) is recorded
    losses = [compute_loss(model) for model in (plain, recorded)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for (name, p), (other, q) in zip(plain.named_parameters(), recorded.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(p.grad, q.grad)
    assert isinstance(recorded[1], nn.Linear)
    assert list(recorded.state_dict()) == list(plain.state_dict())
    stop_recording(recorded)
    assert [type(m) for m in recorded] == [type(m) for m in plain]
    assert not any(hasattr(p, "recording") for p in recorded.parameters())


def record_statistics(model: nn.Module, backward: Callable[[], None]) -> list[tuple[Tensor, int]]:
    """Return X'X and the number of positions of every recorded weight."""
    optimizer = DGD(model.parameters())
    backward()
    return [(s.compute_gram().clone(), int(s.num_positions)) for s in optimizer.input_statistics()]


def test_input_statistics_accumulate_like_gradients() -> None:
    """Over micro-batches, and once under activation checkpointing."""
    model = record_inputs(build_model())

    def micro_batches() -> None:
        for ids, targets in zip(IDS, TARGETS, strict=True):
            (compute_loss(model, ids[None], targets[None]) / 3).backward()

    def recomputed(reentrant: bool) -> None:
        hidden = checkpoint(model[1:4], model[0](IDS), use_reentrant=reentrant)
        F.cross_entropy(model[4](hidden).flatten(0, 1), TARGETS.flatten()).backward()

    expected = record_statistics(model, lambda: compute_loss(model).backward())
    assert [n for _, n in expected] == [12] * 3
    for backward in (micro_batches, partial(recomputed, True), partial(recomputed, False)):
        for (gram, n), (expected_gram, expected_n) in zip(record_statistics(model, backward), expected, strict=True):
            assert n == expected_n
            assert largest(gram, expected_gram) <= ORACLE


def test_input_statistics_skip_positions_without_a_gradient() -> None:
    model = record_inputs(nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 9)).double())
    targets = TARGETS.clone()
    targets[:, 2:] = -100
    statistics = record_statistics(model, lambda: compute_loss(model, IDS, targets).backward())
    assert [n for _, n in statistics] == [5, 6]  # one of the six is the embedding's padding
    x = F.pad(model[0](IDS[:, :2]).reshape(-1, 4).detach(), (0, 1), value=1.0)
    x = x / x.norm(dim=1, keepdim=True)
    assert largest(statistics[1][0], x.mT @ x) <= ORACLE
    assert statistics[0][0].tolist() == [0, 2, 2, 0, 0, 1, 0, 0, 0]


def last_map_pairs(model: nn.Sequential, unit: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return [W b], inputs and output gradients of the last map; gradients are those of a mean times N."""
    x = model[:4](IDS).detach().reshape(-1, 6)
    W, b = model[4].weight.detach().clone(), model[4].bias.detach().clone()
    D = (torch.softmax(x @ W.mT + b, -1) - F.one_hot(TARGETS.flatten(), 9)).detach()
    X, W = F.pad(x, (0, 1), value=1.0), torch.cat([W, b[:, None]], 1)
    if unit:
        length = X.norm(dim=1, keepdim=True)
        X, D = X / length, D * length
    return W, X, D


@pytest.mark.parametrize("inputs", ["unit", "raw"])
@pytest.mark.parametrize("value", ["minus_delta", "target"])
def test_dgd_optimizer_step_equals_the_equation(inputs: Any, value: Any) -> None:
    model = record_inputs(build_model())
    W, X, D = last_map_pairs(model, inputs == "unit")
    optimizer = DGD(model.parameters(), 0.8, inputs=inputs, value=value)
    compute_loss(model).backward()
    optimizer.step()
    offset = W if value == "target" else 0 * W
    expected = offset + dgd_joint(W - offset, X, D, 0.8)
    assert largest(model[4].weight, expected[:, :6]) <= ORACLE
    assert largest(model[4].bias, expected[:, 6]) <= ORACLE


def test_dgd_stores_rows_while_they_are_few() -> None:
    for n, stores_rows in ((4, True), (12, False)):
        model = record_inputs(nn.Linear(6, 3, bias=False).double())
        x, d, W = noise(1, n, 6), noise(2, n, 3), model.weight.detach().clone()
        optimizer = DGD(model.parameters(), 2.0, inputs="raw")
        (model(x) * d).sum().div(n).backward()
        statistics = get_statistics(model.weight)
        assert statistics is not None
        assert bool(statistics.inputs) is stores_rows
        optimizer.step()
        assert largest(model.weight, dgd_joint(W, x, d, 2.0)) <= ORACLE


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = compute_loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.3}, {"value": "target", "momentum": 0.5}], ids=str)
def test_dgd_learns_and_resumes_bit_for_bit(settings: dict[str, Any]) -> None:
    model = record_inputs(build_model())
    optimizer = DGD(model.named_parameters(), 0.5, adam_lr=1e-2, **settings)
    losses = train(model, optimizer, 10)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    rest = train(model, optimizer, 10)
    assert rest[-1] < 0.7 * losses[0]
    other = record_inputs(build_model(seed=1))
    other.load_state_dict(weights)
    resumed = DGD(other.named_parameters(), 0.1, **settings)
    resumed.load_state_dict(saved)
    assert train(other, resumed, 10) == rest
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_dgd_rate_of_a_bias_alone_follows_the_schedule_of_its_group() -> None:
    """`adam_lr` times what a schedule has made of the group's own learning rate, also after a state dict was loaded."""
    steps: list[Tensor] = []
    for lr, group_lr, factor in ((1.0, 1.0, 1.0), (0.01, 1.0, 1.0), (0.3, 0.5, 0.5)):
        model = record_inputs(build_model())
        model[1].weight.requires_grad_(False)
        named = {"params": list(model.named_parameters()), "lr": group_lr}
        saved = DGD([named], lr, adam_lr=1e-3).state_dict()
        optimizer = DGD(model.named_parameters(), 7.0, adam_lr=0.5)
        optimizer.load_state_dict(saved)
        for group in optimizer.param_groups:
            group["lr"] *= factor
        before = model[1].bias.detach().clone()
        train(model, optimizer, 1)
        steps.append((model[1].bias.detach() - before).abs() / factor)
    assert steps[0].max().item() == pytest.approx(1e-3, rel=1e-4)
    for other in steps[1:]:
        torch.testing.assert_close(other, steps[0])


def test_dgd_loads_a_state_without_settings_of_adamw() -> None:
    """States of before those settings were stored in each group, as here, have the optimizer's own."""
    model = record_inputs(build_model())
    model[1].weight.requires_grad_(False)
    optimizer = DGD(model.named_parameters(), 0.1, adam_lr=1e-2)
    train(model, optimizer, 2)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    for group in saved["param_groups"]:
        settings = group.pop("rule_settings")
        if group["rule"] == "dgd":
            group["rule_settings"] = {"base_lr": settings["base_lr"]}
    rest = train(model, optimizer, 3)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    assert train(model, optimizer, 3) == rest


def test_dgd_resumes_momentum_of_bfloat16_bit_for_bit() -> None:
    """The momentum is float32; torch loads a state as the type of its parameter."""
    model = record_inputs(build_model().bfloat16())
    optimizer = DGD(model.named_parameters(), 0.1, momentum=0.5)
    train(model, optimizer, 3)
    other = record_inputs(build_model(seed=1).bfloat16())
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = DGD(other.named_parameters(), 0.1, momentum=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, resumed, 3) == train(model, optimizer, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5}], ids=str)
def test_dgd_resumes_from_a_distributed_checkpoint(settings: dict[str, Any]) -> None:
    """torch creates the state of a fresh optimizer by a step with zero gradients and learning rate 0."""
    model = record_inputs(build_model())
    optimizer = DGD(model.named_parameters(), 0.3, **settings)
    train(model, optimizer, 3)
    other = record_inputs(build_model(seed=1))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = DGD(other.named_parameters(), 0.3, **settings)
    saved, options = get_optimizer_state_dict(model, optimizer), StateDictOptions(strict=False)
    set_optimizer_state_dict(other, resumed, copy.deepcopy(saved), options=options)
    assert train(other, resumed, 3) == train(model, optimizer, 3)


def test_dgd_and_m3_refuse_states_of_other_optimizers() -> None:
    model = record_inputs(build_model())
    optimizers: list[torch.optim.Optimizer] = [
        make(model.parameters()) for make in (DGD, laconic.M3, torch.optim.AdamW)
    ]
    for optimizer in optimizers:
        train(model, optimizer, 1)
    for optimizer in optimizers[:2]:
        for other in optimizers:
            if other is not optimizer:
                with pytest.raises(UsageError, match="the state has groups with the rules"):
                    optimizer.load_state_dict(other.state_dict())
    with pytest.raises(UsageError, match="DGD: the state is of value='minus_delta', not 'target'"):
        DGD(model.parameters(), value="target").load_state_dict(optimizers[0].state_dict())


def rules_of(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    return {id(p): group["rule"] for group in optimizer.param_groups for p in group["params"]}


def test_dgd_updates_tied_weights_and_vectors_by_adamw() -> None:
    model = build_model()
    model[4] = nn.Linear(4, 9)
    model[4].weight = model[0].weight
    rules = rules_of(DGD(record_inputs(model).parameters()))
    assert [rules[id(p)] for p in model.parameters()] == ["adamw", "dgd", "dgd", "adamw", "adamw", "adamw"]
    assert type(model[4]) is nn.Linear


def test_dgd_adds_the_inputs_of_two_maps_with_one_weight() -> None:
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    second.weight = first.weight
    model = record_inputs(nn.Sequential(first, nn.Tanh(), second))
    optimizer = DGD(model.parameters())
    rules = rules_of(optimizer)
    assert [rules[id(p)] for p in (first.weight, first.bias, second.bias)] == ["dgd", "adamw", "adamw"]
    model(noise(1, 3, 4)).square().sum().backward()
    assert [int(s.num_positions) for s in optimizer.input_statistics()] == [6]
    optimizer.step()


def test_dgd_leaves_a_frozen_bias() -> None:
    model = nn.Linear(4, 3).double()
    model.bias.requires_grad_(False)
    W, b, x, d = model.weight.detach().clone(), model.bias.detach().clone(), noise(1, 5, 4), noise(2, 5, 3)
    optimizer = DGD(record_inputs(model).parameters(), 0.7, inputs="raw")
    (model(x) * d).sum().div(5).backward()
    optimizer.step()
    assert torch.equal(model.bias, b)
    assert largest(model.weight, dgd_joint(W, x, d, 0.7)) <= ORACLE


def test_dgd_refuses_gpt2_of_transformers() -> None:
    needs("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 16}
    model = record_inputs(GPT2LMHeadModel(GPT2Config(**sizes)))  # its linear maps are of the class Conv1D
    with pytest.raises(UsageError, match=r"c_attn\.weight has a forward of its own and is not recorded"):
        DGD(model.named_parameters())


def test_dgd_refuses_parameters_that_are_not_recorded() -> None:
    model = record_inputs(build_model())
    model.append(nn.Linear(9, 2))
    with pytest.raises(UsageError, match=r"5\.weight was not recorded"):
        DGD(model.named_parameters())
    both = record_inputs(nn.ModuleList([nn.MultiheadAttention(4, 2), nn.Linear(2, 2)]))
    with pytest.raises(UsageError, match=r"0\.out_proj\.weight has a forward of its own"):
        DGD(both.parameters())
    groups = [{"params": list(both[0].parameters()), "rule": "adamw"}, {"params": list(model[:5].parameters())}]
    assert {group["rule"] for group in DGD(groups).param_groups} == {"adamw", "dgd"}
    with pytest.raises(UsageError, match=r"no nn\.Linear"):
        record_inputs(nn.LayerNorm(3))
    recorded = record_inputs(build_model())
    optimizer = DGD(recorded.parameters())
    compute_loss(recorded).backward()
    optimizer.step()
    with pytest.raises(UsageError, match="no inputs"):
        optimizer.step()


def test_dgd_refuses_invalid_groups() -> None:
    model = record_inputs(build_model())
    with pytest.raises(UsageError, match="rule 'sgd'"):
        DGD([{"params": list(model.parameters()), "rule": "sgd"}])
    with pytest.raises(UsageError, match=r"a parameter \[6\]"):
        DGD([{"params": [model[2].weight], "rule": "dgd"}])
    assert laconic.DGD is DGD


def step_of_two(sharded: bool) -> list[list[float]]:
    """Take one step of a replica, or of a sharded model, on its share of four rows; return the parameters."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_model()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    record_inputs(model)
    replica = model if sharded else DistributedDataParallel(model)
    optimizer, rows = DGD(model.parameters(), 0.8), slice(rank, None, world)
    compute_loss(replica, torch.cat([IDS, IDS[:1]])[rows], torch.cat([TARGETS, TARGETS[:1]])[rows]).backward()
    optimizer.step()
    parameters = [(p.full_tensor() if sharded else p).flatten().tolist() for p in model.parameters()]
    dist.barrier()
    del replica  # its reducer holds the group, whose threads must not be joined when this function's locals are freed
    dist.destroy_process_group()
    return parameters


@pytest.mark.loopback
@pytest.mark.parametrize("sharded", [False, True])
def test_dgd_two_ranks_take_the_step_of_one(tmp_path: Path, sharded: bool) -> None:
    model = record_inputs(build_model())
    optimizer = DGD(model.parameters(), 0.8)
    compute_loss(model, torch.cat([IDS, IDS[:1]]), torch.cat([TARGETS, TARGETS[:1]])).backward()
    optimizer.step()
    for parameters in run_ranks_ok(tmp_path, partial(step_of_two, sharded)):
        for values, p in zip(parameters, model.parameters(), strict=True):
            assert largest(torch.tensor(values, dtype=torch.float64), p.flatten()) <= 100 * ORACLE
