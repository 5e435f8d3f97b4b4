"""Convert rows of published sets to our fields: GSM8K, zen-E's GSM8K-Aug, GSM-Hard, SVAMP, MultiArith, iCoT, MATH.

Rows of instructions, as of Alpaca and Dolly, are converted too; conversations are converted by `chat`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from laconic.config.data import FieldName
from laconic.data.reasoning.chat import (
    CHAIN_FIELDS,
    convert_conversations,
    convert_messages,
    convert_prompt_completion,
    with_chain_field,
)
from laconic.data.strict_jsonl import RowError

Row = dict[str, Any]
EQUATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotations
WHOLE_NUMBER = re.compile(r"([-+]?\d+)\.0*")
NUMBER_TEXT = re.compile(
    r"[-+−]?\s?\$?\s?[-+−]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)\s?%?\.?"
)  # with thousands separators, dollar or percent sign, and full stop
BOX_MARK = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:\{|(?P<word>-?\d+(?:[.,]\d+)*|[A-Za-z]\b))"  # \boxed 2, too
    r"|\\(?!\\(?:boxed|fbox)).|[{}]",  # or an escape, such as \{ or a line break before a brace
    re.DOTALL,
)
MATH_MARKS = re.compile(r"(?:[\s$.]|\\[()[\]])*")  # around a box: $, \( and \[, and a full stop
MATH_TEXT = re.compile(r"\s*\$+([^$]*)\$+[\s.]*")
INSTRUCTION_INPUTS = ("input", "context")  # of Alpaca and Dolly; read after the instruction


def convert_gsm8k(row: Row) -> Row | None:
    """Convert GSM8K: the answer is a solution with equations in << >>, then #### and the number."""
    solution, number = split_gsm8k_answer(row["answer"])
    if not number:
        problem = "does not end with #### and one line, unlike the first row"
        raise RowError("other formats", problem, "add #### ANSWER", field="answer")
    return row | {
        "steps": EQUATION.findall(solution),
        "rationale": EQUATION.sub("", solution).strip(),
        "answer": normalise_number(number),
        "raw_answer": row["answer"],
    }


def split_gsm8k_answer(answer: object) -> tuple[str, str]:
    """Return the solution and what follows the last ####, "" if that is not one line (as after a Markdown heading)."""
    solution, _, number = str(answer).rpartition("####")
    return solution, "" if "\n" in number.strip() or "####" not in str(answer) else number.strip()


def convert_gsm8k_prose(row: Row) -> Row | None:
    """Convert rows in GSM8K's format without equations in << >>: each line of the solution is a step."""
    converted = convert_gsm8k(row)
    return converted and converted | {"steps": list(split_chain(converted["rationale"], "lines"))}


def convert_zen_e(row: Row, chain_split: str | None = None) -> Row | None:
    """Convert zen-E's GSM8K-Aug: the answer is the last word; rows without one give None.

    With `chain_split`, as in `split_chain`, the chain becomes steps.
    """
    words = str(row["answer"] or "").replace("####", " ").split()
    if not words:
        return None
    converted = row | {"answer": normalise_number(words[-1])}
    if chain_split is not None:
        converted["steps"] = list(split_chain(str(converted.pop("cot") or ""), chain_split))
    return converted


def split_chain(chain: str, chain_split: str) -> tuple[str, ...]:
    """Split a chain that is one string into steps, by `data.chain_split`; "sentences" as in CODI's code."""
    if chain_split == "sentences":
        return tuple(part for part in re.sub(r"\.\s*$", "", chain.strip()).split(". ") if part)
    parts = {"lines": chain.splitlines(), "spaces": chain.split(), "whole": [chain]}[chain_split]
    return tuple(part for part in map(str.strip, parts) if part)


def convert_plain(row: Row, question: str, answer: str) -> Row:
    """Convert a row without a chain, with the names that the file has for question and answer."""
    rest = {key: value for key, value in row.items() if key not in (question, answer)}
    fields = {"question": str(row[question]).strip(), "answer": normalise_number(row[answer])}
    return {"steps": []} | rest | fields


