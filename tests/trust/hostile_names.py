"""Names that try to lead out of a folder: of files, runs, memories and sessions."""

import random

PARTS = (
    "..", ".", "%2e%2e", "..%2f", "%00", "%c0%ae%c0%ae", "..\\", "\\\\server\\share", "C:", "C:\\", "~", "~root",
    "$HOME", "CON", "nul.txt", "\u2024\u2024", "\uff0e\uff0e", "\u2025", "\0", "\n", "\x1b[2J", "\u202e", "*", "?",
    ";id", "`id`", "-rf", " ", "a", "secret", "secret.txt", "a" * 300, "lock", ".tmp-1", "file:", "http://127.0.0.1",
    "etc", "passwd",
)  # fmt: skip
SEPARATORS = ("/", "/", "\\", "", "//", "%2f")


def draw_name(number: int) -> str:
    """Return a name; the same for the same number."""
    draw = random.Random(f"name {number}")
    name = draw.choice(("", "", "/", "//"))
    for _ in range(draw.randrange(1, 6)):
        name += draw.choice(PARTS) + draw.choice(SEPARATORS)
    return name[: -1 if draw.random() < 0.5 else None]
