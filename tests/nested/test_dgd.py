"""Laws of the delta rule and its optimizer: its minimiser and bound, what is recorded, and what bad input says."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.errors import NonFiniteError, UsageError
from laconic.nested.optim import dgd_equations
from laconic.nested.optim.dgd import DGD, get_statistics
from laconic.nested.optim.dgd_equations import dgd_embedding, dgd_joint, dgd_mean, dgd_row, dgd_sequential, objective
from tests.core.readings import noise
from tests.tolerances import ORACLE, largest
from tests.training.multi_rank import run_ranks_ok

LENGTHS = st.floats(1e-3, 30.0)
STEPS = st.floats(1e-3, 1e3)


def pairs(seed: int, N: int, i: int, o: int, length: float) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, inputs of one length, errors."""
    X = noise(seed, N, i)
    return noise(seed + 1, o, i), length * X / X.norm(dim=1, keepdim=True), noise(seed + 2, N, o)


def slope(of: Callable[[Tensor], Tensor], W: Tensor) -> float:
    """The largest derivative at W, in units of the largest of the terms that cancel in it."""
    W = W.detach().requires_grad_()
    (found,) = torch.autograd.grad(of(W), W)
    return found.abs().max().item()


@given(st.integers(0, 10**6), LENGTHS, STEPS)
def test_one_step_is_the_minimiser_for_any_input(seed: int, length: float, eta: float) -> None:
    W, X, D = pairs(seed, 1, 5, 3, length)
    for new in (dgd_equations.dgd(W, X[0], D[0], eta), dgd_joint(W, X, D, eta), dgd_mean(W, X, D, eta)):
        scale = max(1.0, length**2, 1 / eta) * (1 + W.abs().max().item() + D.abs().max().item()) ** 2
        assert slope(lambda V: objective(V, W, X, D, eta), new) <= 10 * ORACLE * scale
    row = torch.stack([dgd_row(w, X[0], d, eta) for w, d in zip(W, D[0], strict=True)])
    assert largest(row, dgd_equations.dgd(W, X[0], D[0], eta)) <= ORACLE


@given(st.integers(0, 10**6), st.floats(1e-3, 10.0), st.floats(1e-3, 10.0), st.integers(1, 9))
def test_the_joint_step_is_the_minimiser_of_a_batch_whatever_its_order(
    seed: int, length: float, eta: float, N: int
) -> None:
    W, X, D = pairs(seed, N, 5, 3, length)
    new = dgd_joint(W, X, D, eta)
    scale = max(1.0, length**2, 1 / eta) * (1 + W.abs().max().item() + D.abs().max().item()) ** 2
    assert slope(lambda V: objective(V, W, X, D, eta), new) <= 10 * ORACLE * scale
    near = 10 * ORACLE * (1 + eta * length**2)  # the condition of what is solved
    assert largest(dgd_joint(W, X.flip(0), D.flip(0), eta), new) <= near
    many = dgd_joint(torch.stack([W, 2 * W]), torch.stack([X, X]), torch.stack([D, D]), eta)
    assert largest(many[0], new) <= ORACLE
    live = torch.cat([torch.ones(N), torch.zeros(3)]).bool()
    padded = [torch.cat([T, noise(seed, 3, T.shape[1])]) for T in (X, D)]
    for form in (dgd_joint, dgd_mean, dgd_sequential):
        assert largest(form(W, *padded, eta, valid=live), form(W, X, D, eta)) <= near


@given(st.integers(0, 10**6), LENGTHS, st.floats(0.0, 1e6))
def test_without_errors_no_step_expands(seed: int, length: float, eta: float) -> None:
    W, X, D = pairs(seed, 4, 5, 3, length)
    size = torch.linalg.matrix_norm(W, 2) * (1 + ORACLE)
    for form in (dgd_joint, dgd_mean, dgd_sequential):
        assert torch.linalg.matrix_norm(form(W, X, 0 * D, eta), 2) <= size
    assert torch.linalg.matrix_norm(dgd_equations.dgd(W, X[0], 0 * D[0], eta), 2) <= size


