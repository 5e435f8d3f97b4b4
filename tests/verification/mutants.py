"""The table of mutated decoders: what is replaced, on which model and input, and at which stage it must be found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from laconic.models import activations, attention, block, cache_slots, decoder, rope
from laconic.models.cache import KVCache
from laconic.models.checkpoints import llama2c, weights
from laconic.models.config import DecoderConfig, RopeConfig
from laconic.models.decoder import Decoder
from laconic.models.ops import attention_backends, rope_scaling
from laconic.verification.parity import ParityCase
from tests.reference.weight_formats import interleave
from tests.verification import wrong

Patch = tuple[Any, str, Any]
YARN = RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = RopeConfig("llama3", theta=500.0, factor=8.0, original_max_position_embeddings=64)
SHORT, LONG = (1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2), (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
LONGROPE = RopeConfig("longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=64)
DYNAMIC = RopeConfig("dynamic", factor=2.0)


@dataclass(frozen=True)
class Mutant:
    """A decoder with one mistake.

    Attributes:
        name: What is wrong.
        group: The table it is in.
        stage: The stage of the first divergence.
        patch: Functions to replace.
        layer: The layer of the first divergence; None outside the layers.
        family: Model family.
        case: Name of the input (see `build_case`).
        kind: "local", "backend", or "low" if only bfloat16 is wrong.
        config_changes: Configuration of the right decoder.
        config: Changes the configuration of the mutated decoder.
        change_weights: Changes the weights of the mutated decoder.
        is_in_loader: The mutated decoder is saved and loaded.
    """

    name: str
    group: str
    stage: str
    patch: tuple[Patch, ...] = ()
    layer: int | None = 0
    family: str = "llama"
    case: str = "plain"
    kind: str = "local"
    config_changes: dict[str, Any] = field(default_factory=dict)
    config: Callable[[DecoderConfig], DecoderConfig] | None = None
    change_weights: Callable[[Decoder], None] | None = None
    is_in_loader: bool = False

    @property
    def is_any_llama(self) -> bool:
        """Whether the mistake affects every Llama, including stories260k."""
        return self.group != "further" and self.family == "llama"


def swap(owner: Any, name: str, new: Any) -> tuple[Patch, ...]:
    return ((owner, name, new),)


def with_config(**fields: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, **fields)


def with_scales(factor: Callable[[DecoderConfig, int], float]) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda c: replace(c, attention_scales=tuple(factor(c, l) for l in range(c.num_hidden_layers)))


def swap_longrope_factors(config: DecoderConfig) -> DecoderConfig:
    assert config.rope is not None
    rope_config = replace(config.rope, short_factor=config.rope.long_factor, long_factor=config.rope.short_factor)
    return replace(config, rope=rope_config)


def zero_query_bias(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.submodule("q").bias.zero_()  # pyright: ignore[reportCallIssue]


def convert_keys_with_query_heads(decoder: Decoder) -> None:
    """Undo the conversion from pairs to halves, then repeat it with H heads instead of G."""
    config = decoder.config
    for layer in decoder.layers:
        w = layer.submodule("k").weight  # pyright: ignore[reportCallIssue]
        meta = interleave(w.detach(), config.num_key_value_heads)
        w.copy_(llama2c.half_split(meta, config.num_attention_heads))


def randomise_head(decoder: Decoder) -> None:
    head = decoder.get_submodule("lm_head").weight
    head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(7)) * 0.2)  # pyright: ignore[reportArgumentType, reportCallIssue]


def transposed_without_c_proj(config: DecoderConfig) -> frozenset[str]:
    return frozenset(name for name in transposed_right(config) if not name.endswith("attn.c_proj.weight"))


transposed_right = weights.transposed_weights
without_layer_scale = with_scales(lambda c, l: c.head_dim**-0.5)
ROTATE, TABLES, SEEN = (rope, "rotate_pairs"), (rope, "cos_sin_tables"), (attention, "visibility_mask")

DECODER = (
    Mutant("ε 1e-6 for 1e-5", "decoder", "norm1", case="faint",
           config_changes={"norm_eps": 1e-5}, config=with_config(norm_eps=1e-6)),
    Mutant("softmax in bf16", "decoder", "probs",
           swap(attention_backends, "attention_probabilities", wrong.softmax_bf16)),
    Mutant("−10 in place of −∞", "decoder", "scores_seen",
           swap(attention_backends, "apply_bias_and_mask", wrong.minus_ten)),
    Mutant("RoPE tables in bf16", "decoder", "q_rot", swap(*TABLES, wrong.tables_bf16)),
    Mutant("window 128 for none", "decoder", "scores_seen",
           swap(*SEEN, wrong.windowed(128)), case="long"),
    Mutant("mask one ahead", "decoder", "scores_seen",
           swap(*SEEN, wrong.one_ahead)),
    Mutant("mask hides self", "decoder", "scores_seen", swap(*SEEN, wrong.hides_self)),
    Mutant("mean-centred norm", "decoder", "norm1", swap(block, "rms_norm", wrong.centred)),
    Mutant("wrong norm weight", "decoder", "norm2",
           swap(block.Block, "submodule", wrong.part_of({"norm2": "norm1"}))),
    Mutant("interleaved", "decoder", "q_rot", swap(*ROTATE, wrong.neighbours)),
    Mutant("angle negated", "decoder", "q_rot", swap(*ROTATE, wrong.negated)),
    Mutant("k one position off", "decoder", "k_rot", swap(*ROTATE, wrong.keys_one_off)),
    Mutant("one layer without RoPE", "decoder", "q_rot",
           swap(block.Block, "self_attention", wrong.one_layer_unrotated), layer=1),
    Mutant("RoPE on v", "decoder", "context", swap(block.Block, "attend", wrong.values_rotated)),
    Mutant("heads merged untransposed", "decoder", "context",
           swap(attention_backends, "weighted_values", wrong.unmerged)),
    Mutant("grouping tiled", "decoder", "scores",
           swap(attention_backends, "repeat_heads", wrong.tiled)),
    Mutant("scale D^−½", "decoder", "scores",
           config=with_scales(lambda c, l: c.hidden_size**-0.5)),
    Mutant("gate and up swapped", "decoder", "mid", swap(block,
           "gated_mlp_hidden", wrong.up_before_gate)),
    Mutant("GELU for SiLU", "decoder", "mid", config=with_config(activation="gelu")),
    Mutant("residual dropped", "decoder", "resid1", swap(block.Block,
           "forward", wrong.residual_dropped)),
    Mutant("no final norm", "decoder", "final_norm", swap(Decoder, "final_norm", wrong.unnormed),
           layer=None),
)  # fmt: skip
ROPE = (
    Mutant("pairing", "rope", "q_rot", swap(*ROTATE, wrong.neighbours)),
    Mutant("negated angle", "rope", "q_rot", swap(*ROTATE, wrong.negated)),
    Mutant("wrong base", "rope", "q_rot",
           swap(rope, "frequencies", wrong.law(base=5e5))),
    Mutant("exponent −i/E", "rope", "q_rot",
           swap(rope, "frequencies", wrong.law(0.5))),
    Mutant("exponent −4i/E", "rope", "q_rot",
           swap(rope, "frequencies", wrong.law(2.0))),
    Mutant("order of frequencies reversed", "rope", "q_rot",
           swap(rope, "frequencies", wrong.law(flip=True))),
    Mutant("half of the dims rotated", "rope", "q_rot", swap(*ROTATE, wrong.halves_of_dims)),
    Mutant("position off by one", "rope", "q_rot", swap(*TABLES, wrong.off_by_one)),
    Mutant("start ignored", "rope", "q_rot", swap(*TABLES, wrong.start_ignored), case="start"),
    Mutant("reflection", "rope", "q_rot", swap(*ROTATE, wrong.reflection)),
    Mutant("sin and cos swapped", "rope", "q_rot", swap(*TABLES, wrong.swapped_tables)),
    Mutant("shear", "rope", "q_rot", swap(*ROTATE, wrong.shear)),
    Mutant("angles in bf16", "rope", "q_rot", swap(*TABLES, wrong.angles_bf16), case="start"),
    Mutant("attention factor where none is", "rope", "q_rot",
           swap(*TABLES, wrong.lengthened)),
)  # fmt: skip
FURTHER = (
    Mutant("YaRN ramp inverted", "further", "q_rot", swap(rope_scaling.ROPE_SCALINGS, "yarn", wrong.yarn_inverted),
           config_changes={"rope": YARN}),
    Mutant("YaRN factor missing", "further", "q_rot",
           swap(rope_scaling, "yarn_attention_factor", lambda rope: 1.0), config_changes={"rope": YARN}),
    Mutant("llama3 s inverted", "further", "q_rot", swap(rope_scaling.ROPE_SCALINGS,
           "llama3", wrong.llama3_inverted),
           config_changes={"rope": LLAMA3}),
    Mutant("longrope lists exchanged", "further", "q_rot", config=swap_longrope_factors,
           config_changes={"rope": LONGROPE}),
    Mutant("dynamic base with E/(E−1)", "further", "q_rot", swap(rope_scaling.ROPE_SCALINGS,
           "dynamic", wrong.dynamic_exponent),
           config_changes={"rope": DYNAMIC, "max_position_embeddings": 16}),
    Mutant("Qwen3 norm after rotation", "further", "q",
           swap(block.Block, "self_attention", wrong.normed_after_rotation), family="qwen3"),
    Mutant("q/k norm weights exchanged", "further", "q",
           swap(block.Block, "normalize_heads", wrong.exchanged_normed), family="qwen3"),
    Mutant("Qwen2 bias dropped", "further", "q", change_weights=zero_query_bias, family="qwen2"),
    Mutant("OPT offset 0", "further", "embed",
           swap(decoder, "position_embedding", wrong.row_p), family="opt", layer=None),
    Mutant("OPT scaled twice", "further", "scores",
           swap(attention_backends, "attention_scores", wrong.scaled_twice), family="opt"),
    Mutant("positions that count padding", "further", "q_rot",
           swap(cache_slots, "default_position_ids", wrong.counting_padding), case="padded"),
    Mutant("GPT-2 erf GELU", "further", "mid", config=with_config(activation="gelu"),
           family="gpt2"),
    Mutant("GPT-2 map not transposed", "further", "attn_out",
           swap(weights, "transposed_weights", transposed_without_c_proj), family="gpt2", is_in_loader=True),
    Mutant("split order k, q, v", "further", "q",
           swap(block.Block, "project_qkv", wrong.keys_first), family="gpt2"),
    Mutant("missing inverse layer scale", "further", "scores",
           config=without_layer_scale, family="gpt2", layer=1,
           config_changes={"attention_scales": (12**-0.5, 12**-0.5 / 2)}),
    Mutant("LayerNorm ε", "further", "norm1", family="gpt2", case="faint",
           config_changes={"norm_eps": 1e-5}, config=with_config(norm_eps=1e-6)),
    Mutant("late cast in bf16", "further", "norm1", swap(block, "rms_norm", wrong.late_cast),
           kind="low"),
    Mutant("window W − 1", "further", "scores_seen", family="mistral",
           config=with_config(sliding_windows=(7, 7))),
    Mutant("is_causal with S > 0", "further", "context",
           swap(attention_backends.ATTENTION_BACKENDS, "sdpa", wrong.upper_left), case="pieces", kind="backend"),
    Mutant("cache joined new-before-old", "further", "k_cache",
           swap(block.Block, "self_attention", wrong.new_before_old), case="pieces"),
    Mutant("stale slot after crop", "further", "k_cache", swap(KVCache, "crop", wrong.stale),
           case="cropped"),
    Mutant("key heads converted with H", "further", "k",
           change_weights=convert_keys_with_query_heads),
    Mutant("bias added before the scale", "further", "scores_seen",
           swap(attention_backends, "apply_bias_and_mask", wrong.bias_times(0.25)), case="bias"),
    Mutant("bias sign", "further", "scores_seen",
           swap(attention_backends, "apply_bias_and_mask", wrong.bias_times(-1.0)),
           case="bias"),
    Mutant("dead slot live", "further", "scores_seen",
           swap(*SEEN, wrong.dead_seen), case="padded"),
    Mutant("tied head not tied", "further", "logits", layer=None,
           config_changes={"tie_word_embeddings": True}, config=with_config(tie_word_embeddings=False),
           change_weights=randomise_head),
    Mutant("logits of the last column", "further", "last_logits", swap(activations,
           "last_valid", wrong.last_column),
           case="padded", layer=None),
)  # fmt: skip
MUTANTS = DECODER + ROPE + FURTHER


def build_decoder(family: str, **changes: Any) -> Decoder:
    """Build a small decoder with peaked attention, norm weights away from 1 and biases away from 0."""
    decoder = Decoder(DecoderConfig.tiny(family, initializer_range=0.15, **changes), seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            if p.ndim == 1:
                noise = torch.randn(p.shape, generator=generator)
                p.add_(0.3 * noise)
            elif name == f"{decoder.weight_names.position_embedding}.weight":
                p.mul_(0.1)
    return decoder


def build_case(kind: str, V: int = 97, D: int = 48) -> ParityCase:
    """Build an input of the table by name."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, V, (2, 24), generator=generator)
    if kind == "long":
        return ParityCase(kind, torch.randint(3, V, (1, 160), generator=generator))
    if kind == "faint":
        return ParityCase(kind, vectors=torch.randn(2, 12, D, generator=generator) * 0.01)
    if kind == "start":
        return ParityCase(kind, ids, positions=torch.arange(90, 114).expand(2, -1), pass_positions=True)
    if kind == "padded":
        valid = torch.ones(2, 24, dtype=torch.bool)
        valid[1, :5] = valid[0, 21:] = valid[0, 10] = False
        return ParityCase(kind, ids, valid=valid)
    if kind == "bias":
        return ParityCase(kind, ids, bias=torch.randn(2, 24, 24, generator=generator))
    if kind == "cropped":
        return ParityCase(kind, ids, piece_sizes=(9, 1, 14), extra_tokens=3)
    return ParityCase(kind, ids, piece_sizes=(9, 1, 14) if kind == "pieces" else ())


@contextmanager
def patched(mutant: Mutant) -> Iterator[None]:
    """Patch the functions of a mutant."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, new in mutant.patch:
            patch.setitem(owner, name, new) if isinstance(owner, dict) else patch.setattr(owner, name, new)
        yield


def mutate(mutant: Mutant, right: Decoder) -> Decoder:
    """Copy the right decoder with a mutant's configuration and weight changes; `patched` replaces functions."""
    if not (mutant.config or mutant.change_weights):
        return right
    config = mutant.config(right.config) if mutant.config else right.config
    decoder = Decoder(config, seed=0).eval()
    decoder.load_state_dict(right.state_dict(), strict=False)
    if mutant.change_weights:
        with torch.no_grad():
            mutant.change_weights(decoder)
    return decoder
