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

from laconic.batches import IGNORE_INDEX, ReasoningBatch, ReasoningExample
from laconic.config.data import DigitsConfig, SplitName
from laconic.data.tokenizer import Tokenizer, wrap_backend
from laconic.errors import InputError
from laconic.rng import permuted_index, uniform
from laconic.storage.strict_json import to_canonical_json

OPERATORS = "+-*"
VOCABULARY = [*"0123456789+-*=;", "<bos>", "<eos>", "ans", "<<", ">>", "<unk>", "<", ">", ":"]
TOKEN_IDS = {word: i for i, word in enumerate(VOCABULARY)}
SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
SPLIT_ORDER_SEED = 20261121  # key of the order that is cut into parts
TERSE_KEY = 1  # key of the steps whose chains are terse
HELD_OUT_DIVISOR = 10  # one problem in ten is kept for testing, another one for validation
IntArray = NDArray[np.int64]


class DigitProblems(NamedTuple):
    """n problems: `digits` [n, k+1], `signs` [n, k] (places in SIGNS), `results` [n, k]."""

    digits: IntArray
    operators: IntArray
    results: IntArray


def generate_problems(
    seed: int, num_operations: int, rows: Sequence[int] | IntArray, part: SplitName = "train"
) -> DigitProblems:
    """Those at `rows` of a part, in the order of the seed. Raises `BadInput` beyond the part's last one."""
    total = 10 ** (num_operations + 1) * 3**num_operations
    held = total // HELD_OUT_DIVISOR
    size, first = {"test": (held, 0), "valid": (held, held), "train": (total - 2 * held, 2 * held)}[part]
    places = np.asarray(rows, dtype=np.int64)
    if places.size and int(places.max()) >= size:
        raise InputError(
            f"digits: row {int(places.max())} of {part}: {num_operations} operations give {size:,} problems; ask for fewer"
        )
    number = permuted_index(
        SPLIT_ORDER_SEED, 0, permuted_index(seed, get_args(SplitName).index(part), places, size) + first, total
    )
    digits, signs = (
        np.empty((len(places), num_operations + 1), np.int64),
        np.empty((len(places), num_operations), np.int64),
    )
    for j in range(num_operations + 1):
        number, digits[:, j] = np.divmod(number, 10)
    for j in range(num_operations):
        number, signs[:, j] = np.divmod(number, 3)
    return DigitProblems(digits, signs, solve(digits, signs))


def solve(digits: IntArray, signs: IntArray) -> IntArray:
    """The last digit of every result."""
    results, running = np.empty_like(signs), digits[:, 0]
    for j in range(signs.shape[1]):
        other = digits[:, j + 1]
        running = np.stack([running + other, running - other, running * other])[signs[:, j], np.arange(len(other))] % 10
        results[:, j] = running
    return results


def generate_digit_examples(
    seed: int, n: int, config: DigitsConfig, part: SplitName = "train"
) -> list[ReasoningExample]:
    """The first n problems of a part as text."""
    made = generate_problems(seed, config.num_operations, np.arange(n), part)
    return [
        ReasoningExample(
            problem_id(config.num_operations, part, seed, i),
            format_question(d, s, config),
            format_steps(d, s, r, config),
            str(r[-1]),
        )
        for i, (d, s, r) in enumerate(zip(*(a.tolist() for a in made), strict=True))
    ]


def problem_id(k: int, part: SplitName, seed: int, row: int) -> str:
    """The id of a problem."""
    return f"digits{k}-{part}-{seed}-{row:06d}"


def format_question(digits: Sequence[int], signs: Sequence[int], config: DigitsConfig) -> str:
    """`3 + 4 * 2 =`, and `:` where every chain is terse."""
    end = "= :" if config.results_only_fraction == 1 else "="
    return " ".join([str(digits[0]), *(f"{OPERATORS[s]} {d}" for s, d in zip(signs, digits[1:], strict=True)), end])


def format_steps(
    digits: Sequence[int], signs: Sequence[int], results: Sequence[int], config: DigitsConfig
) -> tuple[str, ...]:
    """The chain as the task's style writes it."""
    if config.chain_style == "results" or config.results_only_fraction == 1:
        return tuple(map(str, results))
    if config.chain_style == "bracket_tokens":
        return tuple(f"< < {r} > >" for r in results)
    begin, end = ("<<", ">>") if config.chain_style == "brackets" else ("", config.step_end)
    before = [digits[0], *results]
    return tuple(
        f"{begin}{a}{OPERATORS[s]}{b}={r}{end}" for a, s, b, r in zip(before, signs, digits[1:], results, strict=False)
    )


def build_digits_tokenizer() -> Tokenizer:
    """24 words: ten digits, + - * = ; << >> < > :, ans, and the special ones; the first token is bos."""
    inner = tokenizers.Tokenizer(models.WordLevel(TOKEN_IDS, unk_token="<unk>"))  # pyright: ignore[reportCallIssue]
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"<<|>>|<[a-z]+>|[a-z]+|\S"), "removed", invert=True)
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(SPECIAL_TOKENS.values()))
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", TOKEN_IDS["<bos>"])]
    )
    return wrap_backend(inner, SPECIAL_TOKENS)


