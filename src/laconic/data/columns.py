"""Published rows as ours: the columns of GSM8K, zen-E's GSM8K-Aug, GSM-Hard, SVAMP and MultiArith, and iCoT's lines."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from laconic.data.lines import Fault
from laconic.data.problems import excerpt

Row = dict[str, Any]
EQUATION = re.compile(r"<<[^<>]*>>")  # what GSM8K's calculator would work out
WHOLE = re.compile(r"([-+]?\d+)\.0*")


def ours(row: Row) -> Row | None:
    """As it is."""
    return row


def gsm8k(row: Row) -> Row | None:
    """GSM8K: an answer that is the solution in words, its equations in << >>, then #### and the number."""
    solution, mark, number = str(row["answer"]).rpartition("####")
    if not mark:
        text = excerpt(str(row["answer"]))
        raise Fault(1, "other shapes", f"answer: no #### before the number in {text!r}, as the first row has it")
    return row | {
        "steps": EQUATION.findall(solution),
        "rationale": EQUATION.sub("", solution).strip(),
        "answer": plain(number),
        "raw_answer": row["answer"],
    }


def zen(row: Row) -> Row | None:
    """zen-E's GSM8K-Aug: the answer is the last word, and missing in some rows, which are left out."""
    words = str(row["answer"] or "").replace("####", " ").split()
    return row | {"answer": plain(words[-1])} if words else None


def chained(split: str) -> Callable[[Row], Row | None]:
    """zen-E's, with the chain cut into steps, of which there may be none."""

    def row_of(row: Row) -> Row | None:
        made = zen(row)
        return made and {key: value for key, value in made.items() if key != "cot"} | {
            "steps": list(cut(str(row["cot"] or ""), split))
        }

    return row_of


def cut(chain: str, split: str) -> tuple[str, ...]:
    """A chain that is one text as steps."""
    if split == "sentences":
        return tuple(part for part in re.sub(r"\.\s*$", "", chain.strip()).split(". ") if part)
    parts = {"lines": chain.splitlines(), "spaces": chain.split(), "whole": [chain]}[split]
    return tuple(part for part in map(str.strip, parts) if part)


def renamed(question: str, answer: str) -> Callable[[Row], Row | None]:
    """Rows whose question and answer have other names; they have no chain."""

    def named(row: Row) -> Row | None:
        rest = {key: value for key, value in row.items() if key not in (question, answer)}
        return {"steps": []} | rest | {"question": str(row[question]).strip(), "answer": plain(row[answer])}

    return named


COLUMNS: Mapping[str, Callable[[Row], Row | None]] = {
    "ours": ours,
    "gsm8k": gsm8k,
    "zen": zen,
    "zen-aug": chained("spaces"),
    "zen-nl": chained("sentences"),
    "gsm-hard": renamed("instruction", "response"),
    "svamp": renamed("question_concat", "Answer"),
    "multiarith": renamed("question", "final_ans"),
}
MARKS = {"gsm-hard": {"instruction", "response"}, "svamp": {"question_concat", "Answer"}, "multiarith": {"final_ans"}}


def columns_of(row: Row) -> str:
    """Whose columns a row has: those of a published set by their names, GSM8K's by its ####, else ours."""
    if "question" in row and "####" in str(row.get("answer")):
        return "zen" if "cot" in row else "gsm8k" if not {"steps", "rationale"} & row.keys() else "ours"
    return next((name for name, marks in MARKS.items() if marks <= row.keys() and "answer" not in row), "ours")


def plain(answer: object) -> str:
    """A number as GSM8K writes it: no comma, no dollar, no full stop, no fraction that is nothing; else as it is."""
    if isinstance(answer, float):
        return str(int(answer)) if answer.is_integer() else repr(answer)
    text = str(answer).strip().replace(",", "").replace("$", "").removesuffix(".").strip()
    whole = WHOLE.fullmatch(text)
    return whole[1] if whole else text


def icot(text: str) -> Row:
    """A line of iCoT's files, QUESTION||CHAIN #### ANSWER: equations are steps, a chain without any is one step."""
    question, bars, rest = text.partition("||")
    chain, mark, answer = rest.partition("####")
    if not (bars and mark and question.strip() and answer.strip()):
        raise Fault(1, "other shapes", f"no row of iCoT: {excerpt(text)}; write QUESTION||STEPS #### ANSWER")
    steps = EQUATION.findall(chain) or [part for part in [chain.strip()] if part]
    return {"question": question.strip(), "steps": steps, "answer": plain(answer)}
