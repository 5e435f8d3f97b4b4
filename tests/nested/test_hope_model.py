"""Laws of the language models: the donor's bits, pieces as the whole, levels taught by the task, files."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from laconic.config.nested import CMSOptions, SelfModifyingOptions, TitansOptions
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.models.decoder import Decoder
from laconic.nested import state as values
from laconic.nested.cms.forward import require_levels
from laconic.nested.cms.low_rank_updates import to_dense
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope, HopeAttention
from laconic.nested.state import FastWeightState
from tests.core.readings import fresh
from tests.nested.helpers import assert_close

pytestmark = pytest.mark.usefixtures("unchecked")
V = 97
CMS: dict[str, Any] = {"eta": 0.5, "clip": 0.0, "clip_error": 0.0}
MEMORY = SelfModifyingOptions(memory_chunk_size=3, projection_chunk_size=3, projection_lr_init=0.3)


def ids_of(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def attention(inner: str = "task", family: str = "llama", **how: Any) -> HopeAttention:
    """A small decoder's weights in float64, its two layers of chunks 2 and 4."""
    place = how.pop("place", "depth")
    own = CMSOptions(inner_objective=cast(Any, inner), **(CMS | how))
    made = HopeAttention.from_decoder(fresh(family).double(), (2, 4), place, options=own)
    assert isinstance(made, HopeAttention)
    return made


def hope(inner: str = "task", memory: Any = MEMORY, **how: Any) -> Hope:
    own = CMSOptions(inner_objective=cast(Any, inner), **(CMS | how))
    shape = HopeConfig.attention_free(
        V, 8, 2, chunk_sizes=(2, 4), num_heads=2, memory=memory, memory_chunk_size=3, cms=own
    )
    made = Hope(shape, 1).double().eval()
    with torch.no_grad():
        for n, p in enumerate(made.parameters()):
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(n)).double())
    return made


def titans(inner: str = "task", **how: Any) -> Hope:
    return hope(inner, TitansOptions(mlp_width=3, num_persistent_tokens=1), **how)


def models(inner: str) -> list[Hope]:
    return [attention(inner), hope(inner), titans(inner)]


def changes(state: FastWeightState) -> list[Tensor]:
    """All that levels and memories hold, and counts; caches aside, whose slots may stand elsewhere."""
    found = [state.position.double()]
    for layer in state.layers:
        found += [x for _, x in values.named_tensors((layer.conv_tails, layer.memory))]
        for level in require_levels(layer):
            found += [to_dense(change) for part in (level.change, level.accumulated) for change in part.values()]
            found += [level.num_tokens.double(), level.num_updates.double()]
    return found + ([] if state.open_chunk is None else [state.open_chunk.num_tokens.double()])


def read(model: Hope, ids: Tensor, state: FastWeightState | None = None, **how: Any) -> tuple[Tensor, FastWeightState]:
    seen = model.read_tokens(ids, state, **how)
    return seen.hidden_states, cast(FastWeightState, seen.cache)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt"])
@pytest.mark.parametrize("place", ["depth", "grow"])
@pytest.mark.parametrize("inner", ["task", "associative"])
def test_with_steps_of_0_it_is_the_donor_bit_for_bit(family: str, place: Any, inner: Any) -> None:
    donor, ids = fresh(family), ids_of(2, 9)
    asked = donor(donor.embed(ids))
    live = torch.tensor([[True] * 9, [False] * 3 + [True] * 6])
    padded = donor(donor.embed(ids), attention_mask=live)
    for structure in ("sequential", "nested", "independent"):
        how = CMSOptions(
            inner_objective=inner, inner_lr=0.0, structure=cast(Any, structure), associative_target="start"
        )
        made = HopeAttention.from_decoder(donor, (2, 4), place, options=how)
        seen = made.read_tokens(ids)
        assert torch.equal(made.logits(seen.hidden_states), donor.logits(asked.hidden))
        assert torch.equal(made.read_tokens(ids, attention_mask=live).hidden_states[live], padded.hidden[live])
        again = made(made.embed(ids[:, :2]), seen.cache)
        assert torch.equal(again.hidden, donor(donor.embed(ids[:, :2]), asked.state).hidden)


