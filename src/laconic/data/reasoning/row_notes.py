"""Notes on what training would leave out of a row, or write unclearly."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.reasoning.chat import has_history, iter_strings
from laconic.data.reasoning.columns import EQUATION, FORM_COLUMNS
from laconic.data.strict_jsonl import make_excerpt

CHAIN_NAMES = (
    *("generated_solution", "deepseek_reasoning", "complex_cot", "chain_of_thought", "explanation", "reasoning"),
    *("thinking", "solution"),
)  # usual names of chains
UNREAD_TEXTS = (
    *("input", "context", "system", "system_prompt", "history", "passage", "article", "paragraphs", "body", "story"),
    *("query", "options", "choices"),
)  # usual names of fields that belong to a question
UNCLEAR_CHAINS = (
    'steps: data.format "pccot" joins them without a separator, as in 3+4=77+1=8; write <<3+4=7>>, end a step with ; '
    'or a line end, or set data.format = "codi" (spaces) or "chat" (lines)'
)
WHOLE_SOLUTION = re.compile(r"\\boxed\{|\A[^\n]*\n.*answer is\b", re.DOTALL | re.IGNORECASE)
THINKING_MARK = re.compile(r"</?think(?:ing)?>")


def iter_notes(
    example: ReasoningExample, config: DataConfig, columns: str | None, chain_field: str | None
) -> Iterator[str]:
    """Yield a note for each part of a row that training would leave out or write unclearly."""
    if columns in FORM_COLUMNS:
        yield from iter_unread_fields(example)
    if has_history(example) and config.format != "chat":
        yield 'conversations of several messages, which need data.format = "chat"'
    has_tools = "messages" in example.metadata and example.metadata.get("tools") not in (None, [], "", "[]")
    if has_tools and config.format != "chat":
        yield 'tools, which are read only with data.format = "chat"'
    if columns == "gsm8k" and not example.steps:
        yield "solutions without equations in <<…>>, unlike the first row; they have no chain"
    if columns == "gsm8k-prose" and EQUATION.search(str(example.metadata.get("raw_answer"))):
        yield "solutions with equations in <<…>>, which are left out; begin the file with one, so that they are read"
    if columns == "standard" and "####" in example.answer:
        yield "answer: has #### but not before one last line, as in GSM8K, so all of it is the answer"
    elif THINKING_MARK.search(example.answer):
        yield "answer: has a mark of thinking that does not begin it, so all of it is the answer"
    elif config.answer_type == "number" and WHOLE_SOLUTION.search(example.answer):
        yield "answer: a whole solution, so all of it is the answer; write the final answer alone, the solution as cot"
    if not example.steps:
        field = next((x for x in CHAIN_NAMES if isinstance(example.metadata.get(x), str)), None)
        if field is not None:
            yield f'{field}: not read; if it is the chain of thought, set data.columns = {{ cot = "{field}" }}'
    equations = EQUATION.split(example.steps[0]) if chain_field != "steps" and len(example.steps) == 1 else []
    if len(equations) > 2 and not "".join(equations).strip():
        yield 'chains of one step with several <<…>>, which data.chain_split = "spaces" separates'
    if config.format == "pccot" and joins_unclearly(example.steps):
        yield UNCLEAR_CHAINS


def iter_unread_fields(example: ReasoningExample) -> Iterator[str]:
    """Yield a note for each field that usually belongs to a question and has a text that is not in it."""
    for field, value in example.metadata.items():
        if field.lower() in UNREAD_TEXTS and any(text not in example.question for text in iter_strings(value)):
            yield f"{make_excerpt(field)}: has a value, which is not part of the question; add it there"


def joins_unclearly(steps: Sequence[str]) -> bool:
    """Return whether nothing separates two steps that follow one another; steps of one character need nothing."""
    if max(map(len, steps), default=0) < 2:
        return False
    return any(a[-1:].isalnum() and b[:1].isalnum() for a, b in pairwise(steps))
