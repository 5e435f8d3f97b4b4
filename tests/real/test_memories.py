"""`laconic evaluate --tasks memories` with SmolLM2-135M-Instruct: the full text as transformers reads it, and KVzip."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from laconic import load_tokenizer
from laconic.evaluation.memories.documents import load_probed_documents
from tests.conftest import REPO, RunCli, needs, shared_dir

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("unchecked")]
TOKENS, LIMIT = 384, 2
TASKS = ("continuation", "needles", "questions")


def test_evaluate_memories_of_smollm2(
    smollm2: Path, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("transformers")
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path))
    files = (shared_dir() / "data/text/standard-ebooks.jsonl", REPO / "examples/book_questions.jsonl")
    sizes = ("--tokens", TOKENS, "--limit", LIMIT, "--methods", "kvzip", "--format", "json")
    result = run_cli(
        "evaluate", smollm2, "--tasks", "memories", "--documents", files[0], "--questions", files[1], *sizes
    )
    assert result.code == 0, result.err
    points = {p["name"]: p["tasks"] for p in json.loads(result.out)["comparisons"][0]["contexts"]}
    for task, nats in score_with_transformers(smollm2, *map(str, files)).items():
        assert points["full text"][task]["nats"] == pytest.approx(nats, abs=2e-3)
    shares = {name: {task: scores["share"]["mean"] for task, scores in p.items()} for name, p in points.items()}
    assert shares["kvzip 0.125"]["passages"] >= 0.8
    assert shares["kvzip 0.125"]["needles"] > shares["last tokens 0.125"]["needles"] + 0.3


def score_with_transformers(folder: Path, documents: str, questions: str) -> dict[str, float]:
    """Return the nats per token of probes after the whole documents, read as one text by transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loaded = load_probed_documents(load_tokenizer(folder), documents, questions, TOKENS, LIMIT)[0]
    nats: dict[str, list[float]] = {task: [] for task in TASKS}
    for document in loaded:
        for task in document.probes.keys() & nats:
            scores = list[float]()
            for ids, n in document.probes[task]:
                with torch.no_grad():
                    logits = model(torch.tensor([[*document.ids, *ids]]), logits_to_keep=n + 1).logits[0, :-1]
                scores.append(float(F.cross_entropy(logits, torch.tensor(ids[-n:]))))
            nats[task].append(sum(scores) / len(scores))
    return {task: sum(values) / len(values) for task, values in nats.items()}