@pytest.mark.parametrize("inner", ["task", "associative"])
def test_with_steps_that_come_to_0_nothing_moves(inner: str) -> None:
    """Through the whole machinery of learning, to the tolerance of another cut of the same products."""
    donor, made, ids = fresh("llama").double(), attention(inner), ids_of(2, 9)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("step.bias"):
                p.fill_(-1e4)
    hidden, state = read(made, ids)
    assert_close([hidden], [donor(donor.embed(ids)).hidden], token_range=1e-12)
    assert not any(
        to_dense(x).any() for layer in state.layers for level in require_levels(layer) for x in level.change.values()
    )
    assert all(level.num_updates.all() for layer in state.layers for level in require_levels(layer))


@pytest.mark.parametrize("inner", ["task", "associative"])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (2, 3, 8)])
def test_pieces_are_the_whole(inner: str, which: int, cuts: tuple[int, ...]) -> None:
    model, ids = models(inner)[which], ids_of(2, 11)
    whole, after = read(model, ids)
    found, state = [], None
    for a, b in zip((0, *cuts), (*cuts, 11), strict=True):
        y, state = read(model, ids[:, a:b], state)
        found.append(y)
    assert_close([torch.cat(found, 1)], [whole])
    assert state is not None
    assert_close(changes(state), changes(after))
    assert all(level.num_updates.all() for layer in state.layers for level in require_levels(layer))
    still, _ = read(model, ids, learn=False)
    assert not torch.allclose(still, whole), "what is learned matters"


@pytest.mark.parametrize("inner", ["task", "associative"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_padding_and_company_change_nothing(inner: str, which: int) -> None:
    """Rows of different lengths, then of different offsets: each as if it were alone."""
    model, ids, more = models(inner)[which], ids_of(3, 7), ids_of(3, 6, 1)
    live = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0]]).bool()
    y, state = read(model, ids, live=live)
    after, last = read(model, more, state)
    for row in range(3):
        own, held = read(model, ids[row : row + 1, live[row]])
        assert_close([y[row : row + 1, live[row]]], [own])
        own, held = read(model, more[row : row + 1], held)
        assert_close([after[row : row + 1]], [own])
        assert_close(changes(values.select_rows(last, [row])), changes(held))


@pytest.mark.parametrize("which", [0, 1])
def test_the_task_teaches_all_levels_by_one_gradient(which: int) -> None:
    """After one chunk every weight has moved by the step times the gradient of -log p of its tokens."""
    model, ids = models("task")[which], ids_of(1, 3)
    static = model.logits(read(model, ids[:, :2])[0])
    loss = cross_entropy(static[0], ids[0, 1:3], reduction="sum")
    _, state = read(model, ids)
    moved = 0
    for n, layer in enumerate(state.layers):
        for l, level in enumerate(require_levels(layer)):
            at = f"{model.weight_names.layers}.{n}.mlp.levels.{l}."
            step = torch.nn.functional.softplus(model.get_parameter(f"{at}step.bias"))
            for name in model.hope_config.mlp_projections:
                (slope,) = torch.autograd.grad(loss, model.get_parameter(f"{at}{name}.weight"), retain_graph=True)
                held = level.change if model.hope_config.chunk_sizes[n][l] == 2 else level.accumulated
                sign = -1.0 if model.hope_config.chunk_sizes[n][l] == 2 else 1.0
                assert_close([to_dense(held[name])[0]], [sign * step * slope])
                moved += int(bool(slope.any()))
    assert moved == 3 * sum(map(len, model.hope_config.chunk_sizes))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("cuts", [(), (1, 2, 3), (2,)])
def test_what_is_not_taught_is_no_target_and_passes_gradients_on(which: int, cuts: tuple[int, ...]) -> None:
    """The chunk of the fastest levels, whole or in pieces, against autograd's gradient of the masked loss."""
    model, ids, taught = wide(which), ids_of(1, 5), torch.tensor([[True, False, False, True, True]])
    static = model.logits(read(model, ids[:, :4])[0])
    loss = cross_entropy(static[0, 2:], ids[0, 3:], reduction="sum")
    early = cross_entropy(static[0, 2:3], ids[0, 3:4])
    state = None
    for a, b in zip((0, *cuts), (*cuts, 5), strict=True):
        _, state = read(model, ids[:, a:b], state, taught=taught[:, a:b])
    assert state is not None
    apart = 0
    for n, layer in enumerate(state.layers):
        for l, level in enumerate(require_levels(layer)):
            at = f"{model.weight_names.layers}.{n}.mlp.levels.{l}."
            step = torch.nn.functional.softplus(model.get_parameter(f"{at}step.bias"))
            for name in model.hope_config.mlp_projections:
                w = model.get_parameter(f"{at}{name}.weight")
                (slope,) = torch.autograd.grad(loss, w, retain_graph=True)
                assert_close([to_dense(level.change[name])[0]], [-step * slope])
                (other,) = torch.autograd.grad(early, w, retain_graph=True)
                apart += int((slope - other).abs().max() > 1e-3 * slope.abs().max())
    assert apart, "one target less is another gradient"
    _, unmasked = read(model, ids)
    assert any(not torch.allclose(x, y) for x, y in zip(changes(unmasked), changes(state), strict=True))


