"""Products of two numbers of N digits with every partial product, as iCoT writes them (arXiv:2405.14838).

Digits stand least significant first, a space between two; a row is a place in one keyed order of all pairs, so no pair
comes twice.
"""

from collections.abc import Collection, Iterator
from itertools import count
from typing import Any

import numpy as np

from laconic.rng import permuted_index

BLOCK = 1024  # pairs drawn at once


def reverse_digits(number: int, width: int) -> str:
    """The digits of a number, least significant first, with zeros up to a width."""
    return " ".join(str(number).zfill(width)[::-1])


def format_partial_products(a: int, b: int, n: int) -> str:
    """The partial products, each n + 1 digits after its zeros; from the second on with the sum so far in brackets."""
    text, total = "", 0
    for place in range(n):
        part, width = a * int(str(b)[::-1][place]) * 10**place, n + 1 + place
        total += part
        text += f"{' + ' if place else ''}{reverse_digits(part, width)}"
        text += f" ( {reverse_digits(total, width)} )" if 0 < place < n - 1 else ""
    return text


def build_row(a: int, b: int, n: int, id: str) -> dict[str, Any]:
    """A row in the fields of the published ones."""
    return {
        "id": id,
        "question": f"{reverse_digits(a, n)} * {reverse_digits(b, n)}",
        "cot": format_partial_products(a, b, n),
        "answer": reverse_digits(a * b, 2 * n),
        "a": a,
        "b": b,
        "product": a * b,
    }


def iter_products(n: int, seed: int, excluded: Collection[tuple[int, int]] = ()) -> Iterator[dict[str, Any]]:
    """Rows in the order of the seed up to the last pair, but for those of `without`, either factor first."""
    first, each = 10 ** (n - 1), 9 * 10 ** (n - 1)
    left = {pair for a, b in excluded for pair in ((a, b), (b, a))}
    for begin in count(0, BLOCK):
        at = np.arange(begin, min(begin + BLOCK, each * each))
        for row, pair in zip(at.tolist(), permuted_index(seed, 0, at, each * each).tolist(), strict=True):
            a, b = first + pair // each, first + pair % each
            if (a, b) not in left:
                yield build_row(a, b, n, f"mult-{n}x{n}-made-{seed}-{row:07d}")
        if begin + BLOCK >= each * each:
            return
