"""`laconic compress`, `generate --memory` and `inspect FILE` as a user gives them, and all that is refused."""

import io
import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic import cli
from laconic.cli.compress import CompressCommand
from laconic.compression.memory import SummaryMemory
from laconic.data.documents import tokenize
from laconic.errors import DiskError
from laconic.experiment import resumable_stream
from laconic.experiment.compress import CompressionJob, resolve_length_rule
from laconic.experiment.compressor import TextCompressor
from tests.compression.compressors import reader
from tests.conftest import RunCli

RECIPE = """method = "autocompressor"
[model]
family = "llama"
tokenizer = "bytes"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 256
[compression]
max_vectors = 4
length_policy = "stop_head"
[stop_head]
initial_mean_fraction = 0.6
[data]
source = "text"
path = "books.jsonl"
[data.text]
row_tokens = 48
segment_tokens = 16
segment_lengths = "fixed"
[train]
steps = 1
batch_size = 2
"""
BOOK = "Chapter one. " + " ".join(f"Sentence {i} stands here." for i in range(12))
KEYS = {
    *("texts", "tokens", "segments", "vectors", "mean", "min", "max", "tokens_per_vector", "file", "text_cache"),
    *("vector_cache", "spent", "saved", "pays_after"),
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
        command = ["laconic", "train", str(folder / "tiny.toml"), "--out", str(folder / name), *keys]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as end:
                cli.main()
        assert not end.value.code
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, place: Path, tmp_path: Path) -> RunCli:
    """Run a command in an empty directory; arguments that are names in `place` become paths."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: run_cli(*(place / str(arg) if (place / str(arg)).exists() else arg for arg in args))


def test_a_file_a_stream_and_python_are_one_memory(run: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("compress", "run", "book.txt", "--out", "book.safetensors")
    assert code == 0
    assert out.startswith(f"read       {len(BOOK)} tokens in 19 segments")
    assert "positions  " in out
    assert "wrote book.safetensors" in err
    model = laconic.load_text_model(place / "run")
    book = model.load("book.safetensors")
    assert book.metadata is not None
    assert book.metadata.documents[0][0].name == "book.txt"
    made = model.compress([BOOK], names=["book.txt"])
    assert replace(made, metadata=None).is_equal(replace(book, metadata=None))
    assert made.metadata is not None
    assert made.metadata.documents == book.metadata.documents
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BOOK.encode())))
    assert run("compress", "run", "-", "--out", "live.safetensors")[0] == 0
    live = SummaryMemory.load("live.safetensors")
    assert torch.equal(live.vectors, book.vectors)
    assert live.metadata is not None
    assert live.metadata.documents[0][0].name == "standard input"


def test_the_bill(run: RunCli) -> None:
    code, out, _ = run("compress", "run", "book.txt", "--out", "x.safetensors", "--vectors", "2", "--format", "json")
    told = json.loads(out)
    assert code == 0
    assert told["schema"] == 1
    assert told["bytes"] == Path("x.safetensors").stat().st_size
    bill = told["bill"]
    assert bill.keys() == KEYS
    n, T = 19, len(BOOK)
    assert (bill["tokens"], bill["segments"], bill["vectors"], bill["min"], bill["max"]) == (T, n, 2 * n, 2, 2)
    assert bill["file"] == 2 * n * 16 * 4
    assert bill["text_cache"] == T * 2 * 1 * 2 * 8 * 4
    assert bill["vector_cache"] == 2 * n * 2 * 1 * 2 * 8 * 4
    assert bill["spent"] == T + 2 * n + sum(2 * i for i in range(n))
    assert bill["saved"] == T - 2 * n
    assert bill["saved"] * bill["pays_after"] > bill["spent"] >= bill["saved"] * (bill["pays_after"] - 1)


def test_lines_are_rows(run: RunCli, place: Path) -> None:
    whole = run("compress", "run", "rows.jsonl", "--out", "rows.safetensors", "--batch-size", "2")
    assert whole[0] == 0
    assert "of 3 texts" in whole[1]
    rows = SummaryMemory.load("rows.safetensors")
    model = laconic.load_text_model(place / "run")
    for row, n in enumerate((1, 3, 2)):
        alone = model.compress([BOOK[: 40 * n]])
        assert torch.allclose(rows.select_rows([row]).compact().vectors, alone.compact().vectors, atol=1e-5)
    assert rows.metadata is not None
    assert [row[0].name for row in rows.metadata.documents] == [f"rows.jsonl:{i}" for i in (1, 2, 3)]


def test_types_of_the_file(run: RunCli) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        assert run("compress", "run", "book.txt", "--out", f"{dtype}.safetensors", "--dtype", dtype)[0] == 0
        sizes[dtype] = SummaryMemory.load(f"{dtype}.safetensors").vectors
    assert sizes["bfloat16"].dtype == torch.bfloat16
    assert torch.equal(sizes["float32"].bfloat16(), sizes["bfloat16"])
    assert run("generate", "run", "x", "--memory", "bfloat16.safetensors", "--max-tokens", "2")[0] == 0


class Stopped(Exception):
    """The command ends here, as if killed."""


@pytest.mark.parametrize(("source", "after"), [("book.txt", 3), ("book.txt", 7), ("rows.jsonl", 4), ("rows.jsonl", 9)])
def test_what_is_resumed_is_as_if_never_stopped(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, source: str, after: int
) -> None:
    asked = ("--stop-rule", "sample", "--seed", "3", "--batch-size", "2")
    assert run("compress", "run", source, "--out", "whole.safetensors", *asked)[0] == 0
    taken = 0
    step = CompressionJob.advance

    def counted(self: CompressionJob, segment: Any) -> SummaryMemory:
        nonlocal taken
        taken += 1
        if taken == after:
            raise Stopped
        return step(self, segment)

    monkeypatch.setattr(CompressionJob, "advance", counted)
    every = ("--save-every", "2")
    assert run("compress", "run", source, "--out", "part.safetensors", *asked, *every)[0] == 70
    assert not Path("part.safetensors").exists()
    assert Path("part.safetensors.part").exists()
    code, _, err = run("compress", "run", source, "--out", "part.safetensors", *asked, *every, "--resume")
    assert code == 0
    assert "going on after " in err
    whole, part = SummaryMemory.load("whole.safetensors"), SummaryMemory.load("part.safetensors")
    assert replace(whole, metadata=None).is_equal(replace(part, metadata=None))
    assert whole.metadata is not None
    assert part.metadata is not None
    assert whole.metadata.documents == part.metadata.documents
    assert not Path("part.safetensors.part").exists()


def test_a_budget_is_shared_out_when_resumed_too(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("compress", "run", "book.txt", "--out", "a.safetensors", "--total-vectors", "11")[0] == 0
    assert int(SummaryMemory.load("a.safetensors").num_vectors) == 11
    grid = resumable_stream.pad_rows
    monkeypatch.setattr(
        resumable_stream, "pad_rows", lambda ids, device: grid(ids, device) if len(ids[0]) == 16 else 1 / 0
    )
    assert (
        run("compress", "run", "book.txt", "--out", "b.safetensors", "--total-vectors", "11", "--save-every", "1")[0]
        == 70
    )
    monkeypatch.setattr(resumable_stream, "pad_rows", grid)
    assert run("compress", "run", "book.txt", "--out", "b.safetensors", "--total-vectors", "11", "--resume")[0] == 0
    assert torch.equal(SummaryMemory.load("a.safetensors").vectors, SummaryMemory.load("b.safetensors").vectors)


@pytest.fixture
def book(run: RunCli) -> str:
    assert run("compress", "run", "book.txt", "--out", "book.safetensors")[0] == 0
    return "book.safetensors"


def test_prompts_on_memories_that_are_joined(run: RunCli, place: Path, book: str) -> None:
    code, out, err = run("generate", "run", "Who", "--memory", book, "--memory", book, "--max-tokens", "4")
    assert code == 0
    assert "tokens in" in err
    model = laconic.load_text_model(place / "run")
    memory = model.load(book)
    both = SummaryMemory.concat_segments(memory, memory)
    (found,) = model.generate(["Who"], both, max_tokens=4)
    assert out == "Who" + found.text + "\n"
    assert found.token_ids == model.generate(["Who"], both, max_tokens=4)[0].token_ids
    code, out, _ = run("generate", "run", "a", "b", "--memory", book, "--max-tokens", "2", "--format", "json")
    assert [row["prompt"] for row in json.loads(out)["generations"]] == ["a", "b"]
    assert run("generate", "run", "a", "--max-tokens", "2")[0] == 0


def test_one_prompt_is_asked_of_each_text_by_name(run: RunCli) -> None:
    assert run("compress", "run", "rows.jsonl", "--out", "rows.safetensors")[0] == 0
    code, out, _ = run("generate", "run", "x", "--memory", "rows.safetensors", "--max-tokens", "2", "--format", "json")
    assert code == 0
    asked = [row["prompt"] for row in json.loads(out)["generations"]]
    assert asked == [f"[rows.jsonl:{i}] x" for i in (1, 2, 3)]


def test_a_file_is_looked_into(run: RunCli, book: str) -> None:
    code, out, _ = run("inspect", book)
    assert code == 0
    assert out.startswith("book.safetensors: ")
    for line in (
        "reader     ",
        "method     parallel, stop, accumulate; positions contiguous, bos none",
        "text       book",
    ):
        assert line in out
    told = json.loads(run("inspect", book, "--format", "json")[1])
    assert told["documents"][0]["name"] == "book.txt"
    assert sum(told["documents"][0]["vectors"]) == told["vectors"]
    assert sum(told["documents"][0]["tokens"]) == told["tokens"] == len(BOOK)
    code, _, err = run("inspect", book, "What?")
    assert code == 2
    assert "is a file, which answers no question; give the folder of a run, or the file alone" in err
    code, _, err = run("inspect", "none.safetensors")
    assert code == 66
    assert "no none.safetensors; give the folder of a run and a question, or the file of a memory" in err


def refused(run: RunCli, code: int, says: str, *args: object) -> None:
    ended, out, err = run(*args)
    assert (ended, out) == (code, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("laconic: ")
    assert says in last


@pytest.mark.parametrize(
    ("code", "says", "args"),
    [
        (2, "q 1.5: give a probability between 0 and 1, neither of them", ["book.txt", "--quantile", "1.5"]),
        (2, "tau 0.0: give a probability between 0 and 1", ["book.txt", "--threshold", "0"]),
        (2, "n 0: lengths 1, 2, 3, 4 are allowed; choose one of them", ["book.txt", "--vectors", "0"]),
        (2, "n and budget given; one of them says", ["book.txt", "--vectors", "2", "--total-vectors", "9"]),
        (2, "budget 0: give 1 vector or more", ["book.txt", "--total-vectors", "0"]),
        (2, "segment 0: give 1 token or more", ["book.txt", "--segment-tokens", "0"]),
        (
            2,
            "segment: 0 vectors, 256 tokens and 4 places, llama has 256",
            ["book.txt", "--segment-tokens", "256", "--vectors", "4"],
        ),
        (2, "--batch-size 0 --save-every None: give 1 or more", ["rows.jsonl", "--batch-size", "0"]),
        (2, "--batch-size 8 --save-every 0: give 1 or more", ["book.txt", "--save-every", "0"]),
        (66, "no file gone.txt; give a text, a .jsonl, or - for standard input", ["gone.txt"]),
        (66, "--resume: no x.safetensors.part; --save-every N keeps one while it reads", ["book.txt", "--resume"]),
        (66, "empty.txt: empty; give a text to compress", ["empty.txt"]),
        (66, "binary.txt: byte 3 is NUL, so it is no text; give a file of text in UTF-8", ["binary.txt"]),
        (66, "latin.txt: byte 6 is not UTF-8; give a whole file of text, saved as UTF-8", ["latin.txt"]),
        (2, "no text is given; give one to compress", ["none.jsonl"]),
        (66, "bad.jsonl:2:10: text: no text: ", ["bad.jsonl"]),
        (66, "missing.jsonl:1:1: text: no such field in ", ["missing.jsonl"]),
        (66, "blank.jsonl:2:1: a blank line between rows; delete it, one row stands on each line", ["blank.jsonl"]),
        (66, "array.jsonl:1:1: the file is one JSON array", ["array.jsonl"]),
    ],
)
def test_what_is_refused_is_one_line_and_leaves_no_file(
    run: RunCli, tmp_path: Path, code: int, says: str, args: list[str]
) -> None:
    files = {
        "empty.txt": b"", "binary.txt": b"abc\0d", "latin.txt": "Ein Stück".encode("latin-1"),
        "none.jsonl": b"", "bad.jsonl": b'{"text": "a"}\n{"text": 5}\n', "missing.jsonl": b'{"words": "a"}\n',
        "blank.jsonl": b'{"text": "a"}\n\n{"text": "b"}\n', "array.jsonl": b'[{"text": "a"}]',
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    refused(run, code, says, "compress", "run", *args, "--out", "x.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == files.keys()


def test_a_text_longer_than_a_memory_can_become_is_told_of_at_once(run: RunCli, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(BOOK * 4)
    code, out, err = run("compress", "run", "long.txt", "--out", "x.safetensors", "--vectors", "4")
    first, last = err.strip().splitlines()
    assert (code, out) == (2, "")
    assert first.startswith("the text has about 75 segments; a memory of 4 vectors of each ends after 60 of 16 tokens")
    assert "memory that accumulates ends after 60 segments of 16" in last
    assert [path.name for path in tmp_path.iterdir()] == ["long.txt"]
    assert "the text has about" not in run("compress", "run", "book.txt", "--out", "x.safetensors")[2]


def test_foreign_and_damaged_memories(run: RunCli, book: str) -> None:
    asked = ("generate", "other", "Who", "--memory", book, "--max-tokens", "2")
    refused(run, 76, "memory: book.safetensors was written for weights ", *asked)
    content = bytearray(Path(book).read_bytes())
    content[-1] ^= 1
    Path("bad.safetensors").write_bytes(content)
    refused(run, 76, "bad.safetensors: digest ", "generate", "run", "Who", "--memory", "bad.safetensors")
    refused(run, 76, "bad.safetensors: digest ", "inspect", "bad.safetensors")
    refused(run, 66, "no gone.safetensors in ", "generate", "run", "Who", "--memory", "gone.safetensors")


def test_memories_are_of_runs_that_read(run: RunCli, book: str, tmp_path: Path) -> None:
    refused(
        run, 2, "--memory: nothing is no run; give the one that wrote it", "generate", "nothing", "x", "--memory", book
    )
    refused(run, 2, "--chat: not of a run, whose recipe says it", "generate", "run", "x", "--memory", book, "--chat")


def test_a_run_of_another_method_keeps_no_memory(run: RunCli, tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text(
        'method = "cot"\n[model]\nfamily = "llama"\ntokenizer = "digits"\nhidden_size = 16\nnum_hidden_layers = 1\n'
        'num_attention_heads = 2\n[data]\nsource = "digits"\nformat = "digits"\n[train]\nsteps = 1\nbatch_size = 2\n'
    )
    assert run("train", "digits.toml", "--out", "thinks")[0] == 0
    (tmp_path / "a.txt").write_text("a")
    says = "thinks was trained by cot, which keeps no memory; give a run of autocompressor"
    refused(run, 2, says, "compress", "thinks", "a.txt", "--out", "x.safetensors")


def test_no_folder_and_a_full_disk(run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    says = "--out no/x.safetensors: there is no folder no; make it first"
    refused(run, 2, says, "compress", "run", "book.txt", "--out", "no/x.safetensors")

    def full(*_: object) -> None:
        raise DiskError("x.safetensors: No space left on device; 900 bytes to write, 0 free")

    monkeypatch.setattr("laconic.compression.memory_file.save_artifact", full)
    refused(run, 74, "No space left on device", "compress", "run", "book.txt", "--out", "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_is_gone_on_from_is_the_same_text_and_the_same_question(run: RunCli, tmp_path: Path, place: Path) -> None:
    model = laconic.load_text_model(place / "run")
    work = CompressionJob(model.method, resolve_length_rule(model.method))
    stages = work.run([[model.token_stream("a.txt", [BOOK])]])
    for _ in range(2):
        next(stages)
    verb = CompressCommand(str(place / "run"), "a.txt", Path("x.safetensors"))
    work.save(verb.partial_path, verb.resume_key(model))
    (tmp_path / "a.txt").write_text(BOOK.replace("one", "two"))
    asked = ("compress", "run", "a.txt", "--out", "x.safetensors", "--resume")
    refused(run, 66, "--resume: the text is not the one that was begun; give that one, or leave --resume out", *asked)
    (tmp_path / "a.txt").write_text(BOOK[:20])
    refused(run, 66, "--resume: the text is not the one that was begun", *asked)
    (tmp_path / "a.txt").write_text(BOOK)
    refused(run, 73, "was begun with n None, asked is 2; ask the same, or remove it", *asked, "--vectors", "2")
    refused(run, 73, "was begun with weights ", "compress", "other", *asked[2:])
    assert run(*asked)[0] == 0


def peak(run: TextCompressor, text: str, times: int) -> int:
    """Bytes of Python's own memory at most, while so many times a text are compressed as one stream."""
    tracemalloc.start()
    run.stream(text for _ in range(times))
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return top


def test_a_text_of_any_length_takes_the_memory_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held of the text, not of tensors; the vectors are a fixed number here."""
    run = reader(segment=1024, memory="fifo", budget=4, room=8192, dtype=torch.float32)
    kept = run.method.segment_model.empty_memory(1)
    monkeypatch.setattr(type(run.method), "compress", lambda self, text, live, before, how: kept.append(
        torch.zeros(1, 1, kept.D), torch.ones(1, 1).bool(), live.sum(1)
    ))  # fmt: skip
    monkeypatch.setattr(tokenize.iter_token_ids, "__defaults__", (8192,))
    text = "All work and no play, said the book. " * 1000
    peak(run, text, 1)  # what is made once
    few, many = peak(run, text, 1), peak(run, text, 4)
    assert many < 1.1 * few