def wide(which: int) -> Hope:
    """With one chunk of 4 tokens for every level."""
    own = CMSOptions(inner_objective="task", **CMS)
    if not which:
        made = HopeAttention.from_decoder(fresh("llama").double(), (4,), "depth", options=own)
        assert isinstance(made, HopeAttention)
        return made
    return (
        Hope(
            HopeConfig.attention_free(
                V, 8, 2, chunk_sizes=(4,), num_heads=2, memory=MEMORY, memory_chunk_size=9, cms=own
            ),
            1,
        )
        .double()
        .eval()
    )


def test_taught_is_refused_where_no_level_learns_of_ids() -> None:
    model, ids = attention("associative"), ids_of(1, 3)
    with pytest.raises(
        UsageError, match="hope: taught says which ids levels learn of, and none here learns of ids; leave it out"
    ):
        read(model, ids, taught=ids > 0)


def test_tokens_that_teach_nothing_end_the_gathering() -> None:
    """Wherever the stretches with and without learning are cut; levels and their counts stand still in between."""
    for model in models("task"):
        ids, learns = ids_of(1, 13), [True] * 3 + [False] * 4 + [True] * 6
        found = []
        for cuts in ((3, 7), (1, 3, 5, 7, 8), tuple(range(1, 13))):
            ys, state = [], None
            for a, b in zip((0, *cuts), (*cuts, 13), strict=True):
                y, state = read(model, ids[:, a:b], state, learn=learns[a])
                ys.append(y)
            assert state is not None
            found.append([torch.cat(ys, 1), *changes(state)])
        for other in found[1:]:
            assert_close(other, found[0])
        _, state = read(model, ids[:, :3])
        _, one = read(model, ids[:, 3:4], state, learn=False)
        _, two = read(model, ids[:, 4:9], one, learn=False)
        assert all(values.states_equal(a.cms, b.cms) for a, b in zip(one.layers, two.layers, strict=True))


