"""Laws of M3: its steps and the size of the loss, what it keeps, where it is gathered, what bad input says."""

import copy
import math
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.errors import UsageError
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested.optim import dgd_equations
from laconic.nested.optim.m3 import M3
from laconic.nested.optim.m3_equations import newton_schulz
from tests.core.readings import noise
from tests.tolerances import FLOAT32, ORACLE, RECOMPUTE, largest
from tests.training.multi_rank import run_ranks_ok

X, Y = noise(1, 12, 4), noise(2, 12, 3)
LITERAL = {"mode": "literal", "slow_every": 3, "lr": 5e-4}


def model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)).to(dtype)


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, n: int, c: float = 1.0) -> list[float]:
    """Losses of n steps of a regression whose loss is multiplied by c."""
    found = []
    for _ in range(n):
        optimizer.zero_grad()
        loss = (net(X.to(next(net.parameters()).dtype)) - Y).square().mean()
        (c * loss).backward()
        optimizer.step()
        found.append(loss.item())
    return found


def moved(c: float, **settings: Any) -> list[Tensor]:
    """What the first step changes of the matrices when the loss is multiplied by c."""
    net = model()
    before = [p.detach().clone() for p in net.parameters() if p.ndim == 2]
    steps(net, M3(net.parameters(), eps=1e-300, **settings), 1, c)
    return [p.detach() - b for p, b in zip([p for p in net.parameters() if p.ndim == 2], before, strict=True)]


@pytest.mark.parametrize("c", [0.5, 7.0])
def test_the_printed_step_is_divided_by_the_size_of_the_loss_and_ours_does_not_see_it(c: float) -> None:
    for one, other in zip(moved(1.0, **LITERAL), moved(c, **LITERAL), strict=True):
        assert largest(c * other, one) <= FLOAT32  # 1e-7 stands beside the norm in Newton-Schulz
    for one, other in zip(moved(1.0), moved(c), strict=True):
        assert largest(other, one) <= FLOAT32
    tied = zip(moved(1.0, second="elementwise"), moved(c, second="elementwise"), strict=True)
    assert all(largest(c * other, one) <= FLOAT32 for one, other in tied)


def test_the_law_holds_for_every_later_step_on_gradients_that_are_given() -> None:
    for c, settings, scaled in ((5.0, LITERAL, True), (5.0, {"slow_every": 3}, False)):
        W = [nn.Parameter(noise(3, 4, 5)) for _ in range(2)]
        both = [M3([w], eps=1e-300, **settings) for w in W]
        for n in range(8):
            before = [w.detach().clone() for w in W]
            for w, size, optimizer in zip(W, (1.0, c), both, strict=True):
                w.grad = size * noise(10 + n, 4, 5)
                optimizer.step()
            one, other = (w.detach() - b for w, b in zip(W, before, strict=True))
            assert largest((c if scaled else 1) * other, one) <= FLOAT32


def test_the_printed_step_anneals_as_one_over_the_root() -> None:
    W, g = nn.Parameter(noise(3, 4, 5)), noise(4, 4, 5)
    optimizer, sizes = M3([W], mode="literal", slow_every=1000, eps=1e-300), []
    for _ in range(64):
        before = W.detach().clone()
        W.grad = g
        optimizer.step()
        sizes.append((W.detach() - before).norm().item())
    for n in (4, 16, 64):
        assert sizes[n - 1] == pytest.approx(sizes[0] / math.sqrt(n), rel=FLOAT32)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_a_step_has_the_root_mean_square_that_adamw_s_has(shape: tuple[int, int]) -> None:
    """Newton-Schulz leaves singular values of .7 to 1.2, so that .2 sqrt(max(o, i)) makes entries of about .2."""
    W = nn.Parameter(torch.zeros(shape).double())
    W.grad = noise(5, *shape)
    M3([W], lr=1.0, alpha=0.0).step()
    assert 0.2 * 0.6 < W.detach().square().mean().sqrt().item() < 0.2 * 1.25


