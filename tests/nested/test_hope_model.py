"""Hope and HopeAttention: the donor's bits, pieces equal the whole, levels learn the task, checkpoints and states."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

import laconic
from laconic.config.nested import CMSOptions, SelfModifyingOptions, TitansOptions
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested import state as states
from laconic.nested.cms import level as cms_level
from laconic.nested.cms.layer import require_levels
from laconic.nested.cms.level import to_dense
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope, HopeAttention
from laconic.nested.state import FastWeightState, reset_rows
from laconic.nested.state_file import read_state_file
from tests.models.fixtures import fresh
from tests.nested.helpers import assert_close, states_equal

pytestmark = pytest.mark.usefixtures("unchecked")
V = 97
CMS: dict[str, Any] = {"inner_lr": 0.5, "max_update_ratio": 0.0, "max_error_norm": 0.0}
MEMORY = SelfModifyingOptions(memory_chunk_size=3, projection_chunk_size=3, projection_lr_init=0.3)


def random_ids(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def cms_options(objective: str, **options: Any) -> CMSOptions:
    return CMSOptions(inner_objective=cast(Any, objective), **(CMS | options))


def build_attention(objective: str = "task", family: str = "llama", **options: Any) -> HopeAttention:
    """Return a HopeAttention on a small decoder in float64, whose two layers have chunk sizes 2 and 4."""
    model = HopeAttention.from_decoder(fresh(family).double(), (2, 4), options=cms_options(objective, **options))
    assert isinstance(model, HopeAttention)
    return model


def build_hope(objective: str = "task", memory: Any = MEMORY, **options: Any) -> Hope:
    """Return a small Hope in float64 with noise on every weight."""
    config = HopeConfig.attention_free(
        V, 8, 2, chunk_sizes=(2, 4), num_heads=2, memory=memory, cms=cms_options(objective, **options)
    )
    model = Hope(replace(config, memory_chunk_size=3), 1).double().eval()
    with torch.no_grad():
        for n, p in enumerate(model.parameters()):
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(n)).double())
    return model


def build_titans(objective: str = "task", **options: Any) -> Hope:
    return build_hope(objective, TitansOptions(mlp_width=3, num_persistent_tokens=1), **options)


def build_models(objective: str) -> list[Hope]:
    return [build_attention(objective), build_hope(objective), build_titans(objective)]


def learned_tensors(state: FastWeightState) -> list[Tensor]:
    """Return everything learned, and counts; caches are left out, since their slots may be in other places."""
    tensors = [state.position.double()]
    for layer in state.layers:
        tensors += [x for _, x in states.named_tensors((layer.conv_tails, layer.memory))]
        for level in require_levels(layer):
            tensors += [to_dense(change) for part in (level.change, level.accumulated) for change in part.values()]
            tensors += [level.num_tokens.double(), level.num_updates.double()]
    return tensors + ([] if state.open_chunk is None else [state.open_chunk.num_tokens.double()])


def read(
    model: Hope, ids: Tensor, state: FastWeightState | None = None, **options: Any
) -> tuple[Tensor, FastWeightState]:
    output = model.read_tokens(ids, state, **options)
    return output.hidden_states, cast(FastWeightState, output.cache)


def read_pieces(model: Hope, ids: Tensor, cuts: tuple[int, ...], **options: Any) -> tuple[Tensor, FastWeightState]:
    outputs, state = [], None
    for a, b in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        y, state = read(model, ids[:, a:b], state, **options)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, 1), state


def all_levels(state: FastWeightState) -> list[states.CMSLevelState]:
    return [level for layer in state.layers for level in require_levels(layer)]


def level_weights(model: Hope, state: FastWeightState) -> list[tuple[states.CMSLevelState, int, str, Tensor, Tensor]]:
    """Return (level state, chunk size, map, weight, step size) of every map of every level."""
    rows = []
    for n, layer in enumerate(state.layers):
        for l, level in enumerate(require_levels(layer)):
            prefix = f"{model.weight_names.layers}.{n}.mlp.levels.{l}."
            step = softplus(model.get_parameter(f"{prefix}step.bias"))
            C = model.hope_config.chunk_sizes[n][l]
            for name in model.hope_config.mlp_projections:
                rows.append((level, C, name, model.get_parameter(f"{prefix}{name}.weight"), step))
    return rows


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt"])
@pytest.mark.parametrize("donor_layout", ["depth", "grow"])
@pytest.mark.parametrize("objective", ["task", "associative"])
def test_hope_attention_with_zero_learning_rate_is_the_donor_bit_for_bit(
    family: str, donor_layout: Any, objective: Any
) -> None:
    donor, ids = fresh(family), random_ids(2, 9)
    expected = donor(donor.embed(ids))
    mask = torch.tensor([[True] * 9, [False] * 3 + [True] * 6])
    padded = donor(donor.embed(ids), attention_mask=mask)
    for structure in ("sequential", "nested", "independent"):
        options = CMSOptions(
            inner_objective=objective, inner_lr=0.0, structure=cast(Any, structure), associative_target="start"
        )
        model = HopeAttention.from_decoder(donor, (2, 4), donor_layout, options=options)
        output = model.read_tokens(ids)
        assert torch.equal(model.logits(output.hidden_states), donor.logits(expected.hidden_states))
        masked = model.read_tokens(ids, attention_mask=mask)
        assert torch.equal(masked.hidden_states[mask], padded.hidden_states[mask])
        more = model(model.embed(ids[:, :2]), output.cache).hidden_states
        assert torch.equal(more, donor(donor.embed(ids[:, :2]), expected.cache).hidden_states)


def test_hope_attention_is_the_donor_bit_for_bit_before_its_first_update() -> None:
    """At a width for which processors have several algorithms of a product."""
    donor, ids = Decoder(DecoderConfig.tiny("llama", hidden_size=256, intermediate_size=512), seed=0), random_ids(2, 32)
    output = HopeAttention.from_decoder(donor, (32,)).read_tokens(ids)
    assert torch.equal(output.hidden_states, donor(donor.embed(ids)).hidden_states)


@pytest.mark.parametrize("objective", ["task", "associative"])
def test_hope_attention_with_vanishing_steps_changes_nothing(objective: str) -> None:
    """Through the whole machinery, to the tolerance of other chunks of the same products."""
    donor, model, ids = fresh("llama").double(), build_attention(objective), random_ids(2, 9)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("step.bias"):
                p.fill_(-1e4)
    hidden, state = read(model, ids)
    assert_close([hidden], [donor(donor.embed(ids)).hidden_states], tolerance=1e-12)
    assert not any(to_dense(x).any() for level in all_levels(state) for x in level.change.values())
    assert all(level.num_updates.all() for level in all_levels(state))


@pytest.mark.parametrize("min_tokens_to_merge", [1, 100])
def test_untrained_levels_are_dynamic_evaluation_with_sgd(
    min_tokens_to_merge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Krause et al. (arXiv:1709.07432): score a chunk, then a step of torch.optim.SGD on its mean loss."""
    monkeypatch.setattr(cms_level, "MIN_TOKENS_TO_MERGE", min_tokens_to_merge)
    decoder, C = fresh("llama").double(), 4
    model = HopeAttention.from_decoder(copy.deepcopy(decoder), (C,), options=cms_options("task"))
    lr = C * float(softplus(model.get_parameter("model.layers.0.mlp.levels.0.step.bias").detach()))  # stored in float32
    ids = random_ids(1, 5 * C + 1)
    with torch.no_grad():
        levels = model.logits(model.read_tokens(ids[:, :-1]).hidden_states)
    optimizer = torch.optim.SGD([p for name, p in decoder.named_parameters() if ".mlp." in name], lr=lr)
    chunks, cache = list[Tensor](), None
    for start in range(0, 5 * C, C):
        output = decoder(decoder.embed(ids[:, start : start + C]), cache)
        chunks.append(decoder.logits(output.hidden_states))
        cache = output.cache.detach()
        cross_entropy(chunks[-1][0], ids[0, start + 1 : start + C + 1]).backward()
        optimizer.step()
        decoder.zero_grad()
    assert_close(levels, torch.cat(chunks, 1))
    with torch.no_grad():
        still = model.logits(model.read_tokens(ids[:, :-1], update_weights=False).hidden_states)
    assert (levels - still).abs().max() > 1e-3


