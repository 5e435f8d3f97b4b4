"""Generate products of two N-digit numbers with all partial products, as in iCoT (arXiv:2405.14838).

Digits are least significant first and separated by spaces. A permutation by the seed orders the pairs.
"""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from laconic.rng import permuted_index

BLOCK = 1024  # pairs computed at once


def reverse_digits(number: int, width: int) -> str:
    """Return the digits of a number, least significant first, padded with zeros."""
    return " ".join(str(number).zfill(width)[::-1])


def format_partial_products(a: int, b: int, n: int) -> str:
    """Return the partial products, each with its zeros, and between them the sum so far in parentheses."""
    terms = list[str]()
    total = 0
    for place in range(n):
        product = a * (b // 10**place % 10) * 10**place
        total += product
        width = n + 1 + place
        term = reverse_digits(product, width)
        if 0 < place < n - 1:  # the first sum is the product itself, the last one the answer
            term += f" ( {reverse_digits(total, width)} )"
        terms.append(term)
    return " + ".join(terms)


def build_row(a: int, b: int, n: int, id: str) -> dict[str, Any]:
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
    """Yield all products in the order of a seed, without the pairs in `excluded` in either order."""
    smallest = 10 ** (n - 1)
    num_factors = 9 * 10 ** (n - 1)
    num_pairs = num_factors * num_factors
    skipped = {pair for a, b in excluded for pair in ((a, b), (b, a))}
    for start in range(0, num_pairs, BLOCK):
        rows = np.arange(start, min(start + BLOCK, num_pairs))
        for row, pair in zip(rows.tolist(), permuted_index(seed, 0, rows, num_pairs).tolist(), strict=True):
            a, b = smallest + pair // num_factors, smallest + pair % num_factors
            if (a, b) not in skipped:
                yield build_row(a, b, n, f"mult-{n}x{n}-made-{seed}-{row:07d}")
