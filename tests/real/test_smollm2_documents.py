"""SmolLM2 reads documents as summary vectors before questions: before training, as transformers does with its text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic.config.load import load_recipe
from laconic.experiment.from_recipe.build import build_experiment
from tests.conftest import RunCli, needs

pytestmark = pytest.mark.real
TAIL = 8
RECIPE = """method = "kava"
[model]
name = "smollm2"
[compression]
max_vectors = 8
[latents]
num_latents = 4
jacobi_iterations = 2
[data]
path = "rows.jsonl"
chain_steps = "all"
segment_tokens = 64
[train]
trainable = "lora"
steps = 1
batch_size = 2
[lora]
rank = 4
"""


def write_rows(folder: Path) -> list[dict[str, Any]]:
    """Write a recipe and rows whose documents have two lengths."""
    names, rows = ["Ada", "Tom", "Mia", "Ben"], list[dict[str, Any]]()
    for i in range(8):
        document = " ".join(f"{name} keeps {i + j} stamps at home." for j, name in enumerate(names[: 2 + i % 3]))
        steps = [f"<<{i}+{i + 1}={2 * i + 1}>>"]
        question = f"How many stamps do {names[0]} and {names[1]} have, case {i}?"
        rows.append({"document": document, "question": question, "steps": steps, "answer": str(2 * i + 1)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(RECIPE)
    return rows


def test_untrained_memory_is_the_tail_of_the_document_for_transformers(smollm2: Path, tmp_path: Path) -> None:
    """Untrained vectors are the document's last tokens, so the chain's loss is that of transformers on tail + row."""
    needs("transformers")
    from transformers import AutoModelForCausalLM

    rows = write_rows(tmp_path)
    recipe = load_recipe(tmp_path / "recipe.toml", ("method=cot",))[0]
    experiment = build_experiment(recipe, torch.device("cpu"))
    batch: Any = experiment.training_data.batch([0, 2], 0, 0)
    with torch.no_grad():
        ours = float(experiment.method.eval()(batch).loss)
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer, nll, count = laconic.load_tokenizer(smollm2), 0.0, 0
    for row in (0, 2):
        tail = tokenizer.encode(rows[row]["document"], add_special_tokens=False)[-TAIL:]
        one = batch.select_rows([row // 2])
        question, chain, answer = (
            ids[0][mask[0]].tolist()
            for ids, mask in (
                (one.question_ids, one.question_mask),
                (one.chain_ids, one.chain_mask),
                (one.answer_ids, one.answer_mask),
            )
        )
        ids = torch.tensor([[*tail, *question, *chain, *answer]])
        with torch.no_grad():
            log_probs = theirs(input_ids=ids).logits[0].log_softmax(-1)
        start = len(tail) + len(question)
        nll -= float(log_probs[start - 1 : -1].gather(1, ids[0, start:, None]).sum())
        count += ids.shape[1] - start
    assert ours == pytest.approx(nll / count, rel=1e-4)


def test_run_on_smollm2_trains_compresses_and_answers(
    smollm2: Path, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = run_cli("train", "recipe.toml", "--out", "run")
    assert result.code == 0, result.err
    assert "rows with a document: 8" in result.err
    reasoner: Any = laconic.load("run")
    documents = [rows[0]["document"], rows[2]["document"]]
    memory = reasoner.compress(documents)
    assert memory.num_vectors.tolist() == [8, 8]
    questions, config = [rows[0]["question"], rows[2]["question"]], laconic.GenerationConfig(max_tokens=8)
    together = reasoner.generate(questions, config, memory=memory)
    alone = [
        reasoner.generate(question, config, memory=reasoner.compress([document]))[0]
        for question, document in zip(questions, documents, strict=True)
    ]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    (tmp_path / "document.txt").write_text(documents[1])
    assert run_cli("compress", "run", "document.txt", "--out", "memory.safetensors").code == 0
    printed = run_cli("generate", "run", questions[1], "--memory", "memory.safetensors", "--max-tokens", 8)
    assert printed.out.rstrip("\n") == alone[1].text.rstrip("\n")
