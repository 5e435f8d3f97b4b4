"""Audits of methods of one's own: a class that inherits from KaVa, and one without latents."""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import RunCli, check_refused
from tests.tiny_recipes import TINY_RECIPE

CODE = """from laconic import Kava, LatentThoughts
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.latent.cot import NoCot

class Own(Kava):
    def __init__(self, decoder, tokenizer, *, num_latents: int = 2):
        latents = LatentThoughts(decoder, num_latents=num_latents, num_iterations=1)
        super().__init__(decoder, latents, DistillationConfig(), KVSelectionConfig(), KVDistillationConfig())

class Prompting(Own):
    def prompt_answers(self, questions, decoding, state=None):
        return super().prompt_answers(questions, decoding, state)

class Plain(NoCot):
    def __init__(self, decoder, tokenizer):
        super().__init__(decoder)
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the classes and a recipe without the tables of a method, in which commands run."""
    head, _, tail = TINY_RECIPE.replace("valid_rows = 20", "valid_rows = 20, test_rows = 16").partition("[latents]")
    (tmp_path / "tiny.toml").write_text(f"{head}[data]{tail.partition('[data]')[2]}")
    (tmp_path / "own_audited.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_audited", raising=False)
    monkeypatch.setenv("LACONIC_ALLOW_CODE", "1")


@pytest.mark.medium
def test_audit_of_a_class_that_inherits_from_kava(run_cli: RunCli) -> None:
    flags = ("--out", "run", "method=own_audited:Own", "train.steps=1")
    assert run_cli("train", "tiny.toml", *flags).code == 0
    audit = run_cli("audit", "run", "--format", "json")
    assert audit.code == 0, audit.err
    data = json.loads(audit.out)
    assert {c["name"] for c in data["conditions"]} >= {"swap vectors", "swap cache", "first 1", "0 iterations"}
    evaluated = run_cli("evaluate", "run", "--tasks", "test", "--format", "json")
    assert json.loads(evaluated.out)["datasets"][0]["runs"][0]["accuracy"]["mean"] == data["accuracy"]["mean"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Plain", "or of a class of yours that inherits"),
        ("Prompting", "answers in a way of its own, with prompt_answers"),
    ],
)
def test_audit_refuses_classes_that_it_cannot_follow(run_cli: RunCli, name: str, message: str) -> None:
    flags = ("--out", "run", f"method=own_audited:{name}", "train.steps=1")
    assert run_cli("train", "tiny.toml", *flags).code == 0
    audit = run_cli("audit", "run")
    check_refused(audit, 2, message)
