"""Convert rows of published data sets to our fields: GSM8K, zen-E's GSM8K-Aug, GSM-Hard, SVAMP, MultiArith, iCoT.

Conversations are converted by `chat`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from laconic.config.data import FieldName
from laconic.data.reasoning.chat import convert_messages, convert_prompt_completion
from laconic.data.strict_jsonl import RowError, make_excerpt

Row = dict[str, Any]
EQUATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotations
WHOLE_NUMBER = re.compile(r"([-+]?\d+)\.0*")


def keep_row(row: Row) -> Row | None:
    return row


def convert_gsm8k(row: Row) -> Row | None:
    """Convert GSM8K: the answer is a solution with equations in << >>, then #### and the number."""
    solution, separator, number = str(row["answer"]).rpartition("####")
    if not separator:
        excerpt = make_excerpt(str(row["answer"]))
        raise RowError(1, "other formats", f"answer: no #### before the number in {excerpt!r}, unlike the first row")
    return row | {
        "steps": EQUATION.findall(solution),
        "rationale": EQUATION.sub("", solution).strip(),
        "answer": normalise_number(number),
        "raw_answer": row["answer"],
    }


def convert_gsm8k_prose(row: Row) -> Row | None:
    """Convert rows in GSM8K's format without equations in << >>: each line of the solution is a step."""
    converted = convert_gsm8k(row)
    return converted and converted | {"steps": list(split_chain(converted["rationale"], "lines"))}


def convert_zen_e(row: Row) -> Row | None:
    """Convert zen-E's GSM8K-Aug: the answer is the last word; rows without one give None."""
    words = str(row["answer"] or "").replace("####", " ").split()
    return row | {"answer": normalise_number(words[-1])} if words else None


def zen_e_converter(chain_split: str) -> Callable[[Row], Row | None]:
    """Return a converter of zen-E's rows that also splits the chain into steps."""

    def convert(row: Row) -> Row | None:
        converted = convert_zen_e(row)
        if converted is None:
            return None
        del converted["cot"]
        return converted | {"steps": list(split_chain(str(row["cot"] or ""), chain_split))}

    return convert


def split_chain(chain: str, chain_split: str) -> tuple[str, ...]:
    """Split a chain that is one string into steps, by `data.chain_split`; "sentences" as in CODI's code."""
    if chain_split == "sentences":
        return tuple(part for part in re.sub(r"\.\s*$", "", chain.strip()).split(". ") if part)
    parts = {"lines": chain.splitlines(), "spaces": chain.split(), "whole": [chain]}[chain_split]
    return tuple(part for part in map(str.strip, parts) if part)


def renaming_converter(question: str, answer: str) -> Callable[[Row], Row | None]:
    """Return a converter of rows that name question and answer differently and have no chain."""

    def convert(row: Row) -> Row | None:
        rest = {key: value for key, value in row.items() if key not in (question, answer)}
        fields = {"question": str(row[question]).strip(), "answer": normalise_number(row[answer])}
        return {"steps": []} | rest | fields

    return convert


COLUMN_CONVERTERS: Mapping[str, Callable[[Row], Row | None]] = {
    "standard": keep_row,
    "gsm8k": convert_gsm8k,
    "gsm8k-prose": convert_gsm8k_prose,
    "zen": convert_zen_e,
    "zen-aug": zen_e_converter("spaces"),
    "zen-nl": zen_e_converter("sentences"),
    "gsm-hard": renaming_converter("instruction", "response"),
    "svamp": renaming_converter("question_concat", "Answer"),
    "multiarith": renaming_converter("question", "final_ans"),
    "messages": convert_messages,
    "prompt-completion": convert_prompt_completion,
}
IDENTIFYING_COLUMNS = {
    "gsm-hard": {"instruction", "response"},
    "svamp": {"question_concat", "Answer"},
    "multiarith": {"final_ans"},
    "messages": {"messages"},
    "prompt-completion": {"prompt", "completion"},
}


def rename_columns(row: Row, columns: Mapping[FieldName, str]) -> Row:
    """Return the row under our names; `columns` has the file's name of a field by ours, where the row has it."""
    names: dict[str, str] = {theirs: ours for ours, theirs in columns.items() if theirs in row}
    return {names.get(key, key): value for key, value in row.items() if key in names or key not in names.values()}


def detect_columns(row: Row) -> str:
    """Return the converter for a row: by the column names of published sets, or GSM8K's ####, else "standard"."""
    if "question" in row and "####" in str(row.get("answer")):
        if "cot" in row:
            return "zen"
        if {"steps", "rationale"} & row.keys():
            return "standard"
        return "gsm8k" if EQUATION.search(str(row["answer"])) else "gsm8k-prose"
    matches = (name for name, keys in IDENTIFYING_COLUMNS.items() if keys <= row.keys() and "answer" not in row)
    return next(matches, "standard")


def normalise_number(answer: object) -> str:
    """Return a number as GSM8K writes it: without commas, dollar sign, full stop or zero fraction."""
    if isinstance(answer, float):
        return str(int(answer)) if answer.is_integer() else repr(answer)
    text = str(answer).strip().replace(",", "").replace("$", "").removesuffix(".").strip()
    whole = WHOLE_NUMBER.fullmatch(text)
    return whole[1] if whole else text


def parse_icot_line(text: str) -> Row:
    """Parse a line of iCoT's files, `QUESTION||CHAIN #### ANSWER`: each equation is a step, or else the whole chain."""
    question, bars, rest = text.partition("||")
    chain, separator, answer = rest.partition("####")
    if not (bars and separator and question.strip() and answer.strip()):
        raise RowError(1, "other formats", f"not in iCoT's format QUESTION||STEPS #### ANSWER: {make_excerpt(text)}")
    steps = EQUATION.findall(chain) or [part for part in [chain.strip()] if part]
    return {"question": question.strip(), "steps": steps, "answer": normalise_number(answer)}
