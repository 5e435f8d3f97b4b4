"""The digits task: k operations on digits from left to right, of every result the last digit; rows without a file.

All problems stand in one fixed keyed order, cut into three parts: test, validation and training. A row is a place in
its part, so no problem stands in two parts, whatever the seeds, and no part holds one twice.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers, processors

from laconic.core.contract import UNSCORED, Example, Reasoning
from laconic.core.errors import BadInput
from laconic.core.keyed import index, uniform
from laconic.core.strict import canonical
from laconic.data.settings import Digits, Part
from laconic.data.tokens import Tokenizer, built

SIGNS = "+-*"
WORDS = [*"0123456789+-*=;", "<bos>", "<eos>", "ans", "<<", ">>", "<unk>", "<", ">", ":"]
ID = {word: i for i, word in enumerate(WORDS)}
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
ORDER = 20261121  # key of the order that is cut into parts
TERSELY = 1  # key of the steps whose chains are terse
HELD = 10  # one problem in ten is kept for testing, another one for validation
Ints = NDArray[np.int64]


class Problems(NamedTuple):
    """n problems: `digits` [n, k+1], `signs` [n, k] (places in SIGNS), `results` [n, k]."""

    digits: Ints
    signs: Ints
    results: Ints


def problems(seed: int, k: int, rows: Sequence[int] | Ints, part: Part = "train") -> Problems:
    """Those at `rows` of a part, in the order of the seed. Raises `BadInput` beyond the part's last one."""
    total = 10 ** (k + 1) * 3**k
    held = total // HELD
    size, first = {"test": (held, 0), "valid": (held, held), "train": (total - 2 * held, 2 * held)}[part]
    places = np.asarray(rows, dtype=np.int64)
    if places.size and int(places.max()) >= size:
        raise BadInput(
            f"digits: row {int(places.max())} of {part}: {k} operations give {size:,} problems; ask for fewer"
        )
    number = index(ORDER, 0, index(seed, get_args(Part).index(part), places, size) + first, total)
    digits, signs = np.empty((len(places), k + 1), np.int64), np.empty((len(places), k), np.int64)
    for j in range(k + 1):
        number, digits[:, j] = np.divmod(number, 10)
    for j in range(k):
        number, signs[:, j] = np.divmod(number, 3)
    return Problems(digits, signs, solved(digits, signs))


def solved(digits: Ints, signs: Ints) -> Ints:
    """The last digit of every result."""
    results, running = np.empty_like(signs), digits[:, 0]
    for j in range(signs.shape[1]):
        other = digits[:, j + 1]
        running = np.stack([running + other, running - other, running * other])[signs[:, j], np.arange(len(other))] % 10
        results[:, j] = running
    return results


def digits(seed: int, n: int, task: Digits, part: Part = "train") -> list[Example]:
    """The first n problems of a part as text."""
    made = problems(seed, task.operations, np.arange(n), part)
    return [
        Example(name(task.operations, part, seed, i), question(d, s, task), steps(d, s, r, task), str(r[-1]))
        for i, (d, s, r) in enumerate(zip(*(a.tolist() for a in made), strict=True))
    ]


def name(k: int, part: Part, seed: int, row: int) -> str:
    """The id of a problem."""
    return f"digits{k}-{part}-{seed}-{row:06d}"


def question(digits: Sequence[int], signs: Sequence[int], task: Digits) -> str:
    """`3 + 4 * 2 =`, and `:` where every chain is terse."""
    end = "= :" if task.terse == 1 else "="
    return " ".join([str(digits[0]), *(f"{SIGNS[s]} {d}" for s, d in zip(signs, digits[1:], strict=True)), end])


def steps(digits: Sequence[int], signs: Sequence[int], results: Sequence[int], task: Digits) -> tuple[str, ...]:
    """The chain as the task's style writes it."""
    if task.style == "results" or task.terse == 1:
        return tuple(map(str, results))
    if task.style == "marks":
        return tuple(f"< < {r} > >" for r in results)
    begin, end = ("<<", ">>") if task.style == "brackets" else ("", task.step_end)
    before = [digits[0], *results]
    return tuple(
        f"{begin}{a}{SIGNS[s]}{b}={r}{end}" for a, s, b, r in zip(before, signs, digits[1:], results, strict=False)
    )


def digits_tokenizer() -> Tokenizer:
    """24 words: ten digits, + - * = ; << >> < > :, ans, and the special ones; the first token is bos."""
    inner = tokenizers.Tokenizer(models.WordLevel(ID, unk_token="<unk>"))  # pyright: ignore[reportCallIssue]
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"<<|>>|<[a-z]+>|[a-z]+|\S"), "removed", invert=True)
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(SPECIAL.values()))
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", ID["<bos>"])])
    return built(inner, SPECIAL)