@pytest.mark.parametrize("inner", ["task", "associative"])
@pytest.mark.parametrize("which", [0, 1])
def test_starts_get_gradients_and_ways_change_no_value(inner: str, which: int) -> None:
    model, ids = models(inner)[which], ids_of(2, 10)
    ways: dict[str, dict[str, Any]] = {"full": {}, "truncated": {"horizon": 2}, "first_order": {}, "none": {}}
    found: dict[str, dict[str, Tensor]] = {}
    names, parameters = zip(*model.named_parameters(), strict=True)
    asked, _ = read(model, ids)
    for way, more in ways.items():
        y, _ = read(model, ids, gradient=way, **more)
        assert_close([y], [asked], token_range=1e-12)
        loss = cross_entropy(model.logits(y)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        slopes = torch.autograd.grad(loss, parameters, materialize_grads=True)
        found[way] = dict(zip(names, slopes, strict=True))
    assert all(g.isfinite().all() for way in ways for g in found[way].values())
    starts = [name for name in names if ".levels." in name and name.split(".")[-2] in model.hope_config.mlp_projections]
    assert all(found[way][name].any() for way in ways for name in starts)
    steps = [name for name in names if name.endswith("step.bias")]
    assert all(found[way][name].any() for way in ("full", "truncated", "first_order") for name in steps)
    assert not any(found["none"][name].any() for name in steps)
    kinds = ("full", "truncated", "first_order")
    assert len({tuple(found[way][starts[0]].flatten().tolist()) for way in kinds}) == 3
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            y, state = read(model, ids[:, :5])
            assert_close([torch.cat([y, read(model, ids[:, 5:], state)[0]], 1)], [asked])
            assert not state.layers[0].cms.levels[0].num_tokens.requires_grad  # type: ignore[union-attr]


def test_values_of_a_gradient_through_the_inner_updates() -> None:
    """gradient full: against differences of the loss itself, the inner gradients taken anew."""
    model, ids = attention("task"), ids_of(1, 6)
    p = model.get_parameter("model.layers.0.mlp.levels.0.up_proj.weight")

    def loss() -> Tensor:
        y, _ = read(model, ids, gradient="full")
        return cross_entropy(model.logits(y)[0, :-1], ids[0, 1:])

    (slope,) = torch.autograd.grad(loss(), p)
    way = torch.randn(p.shape, generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        p.add_(1e-5 * way)
        up = loss()
        p.sub_(2e-5 * way)
        down = loss()
        p.add_(1e-5 * way)
    torch.testing.assert_close((up - down) / 2e-5, (slope * way).sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("which", [0, 1])
def test_states_are_saved_forked_and_reset(which: int, tmp_path: Path) -> None:
    model = models("task")[which]
    _, state = read(model, ids_of(2, 7))
    model.save_state(state, tmp_path / "me.safetensors")
    loaded = model.load_state(tmp_path / "me.safetensors")
    assert values.states_equal(loaded, values.detach(state))
    more = ids_of(4, 5, 2)
    y, after = read(model, more, values.repeat_rows(loaded, 2))
    assert_close([y[1:2]], [read(model, more[1:2], values.select_rows(loaded, [0]))[0]])
    fresh_row = values.reset_rows(after, [0])
    assert_close([read(model, more[:1], values.select_rows(fresh_row, [0]))[0]], [read(model, more[:1])[0]])
    only = values.reset_rows(after, [0], parts=("cms",))
    assert not any(level.num_updates[0] for layer in only.layers for level in require_levels(layer))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(CorruptArtifactError, match="load that model or pass force=True"):
        model.load_state(tmp_path / "me.safetensors")
    assert values.states_equal(model.load_state(tmp_path / "me.safetensors", force=True), loaded)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_folders_hold_the_whole_model(which: int, tmp_path: Path) -> None:
    model, ids = models("task")[which], ids_of(1, 5)
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert replace(loaded.hope_config, decoder=model.hope_config.decoder) == model.hope_config
    held = dict(model.named_parameters())
    assert all(torch.equal(p, held[name]) for name, p in loaded.named_parameters())
    assert_close([read(loaded, ids)[0]], [read(model, ids)[0]], token_range=1e-13)  # mapped weights lie elsewhere
    other = (Hope, HopeAttention)[1 - isinstance(model, HopeAttention)]
    with pytest.raises(InputError, match=r"holds a Hope(Attention)?; load it as that"):
        other.from_pretrained(tmp_path / "model")
    donor = fresh("llama")
    donor.save_pretrained(tmp_path / "donor")
    with pytest.raises(InputError, match=r"config.json: model_type 'llama'; a Hope has 'hope'; see stack\(\)"):
        Hope.from_pretrained(tmp_path / "donor")
    config = (tmp_path / "model" / "config.json").read_text()
    for old, new, says in (
        ('"eta"', '"etas"', "config.json: hope: etas: extra inputs are not permitted; take the version that wrote it"),
        ('"heads"', '"header"', "config.json: hope: 'heads'; take another copy, or the version that wrote it"),
    ):
        (tmp_path / "model" / "config.json").write_text(config.replace(old, new))
        with pytest.raises(InputError, match=says):
            type(model).from_pretrained(tmp_path / "model")


def test_a_random_start_has_its_steps_and_a_seed() -> None:
    shape = HopeConfig.attention_free(V, 8, 2, chunk_sizes=(2, 4), num_heads=2)
    one, two, other = Hope(shape), Hope(shape), Hope(shape, 1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    step = torch.nn.functional.softplus(one.get_parameter("model.layers.0.mlp.levels.1.step.bias"))
    torch.testing.assert_close(step, torch.tensor(1e-3 / 4), rtol=1e-5, atol=0)
    assert not any("self_attn" in name for name, _ in one.named_parameters())
    chained = HopeAttention.from_decoder(fresh("llama"), (2, 4), "chain")
    assert [len(chunks) for chunks in chained.hope_config.chunk_sizes] == [2, 2]
    shared = chained.get_parameter("model.layers.0.mlp.levels.1.up_proj.weight")
    assert torch.equal(shared, chained.get_parameter("model.layers.1.mlp.levels.1.up_proj.weight"))


def test_levels_are_added_to_those_there_are() -> None:
    """Zeros change no bit, before they have learned; copies are the level before, with weights of their own."""
    for model in models("associative"):
        L = len(model.hope_config.chunk_sizes)
        ids, shape = ids_of(2, 7), replace(model.hope_config, chunk_sizes=((2,),) * L)
        small = type(model)(shape, seed=3).double()
        more = small.add_levels((2, 4))
        assert torch.equal(read(more, ids, learn=False)[0], read(small, ids, learn=False)[0])
        assert_close([read(more, ids[:, :4])[0]], [read(small, ids[:, :4])[0]])  # the added level has not fired
        first = "model.layers.0.mlp.levels.0.up_proj.weight"
        assert more.get_parameter(first) is small.get_parameter(first)
        copied = small.add_levels((2, 4), "copy").get_parameter(first.replace("levels.0", "levels.1"))
        assert torch.equal(copied, small.get_parameter(first))
        assert copied.data_ptr() != small.get_parameter(first).data_ptr()
    with pytest.raises(
        UsageError, match=r"hope: levels of chunks \[2\] cannot grow to \[4, 8\]; keep them, and add slower"
    ):
        small.add_levels((4, 8))
    donor = fresh("llama")
    copies = HopeAttention.from_decoder(donor, (2, 4), "grow", new_level_init="copy")
    one, two = (copies.get_parameter(f"model.layers.1.mlp.levels.{l}.down_proj.weight") for l in (0, 1))
    assert torch.equal(one, two)
    assert one is not two
    assert any(one is p for p in donor.parameters())
    with pytest.raises(UsageError, match="hope: a level of zeros in a plain chain wipes out what was before it"):
        HopeAttention.from_decoder(donor, (2, 4), "grow", options=CMSOptions(residual="plain"))


def test_it_is_called_as_a_decoder_is() -> None:
    """With vectors and stages; what has no ids teaches the task nothing."""
    for model in models("task"):
        ids = ids_of(1, 5)
        seen = model(model.embed(ids), capture=("embed", "hidden.1", "final_norm"))
        assert torch.equal(seen.activations["final_norm"], seen.hidden)
        assert torch.equal(seen.activations["embed"], model.embed(ids))
        assert not any(level.num_updates.any() for layer in seen.state.layers for level in require_levels(layer))
        assert isinstance(model, Decoder)
        with pytest.raises(UsageError, match=r"hope: stage probs.0 is not kept; there are embed, hidden.0 to hidden.2"):
            model(model.embed(ids), capture=("probs.0",))
        with pytest.raises(UsageError, match="hope: levels that learn of ids take no positions, bias or stages"):
            model(model.embed(ids), ids=ids, capture=("embed",))
        with pytest.raises(UsageError, match="hope: 2 rows of vectors, the state has 1; take or join its rows"):
            model.read_tokens(ids_of(2, 3), seen.state)
        short = FastWeightState(seen.state.layers[:1], seen.state.position)
        with pytest.raises(UsageError, match="hope: the state has 1 layers, the model 2; load its own"):
            model.read_tokens(ids, short)
    with pytest.raises(UsageError, match="hope: chunks of 1 layers, the decoder has 2; give each its levels"):
        HopeConfig(fresh("llama").config, ((2,),), CMSOptions())
    with pytest.raises(UsageError, match="hope: heads of 3; those of Titans share the width, leave head out"):
        HopeConfig.attention_free(V, 8, 1, num_heads=2, head_dim=3, memory=TitansOptions())
    with pytest.raises(
        UsageError, match="hope: grow keeps the donor's MLP first, and slow_first would run another before"
    ):
        HopeAttention.from_decoder(fresh("llama"), (2, 4), "grow", options=CMSOptions(level_order="slow_first"))


@pytest.mark.slow
def test_what_is_written_is_read() -> None:
    """Prompts of two lengths together are each alone; the state is that of reading prompt and answer."""
    for model in models("task"):
        ids, live = ids_of(2, 6), torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]).bool()
        prompts = [ids[row, live[row]].tolist() for row in range(2)]
        both = generate(
            model,
            input_ids=prompts,
            config=GenerationConfig(max_tokens=4, update_on_prompt=True, update_on_output=True),
        )
        for prompt, one in zip(prompts, both, strict=True):
            (alone,) = generate(
                model,
                input_ids=[prompt],
                config=GenerationConfig(max_tokens=4, update_on_prompt=True, update_on_output=True),
            )
            assert one.token_ids == alone.token_ids
            assert one.passes == (1, 0, 0, len(alone.token_ids))
            _, after = read(model, torch.tensor([prompt + alone.token_ids]))
            assert_close(changes(cast(FastWeightState, alone.state)), changes(after))
            assert_close(changes(cast(FastWeightState, one.state)), changes(after))
        drawn, again = (
            generate(model, input_ids=prompts, config=GenerationConfig(max_tokens=3, temperature=1.0, seed=[1, 2]))
            for _ in range(2)
        )
        assert [one.token_ids for one in drawn] == [one.token_ids for one in again]
