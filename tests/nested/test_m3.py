"""M3: equals its reference, step sizes do not depend on the scale of the loss, resume, AdamW groups, shards."""

import copy
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.errors import UsageError
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested.optim import m3 as m3_module
from laconic.nested.optim.dgd import DGD
from laconic.nested.optim.input_recording import record_inputs
from laconic.nested.optim.m3 import M3
from laconic.nested.optim.m3_equations import M3Hyperparameters, newton_schulz
from laconic.nested.optim.m3_reference import m3_ema, m3_literal
from tests.models.fixtures import noise
from tests.tolerances import FLOAT32, ORACLE, RECOMPUTE, largest
from tests.training.multi_rank import run_ranks_ok

X, Y = noise(1, 12, 4), noise(2, 12, 3)
LITERAL = {"mode": "literal", "slow_every": 3, "lr": 5e-4}


def build_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, c: float = 1.0) -> list[float]:
    """Return the losses of a regression whose loss is multiplied by c."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X.to(next(model.parameters()).dtype)) - Y).square().mean()
        (c * loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("shape", [(4, 5), (5, 3)])
@pytest.mark.parametrize("mode", ["literal", "ema"])
def test_m3_equals_its_reference(mode: Any, shape: tuple[int, int]) -> None:
    """Over more than two slow updates; the reference recomputes every memory from all gradients."""
    gradients = [noise(10 + n, *shape) for n in range(8)]
    hyperparameters = M3Hyperparameters((0.9, 0.99, 0.8), 0.7, 3)
    start, decay = noise(3, *shape), 0.1 if mode == "ema" else 0.0
    weight = nn.Parameter(start.clone())
    optimizer = M3([weight], 0.05, mode=mode, betas=(0.9, 0.99, 0.8), alpha=0.7, slow_every=3, weight_decay=decay)
    for n, g in enumerate(gradients, 1):
        weight.grad = g
        optimizer.step()
        if mode == "literal":
            expected = m3_literal(start, gradients[:n], 0.05, hyperparameters)
        else:
            expected = m3_ema(start, gradients[:n], 0.05, hyperparameters, decay)
        assert largest(weight, expected) <= ORACLE


def first_updates(c: float, **settings: Any) -> list[Tensor]:
    """Return the first update of every matrix if the loss is multiplied by c."""
    model = build_model()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    before = [p.detach().clone() for p in matrices]
    train(model, M3(model.parameters(), eps=1e-300, **settings), 1, c)
    return [p.detach() - b for p, b in zip(matrices, before, strict=True)]


@pytest.mark.parametrize("c", [0.5, 7.0])
def test_m3_ema_does_not_depend_on_the_scale_of_the_loss(c: float) -> None:
    """The printed step is divided by it."""
    for settings, factor in (({}, 1.0), (LITERAL, c)):
        for one, other in zip(first_updates(1.0, **settings), first_updates(c, **settings), strict=True):
            assert largest(factor * other, one) <= FLOAT32  # Newton-Schulz adds 1e-7 to the norm


def test_m3_scale_of_later_steps_on_given_gradients() -> None:
    for c, settings, is_scaled in ((5.0, LITERAL, True), (5.0, {"slow_every": 3}, False)):
        weights = [nn.Parameter(noise(3, 4, 5)) for _ in range(2)]
        optimizers = [M3([w], eps=1e-300, **settings) for w in weights]
        for n in range(8):
            before = [w.detach().clone() for w in weights]
            for w, size, optimizer in zip(weights, (1.0, c), optimizers, strict=True):
                w.grad = size * noise(10 + n, 4, 5)
                optimizer.step()
            one, other = (w.detach() - b for w, b in zip(weights, before, strict=True))
            assert largest((c if is_scaled else 1) * other, one) <= FLOAT32


def test_m3_literal_step_shrinks_like_one_over_the_root() -> None:
    weight, g = nn.Parameter(noise(3, 4, 5)), noise(4, 4, 5)
    optimizer, sizes = M3([weight], mode="literal", slow_every=1000, eps=1e-300), []
    for _ in range(64):
        before = weight.detach().clone()
        weight.grad = g
        optimizer.step()
        sizes.append((weight.detach() - before).norm().item())
    for n in (4, 16, 64):
        assert sizes[n - 1] == pytest.approx(sizes[0] / math.sqrt(n), rel=FLOAT32)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_m3_step_has_the_root_mean_square_of_adamw(shape: tuple[int, int]) -> None:
    """Newton-Schulz leaves singular values of .7 to 1.2, so that .2 sqrt(max(o, i)) gives entries of about .2."""
    weight = nn.Parameter(torch.zeros(shape).double())
    weight.grad = noise(5, *shape)
    M3([weight], lr=1.0, alpha=0.0).step()
    assert 0.2 * 0.6 < weight.detach().square().mean().sqrt().item() < 0.2 * 1.25


@pytest.mark.parametrize("settings", [{"lr": 0.02, "slow_every": 3, "weight_decay": 0.1}, LITERAL], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_m3_learns_and_resumes_bit_for_bit(settings: dict[str, Any], dtype: torch.dtype) -> None:
    model = build_model(dtype=dtype)
    optimizer = M3(model.parameters(), **settings)
    losses = train(model, optimizer, 10)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    state = saved["state"][0]
    assert {"M1", "M2", "O2", "step"} <= state.keys() <= {"M1", "M2", "O2", "step", "V"}
    assert ("V" in state) is (settings.get("mode") == "literal")
    assert all(isinstance(tensor, Tensor) for tensor in state.values())  # as checkpoints require
    rest = train(model, optimizer, 10)
    assert rest[-1] < losses[0]
    other = build_model(seed=1, dtype=dtype)
    other.load_state_dict(weights)
    resumed = M3(other.parameters(), **settings)
    resumed.load_state_dict(saved)
    assert train(other, resumed, 10) == rest
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_m3_accumulated_and_checkpointed_gradients_give_the_same_step() -> None:
    whole, parts, recomputed = build_model(), build_model(), build_model()
    (whole(X) - Y).square().mean().backward()
    for x, y in zip(X.chunk(3), Y.chunk(3), strict=True):
        ((parts(x) - y).square().mean() / 3).backward()
    (checkpoint(recomputed, X, use_reentrant=False) - Y).square().mean().backward()
    for model in (whole, parts, recomputed):
        M3(model.parameters()).step()
    for model in (parts, recomputed):
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert largest(p, q) <= RECOMPUTE


def test_m3_updates_embeddings_heads_and_vectors_by_adamw() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 9))
    model[1].bias.requires_grad_(False)
    groups = M3.build_param_groups(model)
    assert [[name for name, _ in group["params"]] for group in groups] == [
        ["1.weight"],
        ["0.weight", "2.weight", "2.bias", "3.weight", "3.bias"],
    ]
    optimizer = M3(groups, adam_weight_decay=0.1)
    assert [group["rule"] for group in optimizer.param_groups] == ["m3", "adamw"]
    expected, targets = copy.deepcopy(model), torch.arange(9).flip(0)
    F.cross_entropy(model(torch.arange(9)), targets).backward()
    optimizer.step()
    adamw = torch.optim.AdamW(expected.parameters(), lr=2e-3, weight_decay=0.1)
    F.cross_entropy(expected(torch.arange(9)), targets).backward()
    adamw.step()
    for k in (0, 2, 3):
        assert all(torch.equal(p, q) for p, q in zip(model[k].parameters(), expected[k].parameters(), strict=True))
    assert not torch.equal(model[1].weight, expected[1].weight)


@pytest.mark.usefixtures("unchecked")
def test_m3_groups_leave_only_tables_and_heads_to_adamw() -> None:
    """A position table as long as the maps are wide makes no heads of them."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    for tied in (True, False):
        config = DecoderConfig.tiny("gpt2", num_hidden_layers=2, **sizes)
        decoder = Decoder(replace(config, tie_word_embeddings=tied), seed=0)
        groups = {group["rule"]: [name for name, _ in group["params"]] for group in M3.build_param_groups(decoder)}
        assert len(groups["m3"]) == 8
        matrices = [name for name in groups["adamw"] if decoder.get_parameter(name).ndim == 2]
        assert len(matrices) == (2 if tied else 3)
    blocks = [nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(9, 6), nn.Embedding(6, 6), nn.Sequential(*blocks), nn.Linear(6, 9))
    groups = {group["rule"]: [name for name, _ in group["params"]] for group in M3.build_param_groups(model)}
    assert groups["m3"] == [f"2.{n}.{k}.weight" for n in range(2) for k in (0, 2)]
    assert {"0.weight", "1.weight", "3.weight"} <= set(groups["adamw"])


