"""lm-eval scores SmolLM2 through laconic as through its own `hf` model, on 50 questions of GSM8K."""

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import needs

pytestmark = pytest.mark.real
NUM_QUESTIONS = 50
TASK = """task: gsm8k_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def test_laconic_lm_equals_hf_on_smollm2(smollm2: Path, shared: Path, tmp_path: Path) -> None:
    needs("lm_eval")
    import lm_eval
    from lm_eval.models import huggingface
    from lm_eval.tasks import TaskManager

    from laconic.evaluation import lm_eval_model

    with (shared / "data/gsm8k-aug/test.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, NUM_QUESTIONS + 1)]
    choices = [
        {"question": row["question"], "choices": [str(row["answer"]), str(other["answer"])]}
        for row, other in pairwise(rows)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in choices))
    (tmp_path / "task.yaml").write_text(TASK.format(path=tmp_path / "rows.jsonl"))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    hf: Any = huggingface.HFLM
    ours: Any = lm_eval_model.LaconicLM
    models = (ours(str(smollm2)), hf(pretrained=str(smollm2), device="cpu", dtype="float32", batch_size=8))
    scores: list[list[tuple[float, bool]]] = []
    for model in models:
        results: Any = lm_eval.simple_evaluate(
            model=model, tasks=["gsm8k_choice"], task_manager=manager, bootstrap_iters=0
        )
        samples = sorted(results["samples"]["gsm8k_choice"], key=lambda row: row["doc_id"])
        scores.append([pair for row in samples for pair in row["filtered_resps"]])
    assert len(scores[0]) == 2 * NUM_QUESTIONS
    for mine, theirs in zip(*scores, strict=True):
        assert mine[0] == pytest.approx(theirs[0], abs=1e-4)
        assert mine[1] == theirs[1]
