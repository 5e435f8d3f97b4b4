"""Rewrite small questions of GSM8K for the recipes `*-smollm2-digits`: chains of results, with stories among them.

    laconic data make gsm-variants --rows 14300 --max-steps 4 --max-value 9 --integers-only --include-originals \\
        --held-out-fraction 0.1 --new-numbers-fraction 0.1 --data-dir ../shared/data --out small.jsonl
    python benchmarks/word_problems.py --rows 40000 --results-only-fraction 0.4 --out words-mixed.jsonl
    python benchmarks/word_problems.py --rows 4000 --num-operations 2 --out two-changes.jsonl
    python benchmarks/small_questions.py mixed small.jsonl --stories words-mixed.jsonl 10000 16000 --out mixed.jsonl
    python benchmarks/small_questions.py two small.jsonl --stories two-changes.jsonl 0 4000 --out two.jsonl
    python benchmarks/small_questions.py two small.new_numbers.jsonl --out two.new_numbers.jsonl

`mixed` is for a model that writes its chain: 40 % of the questions end in `=` and have a chain such as `<6><3>`, 30 %
end in `=:` and have results alone, 30 % end in `==` and have equations. `two` is for latent thoughts: questions of two
or three steps, with the results of the first two as chain. Questions whose results are not whole numbers are left out.
"""

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

ENDS = {"results": "=", "results alone": "=:", "equations": "=="}
SHARES = {"results": 0.4, "results alone": 0.3, "equations": 0.3}


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def find_results(row: dict[str, Any]) -> list[int] | None:
    """Return the result of each step, such as 7 of `<<3+4=7>>`; None if one is not a whole number."""
    results = [float(match[1]) for match in (re.search(r"=\s*([\d.]+)>>$", step) for step in row["steps"]) if match]
    return [int(x) for x in results] if all(x.is_integer() for x in results) else None


def mix(rows: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Give each question one of three kinds of chains."""
    mixed: list[dict[str, Any]] = []
    for row in rows:
        (style,) = rng.choices(list(SHARES), list(SHARES.values()))
        results = find_results(row)
        if results is None:
            continue
        steps = {
            "results": [f"<{x}>" for x in results],
            "results alone": list(map(str, results)),
            "equations": [f"{step[2:-2]};" for step in row["steps"]],
        }[style]
        mixed.append({**row, "question": f"{row['question'].strip()} {ENDS[style]}", "steps": steps})
    return mixed


def keep_two_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the questions of two or three steps with the results of the first two."""
    pairs = [(row, find_results(row)) for row in rows]
    return [
        {**row, "question": f"{row['question'].strip()} =", "steps": [f"<{x}>" for x in results[:2]]}
        for row, results in pairs
        if results is not None and len(results) in (2, 3)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("style", choices=("mixed", "two"))
    parser.add_argument("questions", type=Path, help="rows of laconic data make gsm-variants")
    parser.add_argument("--stories", nargs=3, metavar=("FILE", "FIRST", "END"), help="rows to add, and which")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random("gsm mix" if args.style == "mixed" else "gsm two results")
    rows = read_rows(args.questions)
    rows = mix(rows, rng) if args.style == "mixed" else keep_two_steps(rows)
    if args.stories:
        path, first, end = args.stories
        rows += read_rows(Path(path))[int(first) : int(end)]
        rng.shuffle(rows)
    lines = [json.dumps({name: row[name] for name in ("id", "question", "steps", "answer")}) for row in rows]
    args.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{args.out}: {len(rows):,} rows")


if __name__ == "__main__":
    main()