def test_m3_groups_have_weight_decays_of_their_own() -> None:
    """A matrix that has no gradient but decay shrinks by 1 - lr decay; so does a vector of AdamW."""
    model = build_model()
    named = dict(model.named_parameters())
    groups = [
        {"params": [named["0.weight"], named["0.bias"]], "weight_decay": 0.5},
        {"params": [named["2.weight"]]},
    ]
    optimizer = M3(groups, lr=0.1, weight_decay=0.25, adam_weight_decay=0.125)
    assert [(g["rule"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("m3", 0.5), ("adamw", 0.5), ("m3", 0.25),
    ]  # fmt: skip
    vector = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [vector], "rule": "adamw"})
    before = {name: p.detach().clone() for name, p in named.items()}
    for p in (*named.values(), vector):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, decay in (("0.weight", 0.5), ("0.bias", 0.5), ("2.weight", 0.25)):
        assert largest(named[name], (1 - 0.1 * decay) * before[name]) <= ORACLE
    assert largest(vector, (1 - 0.1 * 0.125) * torch.ones(2)) <= FLOAT32


@pytest.mark.parametrize("named", [False, True])
def test_m3_and_dgd_add_groups_as_they_are_built(named: bool) -> None:
    """A layer that is unfrozen later has matrices and vectors, and AdamW's learning rate, as in the constructor."""
    for optimizer_class in (M3, DGD):
        settings = {"lr": 0.5, "adam_lr": 0.125} if optimizer_class is DGD else {"lr": 0.5}
        model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)))
        model = record_inputs(model) if optimizer_class is DGD else model
        parts = [list(part.named_parameters() if named else part.parameters()) for part in model]
        optimizer = optimizer_class([{"params": parts[0]}], **settings)
        optimizer.add_param_group({"params": parts[1]})
        built = optimizer_class([{"params": part} for part in parts], **settings)
        for added, group in zip(optimizer.param_groups, built.param_groups, strict=True):
            assert all(x is y for x, y in zip(added["params"], group["params"], strict=True))
            assert {**added, "params": ()} == {**group, "params": ()}


