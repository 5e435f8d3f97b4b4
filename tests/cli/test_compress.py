"""`laconic compress`, `generate --memory` and `inspect FILE` as a user gives them, and all that is refused."""

import io
import json
import os
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic.cli.commands import compress
from laconic.cli.commands.compress import CompressCommand
from laconic.compression.memory import SummaryMemory
from laconic.console import ProgressFn
from laconic.data.documents import tokenize
from laconic.errors import DiskError
from laconic.experiment import resumable_stream
from laconic.experiment.compress import CompressionJob
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.generation.config import GenerationConfig
from tests.compression.compressors import reader
from tests.conftest import RunCli, call_cli, check_refused
from tests.tiny_recipes import TINY_DOCUMENT_RECIPE

LENGTHS = """max_vectors = 4
length_policy = "stop_head"
[stop_head]
initial_mean_fraction = 0.6
"""
RECIPE = (
    TINY_DOCUMENT_RECIPE.replace('"lm"', '"autocompressor"')
    .replace("num_attention_heads = 2\n", "num_attention_heads = 2\nmax_position_embeddings = 256\n")
    .replace("max_vectors = 2\n[cms]\nchunk_sizes = [8]\n", LENGTHS)
)
BOOK = "Chapter one. " + " ".join(f"Sentence {i} stands here." for i in range(12))
COST_KEYS = {
    *("num_texts", "num_tokens", "num_segments", "num_vectors", "mean_vectors", "min_vectors", "max_vectors"),
    *("tokens_per_vector", "file_bytes", "text_cache_bytes", "vector_cache_bytes", "positions_spent"),
    *("positions_saved_per_use", "break_even_uses"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one step, another one of it, and texts."""
    folder = tmp_path_factory.mktemp("reads")
    rows = [{"book": f"b{b}", "text": f"Book {b}. " + BOOK} for b in range(6)]
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.toml").write_text(RECIPE)
    (folder / "book.txt").write_text(BOOK)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": BOOK[: 40 * n]}) + "\n" for n in (1, 3, 2)))
    for name, keys in (("run", ()), ("other", ("seed=1", "model.init_seed=1"))):
        assert call_cli("train", folder / "tiny.toml", "--out", folder / name, *keys) == 0
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, place: Path, tmp_path: Path) -> RunCli:
    """Run a command in an empty directory; arguments that are names in `place` become paths."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: run_cli(*(place / str(arg) if (place / str(arg)).exists() else arg for arg in args))


def test_compress_estimates_the_time_left_from_the_first_segment_on(
    run: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = list[tuple[int, int]]()

    @contextmanager
    def record(text: str) -> Iterator[ProgressFn]:
        yield lambda name, done, total: reports.append((done, total))

    monkeypatch.setattr(compress, "progress", record)
    assert run("compress", "run", "book.txt", "--out", "book.safetensors")[0] == 0
    assert reports[0] == (0, len(BOOK)), "estimates count from the first report on"
    assert 0 < reports[1][0] < reports[-1][0] == len(BOOK)


@pytest.mark.medium
def test_compress_file_stream_and_python_agree(run: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("compress", "run", "book.txt", "--out", "book.safetensors")
    assert code == 0
    assert out.startswith(f"read       {len(BOOK)} tokens in 19 segments")
    assert "positions  " in out
    assert "wrote book.safetensors" in err
    model = laconic.load(place / "run")
    book = model.load_memory("book.safetensors")
    assert book.metadata is not None
    assert book.metadata.documents[0][0].name == "book.txt"
    compressed = model.compress([BOOK], names=["book.txt"])
    assert replace(compressed, metadata=None).is_equal(replace(book, metadata=None))
    assert compressed.metadata is not None
    assert compressed.metadata.documents == book.metadata.documents
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BOOK.encode())))
    assert run("compress", "run", "-", "--out", "live.safetensors")[0] == 0
    live = SummaryMemory.load("live.safetensors")
    assert torch.equal(live.vectors, book.vectors)
    assert live.metadata is not None
    assert live.metadata.documents[0][0].name == "standard input"
    end, start = os.pipe()
    os.write(start, BOOK.encode())
    os.close(start)
    assert run("compress", "run", f"/dev/fd/{end}", "--out", "pipe.safetensors")[0] == 0  # as <(zcat book.txt.gz) is
    os.close(end)
    assert torch.equal(SummaryMemory.load("pipe.safetensors").vectors, book.vectors)


def test_the_bill(run: RunCli) -> None:
    code, out, _ = run("compress", "run", "book.txt", "--out", "x.safetensors", "--vectors", "2", "--format", "json")
    report = json.loads(out)
    assert code == 0
    assert report["schema"] == 1
    assert report["bytes"] == Path("x.safetensors").stat().st_size
    cost = report["cost"]
    assert cost.keys() == COST_KEYS
    n, T = 19, len(BOOK)
    assert (cost["num_tokens"], cost["num_segments"], cost["num_vectors"]) == (T, n, 2 * n)
    assert (cost["min_vectors"], cost["max_vectors"]) == (2, 2)
    assert cost["file_bytes"] == 2 * n * 16 * 4
    assert cost["text_cache_bytes"] == T * 2 * 1 * 2 * 8 * 4
    assert cost["vector_cache_bytes"] == 2 * n * 2 * 1 * 2 * 8 * 4
    assert cost["positions_spent"] == T + 2 * n + sum(2 * i for i in range(n))
    spent, saved, uses = cost["positions_spent"], cost["positions_saved_per_use"], cost["break_even_uses"]
    assert saved == T - 2 * n
    assert saved * uses > spent >= saved * (uses - 1)


def test_compress_jsonl_rows(run: RunCli, place: Path) -> None:
    whole = run("compress", "run", "rows.jsonl", "--out", "rows.safetensors", "--batch-size", "2")
    assert whole[0] == 0
    assert "of 3 texts" in whole[1]
    rows = SummaryMemory.load("rows.safetensors")
    model = laconic.load(place / "run")
    for row, n in enumerate((1, 3, 2)):
        alone = model.compress([BOOK[: 40 * n]])
        assert torch.allclose(rows.select_rows([row]).compact().vectors, alone.compact().vectors, atol=1e-5)
    assert rows.metadata is not None
    assert [row[0].name for row in rows.metadata.documents] == [f"rows.jsonl:{i}" for i in (1, 2, 3)]


@pytest.mark.medium
def test_compress_dtype(run: RunCli) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        assert run("compress", "run", "book.txt", "--out", f"{dtype}.safetensors", "--dtype", dtype)[0] == 0
        sizes[dtype] = SummaryMemory.load(f"{dtype}.safetensors").vectors
    assert sizes["bfloat16"].dtype == torch.bfloat16
    assert torch.equal(sizes["float32"].bfloat16(), sizes["bfloat16"])
    assert run("generate", "run", "x", "--memory", "bfloat16.safetensors", "--max-tokens", "2")[0] == 0


class StoppedError(Exception):
    """Ends a command as if it was killed."""


@pytest.mark.medium
@pytest.mark.parametrize(("source", "after"), [
    ("book.txt", 3), pytest.param("book.txt", 7, marks=pytest.mark.slow),
    pytest.param("rows.jsonl", 4, marks=pytest.mark.slow), ("rows.jsonl", 9),
])  # fmt: skip
def test_compress_resume_equals_uninterrupted(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, source: str, after: int
) -> None:
    arguments = ("--stop-rule", "sample", "--seed", "3", "--batch-size", "2")
    assert run("compress", "run", source, "--out", "whole.safetensors", *arguments)[0] == 0
    taken = 0
    step = CompressionJob.advance

    def counted(self: CompressionJob, segment: Any) -> SummaryMemory:
        nonlocal taken
        taken += 1
        if taken == after:
            raise StoppedError
        return step(self, segment)

    monkeypatch.setattr(CompressionJob, "advance", counted)
    every = ("--save-every", "2")
    assert run("compress", "run", source, "--out", "part.safetensors", *arguments, *every)[0] == 70
    assert not Path("part.safetensors").exists()
    assert "memory in progress, expected a memory (summary vectors)" in run("inspect", "part.safetensors.part")[2]
    message = "part.safetensors.part holds what an interrupted command has read; --resume continues it, or delete it"
    refused(run, 73, message, "compress", "run", source, "--out", "part.safetensors", *arguments, *every)
    code, _, err = run("compress", "run", source, "--out", "part.safetensors", *arguments, *every, "--resume")
    assert code == 0
    assert "resuming after " in err
    whole, part = SummaryMemory.load("whole.safetensors"), SummaryMemory.load("part.safetensors")
    assert replace(whole, metadata=None).is_equal(replace(part, metadata=None))
    assert whole.metadata is not None
    assert part.metadata is not None
    assert whole.metadata.documents == part.metadata.documents
    assert not Path("part.safetensors.part").exists()


@pytest.mark.medium
def test_compress_total_vectors_and_resume(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("compress", "run", "book.txt", "--out", "a.safetensors", "--total-vectors", "11")[0] == 0
    assert int(SummaryMemory.load("a.safetensors").num_vectors) == 11
    grid = resumable_stream.pad_segments
    monkeypatch.setattr(
        resumable_stream, "pad_segments", lambda ids, device: grid(ids, device) if len(ids[0]) == 16 else 1 / 0
    )
    assert (
        run("compress", "run", "book.txt", "--out", "b.safetensors", "--total-vectors", "11", "--save-every", "1")[0]
        == 70
    )
    monkeypatch.setattr(resumable_stream, "pad_segments", grid)
    assert run("compress", "run", "book.txt", "--out", "b.safetensors", "--total-vectors", "11", "--resume")[0] == 0
    assert torch.equal(SummaryMemory.load("a.safetensors").vectors, SummaryMemory.load("b.safetensors").vectors)


def test_compress_deletes_no_part_file_that_it_did_not_write(run: RunCli) -> None:
    Path("x.safetensors.part").write_text("notes")
    assert run("compress", "run", "book.txt", "--out", "x.safetensors")[0] == 0
    assert Path("x.safetensors.part").read_text() == "notes"


@pytest.fixture
def book(run: RunCli) -> str:
    assert run("compress", "run", "book.txt", "--out", "book.safetensors")[0] == 0
    return "book.safetensors"


def test_generate_on_concatenated_memories(run: RunCli, place: Path, book: str) -> None:
    code, out, err = run("generate", "run", "Who", "--memory", book, "--memory", book, "--max-tokens", "4")
    assert code == 0
    assert "tokens read" in err
    model = laconic.load(place / "run")
    memory = model.load_memory(book)
    both = SummaryMemory.concat_segments(memory, memory)
    config = GenerationConfig(max_tokens=4)
    (generation,) = model.generate(["Who"], memory=both, config=config)
    assert out == "Who" + generation.text + "\n"
    assert generation.token_ids == model.generate(["Who"], memory=both, config=config)[0].token_ids
    code, out, _ = run("generate", "run", "a", "b", "--memory", book, "--max-tokens", "2", "--format", "json")
    assert [row["prompt"] for row in json.loads(out)["generations"]] == ["a", "b"]
    assert run("generate", "run", "a", "--max-tokens", "2")[0] == 0


def test_inspect_memory_file(run: RunCli, book: str) -> None:
    code, out, _ = run("inspect", book)
    assert code == 0
    assert out.startswith("book.safetensors: ")
    for line in ("reader     ", "method     ", "text       book"):
        assert line in out
    report = json.loads(run("inspect", book, "--format", "json")[1])
    assert report["documents"][0]["name"] == "book.txt"
    assert sum(report["documents"][0]["vectors"]) == report["vectors"]
    assert sum(report["documents"][0]["tokens"]) == report["tokens"] == len(BOOK)
    check_refused(run("inspect", book, "What?"), 2, "is a memory or state, which takes no question")
    check_refused(run("inspect", "none.safetensors"), 66, "no none.safetensors")


def refused(run: RunCli, code: int, message: str, *args: object) -> None:
    ended, out, err = run(*args)
    assert (ended, out) == (code, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("laconic: ")
    assert message in last


@pytest.mark.parametrize(
    ("code", "message", "args"),
    [
        (2, "1.5", ["book.txt", "--quantile", "1.5"]),
        (2, "1, 2, 3, 4", ["book.txt", "--vectors", "0"]),
        (2, "num_vectors and total_vectors", ["book.txt", "--vectors", "2", "--total-vectors", "9"]),
        (2, "0", ["book.txt", "--segment-tokens", "0"]),
        (
            2,
            "segments of 4,000 tokens exceed the context of 256, with the memory before a segment and the vectors "
            "after it; give --segment-tokens 252 or fewer",
            ["book.txt", "--segment-tokens", "4000", "--vectors", "4"],
        ),
        (2, "5 vectors: this model writes at most 4 per segment; give 4 or fewer", ["book.txt", "--vectors", "5"]),
        (2, "--batch-size 0", ["rows.jsonl", "--batch-size", "0"]),
        (66, "no file gone.txt; give a text, a .jsonl, or - for standard input", ["gone.txt"]),
        (66, "--resume: no file x.safetensors.part", ["book.txt", "--resume"]),
        (66, "empty.txt", ["empty.txt"]),
        (66, "latin.txt: byte 6", ["latin.txt"]),
        (66, "none.jsonl: contains no rows", ["none.jsonl"]),
        (66, "bad.jsonl:2: text", ["bad.jsonl"]),
    ],
)
def test_compress_invalid_input_leaves_no_file(
    run: RunCli, tmp_path: Path, code: int, message: str, args: list[str]
) -> None:
    files = {
        "empty.txt": b"", "latin.txt": "Ein Stück".encode("latin-1"),
        "none.jsonl": b"", "bad.jsonl": b'{"text": "a"}\n{"text": 5}\n', "missing.jsonl": b'{"words": "a"}\n',
        "array.jsonl": b'[{"text": "a"}]',
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    refused(run, code, message, "compress", "run", *args, "--out", "x.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == files.keys()


def test_compress_refuses_a_long_text_before_compressing(
    run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.txt").write_text(BOOK * 4)
    with monkeypatch.context() as patch:
        patch.setattr(CompressionJob, "advance", None)
        code, out, err = run("compress", "run", "long.txt", "--out", "x.safetensors", "--vectors", "4")
    assert (code, out) == (2, "")
    assert "76 segments of 16 tokens; the memory holds at most 60; compress a part" in err
    assert [path.name for path in tmp_path.iterdir()] == ["long.txt"]
    _, _, err = run("compress", "run", "long.txt", "--out", "x.safetensors", "--total-vectors", "100")
    assert "the memory holds at most 60; compress a part" in err
    _, _, err = run("compress", "run", "book.txt", "--out", "x.safetensors", "--segment-tokens", "252")
    assert "book.txt has 2 segments of 252 tokens; the memory holds at most 1;" in err
    assert run("compress", "run", "long.txt", "--out", "x.safetensors", "--vectors", "3").code == 0
    assert run("compress", "run", "book.txt", "--out", "x.safetensors").code == 0


def test_generate_refuses_foreign_and_damaged_memories(run: RunCli, book: str) -> None:
    arguments = ("generate", "other", "Who", "--memory", book, "--max-tokens", "2")
    refused(run, 76, "book.safetensors", *arguments)
    content = bytearray(Path(book).read_bytes())
    content[-1] ^= 1
    Path("bad.safetensors").write_bytes(content)
    refused(run, 76, "bad.safetensors is damaged", "generate", "run", "Who", "--memory", "bad.safetensors")
    refused(run, 66, "no file gone.safetensors; give one", "generate", "run", "Who", "--memory", "gone.safetensors")


def test_generate_memory_requires_a_compressor(run: RunCli, book: str, tmp_path: Path) -> None:
    refused(run, 66, "nothing", "generate", "nothing", "x", "--memory", book)
    refused(run, 2, "--chat: not available for a run", "generate", "run", "x", "--memory", book, "--chat")


def test_compress_keeps_keys_and_values_for_a_run_that_answers(run: RunCli, tmp_path: Path) -> None:
    """A run without a table [compression] reads what its own decoder kept."""
    (tmp_path / "digits.toml").write_text(
        'method = "cot"\n[model]\nfamily = "llama"\ntokenizer = "digits"\nhidden_size = 16\nnum_hidden_layers = 1\n'
        'num_attention_heads = 2\n[data]\nsource = "digits"\nformat = "digits"\n[train]\nsteps = 1\nbatch_size = 2\n'
    )
    assert run("train", "digits.toml", "--out", "thinks")[0] == 0
    (tmp_path / "a.txt").write_text("a")
    assert run("compress", "thinks", "a.txt", "--out", "x.safetensors", "--keep", "1")[0] == 0
    assert run("generate", "thinks", "1 + 2 =", "--memory", "x.safetensors", "--max-tokens", "2")[0] == 0
    refused(run, 2, "was not trained to compress", "compress", "thinks", "a.txt", "--out", "y", "--vectors", "2")


def test_compress_missing_folder_and_full_disk(run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    message = "--out no/x.safetensors"
    refused(run, 2, message, "compress", "run", "book.txt", "--out", "no/x.safetensors")

    def full(*_: object, **__: object) -> None:
        raise DiskError("x.safetensors: No space left on device; 900 bytes to write, 0 free")

    monkeypatch.setattr("laconic.compression.saved_memory.save_artifact", full)
    refused(run, 74, "No space left on device", "compress", "run", "book.txt", "--out", "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_compress_resume_checks_text_and_settings(run: RunCli, tmp_path: Path, place: Path) -> None:
    model = laconic.load(place / "run")
    work = CompressionJob(model.method)
    stages = work.run([[model.token_stream("a.txt", [BOOK])]])
    for _ in range(2):
        next(stages)
    verb = CompressCommand(str(place / "run"), "a.txt", Path("x.safetensors"))
    work.save(verb.partial_path, verb.resume_key(model))
    (tmp_path / "a.txt").write_text(BOOK.replace("one", "two"))
    arguments = ("compress", "run", "a.txt", "--out", "x.safetensors", "--resume")
    refused(run, 66, "--resume", *arguments)
    assert "resuming" not in run(*arguments)[2]
    (tmp_path / "a.txt").write_text(BOOK[:20])
    refused(run, 66, "--resume", *arguments)
    (tmp_path / "a.txt").write_text(BOOK)
    refused(run, 73, "vectors", *arguments, "--vectors", "2")
    refused(run, 73, "weights", "compress", "other", *arguments[2:])
    assert run(*arguments)[0] == 0


def peak(run: TextCompressor, text: str, times: int) -> int:
    """Bytes of Python's own memory at most, while so many times a text are compressed as one stream."""
    tracemalloc.start()
    run.stream(text for _ in range(times))
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return top


@pytest.mark.medium
def test_stream_memory_use_is_independent_of_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held of the text, not of tensors; the vectors are a fixed number here."""
    run = reader(segment=1024, memory_policy="fifo", max_memory_vectors=4, room=8192, dtype=torch.float32)
    memory = run.method.segment_model.empty_memory(1)
    monkeypatch.setattr(type(run.method), "compress", lambda self, text, live, before, rule: memory.append(
        torch.zeros(1, 1, memory.D), torch.ones(1, 1).bool(), live.sum(1)
    ))  # fmt: skip
    monkeypatch.setattr(tokenize.iter_token_ids, "__defaults__", (8192,))
    text = "All work and no play, said the book. " * 1000
    peak(run, text, 1)  # what is compressed once
    few, many = peak(run, text, 1), peak(run, text, 4)
    assert many < 1.1 * few
