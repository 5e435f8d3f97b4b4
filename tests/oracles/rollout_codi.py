"""Oracle of CODI 1: thoughts made one after the other."""

from tests.oracles.rollout import Case, differentiated, jacobi, misread, sequential


def short(case: Case) -> Case:
    """M - 1 rounds, after which the vectors are all made and the last has not been read."""
    return case._replace(rounds=case.M - 1)


chained = differentiated(sequential)

ORACLE = {"1": chained}

MISREAD = {
    "1": {
        "a residual": misread(sequential, residual=True),
        "the LayerNorm left out": misread(sequential, norm=False),
        "detached between thoughts": misread(sequential, detach=True),
        "z_1 from the last question token": misread(sequential, back=1),
        "pads attended": misread(sequential, pads=True),
        "positions counting pads": misread(sequential, columns=True),
        "rounds = M-1 taken for it": differentiated(lambda case: jacobi(short(case))),
    },
}
