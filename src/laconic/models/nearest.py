"""Which key was meant: the nearest by Damerau–Levenshtein distance."""

from collections import Counter
from collections.abc import Iterable, Sequence

MAX_EDITS = 2  # edits: letters put in, left out, replaced, or two neighbours swapped


def edit_distance(a: str, b: str) -> int:
    """Damerau–Levenshtein distance, unrestricted (Lowrance and Wagner 1975, doi:10.1145/321879.321880)."""
    most = len(a) + len(b)
    rows = [[most] * (len(b) + 2), [most, *range(len(b) + 1)]]
    last: dict[str, int] = {}
    for i, x in enumerate(a, 1):
        row, match = [most, i], 0
        for j, y in enumerate(b, 1):
            above = last.get(y, 0)
            swap = rows[above][match] + (i - above - 1) + 1 + (j - match - 1)
            row.append(min(rows[i][j] + (x != y), row[j] + 1, rows[i][j + 1] + 1, swap))
            if x == y:
                match = j
        last[x] = i
        rows.append(row)
    return rows[-1][-1]


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The full key path within two edits of `key`; else the one whose last part is, in the same table if it can be."""
    paths = list(known)
    table, _, part = key.rpartition(".")
    found = closest_word(key, paths)
    if found is None:
        at_home = [path for path in paths if path.rpartition(".")[0] == table]
        ends = closest_word(part, [path.rpartition(".")[2] for path in at_home]) or closest_word(
            part, [path.rpartition(".")[2] for path in paths]
        )
        found = next((path for path in [*at_home, *paths] if path.rpartition(".")[2] == ends), None)
    return found


def closest_word(word: str, known: Sequence[str]) -> str | None:
    """The nearest of some words, if it is within two edits and not a wholly other word."""
    letters = Counter(word)  # an edit takes away one letter at most
    near = [
        (edit_distance(word, x), x)
        for x in known
        if max(len(x) - len(word), (letters - Counter(x)).total()) <= MAX_EDITS
    ]
    found = min(near, default=(MAX_EDITS + 1, ""))
    return found[1] if found[0] <= MAX_EDITS and found[0] < len(word) else None