class DigitsDataset:
    """The task as batches, made when they are asked for (contract.Source)."""

    def __init__(self, seed: int, config: DigitsConfig, part: SplitName = "train", *, drop_last: bool = False) -> None:
        self.seed, self.config, self.drop_last = seed, config, drop_last
        self.part: SplitName = part
        self.num_rows = {"train": config.train_rows, "valid": config.valid_rows, "test": config.test_rows}[part]
        generate_problems(seed, config.num_operations, [self.num_rows - 1], part)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the rows are a function of."""
        said = {"task": self.config.model_dump(), "seed": self.seed, "part": self.part, "drop_last": self.drop_last}
        return hashlib.sha256(
            to_canonical_json({**said, "order": SPLIT_ORDER_SEED, "words": VOCABULARY}).encode()
        ).hexdigest()

    @property
    def max_length(self) -> int:
        """Tokens of the longest chain."""
        made = generate_problems(self.seed, self.config.num_operations, [0], self.part)
        return self.chain_ids(made, self.config.results_only_fraction == 1)[0].shape[1]

    def __len__(self) -> int:
        return self.num_rows

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> ReasoningBatch:
        """The rows as ids, by arithmetic; equal to the text encoded."""
        made = generate_problems(self.seed, self.config.num_operations, rows, self.part)
        terse = self.is_terse(step)
        asked, (chain, number) = self.question_ids(made, terse), self.chain_ids(made, terse)
        answer = np.full((len(asked), 3), TOKEN_IDS["<eos>"])
        answer[:, 0], answer[:, 1] = TOKEN_IDS["ans"], made.results[:, -1]
        follows = np.concatenate([chain, answer, np.full((len(asked), 1), IGNORE_INDEX)], axis=1)
        after = chain.shape[1] + 1
        return ReasoningBatch(
            question_ids=torch.from_numpy(asked), question_mask=torch.ones(asked.shape, dtype=torch.bool),
            chain_ids=torch.from_numpy(chain), chain_mask=torch.ones(chain.shape, dtype=torch.bool),
            chain_step_index=torch.from_numpy(np.tile(number, (len(asked), 1))),
            answer_ids=torch.from_numpy(answer), answer_mask=torch.ones(answer.shape, dtype=torch.bool),
            question_target=torch.from_numpy(follows[:, 0].copy()),
            chain_targets=torch.from_numpy(follows[:, 1:after].copy()),
            answer_targets=torch.from_numpy(follows[:, after:].copy()),
            distill_column=torch.zeros(len(asked), dtype=torch.long),
            answer_number_mask=torch.tensor([False, True, False]).expand(len(asked), -1).clone(),
            row_index=torch.as_tensor(rows, dtype=torch.long), epoch=epoch, step=step,
            ids=tuple(problem_id(self.config.num_operations, self.part, self.seed, int(row)) for row in rows),
        )  # fmt: skip

    def is_terse(self, step: int) -> bool:
        """Whether the chains of this step are results alone: drawn for training, elsewhere only if all are."""
        return self.config.results_only_fraction == 1 or (
            self.part == "train" and bool(uniform(self.seed, TERSE_KEY, step) < self.config.results_only_fraction)
        )

    def question_ids(self, made: DigitProblems, terse: bool) -> IntArray:
        """bos d + d … =, and : where the chain is to be terse."""
        k = self.config.num_operations
        asked = np.full((len(made.digits), 2 * k + 3 + terse), TOKEN_IDS[":"])
        asked[:, 0], asked[:, 2 * k + 2] = TOKEN_IDS["<bos>"], TOKEN_IDS["="]
        asked[:, 1 : 2 * k + 2 : 2], asked[:, 2 : 2 * k + 2 : 2] = made.digits, made.operators + TOKEN_IDS["+"]
        return asked

    def chain_ids(self, made: DigitProblems, terse: bool) -> tuple[IntArray, IntArray]:
        """The steps as ids [n, Nc], and the number of the step of each column [Nc]."""
        before = np.concatenate([made.digits[:, :1], made.results[:, :-1]], axis=1)
        written = {
            "results": "r",
            "equations": "asb=r" + self.config.step_end,
            "brackets": "(asb=r)",
            "bracket_tokens": "<<r>>",
        }
        ids = "r" if terse else written[self.config.chain_style]
        columns = {"r": made.results, "a": before, "s": made.operators + TOKEN_IDS["+"], "b": made.digits[:, 1:]}
        words = {
            "=": TOKEN_IDS["="],
            ";": TOKEN_IDS[";"],
            "(": TOKEN_IDS["<<"],
            ")": TOKEN_IDS[">>"],
            "<": TOKEN_IDS["<"],
            ">": TOKEN_IDS[">"],
        }
        grid = np.stack([columns.get(c, np.full_like(before, words.get(c, 0))) for c in ids], axis=2)
        grid = grid[:, : self.config.num_operations - self.drop_last]
        return grid.reshape(len(grid), grid.shape[1] * grid.shape[2]), np.repeat(np.arange(grid.shape[1]), len(ids))
