"""Published rows as ours: the columns of GSM8K, zen-E's GSM8K-Aug, GSM-Hard, SVAMP and MultiArith, and iCoT's lines."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from laconic.data.problems import make_excerpt
from laconic.data.strict_jsonl import RowError

Row = dict[str, Any]
EQUATION = re.compile(r"<<[^<>]*>>")  # what GSM8K's calculator would work out
WHOLE_NUMBER = re.compile(r"([-+]?\d+)\.0*")


def keep_row(row: Row) -> Row | None:
    """As it is."""
    return row


def convert_gsm8k(row: Row) -> Row | None:
    """GSM8K: an answer that is the solution in words, its equations in << >>, then #### and the number."""
    solution, mark, number = str(row["answer"]).rpartition("####")
    if not mark:
        text = make_excerpt(str(row["answer"]))
        raise RowError(1, "other shapes", f"answer: no #### before the number in {text!r}, as the first row has it")
    return row | {
        "steps": EQUATION.findall(solution),
        "rationale": EQUATION.sub("", solution).strip(),
        "answer": normalise_number(number),
        "raw_answer": row["answer"],
    }


def convert_zen_e(row: Row) -> Row | None:
    """zen-E's GSM8K-Aug: the answer is the last word, and missing in some rows, which are left out."""
    words = str(row["answer"] or "").replace("####", " ").split()
    return row | {"answer": normalise_number(words[-1])} if words else None


def zen_e_converter(split: str) -> Callable[[Row], Row | None]:
    """zen-E's, with the chain cut into steps, of which there may be none."""

    def row_of(row: Row) -> Row | None:
        made = convert_zen_e(row)
        return made and {key: value for key, value in made.items() if key != "cot"} | {
            "steps": list(split_chain(str(row["cot"] or ""), split))
        }

    return row_of


def split_chain(chain: str, split: str) -> tuple[str, ...]:
    """A chain that is one text as steps."""
    if split == "sentences":
        return tuple(part for part in re.sub(r"\.\s*$", "", chain.strip()).split(". ") if part)
    parts = {"lines": chain.splitlines(), "spaces": chain.split(), "whole": [chain]}[split]
    return tuple(part for part in map(str.strip, parts) if part)


def renaming_converter(question: str, answer: str) -> Callable[[Row], Row | None]:
    """Rows whose question and answer have other names; they have no chain."""

    def named(row: Row) -> Row | None:
        rest = {key: value for key, value in row.items() if key not in (question, answer)}
        return {"steps": []} | rest | {"question": str(row[question]).strip(), "answer": normalise_number(row[answer])}

    return named


COLUMN_CONVERTERS: Mapping[str, Callable[[Row], Row | None]] = {
    "ours": keep_row,
    "gsm8k": convert_gsm8k,
    "zen": convert_zen_e,
    "zen-aug": zen_e_converter("spaces"),
    "zen-nl": zen_e_converter("sentences"),
    "gsm-hard": renaming_converter("instruction", "response"),
    "svamp": renaming_converter("question_concat", "Answer"),
    "multiarith": renaming_converter("question", "final_ans"),
}
IDENTIFYING_COLUMNS = {
    "gsm-hard": {"instruction", "response"},
    "svamp": {"question_concat", "Answer"},
    "multiarith": {"final_ans"},
}


def detect_columns(row: Row) -> str:
    """Whose columns a row has: those of a published set by their names, GSM8K's by its ####, else ours."""
    if "question" in row and "####" in str(row.get("answer")):
        return "zen" if "cot" in row else "gsm8k" if not {"steps", "rationale"} & row.keys() else "ours"
    return next(
        (name for name, marks in IDENTIFYING_COLUMNS.items() if marks <= row.keys() and "answer" not in row), "ours"
    )


def normalise_number(answer: object) -> str:
    """A number as GSM8K writes it: no comma, no dollar, no full stop, no fraction that is nothing; else as it is."""
    if isinstance(answer, float):
        return str(int(answer)) if answer.is_integer() else repr(answer)
    text = str(answer).strip().replace(",", "").replace("$", "").removesuffix(".").strip()
    whole = WHOLE_NUMBER.fullmatch(text)
    return whole[1] if whole else text


def parse_icot_line(text: str) -> Row:
    """A line of iCoT's files, QUESTION||CHAIN #### ANSWER: equations are steps, a chain without any is one step."""
    question, bars, rest = text.partition("||")
    chain, mark, answer = rest.partition("####")
    if not (bars and mark and question.strip() and answer.strip()):
        raise RowError(1, "other shapes", f"no row of iCoT: {make_excerpt(text)}; write QUESTION||STEPS #### ANSWER")
    steps = EQUATION.findall(chain) or [part for part in [chain.strip()] if part]
    return {"question": question.strip(), "steps": steps, "answer": normalise_number(answer)}
