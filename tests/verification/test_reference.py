"""transformers as the reference: the adapter changes no bit of it, and models that transformers makes pass parity."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.models import rope
from laconic.models.config import WEIGHT_NAMES
from laconic.models.decoder import Decoder
from laconic.models.ops.rope_scaling import ROPE_SCALINGS
from laconic.verification.hf_reference import TransformersReference
from laconic.verification.inputs import build_inputs
from laconic.verification.parity import CaseComparison, StageResult, first_divergence
from laconic.verification.tiny_models import ROPE_VARIANTS, build_tiny_decoder
from laconic.verification.traces import ParityCase
from tests.conftest import needs

SIZES = {"hidden_size": 42, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 83}
LLAMA = {**SIZES, "intermediate_size": 53, "num_key_value_heads": 3}
AWKWARD: dict[str, dict[str, Any]] = {  # heads of 10 or 14 where D / H is 7, three key heads of six, odd widths
    "llama": {**LLAMA, "head_dim": 10, "attention_bias": True},
    "mistral": {**LLAMA, "head_dim": 10, "num_key_value_heads": 2, "sliding_window": 7},
    "qwen2": {**LLAMA, "hidden_size": 36, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {**LLAMA, "head_dim": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "smollm3": {
        **LLAMA, "head_dim": 10, "num_hidden_layers": 3, "no_rope_layer_interval": 3, "pad_token_id": None,
        "bos_token_id": 1, "eos_token_id": 2, "use_sliding_window": True, "sliding_window": 7,
    },
    "gpt2": {
        "n_embd": 42, "n_layer": 2, "n_head": 6, "vocab_size": 83, "n_positions": 64, "n_inner": 50,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "opt": {**SIZES, "ffn_dim": 50, "max_position_embeddings": 64, "word_embed_proj_dim": 42},
}  # fmt: skip


def build_transformers_model(family: str, folder: Path, **more: Any) -> Path:
    """A random model of transformers, its norms and biases moved away from 1 and 0, saved by it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**AWKWARD[family], **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.2 if p.ndim == 1 else 0.1))
    model.save_pretrained(folder)
    return folder


def compare(decoder: Decoder, reference: TransformersReference, case: ParityCase) -> list[StageResult]:
    with torch.no_grad():
        return CaseComparison(decoder, case).run(reference.iterate_stages(case))


@pytest.mark.medium
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.slow if family not in ("llama", "gpt2") else ())
        for family in WEIGHT_NAMES
    ],
)
def test_reference_random_models_with_unusual_shapes(family: str, tmp_path: Path):
    needs("transformers")
    folder = build_transformers_model(family, tmp_path / "model")
    decoder, reference = Decoder.from_pretrained(folder), TransformersReference(folder)
    for case in build_inputs(decoder).cases:
        findings = compare(decoder, reference, case)
        assert not [f for f in findings if f.verdict not in ("pass", "shown")], (case.name, first_divergence(findings))


@pytest.mark.parametrize("family", tuple(WEIGHT_NAMES))
def test_reference_loads_sharded_checkpoints_of_ours(family: str, tmp_path: Path):
    needs("transformers")
    folder = build_transformers_model(family, tmp_path / "model")
    decoder = Decoder.from_pretrained(folder)
    decoder.save_pretrained(tmp_path / "sharded", max_shard_bytes=40_000.0)
    again = Decoder.from_pretrained(tmp_path / "sharded")
    reference = TransformersReference(tmp_path / "sharded")
    case = next(case for case in build_inputs(again).cases if case.name == "I8")
    assert not [f for f in compare(again, reference, case) if f.verdict not in ("pass", "shown")]


@pytest.mark.parametrize("family", tuple(WEIGHT_NAMES))
def test_reference_hooks_change_no_bit(family: str, tmp_path: Path):
    """Logits under hooks and tap are those of transformers' own eager attention."""
    needs("transformers")
    import transformers

    folder = build_transformers_model(family, tmp_path / "model")
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain, reference = load(folder, attn_implementation="eager").eval(), TransformersReference(folder)
    ids = torch.randint(0, 83, (2, 12))
    valid = torch.arange(12) >= torch.tensor([[0], [5]])
    case = ParityCase("case", ids, valid=valid)
    with torch.no_grad():
        want = plain(ids, attention_mask=valid.long(), position_ids=case.position_ids).logits
    got = list(reference.iterate_stages(case))[-1].activations["logits"]
    assert torch.equal(got[valid], want[valid])
    assert not any(layer._forward_hooks for layer in reference.layers)


@pytest.mark.parametrize("kind", ["default", *ROPE_VARIANTS])
def test_reference_rope_tables_are_bit_equal(kind: str, tmp_path: Path):
    """Eq. C3 to C5 on both sides of each switch (P0 32 and 64, Pmax 128), and in the thousands."""
    needs("transformers")
    decoder = build_tiny_decoder("llama", "" if kind == "default" else kind)
    decoder.save_pretrained(tmp_path / "model")
    reference = TransformersReference(tmp_path / "model")
    rope_config = decoder.config.rope
    assert rope_config is not None
    for start in (0, 100, 3000):
        p = start + torch.arange(32)[None]
        omega, a = ROPE_SCALINGS[kind](rope_config, decoder.config.head_dim, p.amax(1) + 1)
        cos, sin = rope.cos_sin_tables(p, omega, a, torch.float32)
        theirs = reference.model.model.rotary_emb(torch.zeros(1), p)
        assert torch.equal(cos[:, 0], theirs[0]), start
        assert torch.equal(sin[:, 0], theirs[1]), start


def test_reference_opt_query_scale_is_undone(tmp_path: Path):
    needs("transformers")
    decoder = build_tiny_decoder("opt")
    decoder.save_pretrained(tmp_path / "model")
    parts = list(TransformersReference(tmp_path / "model").iterate_stages(ParityCase("case", torch.arange(8)[None])))
    q, q_rot = parts[1].activations["q"], parts[1].activations["q_rot"]
    torch.testing.assert_close(q, q_rot, rtol=1e-6, atol=0)


def test_reference_refuses_a_changed_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    needs("transformers")
    from transformers.models.llama import modeling_llama

    decoder = build_tiny_decoder("llama")
    decoder.save_pretrained(tmp_path / "model")
    reference, right = TransformersReference(tmp_path / "model"), modeling_llama.eager_attention_forward

    def other(*args: Any, **kwargs: Any) -> Any:
        out, probs = right(*args, **kwargs)
        return out, probs * 0.5

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", other)
    with pytest.raises(RuntimeError, match="needs an update"):
        list(reference.iterate_stages(ParityCase("case", torch.arange(8)[None])))


def test_reference_resets_dynamic_rope(tmp_path: Path):
    """transformers keeps the table of the longest pass; the adapter lets every case begin anew."""
    needs("transformers")
    decoder = build_tiny_decoder("llama", "dynamic")
    decoder.save_pretrained(tmp_path / "model")
    reference = TransformersReference(tmp_path / "model")
    ids = torch.arange(8)[None]
    near, far = (ParityCase("case", ids, positions=ids + start, pass_positions=True) for start in (140, 900))
    before = list(reference.iterate_stages(near))[-1].activations["logits"]
    list(reference.iterate_stages(far))
    assert torch.equal(before, list(reference.iterate_stages(near))[-1].activations["logits"])
