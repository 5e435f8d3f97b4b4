"""Oracles of PCCoT 1 and 2: the first thoughts out of the placeholders, and the rounds that follow."""

from torch import Tensor

from tests.oracles.rollout import Case, differentiated, jacobi, misread


def once(case: Case) -> Case:
    return case._replace(rounds=1)


def first(case: Case, **changes: object) -> tuple[Tensor, Tensor]:
    return jacobi(once(case), **changes)  # type: ignore[arg-type]


initial, rounds = differentiated(first), differentiated(jacobi)

ORACLE = {"1": initial, "2": rounds}

MISREAD = {
    "1": {
        "a residual": misread(first, residual=True),
        "a slot fed by its own output": misread(first, start=lambda m: m + 1),
        "all slots started from bot": misread(first, start=lambda m: 0),
        "the LayerNorm left out": misread(first, norm=False),
        "pads attended": misread(first, pads=True),
        "positions counting pads": misread(first, columns=True),
    },
    "2": {
        "a residual": misread(jacobi, residual=True),
        "a slot fed by its own output": misread(jacobi, source=lambda m: m + 1),
        "all slots started from bot": misread(jacobi, start=lambda m: 0),
        "the first slot overwritten": misread(jacobi, keep=False),
        "detached between rounds": misread(jacobi, detach=True),
        "pads attended": misread(jacobi, pads=True),
        "positions counting pads": misread(jacobi, columns=True),
        "the LayerNorm left out": misread(jacobi, norm=False),
        "one round fewer, or the placeholders' pass counted": misread(jacobi, fewer=1),
    },
}
