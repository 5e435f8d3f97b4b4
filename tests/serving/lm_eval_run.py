"""lm-eval's `local-completions` on local tasks: one of each request type, and the scores that it reports."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHOICES = (" a big dog", " the car is", " happy and")
CHOICE_TASK = """task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: CHOICES
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""
TEXT_TASK = """task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "none"
generation_kwargs: {until: UNTIL, max_gen_toks: 12, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def run_lm_eval(folder: Path, texts: list[str], port: int, name: str, tokenizer: Path) -> tuple[list[Any], list[str]]:
    """Run lm-eval's command line against a server.

    Returns:
        For each text, the (log likelihood, is greedy) of each choice; and the generated texts.
    """
    samples = run_tasks(folder, texts, (CHOICE_TASK, TEXT_TASK), port, f"model={name},tokenizer={tokenizer}")
    scores = [[(float(x[0][0]), str(x[0][1]) == "True") for x in row["resps"]] for row in samples["local_choice"]]
    return scores, [row["resps"][0][0] for row in samples["local_text"]]


def run_tasks(
    folder: Path, texts: list[str], tasks: tuple[str, ...], port: int, model_args: str, until: tuple[str, ...] = (".",)
) -> dict[str, list[Any]]:
    """Run tasks on texts against a server; return the samples of each task by its name."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    values, names = {"FILE": str(data), "CHOICES": json.dumps(CHOICES), "UNTIL": json.dumps(until)}, list[str]()
    for task in tasks:
        for name, value in values.items():
            task = task.replace(name, value)
        names.append(task.split()[1])
        (folder / f"{names[-1]}.yaml").write_text(task)
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
        *("--model_args", f"{model_args},base_url=http://127.0.0.1:{port}/v1/completions"),
        *("--batch_size", "4", "--tasks", ",".join(names), "--include_path", str(folder)),
        *("--log_samples", "--output_path", str(folder)),
    ]
    cache = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    result = subprocess.run(command, env=os.environ | cache, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return {
        task: sorted(map(json.loads, next(folder.rglob(f"samples_{task}_*.jsonl")).open()), key=lambda x: x["doc_id"])
        for task in names
    }
