"""Usage errors as one line, from the error boxes of tyro."""

import re
from difflib import SequenceMatcher
from itertools import takewhile

MIN_SIMILARITY = 0.65  # of an option that tyro suggests; it also suggests options whose help has the same words
HINTS = {
    "compress": "several texts are rows of a .jsonl; ",
    "evaluate": "the values of --tasks need commas; ",
    **dict.fromkeys(("generate", "chat"), "write --memory before each memory, and prompts before flags; "),
}


def summarise_usage_error(text: str, command: str) -> str:
    """Return tyro's error box as one sentence, with the option it suggests, or how to get help on a command."""
    body = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()[1:]  # the first line is the title
    lines = [line for row in body if (line := row.strip("│")[1:].rstrip()).strip("─-╰╯ ")]
    if not lines:
        return f"cannot parse the arguments; see {command} --help"
    end = next((i for i, row in enumerate(body) if not row.strip("│─ ")), len(body))
    sentence_lines = list(takewhile(lambda row: not row.startswith(" "), lines[:end]))  # wrapped lines are not indented
    sentence = " ".join(sentence_lines).rstrip(".")
    if sentence.endswith(":") and len(sentence_lines) < len(lines):
        sentence += f" {lines[len(sentence_lines)].strip()}"
    if match := re.match(r"Unrecognized options: (.*)", sentence):
        suggestions = [lines[i + 1].split()[0] for i, row in enumerate(lines[:-1]) if row.startswith("Perhaps you")]
        return describe_unknown(match[1].split(", "), suggestions, command)
    return f"{rewrite_sentence(sentence.rstrip())}; see {command} --help"


def describe_unknown(words: list[str], suggestions: list[str], command: str) -> str:
    """Return the line for the first of the words that a command does not take."""
    option = next((word for word in words if word.startswith("-")), None)
    name = command.removeprefix("laconic ")
    if option is None:
        return f"{words[0]}: {name} takes fewer arguments; {HINTS.get(name, '')}see {command} --help"
    close = [
        s for s in suggestions if s.startswith(option) or SequenceMatcher(None, option, s).ratio() >= MIN_SIMILARITY
    ]
    hint = f"did you mean {close[0]}?" if close else f"see {command} --help"
    return f"{name} has no option {option}; {hint}"


def rewrite_sentence(sentence: str) -> str:
    """Return a sentence of tyro as laconic's messages are written: what is wrong, then what is expected."""
    for pattern, replacement in (
        (r"Missing from (?:laconic )?(.*): (.*)", r"\1 needs \2"),
        (r"Missing value for argument '(.*?)'.*", r"\1: missing value"),
        (r"Error parsing (.*?): .*(?:INT|int\(\)).* (?:\[?)'(.*)'\]?", r"\1: \2 is not an integer"),
        (r"Error parsing (.*?): .*(?:FLOAT|to float:).* (?:\[?)'(.*)'\]?", r"\1: \2 is not a number"),
    ):
        if match := re.fullmatch(pattern, sentence):
            return match.expand(replacement)
    if match := re.fullmatch(r"invalid choice '(.*)' for argument '(.*)'. Expected one of \((.*)\)", sentence):
        choices = set(re.findall("'([^']*)'", match[3])) - {"None"}  # None is the value of a flag that is not given
        return f"{match[2]} {match[1]}: expected one of {', '.join(sorted(choices))}"
    return sentence
