"""`laconic demo read`: conditions, tables and page with a tiny model, and its messages."""

import json
from pathlib import Path

import pytest
import torch

import laconic
from laconic.cli.main import parse_command
from laconic.compression.kv.memory import KVMemory
from laconic.evaluation.compression.reading_demo import (
    CHAPTER_FILE,
    QUESTIONS,
    ChapterQuestion,
    ReadingComparison,
    build_answers_table,
    build_sections,
    compare_reading,
    render_reading_page,
)
from laconic.evaluation.tables import figures_to_json
from tests.conftest import RunCli, check_refused
from tests.evaluation.pages import check_page

pytestmark = pytest.mark.medium

CHAPTER = "Once upon a time there was a girl named Lily. She liked to play in the park with her red ball. " * 8
NAMED = ChapterQuestion("What is the name of the girl?", "Lily")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReadingComparison, Path]:
    """The conditions with a story model and a short text, and the file of the memory."""
    decoder = laconic.Decoder.from_pretrained("stories260k")
    path = tmp_path_factory.mktemp("read") / "memory.safetensors"
    tokenizer = laconic.load_tokenizer("stories260k")
    questions = [NAMED, ChapterQuestion("Where did she play?", "zoo")]
    return compare_reading(decoder, tokenizer, CHAPTER, questions, path), path


def test_compare_reading_conditions(comparison: tuple[ReadingComparison, Path]) -> None:
    results, N = {row.name: row for row in comparison[0].rows}, comparison[0].tokens
    none, full, memory, last = results.values()
    assert (none.positions, full.positions, memory.positions, last.positions) == (1, N, N // 8, N // 8)
    assert full.num_bytes == N * none.num_bytes
    assert memory.num_bytes == comparison[1].stat().st_size < full.num_bytes
    assert len({row.loss for row in results.values()}) == 4
    assert min(row.loss for row in results.values()) > 0
    assert all(seconds > 0 for row in results.values() for seconds in row.first_token_seconds)


def test_compare_reading_full_text_answers_as_one_prompt(comparison: tuple[ReadingComparison, Path]) -> None:
    decoder, tokenizer = laconic.Decoder.from_pretrained("stories260k"), laconic.load_tokenizer("stories260k")
    question = tokenizer.encode(f"\n\nQuestion: {NAMED.text}\nAnswer:", add_special_tokens=False)
    ids = [*tokenizer.encode(CHAPTER), *question]
    config = laconic.GenerationConfig(max_tokens=32)
    text = laconic.generate(decoder, tokenizer, input_ids=[ids], config=config)[0].text
    assert comparison[0].rows[1].answers[0] == " ".join(text.split())


def test_compare_reading_memory_file_loads(comparison: tuple[ReadingComparison, Path]) -> None:
    memory = KVMemory.load(comparison[1])
    assert memory.metadata is not None
    assert memory.metadata.method == "kvzip"
    assert comparison[0].largest_head == memory.M
    notes = " ".join(map(str, build_sections(comparison[0])[0].blocks[1:]))
    assert memory.to_cache().kv_bytes == memory.num_bytes, "in use, no head is padded"
    assert f"the largest keeps {memory.M:,}" in notes
    assert "padded" not in notes
    assert memory.num_tokens.equal(torch.tensor([comparison[0].tokens]))


def test_question_is_right_by_whole_words() -> None:
    question = ChapterQuestion("Who?", "Ogilvy")
    assert question.is_right("It was ogilvy.")
    assert question.is_right("Ogilvy")
    assert not question.is_right("Ogilvyson")
    assert not question.is_right("")


def test_chapter_contains_the_answers() -> None:
    text = CHAPTER_FILE.read_text(encoding="utf-8")
    assert all(question.is_right(text) and not question.is_right(question.text) for question in QUESTIONS)


def test_reading_tables_and_page(comparison: tuple[ReadingComparison, Path]) -> None:
    result = comparison[0]
    marks = [row[1] for row in build_answers_table(result, 1).rows]
    assert marks == ["yes" if row.correct[1] else "no" for row in result.rows]
    page = check_page(render_reading_page(result, "A title", CHAPTER, [("model", "stories260k")]))
    for text in ("memory of an eighth", "A title", NAMED.text, "the largest keeps"):
        assert text in " ".join(page.text.split())
    assert json.loads(json.dumps(figures_to_json(result)))["rows"][1]["name"] == "full text"


def test_demo_read_refuses_a_short_context(run_cli: RunCli, tmp_path: Path) -> None:
    result = run_cli("demo", "read", "--model", "stories260k", "--out", str(tmp_path / "out"))
    assert result.code == 2
    assert "a context of 512; choose another --model" in result.err
    assert not (tmp_path / "out").exists()


def test_demo_read_without_the_model(run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_MODELS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_refused(run_cli("demo", "read", "--out", str(tmp_path / "out")), 66, "make model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("args", [["demo"], ["demo", "--fast"], ["demo", "think", "--fast"]])
def test_demo_without_a_name_is_think(args: list[str]) -> None:
    command = parse_command(args)
    assert type(command).__name__ == "DemoCommand"
    assert command.fast == ("--fast" in args)
