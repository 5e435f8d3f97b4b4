"""The table of wrong decoders: what is replaced, on which fixture and input, where it must be caught and as what."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from laconic.models import attention, block, rope, weights
from laconic.models import positions as models_positions
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.rope import RopeConfig
from laconic.verification.parity import ParityCase
from tests.verify import wrong

Patch = tuple[Any, str, Any]
YARN = RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = RopeConfig("llama3", theta=500.0, factor=8.0, original_max_position_embeddings=64)
SHORT, LONG = (1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2), (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
LONGROPE = RopeConfig("longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=64)
DYNAMIC = RopeConfig("dynamic", factor=2.0)


@dataclass(frozen=True)
class Mutant:
    """One wrong decoder. `changes` make the fixture; `patch` replaces functions, `config` fields, `spoil` weights.

    `cause` begins the sentence that must be printed. `loader` asks that the wrong decoder is saved and loaded.
    """

    name: str
    group: str
    stage: str
    cause: str
    patch: tuple[Patch, ...] = ()
    layer: int | None = 0
    family: str = "llama"
    case: str = "plain"
    kind: str = "local"
    changes: dict[str, Any] = field(default_factory=dict)
    config: Callable[[DecoderConfig], DecoderConfig] | None = None
    spoil: Callable[[Decoder], None] | None = None
    loader: bool = False

    @property
    def everywhere(self) -> bool:
        """Whether it acts on any Llama, stories260k too."""
        return self.group != "further" and self.family == "llama"


def one(owner: Any, name: str, new: Any) -> tuple[Patch, ...]:
    return ((owner, name, new),)


def changed(**fields: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, **fields)


def score_scale(factor: Callable[[DecoderConfig, int], float]) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda c: replace(c, attention_scales=tuple(factor(c, l) for l in range(c.num_hidden_layers)))


def exchanged_lists(config: DecoderConfig) -> DecoderConfig:
    assert config.rope is not None
    how = replace(config.rope, short_factor=config.rope.long_factor, long_factor=config.rope.short_factor)
    return replace(config, rope=how)


def no_query_bias(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.part("q").bias.zero_()


def keys_converted_with_query_heads(decoder: Decoder) -> None:
    """Neighbours to halves as it should be undone, then done again with H heads for G."""
    config = decoder.config
    for layer in decoder.layers:
        w = layer.part("k").weight
        meta = weights.interleave(w.detach(), config.num_key_value_heads)
        w.copy_(weights.half_split(meta, config.num_attention_heads))


def drawn_head(decoder: Decoder) -> None:
    head = decoder.get_submodule("lm_head").weight
    head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(7)) * 0.2)


def forgetting_c_proj(config: DecoderConfig) -> frozenset[str]:
    return frozenset(name for name in transposed_right(config) if not name.endswith("attn.c_proj.weight"))


transposed_right = weights.transposed_weights
by_layer = score_scale(lambda c, l: c.head_dim**-0.5)
ROTATE, TABLES, SEEN = (rope, "rotate"), (rope, "tables"), (attention, "seen")

DECODER = (
    Mutant("ε 1e-6 for 1e-5", "decoder", "norm1", "epsilon: 1e-06, the reference's 1e-05", case="faint",
           changes={"eps": 1e-5}, config=changed(eps=1e-6)),
    Mutant("softmax in bf16", "decoder", "probs", "softmax precision: probabilities are bfloat16",
           one(attention, "probabilities", wrong.softmax_bf16)),
    Mutant("−10 in place of −∞", "decoder", "scores_seen", "unseen scores are set to -10",
           one(attention, "biased", wrong.minus_ten)),
    Mutant("RoPE tables in bf16", "decoder", "q_rot", "table precision: cos and sin", one(*TABLES, wrong.tables_bf16)),
    Mutant("window 128 for none", "decoder", "scores_seen", "window: 128 slots are seen, the reference's 160",
           one(*SEEN, wrong.windowed(128)), case="long"),
    Mutant("mask one ahead", "decoder", "scores_seen", "causality: columns above the diagonal are seen, 1 ahead",
           one(*SEEN, wrong.one_ahead)),
    Mutant("mask hides self", "decoder", "scores_seen", "hidden self", one(*SEEN, wrong.hides_self)),
    Mutant("mean-centred norm", "decoder", "norm1", "centring", one(block, "rms_norm", wrong.centred)),
    Mutant("wrong norm weight", "decoder", "norm2",
           "norm weights exchanged: model.layers.0.input_layernorm.weight is used",
           one(block.Block, "part", wrong.part_of({"norm2": "norm1"}))),
    Mutant("interleaved", "decoder", "q_rot", "pairing", one(*ROTATE, wrong.neighbours)),
    Mutant("angle negated", "decoder", "q_rot", "direction", one(*ROTATE, wrong.negated)),
    Mutant("k one position off", "decoder", "k_rot", "start of the keys", one(*ROTATE, wrong.keys_one_off)),
    Mutant("one layer without RoPE", "decoder", "q_rot", "rotation missing in layer 1",
           one(block.Block, "attention", wrong.one_layer_unrotated), layer=1),
    Mutant("RoPE on v", "decoder", "context", "values are rotated", one(block.Block, "context", wrong.values_rotated)),
    Mutant("heads merged untransposed", "decoder", "context", "merge of heads", one(attention,
           "context", wrong.unmerged)),
    Mutant("grouping tiled", "decoder", "scores", "grouping: query heads read key heads [0, 1, 0, 1], not [0, 0, 1, 1]",
           one(attention, "repeat_heads", wrong.tiled)),
    Mutant("scale D^−½", "decoder", "scores", "scale: scores are times 0.144338, the reference's 0.25; D^-1/2",
           config=score_scale(lambda c, l: c.hidden_size**-0.5)),
    Mutant("gate and up swapped", "decoder", "mid", "gate and up swapped", one(block,
           "gated_mid", wrong.up_before_gate)),
    Mutant("GELU for SiLU", "decoder", "mid", "activation: gelu, the reference's silu", config=changed(act="gelu")),
    Mutant("residual dropped", "decoder", "resid1", "residual dropped", one(block.Block,
           "forward", wrong.residual_dropped)),
    Mutant("no final norm", "decoder", "final_norm", "norm missing", one(Decoder, "final_norm", wrong.unnormed),
           layer=None),
)  # fmt: skip
ROPE = (
    Mutant("pairing", "rope", "q_rot", "pairing", one(*ROTATE, wrong.neighbours)),
    Mutant("negated angle", "rope", "q_rot", "direction", one(*ROTATE, wrong.negated)),
    Mutant("wrong base", "rope", "q_rot", "base: 500000, the reference's 10000",
           one(rope, "frequencies", wrong.law(base=5e5))),
    Mutant("exponent −i/E", "rope", "q_rot", "exponent: frequencies fall with -i/E",
           one(rope, "frequencies", wrong.law(0.5))),
    Mutant("exponent −4i/E", "rope", "q_rot", "exponent: frequencies fall with -4i/E",
           one(rope, "frequencies", wrong.law(2.0))),
    Mutant("order of frequencies reversed", "rope", "q_rot", "order of frequencies: reversed",
           one(rope, "frequencies", wrong.law(flip=True))),
    Mutant("half of the dims rotated", "rope", "q_rot", "part of the dims: 4 of 8", one(*ROTATE, wrong.halves_of_dims)),
    Mutant("position off by one", "rope", "q_rot", "common offset: positions are +1", one(*TABLES, wrong.off_by_one)),
    Mutant("start ignored", "rope", "q_rot", "start of the positions", one(*TABLES, wrong.start_ignored), case="start"),
    Mutant("reflection", "rope", "q_rot", "reflection: the second half", one(*ROTATE, wrong.reflection)),
    Mutant("sin and cos swapped", "rope", "q_rot", "sin and cos swapped", one(*TABLES, wrong.swapped_tables)),
    Mutant("shear", "rope", "q_rot", "shear", one(*ROTATE, wrong.shear)),
    Mutant("angles in bf16", "rope", "q_rot", "table precision: angles", one(*TABLES, wrong.angles_bf16), case="start"),
    Mutant("attention factor where none is", "rope", "q_rot",
           "attention factor: cos and sin are times 1.2, the reference's 1",
           one(*TABLES, wrong.lengthened)),
)  # fmt: skip
FURTHER = (
    Mutant("YaRN ramp inverted", "further", "q_rot", "scaling yarn", one(rope.ROPE_SCALINGS, "yarn", wrong.yarn_inverted),
           changes={"rope": YARN}),
    Mutant("YaRN factor missing", "further", "q_rot",
           "attention factor: cos and sin are times 1, the reference's 1.13863",
           one(rope, "yarn_attention_factor", lambda how: 1.0), changes={"rope": YARN}),
    Mutant("llama3 s inverted", "further", "q_rot", "scaling llama3", one(rope.ROPE_SCALINGS,
           "llama3", wrong.llama3_inverted),
           changes={"rope": LLAMA3}),
    Mutant("longrope lists exchanged", "further", "q_rot", "scaling longrope", config=exchanged_lists,
           changes={"rope": LONGROPE}),
    Mutant("dynamic base with E/(E−1)", "further", "q_rot", "base", one(rope.ROPE_SCALINGS,
           "dynamic", wrong.dynamic_exponent),
           changes={"rope": DYNAMIC, "max_position_embeddings": 16}),
    Mutant("Qwen3 norm after rotation", "further", "q", "norm missing",
           one(block.Block, "attention", wrong.normed_after_rotation), family="qwen3"),
    Mutant("q/k norm weights exchanged", "further", "q",
           "norm weights exchanged: model.layers.0.self_attn.k_norm.weight is used",
           one(block.Block, "normed", wrong.exchanged_normed), family="qwen3"),
    Mutant("Qwen2 bias dropped", "further", "q", "bias: a constant vector", spoil=no_query_bias, family="qwen2"),
    Mutant("OPT offset 0", "further", "embed", "places: row p +0 of the table is added, the reference adds row p +2",
           one(models_positions, "places", wrong.row_p), family="opt", layer=None),
    Mutant("OPT scaled twice", "further", "scores",
           "scale: scores are times 0.0833333, the reference's 0.288675; scaled twice",
           one(attention, "scores", wrong.scaled_twice), family="opt"),
    Mutant("positions that count padding", "further", "q_rot", "padding: positions count dead slots",
           one(models_positions, "default_positions", wrong.counting_padding), case="padded"),
    Mutant("GPT-2 erf GELU", "further", "mid", "activation: gelu, the reference's gelu_new", config=changed(act="gelu"),
           family="gpt2"),
    Mutant("GPT-2 map not transposed", "further", "attn_out", "orientation",
           one(weights, "transposed", forgetting_c_proj), family="gpt2", loader=True),
    Mutant("split order k, q, v", "further", "q", "order of the split: q is the reference's k",
           one(block.Block, "project", wrong.keys_first), family="gpt2"),
    Mutant("missing inverse layer scale", "further", "scores",
           "scale: scores are times 0.288675, the reference's 0.144338; not",
           config=by_layer, family="gpt2", layer=1, changes={"score_scale": (12**-0.5, 12**-0.5 / 2)}),
    Mutant("LayerNorm ε", "further", "norm1", "epsilon: 1e-06, the reference's 1e-05", family="gpt2", case="faint",
           changes={"eps": 1e-5}, config=changed(eps=1e-6)),
    Mutant("late cast in bf16", "further", "norm1", "order of casts", one(block, "rms_norm", wrong.late_cast),
           kind="low"),
    Mutant("window W − 1", "further", "scores_seen", "window: 7 slots are seen, the reference's 8", family="mistral",
           config=changed(windows=(7, 7))),
    Mutant("is_causal with S > 0", "further", "context", "causality aligned upper-left",
           one(attention.ATTENTION_BACKENDS, "sdpa", wrong.upper_left), case="pieces", kind="backend"),
    Mutant("cache joined new-before-old", "further", "k_cache", "cache order",
           one(block.Block, "attention", wrong.new_before_old), case="pieces"),
    Mutant("stale slot after crop", "further", "k_cache", "stale slots", one(KVCache, "crop", wrong.stale),
           case="cropped"),
    Mutant("key heads converted with H", "further", "k",
           "conversion: rows of k are paired as if there were 4 heads, not 2",
           spoil=keys_converted_with_query_heads),
    Mutant("bias added before the scale", "further", "scores_seen", "bias: added times 0.25, that is before the scale",
           one(attention, "biased", wrong.bias_times(0.25)), case="bias"),
    Mutant("bias sign", "further", "scores_seen", "bias sign", one(attention, "biased", wrong.bias_times(-1.0)),
           case="bias"),
    Mutant("dead slot live", "further", "scores_seen", "padding: dead slots are seen",
           one(*SEEN, wrong.dead_seen), case="padded"),
    Mutant("tied head not tied", "further", "logits", "tie: the reference's head is the words' matrix", layer=None,
           changes={"tie_word_embeddings": True}, config=changed(tie_word_embeddings=False), spoil=drawn_head),
    Mutant("logits of the last column", "further", "last_logits", "last column", one(models_positions,
           "last_live", wrong.last_column),
           case="padded", layer=None),
)  # fmt: skip
MUTANTS = DECODER + ROPE + FURTHER


def fixture(family: str, **changes: Any) -> Decoder:
    """A small decoder with lively attention, norm weights away from 1 and biases away from 0."""
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


def case(kind: str, V: int = 97, D: int = 48) -> ParityCase:
    """The inputs that a mutant asks for, by name."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, V, (2, 24), generator=generator)
    if kind == "long":
        return ParityCase(kind, torch.randint(3, V, (1, 160), generator=generator))
    if kind == "faint":
        return ParityCase(kind, vectors=torch.randn(2, 12, D, generator=generator) * 0.01)
    if kind == "start":
        return ParityCase(kind, ids, positions=torch.arange(90, 114).expand(2, -1), pass_positions=True)
    if kind == "padded":
        live = torch.ones(2, 24, dtype=torch.bool)
        live[1, :5] = live[0, 21:] = live[0, 10] = False
        return ParityCase(kind, ids, valid=live)
    if kind == "bias":
        return ParityCase(kind, ids, bias=torch.randn(2, 24, 24, generator=generator))
    if kind == "cropped":
        return ParityCase(kind, ids, piece_sizes=(9, 1, 14), extra_tokens=3)
    return ParityCase(kind, ids, piece_sizes=(9, 1, 14) if kind == "pieces" else ())


@contextmanager
def patched(mutant: Mutant) -> Iterator[None]:
    """The functions of a mutant in place of the right ones."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, new in mutant.patch:
            patch.setitem(owner, name, new) if isinstance(owner, dict) else patch.setattr(owner, name, new)
        yield


def spoiled(mutant: Mutant, right: Decoder) -> Decoder:
    """The decoder that a mutant makes of a right one; its functions are replaced by `patched`."""
    if not (mutant.config or mutant.spoil):
        return right
    config = mutant.config(right.config) if mutant.config else right.config
    decoder = Decoder(config, seed=0).eval()
    decoder.load_state_dict(right.state_dict(), strict=False)
    if mutant.spoil:
        with torch.no_grad():
            mutant.spoil(decoder)
    return decoder
