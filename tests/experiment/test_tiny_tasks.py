"""What the small recipes of streams learn, beside the control whose fast weights stand still."""

import json
import sys
from pathlib import Path

import pytest

from laconic.cli import main as cli

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]


def train_metric(metric: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *keys: str) -> float:
    """Return a metric of the last validation of a run."""
    run_command(monkeypatch, "train", *keys, "--out", str(folder))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["validation"][metric] for line in lines if "validation" in line][-1]


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run `laconic` in this process."""
    monkeypatch.setattr(sys, "argv", ["laconic", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0


def test_parity_is_learned_by_what_learns_while_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained on strings of up to 24 symbols, the model reads most of those of 51 to 100."""
    run = tmp_path / "learns"
    assert train_metric("accuracy", run, monkeypatch, "hope-tiny-parity") >= 0.99
    capsys.readouterr()
    run_command(monkeypatch, "evaluate", str(run), "--tasks", "formal_languages", "--limit", "100", "--format", "json")
    longer = json.loads(capsys.readouterr().out)["streams"][1]
    assert longer["task"] == "formal_languages-bin-1"
    assert longer["conditions"]["learn"]["metrics"]["all"]["mean"] >= 0.5  # rounding changes it
    assert longer["conditions"]["frozen"]["metrics"]["all"]["mean"] <= 0.1
    short = ("train.steps=600", "train.save_every=600", "train.validate_every=600", "inner_loop.enabled=false")
    assert train_metric("accuracy", tmp_path / "still", monkeypatch, "hope-tiny-parity", *short) <= 0.7


def test_pairs_are_not_guessed_by_what_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("train.steps=700", "train.save_every=700", "train.validate_every=700")
    frozen = ("hope-tiny-recall", *short, "inner_loop.enabled=false")
    still = train_metric("accuracy", tmp_path / "still", monkeypatch, *frozen)
    assert still <= 0.1  # chance is one value in 32
    assert train_metric("accuracy", tmp_path / "learns", monkeypatch, "hope-tiny-recall", *short) >= still + 0.15


def few_books(folder: Path, shared: Path) -> Path:
    """The first sections of books, some held out."""
    books: dict[str, list[str]] = {}
    with (shared / "data/text/standard-ebooks.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            part = books.setdefault(json.loads(line)["split"], [])
            part += [line] if len(part) < 8 else []
    path = folder / "books.jsonl"
    path.write_text("".join(line for part in books.values() for line in part), encoding="utf-8")
    return path


def test_levels_learn_what_symbols_mean_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    steps = ("train.steps=12", "train.save_every=12", "train.validate_every=12", "validation.max_rows=8")
    short = (f"data.path={few_books(tmp_path, shared)}", *steps)
    still = train_metric("nats", tmp_path / "still", monkeypatch, "cms-tiny-drift", *short, "cms.inner_lr=0")
    assert train_metric("nats", tmp_path / "learns", monkeypatch, "cms-tiny-drift", *short) <= still - 0.5


def test_a_real_model_reads_a_book_no_worse_for_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Path
) -> None:
    """One update of no size: the donor's weights, which learn while they read."""
    once = ("steps=1", "save_every=1", "validate_every=1", "learning_rate=1e-9", "batch_size=1")
    steps = [f"train.{key}" for key in once]
    keys = (f"data.path={few_books(tmp_path, shared)}", f"model.name={shared / 'models/stories260k'}", *steps)
    donor, learns = (
        train_metric("nats", tmp_path / rate, monkeypatch, "hope-attention-tiny", *keys, f"cms.inner_lr={rate}")
        for rate in ("0", "0.1")
    )
    assert learns <= donor - 0.1


def test_a_decoder_is_trained_by_m3_as_by_adamw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    overrides = f"data.path={few_books(tmp_path, shared)}"
    keys = (overrides, "train.optimizer=adamw", "train.learning_rate=1e-2")
    adamw = train_metric("nats", tmp_path / "adamw", monkeypatch, "m3-tiny", *keys)
    assert train_metric("nats", tmp_path / "m3", monkeypatch, "m3-tiny", overrides) <= adamw + 0.05