def convert_squad(row: Row) -> Row | None:
    """Convert SQuAD: the context is the document, the first answer the answer; questions without one give None.

    Answers may also be a text or a list of texts. Raises `RowError` for anything else.
    """
    texts = row["answers"].get("text") if isinstance(row["answers"], dict) else row["answers"]
    texts = [texts] if isinstance(texts, str) else texts
    if texts is not None and not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise RowError("other formats", 'expected a list of texts or {"text": […]}', field="answers")
    rest = {key: value for key, value in row.items() if key not in ("context", "answers")}
    return rest | {"document": row["context"], "answer": texts[0], "steps": []} if texts else None


def convert_math(row: Row) -> Row | None:
    """Convert a row of MATH or NuminaMath: a problem, a solution, and the answer in a field or in the last `\\boxed{}`.

    Rows without an answer, such as proofs, give None.
    """
    answer = row.get("answer")
    if answer in (None, ""):
        boxed = find_boxed(str(row["solution"]))
        if boxed is None:
            return None
        answer = normalise_number(boxed)
    rest = {key: value for key, value in row.items() if key not in ("problem", "solution")}
    chain = {} if any(row.get(field) for field in CHAIN_FIELDS) else {"cot": row["solution"]}
    return rest | chain | {"question": row["problem"], "answer": answer}


