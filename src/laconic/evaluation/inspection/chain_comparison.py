"""Latents beside a written chain: cosines of keys and values, and the tokens that KV selection policies select.

Shapes: M latents, N columns of the chain or of its selected tokens, G KV heads, E head size, L layers; the selections
and scores of [L, G, N] are those of the matched layers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.evaluation.inspection.inspected_run import InspectedRun, KeysValues, TeacherChain, latent_keys_values
from laconic.latent.rollout import LatentRollout
from laconic.models.attention import accumulation_dtype

BRACKET, OPERATOR, NUMBER = re.compile(r"[<>()\[\]{}]"), re.compile(r"[-+*/×÷·%=−]"), re.compile(r"\d")
KV_SPACES = ("keys", "keys before rotation", "values")
CHAIN, SELECTED = "chain", "selected"  # what latents are compared with
MapRows = tuple[tuple[float, ...], ...]
SelectionMask = NDArray[np.bool_]


class SimilarityMap(NamedTuple):
    """Cosines of latents (rows) with columns, mean over heads; `mean` over the matched layers, and each layer.

    The space is one of `KV_SPACES`; the baseline is `CHAIN`, or `SELECTED` for the tokens that the run's own policy
    selects. The contrast is the mean of the diagonal minus the mean of the rest, look-ahead the share of latents whose
    most similar column is later than their own, both of `mean`.
    """

    space: str
    baseline: str
    mean: MapRows
    layers: tuple[MapRows, ...]
    diagonal_contrast: float
    look_ahead: float


@dataclass(frozen=True)
class ChainComparison:
    """The latents of a run beside the chain of one question; empty without a teacher or a chain.

    The policy is the run's own, and the scores are its I, R and S, with a row for each matched layer and head; matched
    layers are distilled, or would be.
    """

    maps: tuple[SimilarityMap, ...] = ()
    selections: Mapping[str, SelectionMask] = field(default_factory=dict[str, SelectionMask])
    token_classes: tuple[str, ...] = ()
    scores: tuple[MapRows, ...] = ()
    policy: str = ""
    matched_layers: tuple[int, ...] = ()
    is_distilled: bool = False


def compare_with_chain(
    run: InspectedRun, batch: ReasoningBatch, rollout: LatentRollout, tokens: Sequence[str]
) -> ChainComparison:
    teacher = run.teacher_chain(batch)
    mask = batch.chain_mask
    n = len(tokens)
    is_result = torch.zeros_like(mask) if batch.chain_result_mask is None else batch.chain_result_mask
    scores = (torch.cat([layers[l][0, :, :n] for l in teacher.matched_layers]).float() for layers in teacher.scores)
    return ChainComparison(
        maps=similarity_maps(latent_keys_values(run.decoder, rollout), teacher, n),
        selections=chain_selections(teacher, n),
        token_classes=classify_tokens(tokens, is_result[mask].tolist()),
        scores=tuple(map(to_rows, scores)),
        policy=teacher.policy,
        matched_layers=teacher.matched_layers,
        is_distilled=teacher.is_distilled,
    )


def cosine_maps(student: Sequence[Float[Tensor, "G M E"]], teacher: Sequence[Float[Tensor, "G N E"]]) -> Tensor:
    """Return the cosine of each latent with each column, mean over heads: [L, M, N]."""
    units = [[F.normalize(x.to(accumulation_dtype(x.dtype)), dim=-1) for x in side] for side in (student, teacher)]
    return torch.stack([(s @ t.transpose(-1, -2)).mean(0) for s, t in zip(*units, strict=True)])


def diagonal_contrast(map: Float[Tensor, "M N"]) -> float:
    """Return the mean of the diagonal minus the mean of the rest; 0 where there is no rest."""
    on = torch.eye(*map.shape, dtype=torch.bool, device=map.device)
    return float(map[on].mean() - map[~on].mean()) if bool((~on).any()) else 0.0


def look_ahead_share(map: Float[Tensor, "M N"]) -> float:
    """Return the share of latents whose most similar column is later than their own, among those that have one."""
    n = min(map.shape)
    return float((map[:n].argmax(1) > torch.arange(n, device=map.device)).float().mean())


def similarity_maps(slots: KeysValues, teacher: TeacherChain, n: int) -> tuple[SimilarityMap, ...]:
    """Return all maps of the first row of a batch, whose chain has `n` tokens."""
    indices = [columns.index[0][:, columns.valid[0, 0], None] for columns in teacher.choices[teacher.policy]]
    maps: list[SimilarityMap] = []
    for baseline in (CHAIN, SELECTED):
        for space, latents, teachers in zip(KV_SPACES, slots, teacher.keys_values, strict=True):
            columns = [x[0][:, :n] for x in teachers]
            if baseline == SELECTED:
                pairs = zip(columns, indices, strict=True)
                columns = [x.gather(1, index.expand(-1, -1, x.shape[2])) for x, index in pairs]
            layers = cosine_maps([x[0] for x in latents], columns)
            mean = layers[list(teacher.matched_layers)].mean(0)
            rows = tuple(map(to_rows, layers))
            statistics = diagonal_contrast(mean), look_ahead_share(mean)
            maps.append(SimilarityMap(space, baseline, to_rows(mean), rows, *statistics))
    return tuple(maps)


def to_rows(map: Float[Tensor, "M N"]) -> MapRows:
    return tuple(tuple(row) for row in map.tolist())


def classify_tokens(tokens: Sequence[str], is_result: Sequence[bool]) -> tuple[str, ...]:
    """Return the class of each token of a chain; a number that is not the last of its step is an operand."""
    patterns = ((NUMBER, "operand"), (BRACKET, "bracket"), (OPERATOR, "operator"))
    classes = (next((name for pattern, name in patterns if pattern.search(token)), "word") for token in tokens)
    return tuple("result" if last else name for name, last in zip(classes, is_result, strict=True))


def chain_selections(teacher: TeacherChain, n: int) -> dict[str, SelectionMask]:
    """Return what each policy selects of the `n` tokens of the first chain in the matched layers, [L, G, N]."""
    selections: dict[str, SelectionMask] = {}
    for policy, choice in teacher.choices.items():
        layers = [choice[l] for l in teacher.matched_layers]
        mask = np.zeros((len(layers), layers[0].index.shape[1], n), dtype=np.bool_)
        for l, layer in enumerate(layers):
            for g, (index, valid) in enumerate(zip(layer.index[0], layer.valid[0], strict=True)):
                mask[l, g, index[valid].cpu().numpy()] = True
        selections[policy] = mask
    return selections
