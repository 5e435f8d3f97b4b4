"""Decoder: vocabulary resizing, fingerprint, initialisation, captured activations, positions, dropout, dtypes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import CorruptArtifactError
from laconic.models.activations import MODEL_ACTIVATIONS, layer_activations
from laconic.models.cache import KVCache
from laconic.models.checkpoints.hf_config import DropoutRates
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.models.fixtures import FAMILIES, VARIANTS, activation_axes, assert_close, decoder_of, fresh, noise
from tests.tolerances import FLOAT32, error


def x(*shape: int) -> torch.Tensor:
    return noise(1, *shape, dtype=torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_resize_vocabulary_adds_tokens_and_shares_the_rest(name: str, tied: bool) -> None:
    decoder = fresh(name, tie_word_embeddings=tied)
    decoder.activation_checkpointing, decoder.attn_implementation = 2, "eager"
    resized = decoder.resize_vocabulary(5)
    assert resized.config.vocab_size == 102
    assert (resized.activation_checkpointing, resized.attn_implementation, resized.training) == (2, "eager", False)
    new, old = dict(resized.named_parameters()), dict(decoder.named_parameters())
    changed = {key for key in old if new[key] is not old[key]}
    assert changed == {f"{decoder.weight_names.token_embedding}.weight"} | (set() if tied else {"lm_head.weight"})
    for key in changed:
        assert torch.equal(new[key][:97], old[key])
        offset = (new[key][97:] - old[key].mean(0)) / old[key].std(0)
        assert 0.005 < offset.std() < 0.02
    ids = torch.tensor([[3, 5, 96]])
    hidden = resized(resized.embed(ids)).hidden_states
    assert torch.equal(hidden, decoder(decoder.embed(ids)).hidden_states)
    assert error(resized.logits(hidden)[..., :97], decoder.logits(hidden)) <= FLOAT32
    assert torch.equal(decoder.resize_vocabulary(5).token_embedding.weight, resized.token_embedding.weight)
    assert decoder.config.vocab_size == 97
    assert resized.fingerprint != decoder.fingerprint


def test_resize_vocabulary_keeps_frozen_parameters_frozen() -> None:
    decoder = fresh("llama").requires_grad_(False)
    decoder.token_embedding.requires_grad_()
    for module in (decoder.resize_vocabulary(3), decoder):
        assert [name for name, p in module.named_parameters() if p.requires_grad] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("name", FAMILIES)
def test_fingerprint_follows_the_weights(name: str) -> None:
    decoder = fresh(name)
    before = decoder.fingerprint
    assert before == fresh(name).fingerprint == decoder.fingerprint
    last = list(decoder.parameters())[-1]
    with torch.no_grad():
        last.view(-1)[0] += 0.5
    assert decoder.fingerprint != before
    optimizer = torch.optim.SGD(decoder.parameters(), 0.1)
    before = decoder.fingerprint
    decoder(x(1, 3, 48)).hidden_states.square().sum().backward()
    optimizer.step()
    assert decoder.fingerprint != before
    before = decoder.fingerprint
    assert decoder.to(torch.bfloat16).fingerprint != before
    decoder.load_state_dict(fresh(name).state_dict(), assign=True)
    assert decoder.fingerprint == fresh(name).fingerprint


def test_fingerprint_follows_edits_through_data(tmp_path: Path) -> None:
    """They raise no in-place counter; a cache of the old weights is refused."""
    decoder = fresh("llama")
    decoder(x(1, 3, 48)).cache.save(tmp_path / "cache", decoder)
    KVCache.load(tmp_path / "cache", decoder)
    before = decoder.fingerprint
    for p in decoder.parameters():
        p.data.mul_(3)
    assert decoder.fingerprint != before
    with pytest.raises(CorruptArtifactError, match="was written for weights"):
        KVCache.load(tmp_path / "cache", decoder)
    before = decoder.fingerprint
    decoder.layers[0].get_parameter("mlp.down_proj.weight").data.zero_()
    assert decoder.fingerprint != before


def test_fingerprint_works_in_inference_mode(tmp_path: Path) -> None:
    decoder = fresh("llama")
    decoder.save_pretrained(tmp_path / "a")
    with torch.inference_mode():
        assert Decoder.from_pretrained(tmp_path / "a").fingerprint == decoder.fingerprint == fresh("llama").fingerprint


@pytest.mark.parametrize("seed", [0, 1])
def test_initialisation_depends_on_the_seed(seed: int) -> None:
    config = DecoderConfig.tiny("qwen2")
    one, same_one, other = Decoder(config, seed), Decoder(config, seed), Decoder(config, seed + 1)
    assert one.fingerprint == same_one.fingerprint != other.fingerprint
    assert 0.9 < one.token_embedding.weight.std() / config.initializer_range < 1.1
    for name, p in one.named_parameters():
        assert p.ndim == 2 or torch.equal(p, torch.full_like(p, 0.0 if name.endswith("bias") else 1.0))


@pytest.mark.cuda
def test_initialisation_depends_on_the_seed_on_any_device() -> None:
    with torch.device("cuda"):
        decoder = Decoder(DecoderConfig.tiny("qwen2"), 0)
        assert decoder.resize_vocabulary(2).token_embedding.weight.is_cuda
    assert decoder.fingerprint == Decoder(decoder.config, 0).fingerprint


@pytest.mark.parametrize("name", VARIANTS)
def test_captured_activations_have_the_shapes_of_the_table(name: str) -> None:
    decoder = decoder_of(name)
    config, axes = decoder.config, activation_axes(decoder.config)
    cache = decoder(noise(2, 2, 3, 48)).cache
    sizes = {"B": 2, "T": 5, "P": 8, "D": 48, "H": 4, "G": config.num_key_value_heads, "E": config.head_dim}
    sizes |= {"F": config.intermediate_size, "V": 97, "HE": 4 * config.head_dim}
    layer_names, model_names = ([x.name for x in table] for table in (layer_activations(config), MODEL_ACTIVATIONS))
    captured = decoder(noise(1, 2, 5, 48), cache, capture=(*layer_names, *model_names, "hidden")).activations
    expected = {f"{stem}.{i}": axes[stem] for stem in layer_names for i in range(2)}
    expected |= {stem: axes[stem] for stem in model_names} | {f"hidden.{i}": ["B", "T", "D"] for i in range(3)}
    assert {key: list(value.shape) for key, value in captured.items()} == {
        key: [sizes[letter] for letter in shape] for key, shape in expected.items()
    }
    assert ("q_raw" in layer_names) == config.qk_norm
    assert ("gate" in layer_names) == config.gated_mlp


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_activations_agree_with_one_another(name: str) -> None:
    decoder = decoder_of(name)
    capture = ("embed", "hidden", "resid2", "final_norm", "k_cache", "logits", "token")
    output = decoder(noise(1, 2, 5, 48), capture=capture)
    activations = output.activations
    assert torch.equal(activations["embed"], activations["hidden.0"])
    assert torch.equal(activations["resid2.0"], activations["hidden.1"])
    assert torch.equal(activations["final_norm"], output.hidden_states)
    assert torch.equal(activations["hidden.2"], output.hidden_states)
    assert torch.equal(decoder.final_norm(activations["resid2.1"]), output.hidden_states)
    assert torch.equal(activations["k_cache.1"], output.cache.keys[1])
    assert torch.equal(activations["token"], decoder.logits(output.hidden_states[:, -1]).argmax(-1))


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_position_of_minus_one_adds_no_embedding(name: str) -> None:
    decoder, embeds = decoder_of(name), noise(1, 1, 4, 48)
    output = decoder(embeds, position_ids=torch.tensor([[0, -1, -1, 1]]), capture=("embed",))
    assert torch.equal(output.activations["embed"][:, 1:3], embeds[:, 1:3])
    assert not torch.equal(output.activations["embed"][:, 0], embeds[:, 0])
    assert decoder(embeds[:, :1], output.cache).cache.positions.tolist() == [[0, -1, -1, 1, 2]]


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_continue_from_the_cache_or_are_given(name: str) -> None:
    decoder, embeds = decoder_of(name), noise(1, 2, 5, 48)
    mask = torch.tensor([[False, True, True, False, True], [True] * 5])
    cache = decoder(embeds, attention_mask=mask).cache
    assert cache.positions.tolist() == [[0, 0, 1, 0, 2], [0, 1, 2, 3, 4]]
    after = decoder(embeds[:, :2], cache)
    assert after.cache.positions[:, 5:].tolist() == [[3, 4], [5, 6]]
    explicit = decoder(embeds[:, :2], cache, position_ids=after.cache.positions[:, 5:])
    assert_close(explicit.hidden_states, after.hidden_states)
    far = decoder(embeds[:, :2], cache, position_ids=after.cache.positions[:, 5:] + 9)
    assert not torch.equal(far.hidden_states, after.hidden_states)


def test_attention_mask_may_hold_integers_as_tokenizers_return_them() -> None:
    decoder, inputs = decoder_of("llama", torch.float32), noise(0, 2, 5, 48, dtype=torch.float32)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    hidden_states = decoder(inputs, attention_mask=mask).hidden_states
    assert torch.equal(hidden_states, decoder(inputs, attention_mask=mask.bool()).hidden_states)


@pytest.mark.parametrize("part", ["attention", "residual", "embedding"])
def test_dropout_is_active_in_training_only(part: str) -> None:
    decoder, embeds = fresh("gpt2", dropout=DropoutRates(**{part: 0.5})), x(1, 6, 48)
    plain = fresh("gpt2")(embeds).hidden_states
    assert torch.equal(decoder(embeds).hidden_states, plain)
    decoder.train()
    torch.manual_seed(1)
    first = decoder(embeds, capture=("embed", "attn_out"))
    assert not torch.equal(first.hidden_states, plain)
    assert (first.activations["embed"] == 0).any() == (part == "embedding")
    torch.manual_seed(1)
    assert torch.equal(decoder(embeds).hidden_states, first.hidden_states)


def test_replaced_mlp_is_called() -> None:
    decoder = fresh("llama")
    decoder.layers[0].mlp = torch.nn.Identity()
    output = decoder(x(1, 3, 48), capture=("mlp_out.0", "norm2.0"))
    assert decoder(x(1, 3, 48), capture="mlp_out.0").activations["mlp_out.0"].equal(output.activations["mlp_out.0"])
    assert torch.equal(output.activations["mlp_out.0"], output.activations["norm2.0"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_outputs_have_the_weights_dtype(name: str, dtype: torch.dtype) -> None:
    decoder = fresh(name).to(dtype)
    output = decoder(noise(1, 2, 4, 48, dtype=dtype))
    logits = decoder.logits(output.hidden_states)
    assert {x.dtype for x in (logits, output.hidden_states, *output.cache.keys, *output.cache.values)} == {dtype}
    assert output.hidden_states.isfinite().all()


def test_decoder_activations_have_the_names_of_capture() -> None:
    decoder = decoder_of("llama")
    output = decoder(noise(1, 2, 5, 48), capture=("hidden", "k", "probs.1", "logits"))
    L, names = decoder.config.num_hidden_layers, list(output.activations)
    assert len(output.activations["hidden"]) == L + 1
    assert all(x is output.activations[f"hidden.{l}"] for l, x in enumerate(output.activations["hidden"]))
    assert output.activations["hidden"][-1] is output.hidden_states
    assert len(output.activations["k"]) == L
    assert output.activations["probs"][0] is output.activations["probs.1"]
    assert list(output.activations) == names, "a look-up adds no key"
    with pytest.raises(KeyError, match=r"v was not captured; the activations are hidden\.0"):
        output.activations["v"]
    assert repr(output).endswith("activations: hidden, k, probs, logits)")
    assert "<td>probs.1</td><td>[2, 4, 5, 5]</td>" in output._repr_html_()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("n", [1, 3])
def test_forward_num_outputs_equals_the_last_positions(n: int, name: str, backend: str) -> None:
    decoder = fresh(name)
    decoder.attn_implementation = backend
    inputs, mask = x(2, 12, decoder.config.hidden_size), torch.ones(2, 12, dtype=torch.bool)
    mask[0, :3] = False
    for attention_mask in (None, mask):
        cache = None
        for columns in (slice(0, 7), slice(7, 12)):
            part = None if attention_mask is None else attention_mask[:, columns]
            whole = decoder(inputs[:, columns], cache, attention_mask=part)
            last = decoder(inputs[:, columns], cache, attention_mask=part, num_outputs=n)
            assert last.hidden_states.shape[1] == n
            assert_close(last.hidden_states, whole.hidden_states[:, -n:], FLOAT32)
            assert all(torch.equal(a, b) for a, b in zip(last.cache.keys, whole.cache.keys, strict=True))
            cache = whole.cache


def test_a_wrapped_norm_of_queries_is_called() -> None:
    """Qwen3's norms of queries and keys are looked up like every submodule, and run their hooks."""

    class Doubled(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.norm(x)

    decoder, other = (Decoder(DecoderConfig.tiny("qwen3"), seed=0) for _ in range(2))
    ids, calls = torch.arange(6)[None], list[nn.Module]()
    attention: Any = decoder.layers[0].get_submodule("self_attn")
    attention.q_norm.register_forward_hook(lambda module, *_: calls.append(module))
    attention.q_norm = Doubled(attention.q_norm)
    other.layers[0].get_submodule("self_attn.q_norm").weight.data.mul_(2)
    expected = other(other.embed(ids)).hidden_states
    assert torch.equal(decoder(decoder.embed(ids)).hidden_states, expected)
    assert len(calls) == 1