@pytest.mark.parametrize("optimizer_class", [M3, DGD])
def test_m3_and_dgd_with_learning_rate_0_change_nothing(optimizer_class: Any) -> None:
    """As with the optimizers of torch, whose schedules may begin at 0."""
    model = record_inputs(build_model()) if optimizer_class is DGD else build_model()
    before = [p.detach().clone() for p in model.parameters()]
    rates = {"lr": 0.0, "adam_lr": 0.0} if optimizer_class is DGD else {"lr": 0.0}
    optimizer = optimizer_class(model.parameters(), **rates)
    for _ in range(2):
        (model(X) - Y).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("option", ["foreach", "maximize", "decay", "adam_decay", "nesterov"])
def test_m3_and_dgd_refuse_unknown_options_of_groups(option: str) -> None:
    with pytest.raises(UsageError, match=f"M3: a group has {option}.*weight_decay"):
        M3([{"params": list(build_model().parameters()), option: True}])
    model = record_inputs(build_model())
    with pytest.raises(UsageError, match=f"DGD: a group has {option}"):
        DGD([{"params": list(model.parameters()), option: True}])
    with pytest.raises(UsageError, match=r"DGD: weight_decay 0\.1.*rule='adamw'"):
        DGD([{"params": list(model.parameters()), "weight_decay": 0.1}])
    with pytest.raises(UsageError, match=r"M3: weight_decay 0\.1.*ema"):
        M3([{"params": [build_model()[0].weight], "weight_decay": 0.1}], mode="literal")