@pytest.mark.parametrize(
    "settings", [{"lr": 0.02, "slow_every": 3, "decay": 0.1}, {"second": "elementwise"}, LITERAL], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_learns_and_goes_on_bit_for_bit(settings: dict[str, Any], dtype: torch.dtype) -> None:
    net = model(dtype=dtype)
    optimizer = M3(net.parameters(), **settings)
    losses = steps(net, optimizer, 10)
    held, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    kept = held["state"][0]
    assert {"M1", "M2", "A", "O2", "step"} <= kept.keys() <= {"M1", "M2", "A", "O2", "step", "V"}
    assert ("V" in kept) is (settings.get("mode") == "literal" or "second" in settings)
    assert all(isinstance(tensor, Tensor) for tensor in kept.values())  # what a step of a run can hold
    rest = steps(net, optimizer, 10)
    assert rest[-1] < losses[0]
    other = model(seed=1, dtype=dtype)
    other.load_state_dict(weights)
    resumed = M3(other.parameters(), **settings)
    resumed.load_state_dict(held)
    assert steps(other, resumed, 10) == rest
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_accumulated_and_checkpointed_gradients_make_the_same_step() -> None:
    whole, parts, again = model(), model(), model()
    (whole(X) - Y).square().mean().backward()
    for x, y in zip(X.chunk(3), Y.chunk(3), strict=True):
        ((parts(x) - y).square().mean() / 3).backward()
    (checkpoint(again, X, use_reentrant=False) - Y).square().mean().backward()
    for net in (whole, parts, again):
        M3(net.parameters()).step()
    for net in (parts, again):
        for p, q in zip(net.parameters(), whole.parameters(), strict=True):
            assert largest(p, q) <= RECOMPUTE


def test_tables_heads_and_vectors_go_to_adamw() -> None:
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 9))
    net[1].bias.requires_grad_(False)
    groups = M3.build_param_groups(net)
    assert [[name for name, _ in group["params"]] for group in groups] == [
        ["1.weight"],
        ["0.weight", "2.weight", "2.bias", "3.weight", "3.bias"],
    ]
    optimizer = M3(groups, adam_decay=0.1)
    assert [group["rule"] for group in optimizer.param_groups] == ["m3", "adamw"]
    reference = copy.deepcopy(net)
    loss = F.cross_entropy(net(torch.arange(9)), torch.arange(9).flip(0))
    loss.backward()
    optimizer.step()
    peer = torch.optim.AdamW(reference.parameters(), lr=2e-3, weight_decay=0.1)
    F.cross_entropy(reference(torch.arange(9)), torch.arange(9).flip(0)).backward()
    peer.step()
    for k in (0, 2, 3):
        assert all(torch.equal(p, q) for p, q in zip(net[k].parameters(), reference[k].parameters(), strict=True))
    assert not torch.equal(net[1].weight, reference[1].weight)


def test_a_closure_is_called() -> None:
    net = model()
    optimizer = M3(net.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = (net(X) - Y).square().mean()
        loss.backward()
        return loss.item()

    first = optimizer.step(closure)
    assert first == (model()(X) - Y).square().mean().item()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "M3: lr -1.0; a step is larger than 0 and finite"),
        ({"mode": "sum"}, "M3: mode 'sum'; there are 'ema', 'literal'"),
        ({"second": "row"}, "M3: second 'row'; there are 'none', 'elementwise'"),
        ({"betas": (0.9, 1.0, 0.9)}, r"M3: betas\[1\] 1\.0; a share that stays lies in \[0, 1\)"),
        ({"slow_every": 0}, "M3: slow_every 0, ns_steps 5; both count from 1"),
        ({"mode": "literal", "decay": 0.1}, "M3: decay 0.1, second 'none': Algorithm 1 has neither; take"),
    ],
    ids=lambda x: str(x),
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # the words are for those who check no types
    try:
        with pytest.raises(UsageError, match=message):
            M3(model().parameters(), **settings)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_what_is_no_matrix_is_said() -> None:
    with pytest.raises(
        UsageError, match=r"newton_schulz: a matrix \[o, i\] is asked, this has shape \[5\]; vectors go by"
    ):
        newton_schulz(torch.ones(5))
    with pytest.raises(UsageError, match=r"M3: a parameter \[6\] is no matrix; give its group rule='adamw'"):
        M3([{"params": [model()[0].bias], "rule": "m3"}])


def test_it_is_given_out_at_the_door() -> None:
    assert laconic.M3 is M3


def read_bytes(text: Tensor, make: Any, n: int = 300) -> float:
    """Nats per byte of a small decoder over the last 30 of n steps."""
    decoder = Decoder(DecoderConfig.tiny("llama", vocab_size=256, initializer_range=0.05), seed=0)
    optimizer, rows, losses = make(decoder), torch.Generator().manual_seed(0), []
    for _ in range(n):
        read = text[torch.randint(len(text) - 65, (16, 1), generator=rows) + torch.arange(65)]
        logits = decoder.logits(decoder(decoder.embed(read[:, :-1])).hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), read[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


@pytest.mark.slow
def test_a_decoder_on_bytes_learns_as_well_as_by_adamw(shared: Path) -> None:
    """Each at the best of the rates 2e-3, 5e-3, 1e-2, 2e-2 on these rows."""
    text = torch.tensor(list((shared / "data" / "text" / "tinyshakespeare.txt").read_bytes()[:-100_000]))
    adamw = read_bytes(text, lambda decoder: torch.optim.AdamW(decoder.parameters(), lr=5e-3, weight_decay=0.0))
    m3 = read_bytes(text, lambda decoder: M3(M3.build_param_groups(decoder), lr=1e-2))
    assert m3 <= adamw + 0.05
    assert m3 < 2.5  # a count of single bytes has 3.3


def shards() -> dict[str, list[float]]:
    """Five steps of a model whose parameters lie in shards."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(UsageError, match=r"record: 0\.weight lies in shards, its inputs on several ranks"):
        dgd_equations.record_inputs(net)
    optimizer = M3(net.parameters(), lr=0.02, slow_every=2)
    steps(net, optimizer, 5)
    held = optimizer.state_dict()["state"][0]
    assert held["M1"].placements == next(net.parameters()).placements
    found = {name: p.full_tensor().flatten().tolist() for name, p in net.named_parameters()}
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.loopback
def test_shards_are_gathered_for_newton_schulz(tmp_path: Path) -> None:
    net = model()
    steps(net, M3(net.parameters(), lr=0.02, slow_every=2), 5)
    for found in run_ranks_ok(tmp_path, shards):
        for name, p in net.named_parameters():
            assert largest(torch.tensor(found[name], dtype=torch.float64), p.flatten()) <= 100 * ORACLE
