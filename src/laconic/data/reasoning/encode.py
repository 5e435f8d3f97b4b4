"""Encode reasoning examples in the format of a paper: question, chain and answer separately, then joined.

The joined text is not tokenized again, so no token crosses the border between two parts. The position of the number in
an answer is found by character offsets, not by searching ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from tokenizers import Encoding

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.reasoning.chat import render_chat_prompt
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError

NUMBER_PATTERN = re.compile(r"[-+−]?[$]?[.]?\d(?:.*\d)?", re.DOTALL)  # from the sign to the last digit
STEP_NUMBER = re.compile(r"[-−]?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)")
CACHED_TEXTS = 2**15
PREFIX_PROBES = ("123", "82435")  # two numbers; a token with which both begin is a prefix space


@dataclass(frozen=True)
class EncodedExample:
    id: str
    question_ids: tuple[int, ...]
    chain_ids: tuple[int, ...]
    chain_step_index: tuple[int, ...]  # for each chain token, the index of its step
    # for each chain token, whether it has a character of the last number of its step
    chain_result_mask: tuple[bool, ...]
    answer_ids: tuple[int, ...]
    number_span: tuple[int, int]  # columns [start, end) of the number in the answer
    distill_column: int  # answer column before the number; -1 if the format distils nothing
    num_prefix_tokens: int = 0  # special tokens at the beginning of the question
    num_unknown: int = 0  # unknown tokens in question and chain
    document_ids: tuple[int, ...] = ()  # ids of the document that the question is about; empty without one

    def __len__(self) -> int:
        return len(self.question_ids) + len(self.chain_ids) + len(self.answer_ids)


class EncodedText(NamedTuple):
    """The ids of a text, and the characters [start, end) of each."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def token_range(self, start: int, end: int) -> tuple[int, int]:
        tokens = [i for i, (a, b) in enumerate(self.offsets) if a < end and b > start]
        return (tokens[0], tokens[-1] + 1) if tokens else (0, 0)


class EncodedChain(NamedTuple):
    """The ids of a chain, the step of each, and whether it has a character of its step's last number."""

    ids: tuple[int, ...]
    step_index: tuple[int, ...]
    result_mask: tuple[bool, ...]