def test_m3_float32_state_has_ten_bytes_per_number() -> None:
    weight = nn.Parameter(torch.randn(8, 4))
    optimizer = M3([weight])
    for _ in range(2):
        weight.grad = torch.randn(8, 4)
        optimizer.step()
        resumed = M3([weight])
        resumed.load_state_dict(optimizer.state_dict())
        for o in (optimizer, resumed):
            assert sum(t.nbytes for name, t in o.state[weight].items() if name != "step") == 10 * weight.numel()


def test_m3_step_calls_the_closure() -> None:
    model = build_model()
    optimizer = M3(model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(X) - Y).square().mean()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == (build_model()(X) - Y).square().mean().item()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr"), ({"mode": "sum"}, "mode"),
        ({"betas": (0.9, 1.0, 0.9)}, r"betas\[1\]"), ({"betas": (0.9, 0.99)}, r"betas \(0.9, 0.99\): give 3"),
        ({"slow_every": 0}, "slow_every"),
        ({"mode": "literal", "weight_decay": 0.1}, "weight_decay"),
        ({"adam_betas": (1.5, 2.0)}, r"adam_betas\[0\]"), ({"adam_betas": (0.9,)}, "adam_betas"),
        ({"weight_decay": -1.0}, "weight_decay"), ({"adam_weight_decay": -1.0}, "adam_weight_decay"),
        ({"eps": -1.0}, "eps"), ({"alpha": math.nan}, "alpha"), ({"ns_steps": 2.5}, "ns_steps"), ({"lr": "1"}, "lr"),
        ({"mode": "literal", "betas": (0.9, math.nan, 0.9)}, r"betas\[1\]"),
    ],
    ids=str,
)  # fmt: skip
def test_m3_refuses_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        M3(build_model().parameters(), **settings)
    if settings.keys() <= M3(build_model().parameters()).defaults.keys():
        with pytest.raises(UsageError, match=f"M3: {message}"):
            M3([{"params": list(build_model().parameters()), **settings}])


@pytest.mark.parametrize("steps", [0, 1])
def test_m3_refuses_the_state_of_the_other_mode(steps: int) -> None:
    """Before the first step, too: its groups hold the other mode's betas, alpha and period."""
    for settings, other in (({}, LITERAL), (LITERAL, {})):
        model = build_model()
        optimizer = M3(model.parameters(), **settings)
        train(model, optimizer, steps)
        with pytest.raises(UsageError, match=f"M3: the state is of mode='{settings.get('mode', 'ema')}'"):
            M3(build_model().parameters(), **other).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("settings", [{"adam_weight_decay": 0.125}, LITERAL], ids=str)
def test_m3_copied_with_its_model_trains_like_the_original(settings: dict[str, Any]) -> None:
    model = build_model()
    optimizer = M3(model.parameters(), **settings)
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    copies = copy.deepcopy((model, optimizer)), torch.load(file, weights_only=False)
    losses = train(model, optimizer, 3)
    for other, copied in copies:
        assert train(other, copied, 3) == losses
        copied.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert copied.param_groups[-1]["weight_decay"] == settings.get("adam_weight_decay", 0.0)


@pytest.mark.parametrize("scale", [0.0, 1e-7])
def test_m3_float16_stays_finite_at_tiny_gradients(scale: float) -> None:
    p = nn.Parameter(torch.randn(4, 6).half())
    optimizer = M3([p], lr=1e-2)
    p.grad = torch.full_like(p, scale)
    optimizer.step()
    assert p.isfinite().all()


def test_m3_refuses_complex_matrices() -> None:
    with pytest.raises(UsageError, match=r"a parameter \[2, 2\] is complex; set rule='adamw'"):
        M3([nn.Parameter(torch.zeros(2, 2, dtype=torch.cfloat))])


