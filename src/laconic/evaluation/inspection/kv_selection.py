"""What selectors keep of a chain: by the kind of token, by its place, alike between heads and beside random choice.

Shapes: L layers matched, G heads of keys, N tokens of one chain.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laconic.batches import ReasoningBatch
from laconic.evaluation.inspection.subject import DecodeToken, TeacherChain

TOKEN_CLASSES = ("operand", "operator", "result", "bracket", "word")
NUM_CHAIN_PARTS = 5  # parts of equal length that a chain is cut into
BRACKET, OPERATOR, NUMBER = re.compile(r"[<>()\[\]{}]"), re.compile(r"[-+*/×÷·%=−]"), re.compile(r"\d")
SelectionMask = NDArray[np.bool_]


class ChainSelection(NamedTuple):
    """What one selector keeps of one chain in the layers matched, [L, G, N]."""

    name: str
    mask: SelectionMask

    @property
    def token_shares(self) -> tuple[float, ...]:
        """How many of the layers and heads keep each token."""
        return tuple(self.mask.mean((0, 1)).tolist())


class SelectorStatistics(NamedTuple):
    """What a selector keeps over many chains, where there was something to choose: shares of the tokens of a kind and
    of a part of the chain that are kept; the share of kept tokens that two heads have in common (`heads`), and that a
    head has in common with the random selector (`random`); `chance` is what both are for independent draws."""

    name: str
    class_shares: Mapping[str, float]
    part_shares: tuple[float, ...]
    head_overlap: float
    random_overlap: float
    chance_overlap: float
    num_chains: int


def classify_tokens(words: Sequence[str], steps: Sequence[int]) -> tuple[str, ...]:
    """What each token of a chain is, by its text and the step it belongs to: a number behind the `=` of its step, or
    in a step that has none, is a result, any other one an operand."""
    equals = {step for word, step in zip(words, steps, strict=True) if "=" in word}
    found: list[str] = []
    passed: int | None = None
    for word, step in zip(words, steps, strict=True):
        if NUMBER.search(word):
            result = step == passed or step not in equals or bool(re.search(r"=.*\d", word))
            found.append("result" if result else "operand")
        else:
            kinds = ((BRACKET, "bracket"), (OPERATOR, "operator"))
            found.append(next((kind for pattern, kind in kinds if pattern.search(word)), "word"))
        passed = step if "=" in word else passed
    return tuple(found)


def chain_selections(teacher: TeacherChain, row: int, n: int) -> tuple[ChainSelection, ...]:
    """What each selector keeps of the `n` tokens of one row's chain."""
    made: list[ChainSelection] = []
    for name, choice in teacher.choices.items():
        kept = [choice.tokens[l] for l in teacher.matched_layers]
        held = np.zeros((len(kept), kept[0].index.shape[1], n), dtype=np.bool_)
        for l, layer in enumerate(kept):
            for g, (index, live) in enumerate(zip(layer.index[row], layer.valid[row], strict=True)):
                held[l, g, index[live].cpu().numpy()] = True
        made.append(ChainSelection(name, held))
    return tuple(made)


def best_token_per_slot(teacher: TeacherChain, words: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """For each slot the chain token that most matched layers and heads keep for it, by the run's own selector, and the
    share of them; `words` are the chain of the first row."""
    kept = [teacher.choices[teacher.policy].tokens[l] for l in teacher.matched_layers]
    found: list[tuple[str, float]] = []
    for m in range(kept[0].index.shape[2]):
        columns = [i for layer in kept for i in layer.index[0, :, m][layer.valid[0, :, m]].tolist()]
        column, count = Counter(columns).most_common(1)[0] if columns else (0, 0)
        found.append((words[column], count / len(columns)) if columns else ("–", 0.0))
    return tuple(found)


def decode_chain(batch: ReasoningBatch, row: int, decode_token: DecodeToken) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The tokens of one row's chain as text, and the step of each."""
    live = batch.chain_mask[row]
    return tuple(decode_token(int(i)) for i in batch.chain_ids[row][live]), tuple(
        batch.chain_step_index[row][live].tolist()
    )


def selection_overlap(a: SelectionMask, b: SelectionMask | None = None) -> float:
    """The mean share of kept tokens that two heads of `a` have in common; or that a head of `a` has with that of `b`.

    All heads keep equally many. 1 where there is but one head.
    """
    flat = a.reshape(-1, a.shape[2]).astype(np.float64)
    n = flat[0].sum()
    if b is not None:
        return float((flat * b.reshape(flat.shape)).sum(1).mean() / n)
    heads = len(flat)
    common = flat @ flat.T / n
    return float((common.sum() - heads) / (heads * (heads - 1))) if heads > 1 else 1.0


def compute_selector_statistics(
    chains: Sequence[tuple[Sequence[str], Sequence[ChainSelection]]],
) -> tuple[SelectorStatistics, ...]:
    """What each selector does over chains, each with the classes of its tokens; chains kept whole are left out."""
    chosen = [(np.array(kinds), each) for kinds, each in chains if kinds and not each[0].mask.all()]
    if not chosen:
        return ()
    names = [selection.name for selection in chosen[0][1]]
    random = names.index("random")
    return tuple(
        selector_statistics_of(name, [(kinds, each[i].mask, each[random].mask) for kinds, each in chosen])
        for i, name in enumerate(names)
    )


def selector_statistics_of(
    name: str, chains: Sequence[tuple[NDArray[np.str_], SelectionMask, SelectionMask]]
) -> SelectorStatistics:
    """What one selector does, beside the random one."""
    share = np.concatenate([held.mean((0, 1)) for _, held, _ in chains])
    kinds = np.concatenate([kinds for kinds, _, _ in chains])
    part = np.concatenate([np.arange(len(kinds)) * NUM_CHAIN_PARTS // len(kinds) for kinds, _, _ in chains])
    by_place = [share[part == i] for i in range(NUM_CHAIN_PARTS)]
    return SelectorStatistics(
        name,
        {kind: float(share[kinds == kind].mean()) for kind in TOKEN_CLASSES if (kinds == kind).any()},
        tuple(float(x.mean()) if x.size else 0.0 for x in by_place),
        float(np.mean([selection_overlap(held) for _, held, _ in chains])),
        float(np.mean([selection_overlap(held, other) for _, held, other in chains])),
        float(np.mean([held[0, 0].mean() for _, held, _ in chains])),
        len(chains),
    )