@pytest.mark.parametrize("objective", ["task", "associative"])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (2, 3, 8)])
def test_hope_pieces_equal_the_whole(objective: str, which: int, cuts: tuple[int, ...]) -> None:
    model, ids = build_models(objective)[which], random_ids(2, 11)
    whole, final = read(model, ids)
    pieces, state = read_pieces(model, ids, cuts)
    assert_close([pieces], [whole])
    assert_close(learned_tensors(state), learned_tensors(final))
    assert all(level.num_updates.all() for level in all_levels(state))
    assert not torch.allclose(read(model, ids, update_weights=False)[0], whole), "learning matters"


@pytest.mark.parametrize("objective", ["task", "associative"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_hope_in_bfloat16_keeps_changes_in_float32(objective: str, which: int) -> None:
    model = build_models(objective)[which].float()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = read(model, random_ids(2, 11))
    y.float().sum().backward()
    changes = [to_dense(change) for level in all_levels(state) for change in level.change.values()]
    assert {change.dtype for change in changes} == {torch.float32}
    assert all(bool(change.any()) for change in changes)


@pytest.mark.medium
@pytest.mark.parametrize("objective", ["task", "associative"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_hope_padding_and_other_rows_change_nothing(objective: str, which: int) -> None:
    """Rows of different lengths, then continued from different offsets, equal each row alone."""
    model, ids, more = build_models(objective)[which], random_ids(3, 7), random_ids(3, 4, 1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0]]).bool()
    y, state = read(model, ids, attention_mask=mask)
    y_more, final = read(model, more, state)
    for row in range(3):
        alone, row_state = read(model, ids[row : row + 1, mask[row]])
        assert_close([y[row : row + 1, mask[row]]], [alone])
        alone, row_state = read(model, more[row : row + 1], row_state)
        assert_close([y_more[row : row + 1]], [alone])
        assert_close(learned_tensors(states.select_rows(final, [row])), learned_tensors(row_state))


@pytest.mark.parametrize("which", [0, 1])
def test_task_updates_are_one_gradient_for_all_levels(which: int) -> None:
    """After one chunk every weight has changed by the step size times the gradient of its tokens' -log p."""
    model, ids = build_models("task")[which], random_ids(1, 3)
    static = model.logits(read(model, ids[:, :2])[0])
    loss = cross_entropy(static[0], ids[0, 1:3], reduction="sum")
    _, state = read(model, ids)
    changed = 0
    for level, C, name, w, step in level_weights(model, state):
        (grad,) = torch.autograd.grad(loss, w, retain_graph=True)
        if C == 2:
            assert_close([to_dense(level.change[name])[0]], [-step * grad])
        else:
            assert_close([to_dense(level.accumulated[name])[0]], [step * grad])
        changed += int(bool(grad.any()))
    assert changed == 3 * sum(map(len, model.hope_config.chunk_sizes))


def build_one_level(which: int) -> Hope:
    """Return a model whose only levels have a chunk size of 4."""
    if not which:
        model = HopeAttention.from_decoder(fresh("llama").double(), (4,), options=cms_options("task"))
        assert isinstance(model, HopeAttention)
        return model
    config = HopeConfig.attention_free(V, 8, 2, chunk_sizes=(4,), num_heads=2, memory=MEMORY, cms=cms_options("task"))
    return Hope(replace(config, memory_chunk_size=9), 1).double().eval()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("cuts", [(), (1, 2, 3), (2,)])
def test_target_mask_leaves_out_targets_but_passes_gradients(which: int, cuts: tuple[int, ...]) -> None:
    """A chunk, whole or in pieces, against autograd's gradient of the masked loss."""
    model, ids = build_one_level(which), random_ids(1, 5)
    target_mask = torch.tensor([[True, False, False, True, True]])
    static = model.logits(read(model, ids[:, :4])[0])
    loss = cross_entropy(static[0, 2:], ids[0, 3:], reduction="sum")
    first_target = cross_entropy(static[0, 2:3], ids[0, 3:4])
    state = None
    for a, b in zip((0, *cuts), (*cuts, 5), strict=True):
        _, state = read(model, ids[:, a:b], state, target_mask=target_mask[:, a:b])
    assert state is not None
    differ = 0
    for level, _, name, w, step in level_weights(model, state):
        (grad,) = torch.autograd.grad(loss, w, retain_graph=True)
        assert_close([to_dense(level.change[name])[0]], [-step * grad])
        (other,) = torch.autograd.grad(first_target, w, retain_graph=True)
        differ += int((grad - other).abs().max() > 1e-3 * grad.abs().max())
    assert differ, "a missing target gives another gradient"
    _, unmasked = read(model, ids)
    pairs = zip(learned_tensors(unmasked), learned_tensors(state), strict=True)
    assert any(not torch.allclose(x, y) for x, y in pairs)
    with pytest.raises(UsageError, match="target_mask"):
        read(build_attention("associative"), ids, target_mask=ids > 0)


@pytest.mark.medium
def test_tokens_without_learning_end_the_accumulation() -> None:
    """However the text is cut; levels and their counts do not change during these tokens."""
    for model in build_models("task"):
        ids, learns = random_ids(1, 13), [True] * 3 + [False] * 4 + [True] * 6
        results = []
        for cuts in ((3, 7), tuple(range(1, 13))):
            outputs, state = [], None
            for a, b in zip((0, *cuts), (*cuts, 13), strict=True):
                y, state = read(model, ids[:, a:b], state, update_weights=learns[a])
                outputs.append(y)
            assert state is not None
            results.append([torch.cat(outputs, 1), *learned_tensors(state)])
        for other in results[1:]:
            assert_close(other, results[0])
        _, state = read(model, ids[:, :3])
        _, one = read(model, ids[:, 3:4], state, update_weights=False)
        _, two = read(model, ids[:, 4:9], one, update_weights=False)
        assert all(states_equal(a.cms, b.cms) for a, b in zip(one.layers, two.layers, strict=True))


@pytest.mark.medium
@pytest.mark.parametrize("objective", ["task", "associative"])
@pytest.mark.parametrize("which", [0, 1])
def test_hope_outer_gradient_changes_no_value(objective: str, which: int) -> None:
    model, ids = build_models(objective)[which], random_ids(2, 7)
    modes: dict[str, dict[str, Any]] = {"full": {}, "truncated": {"truncate_after": 2}, "first_order": {}}
    grads: dict[str, dict[str, Tensor]] = {}
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected, _ = read(model, ids)
    for mode, extra in modes.items():
        y, _ = read(model, ids, outer_gradient=mode, **extra)
        assert_close([y], [expected], tolerance=1e-12)
        loss = cross_entropy(model.logits(y)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        values = torch.autograd.grad(loss, parameters, materialize_grads=True)
        grads[mode] = dict(zip(names, values, strict=True))
    assert all(g.isfinite().all() for mode in modes for g in grads[mode].values())
    projections = model.hope_config.mlp_projections
    starts = [name for name in names if ".levels." in name and name.split(".")[-2] in projections]
    assert all(grads[mode][name].any() for mode in modes for name in starts)
    steps = [name for name in names if name.endswith("step.bias")]
    assert all(grads[mode][name].any() for mode in ("full", "truncated", "first_order") for name in steps)
    kinds = ("full", "truncated", "first_order")
    assert len({tuple(grads[mode][starts[0]].flatten().tolist()) for mode in kinds}) == 3
    for no_gradient in (torch.no_grad, torch.inference_mode):
        with no_gradient():
            y, state = read(model, ids[:, :5])
            assert_close([torch.cat([y, read(model, ids[:, 5:], state)[0]], 1)], [expected])


def test_hope_refuses_an_unknown_outer_gradient() -> None:
    with pytest.raises(UsageError, match="hope: outer_gradient 'complete' is not one of"):
        build_hope("task").read_tokens(random_ids(1, 4), outer_gradient="complete")  # pyright: ignore[reportArgumentType]


def test_hope_full_outer_gradient_equals_finite_differences() -> None:
    model, ids = build_attention("task"), random_ids(1, 6)
    p = model.get_parameter("model.layers.0.mlp.levels.0.up_proj.weight")

    def loss() -> Tensor:
        y, _ = read(model, ids, outer_gradient="full")
        return cross_entropy(model.logits(y)[0, :-1], ids[0, 1:])

    (grad,) = torch.autograd.grad(loss(), p)
    direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        p.add_(1e-5 * direction)
        up = loss()
        p.sub_(2e-5 * direction)
        down = loss()
        p.add_(1e-5 * direction)
    torch.testing.assert_close((up - down) / 2e-5, (grad * direction).sum(), rtol=1e-6, atol=0)


@pytest.mark.medium
@pytest.mark.parametrize("which", [0, 1])
def test_hope_state_files_forks_and_resets(which: int, tmp_path: Path) -> None:
    model, path = build_models("task")[which], tmp_path / "state.safetensors"
    _, state = read(model, random_ids(2, 7))
    model.save_state(state, path)
    metadata = read_state_file(path).metadata
    assert (metadata["tokens"], metadata["version"]) == (int(state.position.sum()), laconic.__version__)
    loaded = model.load_state(path)
    assert states_equal(loaded, states.detach(state))
    more = random_ids(4, 5, 2)
    y, after = read(model, more, states.select_rows(loaded, [0, 0, 1, 1]))
    assert_close([y[1:2]], [read(model, more[1:2], states.select_rows(loaded, [0]))[0]])
    reset = reset_rows(after, [0])
    assert_close([read(model, more[:1], states.select_rows(reset, [0]))[0]], [read(model, more[:1])[0]])
    assert not any(level.num_updates[0] for level in all_levels(reset))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(CorruptArtifactError, match="use that model"):
        model.load_state(path)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_hope_checkpoint_round_trip(which: int, tmp_path: Path) -> None:
    model, ids, folder = build_models("task")[which], random_ids(1, 5), tmp_path / "model"
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder, dtype=torch.float64)
    assert replace(loaded.hope_config, decoder=model.hope_config.decoder) == model.hope_config
    weights = dict(model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in loaded.named_parameters())
    assert_close([read(loaded, ids)[0]], [read(model, ids)[0]], tolerance=1e-13)  # mapped weights: other alignment
    for dtype, expected in (("bfloat16", torch.bfloat16), ("auto", torch.float64)):
        assert type(model).from_pretrained(folder, dtype=dtype).config.dtype == expected
    other = (Hope, HopeAttention)[1 - isinstance(model, HopeAttention)]
    with pytest.raises(InputError, match="from_pretrained"):
        other.from_pretrained(folder)
    fresh("llama").save_pretrained(tmp_path / "donor")
    with pytest.raises(InputError, match="model_type is 'llama'"):
        Hope.from_pretrained(tmp_path / "donor")
    config = (folder / "config.json").read_text()
    for old, new, key in (
        ('"inner_lr"', '"inner_lrs"', r"cms\.inner_lrs"),
        ('"num_heads"', '"heads"', "num_heads"),
        ('"num_heads"', '"gizmo": 1, "num_heads"', "gizmo"),
        ('"num_heads": ', '"num_heads": "x", "unused": ', "num_heads"),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 3', "chunk_sizes for 2 layers"),
    ):
        assert old in config
        (folder / "config.json").write_text(config.replace(old, new))
        with pytest.raises(InputError, match=rf"config\.json: hope: {key}"):
            HopeConfig.from_folder(folder)


def test_hope_seed_determines_the_initial_weights() -> None:
    config = HopeConfig.attention_free(V, 8, 2, chunk_sizes=(2, 4), num_heads=2)
    one, two, other = Hope(config), Hope(config), Hope(config, 1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    step = softplus(one.get_parameter("model.layers.0.mlp.levels.1.step.bias"))
    torch.testing.assert_close(step, torch.tensor(1e-3 / 4), rtol=1e-5, atol=0)
    assert not any("self_attn" in name for name, _ in one.named_parameters())
    chained = HopeAttention.from_decoder(fresh("llama"), (2, 4), "chain")
    assert [len(sizes) for sizes in chained.hope_config.chunk_sizes] == [2, 2]
    shared = chained.get_parameter("model.layers.0.mlp.levels.1.up_proj.weight")
    assert torch.equal(shared, chained.get_parameter("model.layers.1.mlp.levels.1.up_proj.weight"))


def test_add_levels_keeps_the_output() -> None:
    for model in build_models("associative"):
        L = len(model.hope_config.chunk_sizes)
        ids, config = random_ids(2, 7), replace(model.hope_config, chunk_sizes=((2,),) * L)
        small = type(model)(config, seed=3).double()
        grown = small.add_levels((2, 4))
        assert torch.equal(read(grown, ids, update_weights=False)[0], read(small, ids, update_weights=False)[0])
        assert_close([read(grown, ids[:, :4])[0]], [read(small, ids[:, :4])[0]])  # the new level is not updated yet
        first = "model.layers.0.mlp.levels.0.up_proj.weight"
        assert grown.get_parameter(first) is small.get_parameter(first)
    with pytest.raises(UsageError, match=r"\[4, 8\] must begin with the model's, \[2\]"):
        small.add_levels((4, 8))


def test_hope_forward_accepts_the_arguments_of_a_decoder() -> None:
    """Vectors and captured activations; vectors without ids do not teach the task."""
    for model in build_models("task"):
        ids = random_ids(1, 5)
        output = model(model.embed(ids), capture=("embed", "hidden.1", "final_norm"))
        assert torch.equal(output.activations["final_norm"], output.hidden_states)
        assert torch.equal(output.activations["embed"], model.embed(ids))
        assert not any(level.num_updates.any() for level in all_levels(output.cache))  # pyright: ignore[reportArgumentType]
        assert isinstance(model, Decoder)


@pytest.mark.parametrize("objective", ["task", "associative"])
@pytest.mark.parametrize("which", [0, 1])
def test_hope_takes_masks_of_integers_and_ids_of_int32(objective: str, which: int) -> None:
    """As tokenizers of transformers and numpy return them, and as `Decoder` takes them."""
    model, ids = build_models(objective)[which], random_ids(2, 5)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    for update_weights in (True, False):
        options: dict[str, Any] = {"update_weights": update_weights}
        expected, _ = read(model, ids, read(model, ids, attention_mask=mask.bool(), **options)[1], **options)
        state = read(model, ids.int(), attention_mask=mask, **options)[1]
        assert torch.equal(read(model, ids.int(), state, **options)[0], expected)
    if objective == "task":
        assert torch.equal(read(model, ids, target_mask=mask)[0], read(model, ids, target_mask=mask.bool())[0])


def test_hope_refuses_inputs_and_options_that_do_not_fit() -> None:
    model, ids = build_hope(), random_ids(1, 5)
    state = model.read_tokens(ids).cache
    with pytest.raises(UsageError, match=r"cannot capture probs\.0"):
        model(model.embed(ids), capture=("probs.0",))
    with pytest.raises(UsageError, match="position_ids"):
        model(model.embed(ids), input_ids=ids, capture=("embed",))
    with pytest.raises(UsageError, match="2 rows, the state 1"):
        model.read_tokens(random_ids(2, 3), state)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="1 layers, the model 2"):
        model.read_tokens(ids, FastWeightState(state.layers[:1], state.position))  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UsageError, match="chunk_sizes for 1 layers"):
        HopeConfig(fresh("llama").config, ((2,),), CMSOptions())
    with pytest.raises(UsageError, match="head_dim 3"):
        HopeConfig.attention_free(V, 8, 1, num_heads=2, head_dim=3, memory=TitansOptions())
    with pytest.raises(UsageError, match="width 8 is not divisible by 3 heads"):
        HopeConfig.attention_free(V, 8, 1, num_heads=3)
    with pytest.raises(UsageError, match="width 8 is not divisible by 0 heads"):
        HopeConfig.attention_free(V, 8, 1, num_heads=0, memory=TitansOptions())
    with pytest.raises(UsageError, match="head_dim 0: must be at least 1"):
        HopeConfig.attention_free(V, 8, 1, num_heads=2, head_dim=0)
    with pytest.raises(UsageError, match="residual"):
        HopeAttention.from_decoder(fresh("llama"), (2, 4), "grow", options=CMSOptions(residual="plain"))
    with pytest.raises(UsageError, match="donor_layout 'deep' is unknown; use one of 'depth'"):
        HopeAttention.from_decoder(fresh("llama"), (2, 4), "deep")  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_generate_with_hope_reads_what_it_writes() -> None:
    """Prompts of two lengths together equal each alone; the state is that of reading prompt and answer."""
    config = GenerationConfig(max_tokens=4, update_on_prompt=True, update_on_output=True)
    for model in build_models("task"):
        ids, mask = random_ids(2, 6), torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]).bool()
        prompts = [ids[row, mask[row]].tolist() for row in range(2)]
        together = generate(model, input_ids=prompts, config=config)
        for prompt, one in zip(prompts, together, strict=True):
            (alone,) = generate(model, input_ids=[prompt], config=config)
            assert one.token_ids == alone.token_ids
            assert one.passes == (1, 0, 0, len(alone.token_ids))
            _, after = read(model, torch.tensor([prompt + alone.token_ids]))
            assert_close(learned_tensors(cast(FastWeightState, alone.state)), learned_tensors(after))
            assert_close(learned_tensors(cast(FastWeightState, one.state)), learned_tensors(after))
