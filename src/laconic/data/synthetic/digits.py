"""The digits task: k operations on digits from left to right, keeping the last digit of every result.

All problems with k operations are in one fixed order, divided into test, validation and training. A row is an index
into its split, so whatever the seed, no problem is in two splits or twice in one. With several numbers of operations,
row i has the (i mod n)-th of the n numbers.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import NamedTuple, get_args

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import Regex, decoders, models, pre_tokenizers, processors

from laconic.batches import IGNORE_INDEX, ReasoningBatch, ReasoningExample
from laconic.config.data import DigitsConfig, SplitName
from laconic.data.synthetic.base import SPECIAL_TOKENS, BoolArray, IntArray
from laconic.data.tokenizer import Tokenizer, wrap_backend
from laconic.errors import InputError
from laconic.rng import permuted_index, uniform
from laconic.storage.manifest import hash_json

OPERATORS = "+-*"
VOCABULARY = [*"0123456789+-*=;", "<bos>", "<eos>", "ans", "<<", ">>", "<unk>", "<", ">", ":"]
WORD_PATTERN = r"<<|>>|<[a-z]+>|[a-z]+|\S"
TOKEN_IDS = {word: i for i, word in enumerate(VOCABULARY)}
SPLIT_ORDER_SEED = 20261121  # of the order that is divided into splits
TERSE_KEY = 1  # purpose of the random number that makes a step's chains terse
HELD_OUT_DIVISOR = 10  # a tenth of the problems is for testing, another tenth for validation


class DigitProblems(NamedTuple):
    """n problems: `digits` [n, k+1], `operators` [n, k] (indices into OPERATORS), `results` [n, k].

    `names` [n, k+1] are the ids of words that questions have in place of digits; None if they have the digits.
    """

    digits: IntArray
    operators: IntArray
    results: IntArray
    names: IntArray | None = None


class DigitChains(NamedTuple):
    """n chains of equal length: ids [n, Nc], the step of each column [Nc], and which columns are results [Nc]."""

    ids: IntArray
    step_index: IntArray
    is_result: BoolArray


def generate_problems(
    seed: int, num_operations: int, rows: Sequence[int] | IntArray, part: SplitName = "train"
) -> DigitProblems:
    """Return some problems of a split, in the order of the seed. Raises `InputError` beyond the last one."""
    k = num_operations
    total = 10 ** (k + 1) * 3**k
    num_held_out = total // HELD_OUT_DIVISOR
    size, first = {
        "test": (num_held_out, 0),
        "valid": (num_held_out, num_held_out),
        "train": (total - 2 * num_held_out, 2 * num_held_out),
    }[part]
    index = np.asarray(rows, dtype=np.int64)
    if index.size and int(index.max()) >= size:
        place = f"digits: {part} row {int(index.max())}"
        raise InputError(f"{place}: {k} operations give only {size:,} problems; lower the rows")
    in_split = permuted_index(seed, get_args(SplitName).index(part), index, size)
    number = permuted_index(SPLIT_ORDER_SEED, 0, in_split + first, total)
    digits = np.empty((len(index), k + 1), np.int64)
    operators = np.empty((len(index), k), np.int64)
    for j in range(k + 1):
        number, digits[:, j] = np.divmod(number, 10)
    for j in range(k):
        number, operators[:, j] = np.divmod(number, 3)
    return DigitProblems(digits, operators, solve(digits, operators))


def solve(digits: IntArray, operators: IntArray) -> IntArray:
    """Return the last digit of every result, [n, k]."""
    results = np.empty_like(operators)
    running = digits[:, 0]
    rows = np.arange(len(digits))
    for j in range(operators.shape[1]):
        x = digits[:, j + 1]
        running = np.stack([running + x, running - x, running * x])[operators[:, j], rows] % 10
        results[:, j] = running
    return results


def problem_id(k: int, part: SplitName, seed: int, row: int) -> str:
    return f"digits{k}-{part}-{seed}-{row:06d}"


def concat_batches(batches: Sequence[ReasoningBatch]) -> ReasoningBatch:
    """Concatenate the rows of batches of one step: questions padded on the left, chains and answers on the right."""
    first = batches[0]
    tensors: dict[str, torch.Tensor] = {}
    for name in (f.name for f in fields(first) if isinstance(getattr(first, f.name), torch.Tensor)):
        parts: list[torch.Tensor] = [getattr(batch, name) for batch in batches]
        if parts[0].ndim == 2:
            fill = IGNORE_INDEX if name.endswith("targets") else 0
            width = max(part.shape[1] for part in parts)
            gaps = [width - part.shape[1] for part in parts]
            padding = [(gap, 0) if name.startswith("question") else (0, gap) for gap in gaps]
            parts = [F.pad(part, pad, value=fill) for part, pad in zip(parts, padding, strict=True)]
        tensors[name] = torch.cat(parts)
    return replace(first, **tensors, ids=tuple(id for batch in batches for id in batch.ids))


def build_digits_tokenizer(vocabulary: Sequence[str] = VOCABULARY, pattern: str = WORD_PATTERN) -> Tokenizer:
    """Build the tokenizer: digits, `+ - * = ; << >> < > :`, `ans` and special tokens; it adds bos."""
    word_ids = {word: i for i, word in enumerate(vocabulary)}
    backend = tokenizers.Tokenizer(models.WordLevel(word_ids, unk_token="<unk>"))  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL_TOKENS.values()))
    bos = ("<bos>", word_ids["<bos>"])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    return wrap_backend(backend, SPECIAL_TOKENS)


class DigitsDataset:
    """The digits task as batches of ids (batches.TrainingData). Raises `InputError` for more rows than problems."""

    vocabulary: Sequence[str] = VOCABULARY

    def __init__(
        self, seed: int, config: DigitsConfig, part: SplitName = "train", *, drop_last_step: bool = False
    ) -> None:
        self.seed, self.config, self.drop_last_step = seed, config, drop_last_step
        self.part: SplitName = part
        self.num_rows = {"train": config.train_rows, "valid": config.valid_rows, "test": config.test_rows}[part]
        for k in config.operation_counts:
            generate_problems(seed, k, [(self.num_rows - 1) // len(config.operation_counts)], part)

    @property
    def fingerprint(self) -> str:
        source = {
            "task": self.config.model_dump(exclude_none=True),
            "seed": self.seed,
            "part": self.part,
            "drop_last": self.drop_last_step,
            "order": SPLIT_ORDER_SEED,
            "words": list(self.vocabulary),
        }
        return hash_json(source)

    @property
    def max_length(self) -> int:
        k = self.config.num_operations
        problems = self.get_problems(k, np.zeros(1, np.int64))
        return self.chain_ids(problems, k - self.drop_last_step, self.is_always_terse).ids.shape[1]

    def __len__(self) -> int:
        return self.num_rows

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> ReasoningBatch:
        """Return a batch, computed by arithmetic; equal to the encoded text of the problems."""
        index = np.asarray(rows, dtype=np.int64)
        counts = self.config.operation_counts
        if len(counts) == 1:
            return self.batch_of(counts[0], index, index, epoch, step)
        places = [np.flatnonzero(index % len(counts) == offset) for offset in range(len(counts))]
        parts = [
            self.batch_of(k, index[place] // len(counts), index[place], epoch, step)
            for k, place in zip(counts, places, strict=True)
            if len(place)
        ]
        return concat_batches(parts).select_rows(np.concatenate(places).argsort().tolist())

    def get_problems(self, k: int, rows: IntArray) -> DigitProblems:
        return generate_problems(self.seed, k, rows, self.part)

    def batch_of(self, k: int, rows: IntArray, row_index: IntArray, epoch: int, step: int) -> ReasoningBatch:
        """Return the batch of some problems with k operations, whose indices in the data set are `row_index`."""
        problems = self.get_problems(k, rows)
        terse = self.is_terse(step)
        chain, step_index, is_result = self.chain_ids(problems, k - self.drop_last_step, terse)
        question = torch.from_numpy(self.question_ids(problems, terse))
        documents = torch.from_numpy(self.documents(problems, rows))
        n = len(question)
        answer = np.full((n, 3), TOKEN_IDS["<eos>"])
        answer[:, 0] = TOKEN_IDS["ans"]
        answer[:, 1] = problems.results[:, -1]
        targets = np.concatenate([chain, answer, np.full((n, 1), IGNORE_INDEX)], axis=1)
        chain_end = chain.shape[1] + 1
        return ReasoningBatch(
            question_ids=question,
            question_mask=torch.ones(question.shape, dtype=torch.bool),
            chain_ids=torch.from_numpy(chain),
            chain_mask=torch.ones(chain.shape, dtype=torch.bool),
            chain_step_index=torch.from_numpy(np.tile(step_index, (n, 1))),
            answer_ids=torch.from_numpy(answer),
            answer_mask=torch.ones(answer.shape, dtype=torch.bool),
            question_target=torch.from_numpy(targets[:, 0].copy()),
            chain_targets=torch.from_numpy(targets[:, 1:chain_end].copy()),
            answer_targets=torch.from_numpy(targets[:, chain_end:].copy()),
            distill_column=torch.zeros(n, dtype=torch.long),
            answer_number_mask=torch.tensor([False, True, False]).expand(n, -1).clone(),
            row_index=torch.as_tensor(row_index, dtype=torch.long),
            ids=tuple(problem_id(k, self.part, self.seed, int(row)) for row in rows),
            epoch=epoch,
            step=step,
            document_ids=documents if documents.numel() else None,
            document_mask=torch.ones_like(documents, dtype=torch.bool) if documents.numel() else None,
            chain_result_mask=torch.from_numpy(np.tile(is_result, (n, 1))),
        )

    def generate_examples(self, num_rows: int) -> list[ReasoningExample]:
        """Return the first rows as text, with every step of their chains; they are terse only if all are."""
        counts = self.config.operation_counts
        terse = self.is_always_terse
        words = np.array(self.vocabulary, object)
        examples: dict[int, ReasoningExample] = {}
        for offset, k in enumerate(counts):
            rows = np.arange(len(range(offset, num_rows, len(counts))))
            problems = self.get_problems(k, rows)
            chains = self.chain_ids(problems, k, terse)
            starts = [*np.flatnonzero(np.diff(chains.step_index, prepend=-1)).tolist(), chains.ids.shape[1]]
            ids = (self.question_ids(problems, terse)[:, 1:], chains.ids, self.documents(problems, rows))
            texts = zip(*(words[part].tolist() for part in ids), strict=True)
            for row, (question, chain, document) in enumerate(texts):
                examples[offset + row * len(counts)] = ReasoningExample(
                    id=problem_id(k, self.part, self.seed, row),
                    question=" ".join(question),
                    steps=tuple(self.format_step(chain[a:b]) for a, b in pairwise(starts)),
                    answer=str(problems.results[row, -1]),
                    document=" ".join(document) or None,
                )
        return [examples[i] for i in range(num_rows)]

    def format_step(self, words: Sequence[str]) -> str:
        return (" " if self.config.chain_style == "bracket_tokens" else "").join(words)

    def documents(self, problems: DigitProblems, rows: IntArray) -> IntArray:
        """Return the ids of the documents that questions are about, [n, N]; here they have none, N = 0."""
        return np.zeros((len(rows), 0), np.int64)

    @property
    def is_always_terse(self) -> bool:
        return self.config.results_only_fraction == 1

    def is_terse(self, step: int) -> bool:
        """Return whether the chains of this step are results only: at random in training, else only if all are."""
        fraction = self.config.results_only_fraction
        return self.is_always_terse or (self.part == "train" and bool(uniform(self.seed, TERSE_KEY, step) < fraction))

    def question_ids(self, problems: DigitProblems, terse: bool) -> IntArray:
        """Return bos, the digits and operators, =, and : if the chain is to be terse."""
        k = problems.operators.shape[1]
        ids = np.full((len(problems.digits), 2 * k + 3 + terse), TOKEN_IDS[":"])
        ids[:, 0] = TOKEN_IDS["<bos>"]
        ids[:, 1 : 2 * k + 2 : 2] = problems.digits
        ids[:, 2 : 2 * k + 2 : 2] = problems.operators + TOKEN_IDS["+"]
        ids[:, 2 * k + 2] = TOKEN_IDS["="]
        return ids

    def chain_ids(self, problems: DigitProblems, num_steps: int, terse: bool) -> DigitChains:
        before = np.concatenate([problems.digits[:, :1], problems.results[:, :-1]], axis=1)
        operators = problems.operators + TOKEN_IDS["+"]
        columns = {"a": before, "op": operators, "b": problems.digits[:, 1:], "r": problems.results}
        equation = ["a", "op", "b", "=", "r", *self.config.step_end]
        layouts = {
            "results": ["r"],
            "equations": equation,
            "lookups": equation,
            "brackets": ["<<", "a", "op", "b", "=", "r", ">>"],
            "bracket_tokens": ["<", "<", "r", ">", ">"],
        }
        layout = ["r"] if terse else layouts[self.config.chain_style]
        parts = [columns[c] if c in columns else np.full_like(before, TOKEN_IDS[c]) for c in layout]
        ids = np.stack(parts, axis=2)[:, :num_steps]
        n, _, width = ids.shape
        is_result = np.tile([c == "r" for c in layout], num_steps)
        return DigitChains(ids.reshape(n, num_steps * width), np.repeat(np.arange(num_steps), width), is_result)
