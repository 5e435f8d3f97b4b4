"""Which tokens of a chain KV selection policies select, and the classes of these tokens.

Shapes: L matched layers, G KV heads, N tokens of one chain.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laconic.evaluation.inspection.inspected_run import TeacherChain

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
        layers = [choice[l] for l in teacher.matched_layers]
        mask = np.zeros((len(layers), layers[0].index.shape[1], n), dtype=np.bool_)
        for l, layer in enumerate(layers):
            for g, (index, valid) in enumerate(zip(layer.index[0], layer.valid[0], strict=True)):
                mask[l, g, index[valid].cpu().numpy()] = True
        selections.append(ChainSelection(policy, mask))
    return tuple(selections)
