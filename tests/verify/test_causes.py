"""Signatures that no mutant shows: each made from the right stages by hand, and the sentence it must give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.models import activations as models_activations
from laconic.models import attention
from laconic.models.decoder import Decoder
from laconic.verification.causes import ALIKE, MEANS, RULES, bisection, likely
from laconic.verification.evidence import Evidence, pairs, turns, unpaired
from laconic.verification.parity import (
    CaseComparison,
    StageResult,
    first_divergence,
    measure_floors,
    replay_stages,
    trace_stages,
)
from laconic.verification.run import run_parity
from laconic.verification.traces import iterate_stages, stage_key
from tests.conftest import needs
from tests.verify import wrong
from tests.verify.mutants import case, fixture

Stages = dict[str, Tensor]
Make = Callable[[Stages, Decoder], Tensor]


def told(family: str, kind: str, at: tuple[str, int | None, int], make: Make, **changes: Any) -> str:
    """The cause of a stage of one piece that is what `make` makes of the right stages."""
    stage, layer, piece = at
    decoder, what = fixture(family, **changes), case(kind)
    row = len(decoder.layers) if layer is None else layer
    made = next(
        m for m in replay_stages(trace_stages(decoder, what), what, decoder) if (m.piece, m.layer) == (piece, row)
    )
    S, T = what.pieces()[piece]
    right = {**made.activations, "vectors": what.embed(decoder)[:, S : S + T]}
    with torch.no_grad():
        got = make(right, decoder)
    seen = (what.valid_mask[:, : S + T], what.position_ids[:, : S + T])
    return likely(Evidence(decoder, stage, layer, got, right[stage], right, *seen))


def doubled(s: Stages, d: Decoder) -> Tensor:
    return unpaired(pairs(s["q"]) * turns(s["q"], s["q_rot"])[:, None] ** 2)


def rounded(s: Stages, d: Decoder) -> Tensor:
    c = turns(s["q"], s["q_rot"])[:, None]
    return unpaired(pairs(s["q"]) * torch.complex(c.real.half().double(), c.imag.half().double()))


def reversed_(s: Stages, d: Decoder) -> Tensor:
    return unpaired(pairs(s["q"]) * turns(s["q"], s["q_rot"])[:, None].flip(-1))


def lowered(s: Stages, d: Decoder) -> Tensor:
    return torch.where(s["scores_seen"].isinf(), s["scores"] - 50, s["scores_seen"])


def with_(name: str, cut: int, new: Callable[[Stages], Tensor]) -> Make:
    return lambda s, d: torch.cat([s[name][:, :, :cut], new(s)], 2)


def quarter(x: Tensor) -> Tensor:
    return unpaired(pairs(x) * 1j).float()


Q, LAST = ("q_rot", 0, 0), 2
SIGNATURES: dict[str, tuple[str, str, tuple[str, int | None, int], Make]] = {
    "rotation missing in layer 0": ("llama", "plain", Q, lambda s, d: s["q"]),
    "reflection: one sign": (
        "llama", "plain", Q,
        lambda s, d: wrong.one_sign(s["q"], *(t.float().repeat(1, 1, 2)[:, None] for t in cos_sin(s))),
    ),
    "scaling: every frequency is 2 times": ("llama", "plain", Q, doubled),
    "table precision: cos and sin are float16": ("llama", "plain", Q, rounded),
    "angle: other frequencies; a piece of one position": ("llama", "pieces", ("q_rot", 0, 1), reversed_),
    "start of the positions: a slot read alone": ("llama", "pieces", ("q_rot", 0, 1), lambda s, d: s["q"]),
    "norm weight missing": (
        "llama", "plain", ("norm1", 0, 0), lambda s, d: s["norm1"] / d.layers[0].part("norm1").weight,
    ),
    "norm weight: another one": (
        "llama", "plain", ("norm1", 0, 0), lambda s, d: s["norm1"] * torch.linspace(1, 2, 48),
    ),
    "bias: a constant vector": (
        "gpt2", "plain", ("norm2", 1, 0), lambda s, d: s["norm2"] - d.layers[1].part("norm2").bias,
    ),
    "order of rows": ("llama", "plain", ("v", 0, 0), lambda s, d: s["v"].flip(1)),
    "keys are not rotated": ("llama", "pieces", ("k_cache", 0, LAST), with_("k_cache", 10, lambda s: s["k"])),
    "keys are rotated twice": (
        "llama", "pieces", ("k_cache", 0, LAST), with_("k_cache", 10, lambda s: quarter(s["k_rot"])),
    ),
    "values are rotated": ("llama", "pieces", ("v_cache", 0, LAST), with_("v_cache", 10, lambda s: quarter(s["v"]))),
    "cache: 23 slots are held, the reference holds 24": (
        "llama", "pieces", ("k_cache", 0, LAST), lambda s, d: s["k_cache"][:, :, 1:],
    ),
    "scale: scores are times 1, the reference's 0.25; not scaled": (
        "llama", "plain", ("scores", 0, 0), lambda s, d: s["scores"] * 4,
    ),
    "scale: scores are times 0.125, the reference's 0.25; divided by layer 1 + 1": (
        "llama", "plain", ("scores", 1, 0), lambda s, d: s["scores"] / 2,
    ),
    "unseen scores are lowered by -50": ("llama", "plain", ("scores_seen", 0, 0), lowered),
    "softmax precision: probabilities are float16": (
        "llama", "plain", ("probs", 0, 0), lambda s, d: s["probs"].half().float(),
    ),
    "branch dropped": ("llama", "plain", ("resid1", 0, 0), lambda s, d: s["x"]),
    "tie: our head is the words' matrix": (
        "llama", "plain", ("logits", None, 0), lambda s, d: s["final_norm"] @ d.token_embedding.weight.T,
    ),
    "no signature known; at mid look at: gate and up": (
        "llama", "plain", ("mid", 0, 0), lambda s, d: s["gate"].tanh() * s["up"],
    ),
    "no signature known; at next_probs look at: index": (
        "llama", "plain", ("next_probs", None, 0), lambda s, d: s["next_probs"].flip(-1),
    ),
}  # fmt: skip


def cos_sin(s: Stages) -> tuple[Tensor, Tensor]:
    c = turns(s["q"], s["q_rot"])
    return c.real, c.imag


@pytest.mark.parametrize("cause", SIGNATURES)
def test_a_signature_gives_its_cause(cause: str) -> None:
    said = told(*SIGNATURES[cause])
    assert said.startswith(cause)


def test_other_shapes_and_absent_stages_are_told_as_such() -> None:
    said = told("llama", "plain", ("mid", 0, 0), lambda s, d: s["mid"][:, 1:])
    assert said == "shape: [2, 23, 64], the reference's [2, 24, 64]"
    said = told("llama", "plain", ("mid", 0, 0), lambda s, d: s.pop("up") * 0)
    assert said.startswith("no signature known; at mid look at")


def test_every_stage_has_rules_and_words() -> None:
    names = {stage.name for stage in (*models_activations.LAYER_ACTIVATIONS, *models_activations.MODEL_ACTIVATIONS)}
    assert names <= {ALIKE.get(name, name) for name in names} | set(ALIKE)
    assert {ALIKE.get(name, name) for name in names} == set(MEANS)
    assert set(RULES) == names - {"token", "next_probs"}


def propagated(far: list[bool]) -> list[StageResult]:
    return [
        StageResult("I1", "resid2", l, "propagated", 1.0 if wide else 0.0, 1e-7, verdict="shown")
        for l, wide in enumerate(far)
    ]


def test_bisection_goes_to_the_middle_and_then_to_the_half_that_parts() -> None:
    said = bisection(propagated([False] * 5 + [True] * 3))
    assert said == "bisection: resid2.3 agrees, resid2.5 parts, resid2.4 agrees, so layer 5"
    assert bisection(propagated([True] * 4)) == "bisection: resid2.1 parts, resid2.0 parts, so layer 0"
    assert bisection(propagated([False] * 4)) == "bisection: the last layer agrees"
    assert bisection([]) == "bisection: the last layer agrees"


def test_a_whole_run_tells_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    monkeypatch.setattr(attention, "visibility_mask", wrong.dead_seen)
    report = run_parity("tiny:llama", inputs="I9", reference="transformers")
    assert not report.is_ok
    assert report.cause == "padding: dead slots are seen"


CHANGED: list[tuple[str, str, int | None, str, tuple[int, ...], str, str]] = [
    ("llama", "up", 1, "weight", (3, 4), "up.1", "weights: row 3 of up_proj in layer 1 differs"),
    ("llama", "q", 0, "weight", (17, 2), "q.0", "weights: row 17 of q_proj in layer 0 differs"),
    ("llama", "down", 1, "weight", (9, 60), "mlp_out.1", "weights: row 9 of down_proj in layer 1 differs"),
    ("llama", "norm2", 1, "weight", (7,), "norm2.1", "norm weight: entry 7 of post_attention_layernorm in layer 1 is "),
    ("llama", "final_norm", None, "weight", (5,), "final_norm", "norm weight: entry 5 of norm is "),
    ("llama", "head", None, "weight", (8, 1), "logits", "weights: row 8 of lm_head differs"),
    ("llama", "words", None, "weight", (0, 1), "embed", "weights: row 0 of embed_tokens differs"),
    ("qwen3", "k_norm", 1, "weight", (2,), "k.1", "norm weight: entry 2 of k_norm in layer 1 is "),
    ("qwen3", "k", 1, "weight", (2, 2), "k_raw.1", "weights: row 2 of k_proj in layer 1 differs"),
    ("qwen2", "q", 1, "bias", (6,), "q.1", "bias: entry 6 of q_proj in layer 1 differs"),
    ("gpt2", "qkv", 1, "weight", (50, 2), "k.1", "weights: column 50 of c_attn in layer 1 differs"),
    ("gpt2", "places", None, "weight", (3, 2), "embed", "weights: row 3 of wpe differs"),
    ("opt", "norm1", 0, "bias", (4,), "norm1.0", "bias: entry 4 of self_attn_layer_norm in layer 0 differs"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "role", "layer", "kind", "at", "stage", "cause"), CHANGED)
def test_one_changed_number_is_named(
    family: str, role: str, layer: int | None, kind: str, at: tuple[int, ...], stage: str, cause: str
) -> None:
    decoder, what = fixture(family), case("plain")
    if role == "words":
        assert what.ids is not None
        at = (int(what.ids[0, 5]), at[1])
        cause = cause.replace("row 0", f"row {at[0]}")
    there = trace_stages(decoder, what)
    path = getattr(decoder.weight_names, role)
    root: Any = decoder if layer is None else decoder.layers[layer]
    with torch.no_grad():
        getattr(root.get_submodule(path), kind)[at] += 0.02
        comparison = CaseComparison(decoder, what, measure_floors(decoder, what))
        for made, own in zip(replay_stages(there, what, decoder), iterate_stages(decoder, what), strict=True):
            comparison.add_layer(made, own)
    found, evidence = first_divergence(comparison.results()), comparison.evidence
    assert found is not None
    assert evidence is not None
    assert stage_key(found.stage, found.layer) == stage
    assert likely(evidence).startswith(cause)