def test_a_table_is_a_map_of_one_hot_inputs() -> None:
    e, ids, D = noise(1, 6, 4), torch.tensor([0, 2, 2, 5]), noise(2, 4, 4)
    X = F.one_hot(ids, 6).double()
    G = torch.zeros(6, 4).double().index_add_(0, ids, D) / 4
    got = dgd_embedding(e, G, torch.bincount(ids, minlength=6), 4, 0.7)
    assert largest(got, dgd_joint(e.mT, X, D, 0.7).mT) <= ORACLE


def test_the_forms_of_a_batch_agree_to_first_order_and_differ_beyond() -> None:
    W, X, D = pairs(0, 6, 4, 3, 2.0)
    for eta, least, most in ((1e-6, 0.0, 1e-4), (1.0, 0.05, 2.0)):
        joint = dgd_joint(W, X, D, eta) - W
        for form in (dgd_mean, dgd_sequential):
            assert least <= (form(W, X, D, eta) - W - joint).norm() / joint.norm() <= most
    two = [torch.stack([T, 2 * T]) for T in (W, X, D)]
    live = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    apart = torch.stack([dgd_sequential(*(T[k] for T in two), 0.7, valid=live[k]) for k in range(2)])
    assert largest(dgd_sequential(*two, 0.7, valid=live), apart) <= ORACLE


def test_the_erasing_has_a_weight() -> None:
    W, X, D = pairs(0, 6, 4, 3, 2.0)
    assert largest(dgd_joint(W, X, D, 0.1, erase=0.0), W - 0.1 * D.mT @ X / 6) <= ORACLE
    for form in (dgd_joint, dgd_mean, dgd_sequential):
        scaled = form(W, 0.5 * X, 2 * D, 0.7)  # a quarter of the square, the same write
        assert largest(form(W, X, D, 0.7, erase=0.25), scaled) <= ORACLE


def test_bfloat16_and_autocast_are_summed_wide() -> None:
    W, X, D = (t.float() for t in pairs(0, 6, 4, 3, 2.0))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dgd_joint(W, X, D, 0.7), dgd_joint(W, X, D, 0.7).float())
        inside = dgd_joint(W, X, D, 0.7)
    assert torch.equal(inside, dgd_joint(W, X, D, 0.7))
    assert dgd_joint(W.bfloat16(), X.bfloat16(), D.bfloat16(), 0.7).dtype == torch.bfloat16


def test_a_step_beyond_the_numbers_is_said() -> None:
    W, X, D = pairs(0, 6, 4, 3, 2.0)
    with pytest.raises(NonFiniteError, match="I \\+ eta A has no Cholesky factor"):
        dgd_joint(W, X * math.nan, D, 0.7)


def test_weights_of_a_window_are_shares() -> None:
    W, X, D = pairs(0, 1, 4, 3, 2.0)
    window = torch.stack([W, W])
    assert (
        largest(dgd_equations.ggd(W, X[0], D[0], 0.7, window=window), dgd_equations.dgd(W, X[0], D[0], 0.7)) <= ORACLE
    )
    with pytest.raises(UsageError, match="weights sum to 3; w_i are shares of the window, sum 1"):
        dgd_equations.ggd(W, X[0], D[0], 0.7, window=window, weights=torch.tensor([1.0, 2.0]).double())


# dgd-tiny: inputs correlated .9 from one to the next, of norms .3 to 3, a map 16 -> 8 learned from 2,000 of them.