def iter_boxes(text: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield start and end of each `\\boxed{}` that is closed, and start and end of its content."""
    open_braces: list[re.Match[str]] = []
    for mark in BOX_MARK.finditer(text):
        if mark["word"]:
            yield *mark.span(), *mark.span("word")
        elif mark[0].endswith("{") and mark[0] != r"\{":
            open_braces.append(mark)
        elif mark[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening[0] != "{":
                yield opening.start(), mark.end(), opening.end(), mark.start()


def find_boxed(solution: str) -> str | None:
    """Return the content of the last `\\boxed{}` of a solution that is closed and not empty, or None."""
    for _, _, start, end in sorted(iter_boxes(solution), reverse=True):
        content = solution[start:end].strip()
        if content:
            return content
    return None


def unbox_answer(row: Row) -> Row:
    """Replace an answer that is nothing but a box, with or without marks of mathematics, or `$18$`, by its content."""
    answer = row["answer"] if isinstance(row.get("answer"), str) else ""
    start, end, _, _ = min(iter_boxes(answer), default=(0, 0, 0, 0))  # the first, which may be around others
    is_box = end and MATH_MARKS.fullmatch(answer, 0, start) and MATH_MARKS.fullmatch(answer, end)
    boxed = find_boxed(answer) if is_box else None
    match = MATH_TEXT.fullmatch(answer)
    if match and NUMBER_TEXT.fullmatch(match[1].strip()):
        boxed = match[1]
    return row if boxed is None else row | {"answer": normalise_number(boxed)}


def join_instruction(row: Row) -> Any:
    """Return the instruction of a row; its input or context, if there is one, follows after an empty line."""
    question = row["instruction"]
    if not (isinstance(question, str) and question.strip()):
        return question
    inputs = [row.get(key) or "" for key in INSTRUCTION_INPUTS if isinstance(row.get(key, ""), str | None)]
    return "\n\n".join([question, *(text for text in inputs if text.strip())])


def convert_instruction(row: Row) -> Row | None:
    answer = "response" if "response" in row else "output"
    inputs = [key for key in INSTRUCTION_INPUTS if isinstance(row.get(key, ""), str | None)]
    rest = {key: value for key, value in row.items() if key not in ("instruction", answer, *inputs)}
    return with_chain_field(rest | {"question": join_instruction(row), "answer": row[answer]})


def find_question(row: Row, question_column: str) -> Any:
    """Return what a row asks, as training reads it: a question, an instruction with its input, or MATH's problem."""
    if question_column in row or "instruction" not in row:
        return row.get(question_column, row.get("problem"))
    return join_instruction(row)


COLUMN_CONVERTERS: Mapping[str, Callable[[Row], Row | None]] = {
    "standard": lambda row: row,
    "gsm8k": convert_gsm8k,
    "gsm8k-prose": convert_gsm8k_prose,
    "zen": convert_zen_e,
    "zen-aug": partial(convert_zen_e, chain_split="spaces"),
    "zen-nl": partial(convert_zen_e, chain_split="sentences"),
    "gsm-hard": partial(convert_plain, question="instruction", answer="response"),
    "svamp": partial(convert_plain, question="question_concat", answer="Answer"),
    "multiarith": partial(convert_plain, question="question", answer="final_ans"),
    "squad": convert_squad,
    "math": convert_math,
    "messages": convert_messages,
    "prompt-completion": convert_prompt_completion,
    "conversations": convert_conversations,
    "instruction": convert_instruction,
}
DATASET_COLUMNS: Mapping[str, tuple[set[str], set[str]]] = {
    "svamp": ({"question_concat", "Answer"}, {"ID", "Body", "Question", "Equation", "Type", "__index_level_0__"}),
    "multiarith": ({"question", "final_ans"}, {"id", "__index_level_0__"}),
    "squad": ({"question", "context", "answers"}, {"id", "title"}),
}  # which every row of the set has, and which it may have besides
IDENTIFYING_COLUMNS: Sequence[tuple[str, set[str]]] = (
    ("messages", {"messages"}),
    ("prompt-completion", {"prompt", "completion"}),
    ("instruction", {"instruction", "output"}),
    ("instruction", {"instruction", "response"}),
    ("conversations", {"conversations"}),
    ("conversations", {"conversation"}),
)
FORM_COLUMNS = ("standard", *(name for name, _ in IDENTIFYING_COLUMNS))  # not those of a published set
MATH_COLUMNS = {"problem", "solution"}


def rename_columns(row: Row, columns: Mapping[FieldName, str]) -> Row:
    """Return the row under our names; `columns` has the file's name of a field by ours, where the row has it."""
    names: dict[str, str] = {theirs: ours for ours, theirs in columns.items() if theirs in row}
    return {names.get(key, key): value for key, value in row.items() if key in names or key not in names.values()}


def detect_columns(row: Row) -> str:
    """Return the converter for a row: by its columns, or GSM8K's line after ####, else "standard".

    A row of a published set has no other columns than the set, so that nothing else is taken for its numbers.
    """
    if "question" in row and split_gsm8k_answer(row.get("answer"))[1]:
        if "cot" in row:
            return "zen"
        if {"steps", "rationale"} & row.keys():
            return "standard"
        return "gsm8k" if EQUATION.search(str(row["answer"])) else "gsm8k-prose"
    is_conversation = "messages" in row and "answer" not in row
    has_other_form = any(keys <= row.keys() for _, keys in IDENTIFYING_COLUMNS)
    is_math = row.keys() >= MATH_COLUMNS and "question" not in row and not is_conversation
    if is_math and (not has_other_form or convert_math(row)):
        return "math"
    if "answer" in row:
        return "standard"
    if row.keys() == {"instruction", "response"} and type(row["response"]) in (int, float):
        return "gsm-hard"
    for name, (required, others) in DATASET_COLUMNS.items():
        if required <= row.keys() <= required | others:
            return name
    return next((name for name, keys in IDENTIFYING_COLUMNS if keys <= row.keys()), "standard")


def normalise_number(answer: object) -> str:
    """Return a number as GSM8K writes it: without commas, dollar sign, full stop or zero fraction; texts stay."""
    if isinstance(answer, float):
        return str(int(answer)) if answer.is_integer() else repr(answer)
    text = str(answer).strip()
    if not NUMBER_TEXT.fullmatch(text):
        return text
    text = text.replace(",", "").replace("$", "").removesuffix(".").strip()
    whole = WHOLE_NUMBER.fullmatch(text)
    return whole[1] if whole else text


def parse_icot_line(text: str) -> Row:
    """Parse a line of iCoT's files, `QUESTION||CHAIN #### ANSWER`: each equation is a step, or else the whole chain."""
    question, bars, rest = text.partition("||")
    chain, separator, answer = rest.partition("####")
    if not (bars and separator and question.strip() and answer.strip()):
        raise RowError("other formats", "not in iCoT's format QUESTION||STEPS #### ANSWER")
    steps = EQUATION.findall(chain) or [part for part in [chain.strip()] if part]
    return {"question": question.strip(), "steps": steps, "answer": normalise_number(answer)}