class ReasoningEncoder:
    """Encodes rows with one tokenizer and one format.

    Raises `InputError` if the tokenizer has no end-of-sequence token, no template for the format chat, or cannot encode
    the prompt of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, config: DataConfig) -> None:
        if config.format == "chat" and tokenizer.chat_template is None:
            raise InputError('data.format "chat": the model has no chat template; set another format, such as "codi"')
        self.tokenizer, self.config = tokenizer, config
        unk_token_id = tokenizer.special_token_id("unk_token")
        self.unk_token_id = unk_token_id if unk_token_id != tokenizer.eos_token_id else None
        self.prefix_space_id = self._find_prefix_space()
        # Steps and answers repeat: of the 241,067 steps of 100,000 rows, 89,181 differ.
        self.encode_step = lru_cache(CACHED_TEXTS)(self._encode_step)
        self.encode_answer = lru_cache(CACHED_TEXTS)(self._encode_answer)
        self.eos_token_id = find_eos_token_id(tokenizer, config)
        added = tokenizer.backend.get_added_tokens_decoder()
        self.special_ids = {id for id, token in added.items() if token.special and id != self.unk_token_id}
        self.special_ids.add(self.eos_token_id)
        self.num_eos = {"codi": 3 if config.separator == "eos" else 1, "icot": 3}.get(config.format, 1)
        prompts = {"coconut": "###", "icot": "####", "digits": "ans"}
        self.answer_prompt = prompts.get(config.format, config.answer_prompt)
        self.answer_prompt_ids = self.encode_text(self.answer_prompt).ids
        if self.unk_token_id in self.answer_prompt_ids:
            message = f"format {config.format}: the tokenizer cannot encode {self.answer_prompt!r}; use another format"
            raise InputError(message)

    def _find_prefix_space(self) -> int | None:
        """Return the id of SentencePiece's prefix space if it is a token of its own."""
        first, second = (self.tokenizer.encode(text, add_special_tokens=False) for text in PREFIX_PROBES)
        is_separate = min(len(first), len(second)) > 1 and first[0] == second[0] != self.unk_token_id
        return first[0] if is_separate else None

    def encode_text(self, text: str) -> EncodedText:
        """Encode a text that continues another: without special tokens and prefix space."""
        encoding = self.tokenizer.encode_with_offsets(text, add_special_tokens=False)
        start = 1 if encoding.ids and encoding.ids[0] == self.prefix_space_id else 0
        return EncodedText(encoding.ids[start:], encoding.offsets[start:])

    def encode_question(self, text: str) -> tuple[Encoding, int]:
        """Encode a question without special tokens at its end, and return how many are at its beginning."""
        encoding = self.tokenizer.encode_with_offsets(text)
        mask = encoding.special_tokens_mask
        if all(mask):
            raise InputError(f"question {text[:40]!r}: the tokenizer encodes it as nothing")
        encoding.truncate(len(mask) - mask[::-1].index(0))
        return encoding, mask.index(0)

    def encode_example(self, example: ReasoningExample) -> EncodedExample:
        """Encode an example. Raises `InputError` with its id."""
        try:
            start, end = find_number(example.answer, self.config)
            steps = example.steps[:-1] if self.config.chain_steps == "drop_last" else example.steps
            encode = self._encode_icot if self.config.format == "icot" else self._encode_parts
            row = encode(example, steps, start, end)
            document_ids: list[int] = []
            if example.document is not None:  # without special tokens, as `laconic compress` reads a file
                document_ids = self.tokenizer.encode(example.document, add_special_tokens=False)
                if not document_ids:
                    raise InputError("document: it has no token; give a text, or remove the field")
            return replace(row, num_unknown=self._check_tokens(row), document_ids=tuple(document_ids))
        except InputError as error:
            raise InputError(f"row {example.label}: {error}") from None

    def _check_tokens(self, row: EncodedExample) -> int:
        """Return the number of unknown tokens; raise for one in the answer and for special tokens in the text."""
        if self.unk_token_id in row.answer_ids:
            raise InputError("the tokenizer cannot encode a part of the answer; use another tokenizer")
        text_ids = (*row.question_ids[row.num_prefix_tokens :], *row.chain_ids, *row.answer_ids)
        if sum(map(self.special_ids.__contains__, text_ids)) != self.num_eos:
            raise InputError("the text contains a special token of the tokenizer; remove it")
        if self.unk_token_id is None:
            return 0
        return (row.question_ids + row.chain_ids).count(self.unk_token_id)

    def _encode_parts(self, example: ReasoningExample, steps: tuple[str, ...], start: int, end: int) -> EncodedExample:
        """Encode question, chain and answer separately; [start, end) is the number in the answer."""
        config, eos = self.config, (self.eos_token_id,)
        question, num_prefix = self._encode_prompt(example)
        separator = eos if config.format == "codi" and config.separator == "eos" else ()
        chain = self._encode_joined(steps) if config.format == "codi" else self._encode_steps(steps)
        is_chat_reply = config.format == "chat" and config.answer_type == "text"  # the answer alone
        prompt = f"{self.answer_prompt} " if config.format in ("codi", "coconut", "chat") and not is_chat_reply else ""
        prompt_ids = () if prompt or is_chat_reply else self.answer_prompt_ids
        answer_ids, (first, last) = self.encode_answer(prompt + example.answer, len(prompt) + start, len(prompt) + end)
        shift = len(separator) + len(prompt_ids)
        return EncodedExample(
            id=example.id,
            question_ids=(*question.ids, *separator),
            chain_ids=chain.ids,
            chain_step_index=chain.step_index,
            chain_result_mask=chain.result_mask,
            answer_ids=(*separator, *prompt_ids, *answer_ids, *eos),
            number_span=(first + shift, last + shift),
            distill_column=-1 if config.format == "coconut" else first + shift - 1,
            num_prefix_tokens=num_prefix,
        )

    def _encode_prompt(self, example: ReasoningExample) -> tuple[Encoding, int]:
        """Encode the question, and return how many tokens at its beginning cannot be dropped: a whole chat prompt."""
        if self.config.format != "chat":
            return self.encode_question(example.question + ("\n" if self.config.format == "coconut" else ""))
        prompt = render_chat_prompt(example, self.tokenizer)
        encoding = self.tokenizer.encode_with_offsets(prompt, add_special_tokens=False)
        return encoding, len(encoding)

    def _encode_steps(self, steps: tuple[str, ...]) -> EncodedChain:
        line_end = "\n" if self.config.format in ("coconut", "chat") else ""
        encoded = [self.encode_step(step, line_end) for step in steps]
        return EncodedChain(
            tuple(id for ids, _ in encoded for id in ids),
            tuple(i for i, (ids, _) in enumerate(encoded) for _ in ids),
            tuple(is_result for _, mark in encoded for is_result in mark),
        )

    def _encode_step(self, step: str, line_end: str) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        text = self.encode_text(step + line_end)
        return tuple(text.ids), mark_results(text.offsets, (step,), 0, 0)

    def _encode_answer(self, text: str, start: int, end: int) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return the ids of an answer, and the range of those that overlap the characters [start, end)."""
        encoded = self.encode_text(text)
        return tuple(encoded.ids), encoded.token_range(start, end)

    def _encode_joined(self, steps: tuple[str, ...]) -> EncodedChain:
        """Encode all steps as one text (CODI); sentences are joined as in CODI's code."""
        space, end = (". ", ".\n") if self.config.chain_split == "sentences" else (" ", "")
        if not steps:
            return EncodedChain((), (), ())
        text = self.encode_text(space.join(steps) + end)
        step_index = assign_steps(text.offsets, steps, len(space), 0)
        return EncodedChain(tuple(text.ids), tuple(step_index), mark_results(text.offsets, steps, len(space), 0))

    def _encode_icot(self, example: ReasoningExample, steps: tuple[str, ...], start: int, end: int) -> EncodedExample:
        """Encode the row as one string and then split it (iCoT); the answer begins with the chain's eos."""
        eos = self.tokenizer.backend.id_to_token(self.eos_token_id)
        prompt = f"{eos} {self.answer_prompt} "
        texts = (f" {example.question} {eos}", f" {' '.join(steps)} ", prompt, example.answer, f" {eos}")
        ends = [sum(map(len, texts[:i])) for i in range(6)]
        encoding, num_prefix = self.encode_question("".join(texts))
        row = EncodedText(encoding.ids, encoding.offsets)
        # A token belongs to the part in which it ends: in " #### " + "18", the space of "Ġ18" is outside its part.
        first, second = (sum(b <= mark for _, b in row.offsets) for mark in ends[1:3])
        offsets = row.offsets[first:second]
        begin = ends[1] + 1
        low, high = row.token_range(ends[3] + start, ends[3] + end)
        return EncodedExample(
            id=example.id,
            question_ids=tuple(row.ids[:first]),
            chain_ids=tuple(row.ids[first:second]),
            chain_step_index=tuple(assign_steps(offsets, steps, 1, begin)),
            chain_result_mask=mark_results(offsets, steps, 1, begin),
            answer_ids=tuple(row.ids[second:]),
            number_span=(low - second, high - second),
            distill_column=-1,
            num_prefix_tokens=num_prefix,
        )


