"""Write word problems of single digits, with and without chains of results, for the recipes `*-smollm2-digits`.

    python benchmarks/word_problems.py --rows 40000 --out words.jsonl
    python benchmarks/word_problems.py --rows 40000 --results-only-fraction 0.4 --out words-mixed.jsonl

A story has a start and `--num-operations` changes of one number, which stays between 0 and 9:
"Ben has 2 pens. Ann has 4 coins. She finds 3 more. Half of them are stolen…". The chain has the number after
each change, `<7><3>`, or equations, `4+3=7;7/2=3;`. `OUT.held_out.jsonl` has stories that OUT does not contain.
"""

import argparse
import json
import random
from pathlib import Path

GIRLS = "Ann Eve Mia Zoe Kate Lucy Emma Anna Sara Julia Maria Alice Laura Grace Helen"
BOYS = "Ben Tom Sam Max Leo Jack Paul Mark John Adam David Peter Henry Oscar Simon"
THINGS = (
    "coins pens books apples cards balls stones shells eggs cups keys stamps toys plants boxes bags plates pears "
    "lemons cookies candles tickets photos flowers buttons hats"
)
FEMALE = {"He": "She", "he": "she", "him": "her", "his": "her"}
MALE = {word: word for word in FEMALE}
ADD = (
    "{He} finds {k} more.",
    "{He} buys {k} more.",
    "{He} gets {k} from {other}.",
    "{other} gives {him} {k}.",
    "{He} wins {k}.",
    "{He} picks up {k} more.",
)
SUBTRACT = (
    "{He} loses {k}.",
    "{He} sells {k}.",
    "{He} gives {k} to {other}.",
    "{other} takes {k} of them.",
    "{He} throws {k} away.",
    "{other} steals {k}.",
    "{He} leaves {k} at home.",
)
MULTIPLY = {
    2: ("{He} doubles {his} {things}.", "Then {he} has twice as many.", "Their number doubles."),
    3: ("{He} triples {his} {things}.", "Then {he} has three times as many.", "Their number triples."),
}
HALVE = ("{He} keeps half of them.", "Half of them are stolen.", "{He} gives half of them to {other}.")
QUESTIONS = (
    "How many {things} does {name} have now?",
    "How many {things} are left?",
    "How many {things} is that?",
)


def count(number: int, things: str) -> str:
    return f"{number} {things if number != 1 else things.removesuffix('es' if things == 'boxes' else 's')}"


def choose_change(rng: random.Random, number: int) -> tuple[str, str, int, int]:
    """Return a sentence with placeholders, its operator and operand, and the number after it, between 0 and 9."""
    while True:
        kind = rng.choice(("add", "subtract", "multiply", "halve"))
        operand = rng.randint(1, 9)
        if kind == "add" and number + operand <= 9:
            return rng.choice(ADD), "+", operand, number + operand
        if kind == "subtract" and operand <= number:
            return rng.choice(SUBTRACT), "-", operand, number - operand
        if kind == "multiply" and operand in MULTIPLY and 0 < number * operand <= 9:
            return rng.choice(MULTIPLY[operand]), "*", operand, number * operand
        if kind == "halve" and number and number % 2 == 0:
            return rng.choice(HALVE), "/", 2, number // 2


def write_story(rng: random.Random, num_operations: int) -> tuple[str, list[str]]:
    """Return a story with its question, and an equation such as `4+3=7` for each change."""
    is_girl = rng.random() < 0.5
    name, other = rng.choice((GIRLS if is_girl else BOYS).split()), rng.choice((BOYS if is_girl else GIRLS).split())
    things, other_things = rng.sample(THINGS.split(), 2)
    words = {**(FEMALE if is_girl else MALE), "name": name, "other": other, "things": things}
    number = rng.randint(1, 9)
    sentences, equations = [f"{name} has {count(number, things)}."], []
    for _ in range(num_operations):
        sentence, operator, operand, result = choose_change(rng, number)
        sentences.append(sentence.format(k=operand, **words))
        equations.append(f"{number}{operator}{operand}={result}")
        number = result
    if rng.random() < 0.3:  # a number that is not needed
        sentences.insert(0, f"{other} has {count(rng.randint(1, 9), other_things)}.")
    sentences.append(rng.choice(QUESTIONS).format(**words))
    return " ".join(sentences), equations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-operations", type=int, default=4)
    parser.add_argument("--results-only-fraction", type=float, default=0.0)
    parser.add_argument("--chain-style", choices=("results", "equations"), default="results")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(f"word problems {args.seed}")
    seen = set[str]()
    for path, split, rows in ((args.out.with_suffix(".held_out.jsonl"), "test", 1000), (args.out, "train", args.rows)):
        with path.open("w", encoding="utf-8") as file:
            for row in range(rows):
                story, equations = write_story(rng, args.num_operations)
                while story in seen:
                    story, equations = write_story(rng, args.num_operations)
                seen.add(story)
                is_short = split == "train" and rng.random() < args.results_only_fraction
                results = [equation[-1] for equation in equations]
                if is_short:
                    steps = results
                elif args.chain_style == "equations":
                    steps = [f"{equation};" for equation in equations]
                else:
                    steps = [f"<{result}>" for result in results]
                question = f"{story} =:" if is_short else f"{story} ="
                fields = {"id": f"words-{split}-{args.seed}-{row:06}", "question": question, "steps": steps}
                file.write(json.dumps(fields | {"answer": results[-1]}) + "\n")
        print(f"{path}: {rows:,} rows")


if __name__ == "__main__":
    main()
