"""docs/mutations.md: every wrong decoder, where it is caught and as what, and what weaker checks would have seen.

python benchmarks/mutations.py        needs stories260k in ../shared/models, or in the folder LACONIC_DATA names
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(REPO))

from laconic.models.decoder import Decoder
from tests.conftest import find_shared  # noqa: E402
from tests.verify.angles import CHECKS  # noqa: E402
from tests.verify.caught import found  # noqa: E402
from tests.verify.mutants import DECODER, FURTHER, MUTANTS, ROPE, Mutant, patched, spoiled  # noqa: E402

LENGTH = 201
INTRO = """# Wrong decoders

Each line is the decoder with one function, one field or one weight wrong. `tests/verify/test_mutations.py` asks, in the
default test run, that `laconic verify parity` finds the stage named as the first divergence and prints the cause; the
right decoder passes on the same inputs. None is missed: {caught} of {total} caught.

Made by `make bench` (`python benchmarks/mutations.py`), float32, one thread.

- *Logits*: relative L2 error of the logits against the right decoder; *random* is a small random model of the family on
  the input that shows the mistake, *stories260k* a story of {length} tokens.
- *Texts*: how many of three greedy continuations of stories260k to {length} tokens stay equal, token for token, by the
  eager back end.
"""

WEAK = """*golden values*: against loops with `math.cos`, from position 0 and from 90 · *q·k*: products of queries and
keys within one pass · *position 0*: values there · *properties*: length kept, position 0 untouched, products that
depend on differences alone, a vector that changes with its position."""
HEAD = "| wrong | caught at | printed cause | family, input | logits: random / stories260k | texts |"


def story(path: Path) -> tuple[Decoder, list[list[int]]]:
    """The model and its prompts."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    decoder = Decoder.from_pretrained(path)
    decoder.attn_implementation = "eager"  # the equations, of which each is one function to replace
    bos = decoder.config.bos_token_id
    lines = (path / "greedy-llama2c.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    prompts = [json.loads(line)["prompt"] for line in lines]
    return decoder, [[bos, *tokenizer.encode(text, add_special_tokens=False).ids] for text in prompts]


def greedy(decoder: Decoder, prompt: list[int]) -> list[int]:
    """Up to LENGTH ids, one by one on the cache."""
    ids, state, new = list(prompt), None, list(prompt)
    while len(ids) < LENGTH:
        seen = decoder(decoder.embed(torch.tensor([new])), state)
        new = [int(decoder.logits(seen.hidden[0, -1]).argmax())]
        ids, state = ids + new, seen.state
    return ids


def logits(decoder: Decoder, ids: list[int]) -> Tensor:
    """Of every position, read at once."""
    return decoder.logits(decoder(decoder.embed(torch.tensor([ids]))).hidden)


def number(x: float) -> str:
    """Two digits."""
    return f"{x:.1e}" if x < 0.1 else f"{x:.2f}"


class Story:
    """What becomes of stories260k under a mutant."""

    def __init__(self, path: Path) -> None:
        self.decoder, self.prompts = story(path)
        self.texts = [greedy(self.decoder, prompt) for prompt in self.prompts]
        self.right = logits(self.decoder, self.texts[0])

    def columns(self, mutant: Mutant) -> tuple[str, str]:
        """Error of the logits, equal texts; dashes where the mutant is of another family."""
        if not mutant.everywhere:
            return "–", "–"
        decoder = spoiled(mutant, self.decoder)
        decoder.attn_implementation = "eager"
        with patched(mutant):
            gap = float((logits(decoder, self.texts[0]) - self.right).norm() / self.right.norm())
            same = sum(greedy(decoder, p) == text for p, text in zip(self.prompts, self.texts, strict=True))
        return number(gap) if gap == gap else "NaN", f"**{same} of 3**" if same == 3 else str(same)


def row(mutant: Mutant, story: Story) -> tuple[str, bool]:
    """One line of the table, and whether the mutant was caught as it must be."""
    with tempfile.TemporaryDirectory() as folder:
        first, cause, error = found(mutant, Path(folder) / "model")
    caught = first is not None and (first.stage, first.layer) == (mutant.stage, mutant.layer)
    caught = caught and cause.startswith(mutant.cause)
    layer = "" if mutant.layer is None else f".{mutant.layer}"
    stage = f"`{mutant.stage}{layer}`" if caught else "**missed**"
    family = f"{mutant.family}, {mutant.case}"
    gap, same = story.columns(mutant)
    return f"| {mutant.name} | {stage} | {cause} | {family} | {number(error)} / {gap} | {same} |", caught


def rotations() -> list[str]:
    """Which checks of a rotation object to which mutant."""
    lines = [f"| rotation | {' | '.join(CHECKS)} |", "|---" * (len(CHECKS) + 1) + "|"]
    counts = dict.fromkeys(CHECKS, 0)
    for mutant in ROPE:
        with patched(mutant):
            seen = {name: check() for name, check in CHECKS.items()}
        counts = {name: n + seen[name] for name, n in counts.items()}
        lines.append(f"| {mutant.name} | {' | '.join('caught' if ok else 'missed' for ok in seen.values())} |")
    return [*lines, f"| **{len(ROPE)}** | {' | '.join(f'**{n}**' for n in counts.values())} |"]


def write(page: Path, say: Callable[[str], None] = lambda line: None) -> None:
    """Runs every mutant and writes the page."""
    shared = find_shared()
    if shared is None:
        raise SystemExit("the page needs stories260k: ../shared beside the checkout, or LACONIC_DATA")
    began, lines, caught = time.monotonic(), [], 0
    with torch.no_grad():
        tale = Story(shared / "models" / "stories260k")
        for title, group in (("Decoder", DECODER), ("RoPE", ROPE), ("Families and state", FURTHER)):
            lines += [f"\n## {title} ({len(group)})\n", HEAD]
            lines.append("|---|---|---|---|---|---|")
            for mutant in group:
                line, good = row(mutant, tale)
                lines.append(line)
                caught += good
                say(f"[{time.monotonic() - began:3.0f} s] {caught:2d} caught: {mutant.name}")
    lines += ["\n## What weaker checks of a rotation see\n", *rotations(), "", WEAK]
    intro = INTRO.format(caught=caught, total=len(MUTANTS), length=LENGTH)
    page.write_text(intro + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(REPO / "docs" / "mutations.md", lambda line: print(line, file=sys.stderr))
