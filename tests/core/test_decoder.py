"""What a decoder refuses and how it says so; growing, the fingerprint, wanted stages, default positions, dropout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.errors import InputError
from laconic.models.activations import MODEL_ACTIVATIONS, layer_activations
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.hf_config import DropoutRates
from tests.core.readings import FAMILIES, VARIANTS, axes, decoder_of, fresh, noise, same
from tests.tolerances import FLOAT32, error


def x(*shape: int) -> torch.Tensor:
    return noise(1, *shape, dtype=torch.float32)


STATE = KVCache.empty(DecoderConfig.tiny("llama", num_hidden_layers=3, num_key_value_heads=4, head_dim=8), 2)
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("llama", (torch.ones(2, 5, 48, dtype=torch.long),), {}, "vectors are int64; did you mean decoder.embed(ids)?"),
    ("llama", (x(2, 5, 64),), {}, "vectors have width 64, decoder 48"),
    ("llama", (x(2, 0, 48),), {}, "vectors hold no position; T must be at least 1"),
    ("llama", (x(0, 2, 48),), {}, "vectors hold no row; B must be at least 1"),
    ("llama", (x(2, 5, 48),), {"live": torch.ones(2, 4).bool()}, "live is [2, 4], vectors are [2, 5]"),
    ("gpt2", (x(2, 5, 48),), {"live": torch.ones(2, 5).long()}, "live is int64; did you mean live.bool()?"),
    ("llama", (x(2, 5, 48),), {"positions": torch.zeros(2, 1).long()}, "positions are [2, 1], vectors are [2, 5]"),
    ("llama", (x(2, 5, 48), STATE), {}, "state has 3 layers of 4 heads × 8, decoder 2 of 2 × 16"),
    ("llama", (x(2, 5, 48), KVCache((), (), STATE.positions, STATE.valid)), {}, "state has 0 layers of 0 heads × 0"),
    ("llama", (x(3, 5, 48), KVCache.empty(DecoderConfig.tiny("llama"), 2)), {}, "state has 2 rows, vectors 3"),
    ("llama", (x(2, 5, 48),), {"bias": x(2, 5, 9)}, "bias [2, 5, 9] does not fit [2, 5, 5]"),
    ("llama", (x(2, 5, 48),), {"bias": x(5, 5)}, "bias [5, 5] does not fit [2, 5, 5]"),
    (
        "llama",
        (x(1, 1, 48),),
        {"positions": torch.tensor([[-1]])},
        "position −1 (none) needs a table of positions; llama",
    ),
    ("opt", (x(1, 1, 48),), {"positions": torch.tensor([[-2]])}, "position -2: the least is −1, none"),
    ("opt", (x(1, 1, 48),), {"positions": torch.tensor([[128]])}, "position 128 ≥ 128 of opt"),
    ("gpt2", (x(1, 129, 48),), {}, "position 128 ≥ 128 of gpt2"),
    ("llama", (x(1, 1, 48),), {"want": ("q_rott",)}, "stage q_rott: no such stage; did you mean q_rot?"),
    ("llama", (x(1, 1, 48),), {"want": ("k.2",)}, "stage k.2: the decoder has layers 0 to 1"),
    ("llama", (x(1, 1, 48),), {"want": ("hidden.3",)}, "stage hidden.3: the decoder has layers 0 to 1"),
    ("llama", (x(1, 1, 48),), {"want": ("q_raw",)}, "stage q_raw: no such stage"),
    ("gpt2", (x(1, 1, 48),), {"want": ("gate",)}, "stage gate: no such stage"),
]


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize(("name", "given", "named", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_refused(name: str, given: tuple[Any, ...], named: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        fresh(name)(*given, **named)
    assert message in str(caught.value)


@pytest.mark.usefixtures("as_users_call_it")
def test_a_bias_against_a_state_is_measured_with_it() -> None:
    decoder = decoder_of("llama", torch.float32)
    state = decoder(x(2, 7, 48)).state
    decoder(x(2, 5, 48), state, bias=x(1, 1, 12))
    with pytest.raises(ValueError, match=r"^bias \[2, 5, 9\] does not fit \[2, 5, 12\]$"):
        decoder(x(2, 5, 48), state, bias=x(2, 5, 9))


@pytest.mark.parametrize("bad", [700, -1])
def test_an_id_out_of_range(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"^ids\[0, 3\] = {bad}, vocabulary 97$"):
        decoder_of("llama").embed(torch.tensor([[1, 2, 3, bad]]))


def test_an_unknown_back_end() -> None:
    decoder = fresh("llama")
    decoder.attn_implementation = "flash"
    with pytest.raises(ValueError, match=r"^attention 'flash': known are sdpa, eager, flex$"):
        decoder(x(1, 1, 48))


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"^num_key_value_heads 3 does not divide num_attention_heads 8$"):
        DecoderConfig.tiny("llama", num_attention_heads=8, num_key_value_heads=3)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_grow(name: str, tied: bool) -> None:
    decoder = fresh(name, tie_word_embeddings=tied)
    decoder.activation_checkpointing, decoder.attn_implementation = 2, "eager"
    bigger = decoder.resize_vocabulary(5, seed=3)
    assert bigger.config.vocab_size == 102
    assert (bigger.activation_checkpointing, bigger.attn_implementation, bigger.training) == (2, "eager", False)
    new, old = dict(bigger.named_parameters()), dict(decoder.named_parameters())
    changed = {key for key in old if new[key] is not old[key]}
    assert changed == {f"{decoder.weight_names.token_embedding}.weight"} | (set() if tied else {"lm_head.weight"})
    for key in changed:
        assert torch.equal(new[key][:97], old[key])
        away = (new[key][97:] - old[key].mean(0)) / old[key].std(0)
        assert 0.005 < away.std() < 0.02
    ids = torch.tensor([[3, 5, 96]])
    hidden = bigger(bigger.embed(ids)).hidden
    assert torch.equal(hidden, decoder(decoder.embed(ids)).hidden)
    assert error(bigger.logits(hidden)[..., :97], decoder.logits(hidden)) <= FLOAT32
    assert torch.equal(decoder.resize_vocabulary(5, seed=3).token_embedding.weight, bigger.token_embedding.weight)
    assert not torch.equal(decoder.resize_vocabulary(5, seed=4).token_embedding.weight, bigger.token_embedding.weight)
    assert decoder.config.vocab_size == 97
    assert bigger.fingerprint != decoder.fingerprint


def test_growing_leaves_what_is_frozen_frozen() -> None:
    decoder = fresh("llama").requires_grad_(False)
    decoder.token_embedding.requires_grad_()
    for grown in (decoder.resize_vocabulary(3), decoder):
        assert [name for name, p in grown.named_parameters() if p.requires_grad] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_fingerprint_follows_the_weights(name: str) -> None:
    decoder = fresh(name)
    before = decoder.fingerprint
    assert before == fresh(name).fingerprint == decoder.fingerprint
    last = list(decoder.parameters())[-1]
    with torch.no_grad():
        last.view(-1)[0] += 0.5
    assert decoder.fingerprint != before
    optimizer = torch.optim.SGD(decoder.parameters(), 0.1)
    before = decoder.fingerprint
    decoder(x(1, 3, 48)).hidden.square().sum().backward()
    optimizer.step()
    assert decoder.fingerprint != before
    before = decoder.fingerprint
    assert decoder.to(torch.bfloat16).fingerprint != before
    decoder.load_state_dict(fresh(name).state_dict(), assign=True)
    assert decoder.fingerprint == fresh(name).fingerprint


def test_a_decoder_made_in_inference_mode_has_a_fingerprint(tmp_path: Path) -> None:
    decoder = fresh("llama")
    decoder.save_pretrained(tmp_path / "a")
    with torch.inference_mode():
        assert Decoder.from_pretrained(tmp_path / "a").fingerprint == decoder.fingerprint == fresh("llama").fingerprint


@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_start_is_its_seed(seed: int) -> None:
    config = DecoderConfig.tiny("qwen2")
    one, same_one, other = Decoder(config, seed), Decoder(config, seed), Decoder(config, seed + 1)
    assert one.fingerprint == same_one.fingerprint != other.fingerprint
    assert 0.9 < one.token_embedding.weight.std() / config.initializer_range < 1.1
    for name, p in one.named_parameters():
        assert p.ndim == 2 or torch.equal(p, torch.full_like(p, 0.0 if name.endswith("bias") else 1.0))


@pytest.mark.cuda
def test_a_random_start_is_its_seed_on_any_device() -> None:
    with torch.device("cuda"):
        there = Decoder(DecoderConfig.tiny("qwen2"), 0)
        assert there.resize_vocabulary(2).token_embedding.weight.is_cuda
    assert there.fingerprint == Decoder(there.config, 0).fingerprint


@pytest.mark.parametrize("name", VARIANTS)
def test_every_stage_has_the_name_and_shape_of_the_table(name: str) -> None:
    decoder = decoder_of(name)
    config, letters = decoder.config, axes(decoder.config)
    state = decoder(noise(2, 2, 3, 48)).state
    sizes = {"B": 2, "T": 5, "P": 8, "D": 48, "H": 4, "G": config.num_key_value_heads, "E": config.head_dim}
    sizes |= {"F": config.intermediate_size, "V": 97, "HE": 4 * config.head_dim}
    per_layer, once = [stage.name for stage in layer_activations(config)], [stage.name for stage in MODEL_ACTIVATIONS]
    found = decoder(noise(1, 2, 5, 48), state, want=(*per_layer, *once, "hidden")).activations
    asked = {f"{stem}.{i}": letters[stem] for stem in per_layer for i in range(2)}
    asked |= {stem: letters[stem] for stem in once} | {f"hidden.{i}": ["B", "T", "D"] for i in range(3)}
    assert {key: list(value.shape) for key, value in found.items()} == {
        key: [sizes[letter] for letter in letters] for key, letters in asked.items()
    }
    assert ("q_raw" in per_layer) == config.qk_norm
    assert ("gate" in per_layer) == config.gated_mlp


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_that_are_the_same_thing(name: str) -> None:
    decoder = decoder_of(name)
    found = decoder(noise(1, 2, 5, 48), want=("embed", "hidden", "resid2", "final_norm", "k_cache", "logits", "token"))
    stages = found.activations
    assert torch.equal(stages["embed"], stages["hidden.0"])
    assert torch.equal(stages["resid2.0"], stages["hidden.1"])
    assert torch.equal(stages["final_norm"], found.hidden)
    assert torch.equal(stages["hidden.2"], found.hidden)
    assert torch.equal(decoder.final_norm(stages["resid2.1"]), found.hidden)
    assert torch.equal(stages["k_cache.1"], found.state.keys[1])
    assert torch.equal(stages["token"], decoder.logits(found.hidden[:, -1]).argmax(-1))


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_no_position_adds_nothing(name: str) -> None:
    decoder, vectors = decoder_of(name), noise(1, 1, 4, 48)
    seen = decoder(vectors, positions=torch.tensor([[0, -1, -1, 1]]), want=("embed",))
    assert torch.equal(seen.activations["embed"][:, 1:3], vectors[:, 1:3])
    assert not torch.equal(seen.activations["embed"][:, 0], vectors[:, 0])
    assert decoder(vectors[:, :1], seen.state).state.positions.tolist() == [[0, -1, -1, 1, 2]]


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_go_on_from_the_state_and_may_be_given(name: str) -> None:
    decoder, vectors = decoder_of(name), noise(1, 2, 5, 48)
    live = torch.tensor([[False, True, True, False, True], [True] * 5])
    state = decoder(vectors, live=live).state
    assert state.positions.tolist() == [[0, 0, 1, 0, 2], [0, 1, 2, 3, 4]]
    after = decoder(vectors[:, :2], state)
    assert after.state.positions[:, 5:].tolist() == [[3, 4], [5, 6]]
    given = decoder(vectors[:, :2], state, positions=after.state.positions[:, 5:])
    same(given.hidden, after.hidden)
    far = decoder(vectors[:, :2], state, positions=after.state.positions[:, 5:] + 9)
    assert not torch.equal(far.hidden, after.hidden)


@pytest.mark.parametrize("part", ["attention", "residual", "embedding"])
def test_dropout_acts_in_training_only(part: str) -> None:
    decoder, vectors = fresh("gpt2", dropout=DropoutRates(**{part: 0.5})), x(1, 6, 48)
    plain = fresh("gpt2")(vectors).hidden
    assert torch.equal(decoder(vectors).hidden, plain)
    decoder.train()
    torch.manual_seed(1)
    first = decoder(vectors, want=("embed", "attn_out"))
    assert not torch.equal(first.hidden, plain)
    assert (first.activations["embed"] == 0).any() == (part == "embedding")
    torch.manual_seed(1)
    assert torch.equal(decoder(vectors).hidden, first.hidden)


def test_another_module_in_the_place_of_the_mlp_is_what_runs() -> None:
    decoder = fresh("llama")
    decoder.layers[0].mlp = torch.nn.Identity()
    seen = decoder(x(1, 3, 48), want=("mlp_out.0", "norm2.0"))
    assert torch.equal(seen.activations["mlp_out.0"], seen.activations["norm2.0"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_of_the_type_of_the_weights(name: str, dtype: torch.dtype) -> None:
    decoder = fresh(name).to(dtype)
    seen = decoder(noise(1, 2, 4, 48, dtype=dtype))
    assert {x.dtype for x in (seen.hidden, *seen.state.keys, *seen.state.values, decoder.logits(seen.hidden))} == {
        dtype
    }
    assert seen.hidden.isfinite().all()


def test_the_scale_of_a_layer() -> None:
    assert [decoder_of("gpt2, scale by layer").attention_scale(i) for i in (0, 1)] == [1.0, 0.5]
    assert decoder_of("llama").attention_scale(1) == 16**-0.5
