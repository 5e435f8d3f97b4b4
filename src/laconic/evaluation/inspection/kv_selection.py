"""Which tokens of a chain KV selection policies select, and the classes of these tokens.

Shapes: L matched layers, G KV heads, N tokens of one chain.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from laconic.evaluation.inspection.inspected_run import TeacherChain

BRACKET, OPERATOR, NUMBER = re.compile(r"[<>()\[\]{}]"), re.compile(r"[-+*/×÷·%=−]"), re.compile(r"\d")
SelectionMask = NDArray[np.bool_]


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