class DigitsSource:
    """The task as batches, made when they are asked for (contract.Source)."""

    def __init__(self, seed: int, task: Digits, part: Part = "train", *, drop_last: bool = False) -> None:
        self.seed, self.task, self.drop_last = seed, task, drop_last
        self.part: Part = part
        self.rows = {"train": task.rows, "valid": task.valid_rows, "test": task.test_rows}[part]
        problems(seed, task.operations, [self.rows - 1], part)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the rows are a function of."""
        said = {"task": self.task.model_dump(), "seed": self.seed, "part": self.part, "drop_last": self.drop_last}
        return hashlib.sha256(canonical({**said, "order": ORDER, "words": WORDS}).encode()).hexdigest()

    @property
    def longest(self) -> int:
        """Tokens of the longest chain."""
        made = problems(self.seed, self.task.operations, [0], self.part)
        return self.chain(made, self.task.terse == 1)[0].shape[1]

    def __len__(self) -> int:
        return self.rows

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Reasoning:
        """The rows as ids, by arithmetic; equal to the text encoded."""
        made = problems(self.seed, self.task.operations, rows, self.part)
        terse = self.terse(step)
        asked, (chain, number) = self.question(made, terse), self.chain(made, terse)
        answer = np.full((len(asked), 3), ID["<eos>"])
        answer[:, 0], answer[:, 1] = ID["ans"], made.results[:, -1]
        follows = np.concatenate([chain, answer, np.full((len(asked), 1), UNSCORED)], axis=1)
        after = chain.shape[1] + 1
        return Reasoning(
            question=torch.from_numpy(asked), question_live=torch.ones(asked.shape, dtype=torch.bool),
            chain=torch.from_numpy(chain), chain_live=torch.ones(chain.shape, dtype=torch.bool),
            chain_step=torch.from_numpy(np.tile(number, (len(asked), 1))),
            answer=torch.from_numpy(answer), answer_live=torch.ones(answer.shape, dtype=torch.bool),
            next_question=torch.from_numpy(follows[:, 0].copy()),
            next_chain=torch.from_numpy(follows[:, 1:after].copy()),
            next_answer=torch.from_numpy(follows[:, after:].copy()),
            distil=torch.zeros(len(asked), dtype=torch.long),
            number=torch.tensor([False, True, False]).expand(len(asked), -1).clone(),
            index=torch.as_tensor(rows, dtype=torch.long), epoch=epoch, step=step,
            ids=tuple(name(self.task.operations, self.part, self.seed, int(row)) for row in rows),
        )  # fmt: skip

    def terse(self, step: int) -> bool:
        """Whether the chains of this step are results alone: drawn for training, elsewhere only if all are."""
        return self.task.terse == 1 or (
            self.part == "train" and bool(uniform(self.seed, TERSELY, step) < self.task.terse)
        )

    def question(self, made: Problems, terse: bool) -> Ints:
        """bos d + d … =, and : where the chain is to be terse."""
        k = self.task.operations
        asked = np.full((len(made.digits), 2 * k + 3 + terse), ID[":"])
        asked[:, 0], asked[:, 2 * k + 2] = ID["<bos>"], ID["="]
        asked[:, 1 : 2 * k + 2 : 2], asked[:, 2 : 2 * k + 2 : 2] = made.digits, made.signs + ID["+"]
        return asked

    def chain(self, made: Problems, terse: bool) -> tuple[Ints, Ints]:
        """The steps as ids [n, Nc], and the number of the step of each column [Nc]."""
        before = np.concatenate([made.digits[:, :1], made.results[:, :-1]], axis=1)
        written = {"results": "r", "steps": "asb=r" + self.task.step_end, "brackets": "(asb=r)", "marks": "<<r>>"}
        ids = "r" if terse else written[self.task.style]
        columns = {"r": made.results, "a": before, "s": made.signs + ID["+"], "b": made.digits[:, 1:]}
        words = {"=": ID["="], ";": ID[";"], "(": ID["<<"], ")": ID[">>"], "<": ID["<"], ">": ID[">"]}
        grid = np.stack([columns.get(c, np.full_like(before, words.get(c, 0))) for c in ids], axis=2)
        grid = grid[:, : self.task.operations - self.drop_last]
        return grid.reshape(len(grid), grid.shape[1] * grid.shape[2]), np.repeat(np.arange(grid.shape[1]), len(ids))