@pytest.mark.parametrize(("optimizer_class", "rule"), [(M3, "m3"), (M3, "adamw"), (DGD, "adamw")])
def test_m3_and_dgd_refuse_sparse_gradients(optimizer_class: Any, rule: str) -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = optimizer_class([{"params": embedding.parameters(), "rule": rule}])
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match="sparse=False"):
        optimizer.step()


def test_m3_refuses_vectors() -> None:
    with pytest.raises(UsageError, match=r"\[5\]"):
        newton_schulz(torch.ones(5))
    with pytest.raises(UsageError, match=r"\[6\]"):
        M3([{"params": [build_model()[0].bias], "rule": "m3"}])
    assert laconic.M3 is M3


def train_decoder(text: Tensor, build_optimizer: Any, steps: int = 300) -> float:
    """Return the nats per byte of a small decoder over the last 30 steps."""
    decoder = Decoder(DecoderConfig.tiny("llama", vocab_size=256, initializer_range=0.05), seed=0)
    optimizer, rows, losses = build_optimizer(decoder), torch.Generator().manual_seed(0), []
    for _ in range(steps):
        ids = text[torch.randint(len(text) - 65, (16, 1), generator=rows) + torch.arange(65)]
        logits = decoder.logits(decoder(decoder.embed(ids[:, :-1])).hidden_states)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


@pytest.mark.slow
def test_m3_trains_a_decoder_on_bytes_as_well_as_adamw(shared: Path) -> None:
    """Each at the best of the learning rates 2e-3, 5e-3, 1e-2, 2e-2 on these rows."""
    text = torch.tensor(list((shared / "data" / "text" / "tinyshakespeare.txt").read_bytes()[:-100_000]))
    adamw = train_decoder(text, lambda decoder: torch.optim.AdamW(decoder.parameters(), lr=5e-3, weight_decay=0.0))
    m3 = train_decoder(text, lambda decoder: M3(M3.build_param_groups(decoder), lr=1e-2))
    assert m3 <= adamw + 0.05
    assert m3 < 2.5  # the entropy of single bytes is 3.3


def train_sharded() -> dict[str, list[float]]:
    """Train a model with sharded parameters for five steps; return its weights."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = build_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(UsageError, match=r"momentum 0\.9 is not supported with sharded weights"):
        DGD(record_inputs(model).parameters(), momentum=0.9)
    optimizer = M3(model.parameters(), lr=0.02, slow_every=2)
    train(model, optimizer, 5)
    state = optimizer.state_dict()["state"][0]
    assert state["M1"].placements == next(model.parameters()).placements
    weights = {name: p.full_tensor().flatten().tolist() for name, p in model.named_parameters()}
    dist.barrier()
    dist.destroy_process_group()
    return weights


@pytest.mark.parametrize("is_fast", [True, False])
def test_newton_schulz_in_float32_where_bfloat16_is_slow(monkeypatch: pytest.MonkeyPatch, is_fast: bool) -> None:
    """Both are bfloat16 numbers near the equation's in float64; those of float32 are its nearest ones."""
    monkeypatch.setattr(m3_module, "has_fast_bfloat16", lambda device: is_fast)
    m = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    result = m3_module.orthogonalize(m, 1.0, 5)
    error = (result.double() - newton_schulz(m.double())).abs().max()
    assert result.dtype == torch.bfloat16
    assert error < (0.05 if is_fast else 0.004)


@pytest.mark.medium
@pytest.mark.loopback
def test_m3_gathers_shards_for_newton_schulz(tmp_path: Path) -> None:
    model = build_model()
    train(model, M3(model.parameters(), lr=0.02, slow_every=2), 5)
    for weights in run_ranks_ok(tmp_path, train_sharded):
        for name, p in model.named_parameters():
            assert largest(torch.tensor(weights[name], dtype=torch.float64), p.flatten()) <= 100 * ORACLE


def test_m3_takes_the_groups_of_a_scheduled_optimizer() -> None:
    model = nn.Linear(3, 2)
    optimizer = laconic.M3(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1] * len(optimizer.param_groups), total_steps=10)
    assert len(laconic.M3(optimizer.param_groups).param_groups) == len(optimizer.param_groups)
