"""Which tokens of a chain KV selection policies select, and the classes of these tokens.

Shapes: L matched layers, G KV heads, N tokens of one chain.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laconic.evaluation.inspection.inspected_run import TeacherChain

NO_TOKEN = "–"
BRACKET, OPERATOR, NUMBER = re.compile(r"[<>()\[\]{}]"), re.compile(r"[-+*/×÷·%=−]"), re.compile(r"\d")
SelectionMask = NDArray[np.bool_]


class ChainSelection(NamedTuple):
    """What one policy selects of one chain in the matched layers, [L, G, N]."""

    policy: str
    mask: SelectionMask

    @property
    def token_shares(self) -> tuple[float, ...]:
        return tuple(self.mask.mean((0, 1)).tolist())


def classify_tokens(tokens: Sequence[str], is_result: Sequence[bool]) -> tuple[str, ...]:
    """Return the class of each token of a chain; a number that is not the last of its step is an operand."""
    patterns = ((NUMBER, "operand"), (BRACKET, "bracket"), (OPERATOR, "operator"))
    classes = (next((name for pattern, name in patterns if pattern.search(token)), "word") for token in tokens)
    return tuple("result" if last else name for name, last in zip(classes, is_result, strict=True))


def chain_selections(teacher: TeacherChain, n: int) -> tuple[ChainSelection, ...]:
    """Return what each policy selects of the `n` tokens of the first chain."""
    selections: list[ChainSelection] = []
    for policy, choice in teacher.choices.items():
        layers = [choice.tokens[l] for l in teacher.matched_layers]
        mask = np.zeros((len(layers), layers[0].index.shape[1], n), dtype=np.bool_)
        for l, layer in enumerate(layers):
            for g, (index, valid) in enumerate(zip(layer.index[0], layer.valid[0], strict=True)):
                mask[l, g, index[valid].cpu().numpy()] = True
        selections.append(ChainSelection(policy, mask))
    return tuple(selections)


def best_token_per_slot(teacher: TeacherChain, tokens: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return for each slot the token of the first chain that most matched layers and heads choose, and their share."""
    layers = [teacher.choices[teacher.policy].tokens[l] for l in teacher.matched_layers]
    best: list[tuple[str, float]] = []
    for m in range(layers[0].index.shape[2]):
        columns = [i for layer in layers for i in layer.index[0, :, m][layer.valid[0, :, m]].tolist()]
        column, count = Counter(columns).most_common(1)[0] if columns else (0, 0)
        best.append((tokens[column], count / len(columns)) if columns else (NO_TOKEN, 0.0))
    return tuple(best)