def find_number(answer: str, config: DataConfig) -> tuple[int, int]:
    """Return the characters [start, end) of the number with its sign; of the whole answer for text answers."""
    if config.answer_type == "text":
        return 0, len(answer)
    match = NUMBER_PATTERN.search(answer)
    if match is None:
        raise InputError(f'answer {answer[:40]!r} has no number; give one, or set data.answer_type = "text"')
    return match.span()


def assign_steps(offsets: Sequence[tuple[int, int]], steps: tuple[str, ...], space: int, start: int) -> list[int]:
    """Return the step in which each token ends; text between two steps belongs to the first.

    `space` characters are between two steps, the first of which begins at character `start`.
    """
    begins = [start + sum(len(s) + space for s in steps[:i]) for i in range(len(steps))]
    return [max(0, sum(begin < end for begin in begins) - 1) for _, end in offsets]


def mark_results(offsets: Sequence[tuple[int, int]], steps: Sequence[str], space: int, start: int) -> tuple[bool, ...]:
    """Return whether each token has a character of the last number of a step; arguments as of `assign_steps`."""
    results = list[tuple[int, int]]()
    for step in steps:
        spans = [match.span() for match in STEP_NUMBER.finditer(step)]
        results += [(start + first, start + end) for first, end in spans[-1:]]
        start += len(step) + space
    return tuple(any(a < end and begin < b for begin, end in results) for a, b in offsets)


def find_eos_token_id(tokenizer: Tokenizer, config: DataConfig) -> int:
    """Return the id that ends an answer: the token `data.eos_token`, else the tokenizer's own. Raises `InputError`."""
    if config.eos_token is None and tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    eos_token_id = None if config.eos_token is None else tokenizer.backend.token_to_id(config.eos_token)
    if eos_token_id is None:
        problem = "the tokenizer's files name no eos_token"
        if config.eos_token is not None:
            problem = f"data.eos_token {config.eos_token!r} is not in the vocabulary"
        special = [t.content for t in tokenizer.backend.get_added_tokens_decoder().values() if t.special]
        raise InputError(f"{problem}; set data.eos_token to a special token: {', '.join(special[:8]) or 'none'}")
    return eos_token_id