def stream(seed: int = 0, n: int = 2000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    asked, X = draw(8, 16) / 4, draw(n, 16)
    for t in range(1, n):
        X[t] = 0.9 * X[t - 1] + math.sqrt(0.19) * X[t]
    lengths = 0.3 * 10 ** torch.rand(n, 1, generator=generator, dtype=torch.float64)
    X = lengths * X / X.norm(dim=1, keepdim=True)
    return X, X @ asked.mT


def online(X: Tensor, Y: Tensor, step: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """Mean of 1/2 |W x - y|^2 over the last 500, each before its step; infinite once it is beyond 1e6."""
    W, losses = torch.zeros(Y.shape[1], X.shape[1], dtype=X.dtype), []
    for x, y in zip(X, Y, strict=True):
        delta = W @ x - y
        losses.append(0.5 * delta.square().sum().item())
        if not losses[-1] < 1e6:
            return math.inf
        W = step(W, x, delta)
    return sum(losses[-500:]) / 500


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Thousands of calls of one shape."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.slow  # examples/dgd.py shows the same, and is run
@pytest.mark.usefixtures("unchecked")
def test_online_regression_settles_at_half_its_target_and_the_controls_diverge() -> None:
    etas = (1e-3, 1e-2, 0.1, 1.0, 10.0)
    X, Y = stream()
    quarter = 0.25 * 0.5 * Y[-500:].square().sum(1).mean().item()
    found = {name: [online(X, Y, lambda W, x, d, s=step, e=eta: s(W, x, d, e)) for eta in etas] for name, step in {
        "minimiser": dgd_equations.dgd, "target": partial(dgd_equations.ggd, value="target"), "plain": partial(dgd_equations.ggd, objective="dot"),
        "printed": partial(dgd_equations.dgd, form="printed"), "short": partial(dgd_equations.dgd, form="short"),
    }.items()}  # fmt: skip
    assert all(map(math.isfinite, (*found["minimiser"], *found["target"])))
    assert all(round(loss, 3) == 0.121 and loss == pytest.approx(quarter, rel=0.01) for loss in found["minimiser"][2:])
    assert all(loss < 1e-4 for loss in found["target"][2:])
    assert found["plain"][3:] == found["printed"][3:] == [math.inf] * 2
    assert found["short"] == [math.inf] * 5
    assert max(*found["plain"][:3], *found["printed"][:3]) < 0.4


# The optimizer.


def model(seed: int = 0, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(9, 4), nn.Linear(4, 6, bias=bias), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, 9)
    ).double()


IDS = torch.tensor([[1, 2, 3, 4], [5, 2, 7, 8], [0, 1, 3, 3]])
ASKED = torch.tensor([[2, 3, 4, 5], [2, 7, 8, 0], [1, 3, 3, 2]])


def loss_of(net: nn.Module, ids: Tensor = IDS, asked: Tensor = ASKED) -> Tensor:
    return F.cross_entropy(net(ids).flatten(0, 1), asked.flatten())


def test_recording_changes_no_bit_and_plain_undoes_it() -> None:
    bare, net = model(), dgd_equations.record_inputs(model())
    assert dgd_equations.record_inputs(net) is net
    losses = [loss_of(m) for m in (bare, net)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for (name, p), (other, q) in zip(bare.named_parameters(), net.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(p.grad, q.grad)
    assert isinstance(net[1], nn.Linear)
    assert list(net.state_dict()) == list(bare.state_dict())
    dgd_equations.stop_recording(net)
    assert [type(m) for m in net] == [type(m) for m in bare]
    assert not any(hasattr(p, "recording") for p in net.parameters())
    assert not any(hasattr(p, "recording") for p in copy.deepcopy(dgd_equations.record_inputs(net)).parameters())


def recorded(net: nn.Module, backward: Callable[[], None]) -> list[tuple[Tensor, int]]:
    """X'X and positions of every map and table, of whatever `backward` does."""
    optimizer = DGD(net.parameters())
    backward()
    return [(r.compute_gram().clone(), int(r.num_positions)) for r in optimizer.input_statistics()]


def test_recording_adds_up_as_gradients_do_and_once_under_checkpointing() -> None:
    net = dgd_equations.record_inputs(model())

    def apart() -> None:
        for ids, asked in zip(IDS, ASKED, strict=True):
            (loss_of(net, ids[None], asked[None]) / 3).backward()

    def again(reentrant: bool) -> None:
        middle = checkpoint(net[1:4], net[0](IDS), use_reentrant=reentrant)
        F.cross_entropy(net[4](middle).flatten(0, 1), ASKED.flatten()).backward()

    once = recorded(net, lambda: loss_of(net).backward())
    assert [n for _, n in once] == [12] * 3
    for way in (apart, partial(again, True), partial(again, False)):
        for (gram, seen), (asked, n) in zip(recorded(net, way), once, strict=True):
            assert seen == n
            assert largest(gram, asked) <= ORACLE


def test_positions_without_an_error_do_not_erase() -> None:
    net = dgd_equations.record_inputs(nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 9)).double())
    asked = ASKED.clone()
    asked[:, 2:] = -100
    found = recorded(net, lambda: loss_of(net, IDS, asked).backward())
    assert [n for _, n in found] == [5, 6]  # one of the six is the table's padding
    x = net[0](IDS[:, :2]).reshape(-1, 4).detach()
    x = F.pad(x, (0, 1), value=1.0)
    x = x / x.norm(dim=1, keepdim=True)
    assert largest(found[1][0], x.mT @ x) <= ORACLE
    assert found[0][0].tolist() == [0, 2, 2, 0, 0, 1, 0, 0, 0]


def by_hand(net: nn.Sequential, unit: bool, rides: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[W b], inputs and errors of the last map, errors those of a mean."""
    x = net[:4](IDS).detach().reshape(-1, 6)
    W, b = net[4].weight.detach().clone(), net[4].bias.detach().clone()
    d = (torch.softmax(x @ W.mT + b, -1) - F.one_hot(ASKED.flatten(), 9)).detach()
    X = F.pad(x, (0, 1), value=1.0) if rides else x
    whole = torch.cat([W, b[:, None]], 1) if rides else W
    if unit:
        length = X.norm(dim=1, keepdim=True)
        X, d = X / length, d * length
    return whole, X, d


@pytest.mark.parametrize("batch", ["joint", "mean", "sequential"])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("rides", [True, False])
@pytest.mark.parametrize("value", ["minus_delta", "target"])
def test_a_step_of_the_optimizer_is_the_equation(batch: Any, unit: bool, rides: bool, value: Any) -> None:
    net = dgd_equations.record_inputs(model())
    whole, X, D = by_hand(net, unit, rides)
    inputs, bias = "unit" if unit else "raw", "rides" if rides else "gd"
    optimizer = DGD(net.parameters(), 0.8, batch=batch, inputs=inputs, bias=bias, value=value, erase=0.5)
    loss_of(net).backward()
    plain = net[4].bias.grad * 0.8
    before = net[4].bias.detach().clone()
    optimizer.step()
    form = {"joint": dgd_joint, "mean": dgd_mean, "sequential": dgd_sequential}[batch]
    held = whole if value == "target" else 0 * whole
    asked = held + form(whole - held, X, D, 0.8, erase=0.5)
    assert largest(net[4].weight, asked[:, :6]) <= ORACLE
    assert largest(net[4].bias, asked[:, 6] if rides else before - plain) <= ORACLE


def test_a_sum_over_positions_is_divided_by_them() -> None:
    nets = [dgd_equations.record_inputs(model()) for _ in range(2)]
    for net, loss in zip(nets, ("mean", "sum"), strict=True):
        optimizer = DGD(net.parameters(), 0.8, loss=loss, adam_lr=1e-9)
        (loss_of(net) * (12 if loss == "sum" else 1)).backward()
        optimizer.step()
    assert largest(nets[1][4].weight, nets[0][4].weight) <= ORACLE


def test_few_positions_are_kept_as_rows_and_give_the_same_step() -> None:
    for n, rows in ((4, True), (12, False)):
        net = dgd_equations.record_inputs(nn.Linear(6, 3, bias=False).double())
        x, d, W = noise(1, n, 6), noise(2, n, 3), net.weight.detach().clone()
        optimizer = DGD(net.parameters(), 2.0, inputs="raw")
        (net(x) * d).sum().div(n).backward()
        recording = get_statistics(net.weight)
        assert recording is not None
        assert bool(recording.inputs) is rows
        optimizer.step()
        assert largest(net.weight, dgd_joint(W, x, d, 2.0)) <= ORACLE


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> list[float]:
    found = []
    for _ in range(n):
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.3}, {"value": "target", "momentum": 0.5}], ids=str)
def test_it_learns_and_goes_on_bit_for_bit(settings: dict[str, Any]) -> None:
    net = dgd_equations.record_inputs(model())
    optimizer = DGD(net.named_parameters(), 0.5, adam_lr=1e-2, **settings)
    losses = steps(net, optimizer, 10)
    held, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    rest = steps(net, optimizer, 10)
    assert rest[-1] < 0.7 * losses[0]
    other = dgd_equations.record_inputs(model(seed=1))
    other.load_state_dict(weights)
    resumed = DGD(other.named_parameters(), 0.1, **settings)
    resumed.load_state_dict(held)
    assert steps(other, resumed, 10) == rest
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_a_shared_weight_and_vectors_go_to_adamw() -> None:
    net = model()
    net[4] = nn.Linear(4, 9)
    net[4].weight = net[0].weight
    optimizer = DGD(dgd_equations.record_inputs(net).parameters())
    rules = {id(p): group["rule"] for group in optimizer.param_groups for p in group["params"]}
    assert [rules[id(p)] for p in net.parameters()] == ["adamw", "dgd", "dgd", "adamw", "adamw", "adamw"]
    assert type(net[4]) is nn.Linear


def test_two_maps_of_one_weight_add_their_inputs_and_no_frozen_bias_moves() -> None:
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    second.weight = first.weight
    net = dgd_equations.record_inputs(nn.Sequential(first, nn.Tanh(), second))
    optimizer = DGD(net.parameters())
    rules = {id(p): group["rule"] for group in optimizer.param_groups for p in group["params"]}
    assert [rules[id(p)] for p in (first.weight, first.bias, second.bias)] == ["dgd", "adamw", "adamw"]
    net(noise(1, 3, 4)).square().sum().backward()
    assert [int(recording.num_positions) for recording in optimizer.input_statistics()] == [6]
    optimizer.step()
    frozen = nn.Linear(4, 3).double()
    frozen.bias.requires_grad_(False)
    W, b, x, d = frozen.weight.detach().clone(), frozen.bias.detach().clone(), noise(1, 5, 4), noise(2, 5, 3)
    optimizer = DGD(dgd_equations.record_inputs(frozen).parameters(), 0.7, inputs="raw")
    (frozen(x) * d).sum().div(5).backward()
    optimizer.step()
    assert torch.equal(frozen.bias, b)
    assert largest(frozen.weight, dgd_joint(W, x, d, 0.7)) <= ORACLE


def test_what_is_not_recorded_is_named() -> None:
    net = dgd_equations.record_inputs(model())
    net.append(nn.Linear(9, 2))
    with pytest.raises(UsageError, match=r"DGD: 5\.weight was not recorded; call dgd\.record\(model\) first"):
        DGD(net.named_parameters())
    with pytest.raises(UsageError, match=r"a parameter \[2, 9\] was not recorded"):
        DGD(net.parameters())
    both = dgd_equations.record_inputs(nn.ModuleList([nn.MultiheadAttention(4, 2), nn.Linear(2, 2)]))
    named = r"DGD: 0\.out_proj\.weight is a map with a forward of its own, not recorded; give it rule='adamw'"
    with pytest.raises(UsageError, match=named):
        DGD(both.parameters())
    groups = [{"params": list(both[0].parameters()), "rule": "adamw"}, {"params": list(net[:5].parameters())}]
    assert {group["rule"] for group in DGD(groups).param_groups} == {"adamw", "dgd"}


def test_a_model_without_maps_has_nothing_to_record() -> None:
    with pytest.raises(UsageError, match=r"record: no nn\.Linear and no nn\.Embedding in this model; give one"):
        dgd_equations.record_inputs(nn.LayerNorm(3))


def test_a_gradient_without_inputs_is_said() -> None:
    net = dgd_equations.record_inputs(model())
    optimizer = DGD(net.parameters())
    loss_of(net).backward()
    optimizer.step()
    with pytest.raises(
        UsageError, match=r"DGD: 0\.weight has a gradient and no inputs beside it; step once after each"
    ):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "DGD: lr 0.0; a step is larger than 0 and finite"),
        ({"lr": math.inf}, "DGD: lr inf; a step is larger than 0"),
        ({"batch": "all"}, "DGD: batch 'all'; there are 'joint', 'mean', 'sequential'"),
        ({"inputs": "short"}, "DGD: inputs 'short'; there are 'unit', 'raw'"),
        ({"value": "y"}, "DGD: value 'y'; there are 'minus_delta', 'target'"),
        ({"loss": "max"}, "DGD: loss 'max'; there are 'mean', 'sum'"),
        ({"bias": "no"}, "DGD: bias 'no'; there are 'rides', 'gd'"),
        ({"momentum": 1.0}, r"DGD: momentum 1\.0; a share that stays lies in \[0, 1\)"),
        ({"erase": -1.0}, "DGD: erase -1.0; it is the weight of a square, 0 or more"),
    ],
    ids=lambda x: str(x),
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # the words are for those who check no types
    try:
        with pytest.raises(UsageError, match=message):
            DGD(dgd_equations.record_inputs(model()).parameters(), **settings)
        with pytest.raises(UsageError, match='ggd: value \'u\'; there are "minus_delta", "target", or a function'):
            dgd_equations.ggd(torch.ones(2, 2), torch.ones(2), torch.ones(2), 0.1, value="u")  # pyright: ignore
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_groups_that_cannot_be_meant() -> None:
    net = dgd_equations.record_inputs(model())
    with pytest.raises(UsageError, match="optimizer: no parameter was given; hand over"):
        DGD([])
    with pytest.raises(UsageError, match="DGD: rule 'sgd'; there are dgd, adamw"):
        DGD([{"params": list(net.parameters()), "rule": "sgd"}])
    with pytest.raises(
        UsageError, match=r"DGD: a parameter \[6\] belongs to no recorded map; give its group rule='adamw'"
    ):
        DGD([{"params": [net[2].weight], "rule": "dgd"}])


def test_it_is_given_out_at_the_door() -> None:
    assert laconic.DGD is DGD


def step_of_two() -> list[float]:
    """One step of a replica on its share of four rows; the last map's weight."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = dgd_equations.record_inputs(model())
    replica, optimizer = DistributedDataParallel(net), DGD(net.parameters(), 0.8)
    rows = slice(rank, None, world)
    loss_of(replica, torch.cat([IDS, IDS[:1]])[rows], torch.cat([ASKED, ASKED[:1]])[rows]).backward()
    optimizer.step()
    found = net[1].weight.flatten().tolist()
    bare = dgd_equations.record_inputs(model())
    refused = DGD(bare.parameters(), 0.8, batch="mean")
    loss_of(bare).backward()
    with pytest.raises(UsageError, match="several ranks add up X'X, which batch='joint' alone can do with"):
        refused.step()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.loopback
def test_two_replicas_take_the_step_of_one(tmp_path: Path) -> None:
    net = dgd_equations.record_inputs(model())
    optimizer = DGD(net.parameters(), 0.8)
    loss_of(net, torch.cat([IDS, IDS[:1]]), torch.cat([ASKED, ASKED[:1]])).backward()
    optimizer.step()
    for found in run_ranks_ok(tmp_path, step_of_two):
        assert largest(torch.tensor(found, dtype=torch.float64), net[1].weight.flatten()) <= 100 * ORACLE
