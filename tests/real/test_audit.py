"""An audit of SmolLM2 with a LoRA adapter after one update: it works at this size, and its answers are evaluate's."""

import json
from pathlib import Path

import pytest

from tests.conftest import RunCli

RECIPE = """method = "kava"
[model]
name = "{model}"
[latents]
num_latents = 2
jacobi_iterations = 1
[distillation]
[kv_selection]
[kv_distillation]
[data]
path = "train.jsonl"
test = "test.jsonl"
format = "pccot"
[train]
trainable = "lora"
steps = 1
batch_size = 2
"""


@pytest.mark.real
@pytest.mark.usefixtures("unchecked")
def test_audit_of_smollm2_with_lora(
    run_cli: RunCli, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, start, count in (("train", 0, 4), ("test", 10, 10)):
        rows = [
            {
                "question": f"A box has {n} red and {n + 3} blue pens. How many pens do 2 boxes have?",
                "steps": [f"{n}+{n + 3}={2 * n + 3}", f"{2 * n + 3}*2={4 * n + 6}"],
                "answer": str(4 * n + 6),
            }
            for n in range(start, start + count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "smol.toml").write_text(RECIPE.format(model=smollm2))
    assert run_cli("train", "smol.toml", "--out", "run").code == 0
    result = run_cli("audit", "run", "--format", "json")
    assert result.code == 0, result.err
    audit = json.loads(result.out)
    assert (audit["questions"], audit["num_tests"]) == (10, 13)
    by_name = {condition["name"]: condition for condition in audit["conditions"]}
    assert by_name["zero cache"]["changed_share"] > 0  # what is read in place of thoughts reaches the answers
    evaluated = json.loads(run_cli("evaluate", "run", "--format", "json").out)["datasets"][0]["runs"][0]
    assert evaluated["accuracy"]["mean"] == audit["accuracy"]["mean"]
