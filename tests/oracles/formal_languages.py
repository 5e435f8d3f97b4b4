"""Membership oracle of the six formal languages, and next symbols by enumeration."""

from itertools import product

ALPHABET = {"parity": "ab", "aa": "a", "abab": "ab", "anbn": "ab", "anbncn": "abc", "shuffle2": "()[]"}


def belongs(language: str, string: str) -> bool:
    if language == "parity":
        return sum(1 for symbol in string if symbol == "b") % 2 == 0
    if language == "aa":
        return string == "aa" * (len(string) // 2)
    if language == "abab":
        return string == "abab" * (len(string) // 4)
    if language in ("anbn", "anbncn"):
        letters = "ab" if language == "anbn" else "abc"
        n = len(string) // len(letters)
        return n > 0 and string == "".join(letter * n for letter in letters)
    return all(balanced(string, pair) for pair in ("()", "[]"))


def balanced(string: str, pair: str) -> bool:
    rest = "".join(symbol for symbol in string if symbol in pair)
    while pair in rest:
        rest = rest.replace(pair, "")
    return rest == ""


def strings(language: str, n: int) -> list[str]:
    """Return all strings of length n."""
    return [s for s in map("".join, product(ALPHABET[language], repeat=n)) if belongs(language, s)]


def follows(members: list[str], prefix: str) -> frozenset[str]:
    """Return what follows a prefix in any member; "." if one ends there."""
    return frozenset((member[len(prefix) :] or ".")[0] for member in members if member.startswith(prefix))
