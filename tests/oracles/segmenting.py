"""Oracle of AC7, random segment lengths, as loops from the formula, and misreadings of it."""

import math
from collections.abc import Callable, Sequence


def shortest(W: int, w: int, X: int) -> int:
    return max(math.ceil((W - X) / (w - 1)), 2)


def smallest(draws: Sequence[float], count: int) -> list[int]:
    """Return the positions of the smallest random numbers, in order."""
    result: list[int] = []
    while len(result) < count:
        best = None
        for i, draw in enumerate(draws):
            if i not in result and (best is None or draw < draws[best]):
                best = i
        assert best is not None
        result.append(best)
    return sorted(result)


def random_lengths(
    W: int,
    w: int,
    X: int,
    draws: Sequence[float],
    *,
    low: Callable[[int, int, int], int] = shortest,
    points: Callable[[Sequence[float], int], list[int]] = smallest,
    rest: Callable[[int, int, int], int] = lambda W, w, low: W - w * low,
) -> list[int]:
    least = low(W, w, X)
    room = rest(W, w, least)
    borders = [0, *points(draws[: max(room, 0)], w - 1), room]
    return [least + borders[i + 1] - borders[i] for i in range(w)]


def spread(draws: Sequence[float], count: int) -> list[int]:
    """Sample points with replacement, by the value of each random number."""
    return sorted(int(draw * len(draws)) for draw in draws[:count])


def misread(**changes: Callable[..., object]) -> Callable[..., list[int]]:
    return lambda *inputs: random_lengths(*inputs, **changes)  # pyright: ignore[reportArgumentType]


ORACLE = {"AC7": random_lengths}

MISREAD = {
    "AC7": {
        "the shortest by all w segments": misread(low=lambda W, w, X: max(math.ceil((W - X) / w), 2)),
        "two tokens are always enough": misread(low=lambda W, w, X: 2),
        "rounded down": misread(low=lambda W, w, X: max((W - X) // (w - 1), 2)),
        "cut points with replacement": misread(points=spread),
        "cut points in the order drawn": misread(points=lambda draws, n: smallest(draws, n)[::-1]),
        "the last segment takes all that is left": misread(
            points=lambda draws, n: [min(i, len(draws)) for i in range(n)]
        ),
    }
}
