"""`laconic evaluate --tasks memories` and `laconic report` of a model and an AutoCompressor, as a user calls them."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from laconic import Decoder, DecoderConfig, LanguageModel
from laconic.compression.kv.compress import DocumentCompression, compress_document
from laconic.compression.kv.config import KVCompressionConfig
from laconic.compression.kv.memory import KVMemory
from laconic.data.tokenizer import build_byte_tokenizer, load_tokenizer
from laconic.evaluation.memories import contexts, suite
from laconic.evaluation.memories.contexts import KV_METHODS, build_kv_context
from laconic.evaluation.memories.documents import load_probed_documents
from laconic.experiment.text_models.kv_compressor import build_repeat_prompt, compress_text
from tests.conftest import RunCli, check_refused, needs
from tests.evaluation.pages import leave_out_images
from tests.runs import train_tiny_run

COMPRESSOR = ("model.max_position_embeddings=1024", "compression.max_vectors=4", "compression.summary_init=normal",
              "data.text.row_tokens=128", "data.text.segment_tokens=64")  # fmt: skip
FLAGS = ("--tasks", "memories", "--documents", "books.jsonl", "--questions", "questions.jsonl", "--tokens", 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, documents, questions, and a run of an AutoCompressor."""
    folder = tmp_path_factory.mktemp("memories")
    train_tiny_run("autocompressor", folder, *COMPRESSOR)
    tokenizer = build_byte_tokenizer()
    config = DecoderConfig.tiny("llama", vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    torch.manual_seed(0)
    LanguageModel(Decoder(config).eval(), tokenizer).save(folder / "tiny")
    books = [{"book": name, "text": " ".join(f"{i * n * n}." for n in range(200))} for i, name in enumerate("abcd", 1)]
    (folder / "books.jsonl").write_text("".join(json.dumps(book) + "\n" for book in books))
    questions = [
        {"document": "a", "question": "What is 4?", "answer": "16.\n"},
        {"document": "b", "question": "?", "answer": "-"},
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    return folder


@pytest.fixture(autouse=True)
def results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache in which the results of models are stored; commands run in the folder."""
    monkeypatch.setenv("LACONIC_CACHE", str(folder / "cache"))
    monkeypatch.setattr(contexts, "CartridgeConfig", partial(contexts.CartridgeConfig, num_rows=16, max_tokens=4))
    leave_out_images(monkeypatch, only_dark=True)
    monkeypatch.chdir(folder)
    return folder / "cache"


def evaluate_json(run_cli: RunCli, *args: object) -> dict[str, Any]:
    result = run_cli("evaluate", *args, "--device", "cpu", "--format", "json")
    assert result.code == 0, result.err
    return json.loads(result.out)


@pytest.mark.medium
def test_evaluate_memories_compares_all_methods_with_the_baselines(
    run_cli: RunCli, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*FLAGS, "--limit", 2, "--keep", "0.25,0.1")
    data = evaluate_json(run_cli, "tiny", *flags)
    assert data["notes"] == [
        "left out 1 question whose answer is not in the document, cut to 300 tokens",
        "KVzip reads 2 of 2 documents in windows, as text and repetition exceed the context of 512 tokens: all heads "
        "then keep the same number of slots, so that kvzip is kvzip-equal; --tokens 273 or less gives one window",
    ]
    (comparison,) = data["comparisons"]
    points = {point["name"]: point for point in comparison["contexts"]}
    sized = {f"{name} {keep}" for name in ("last tokens", *KV_METHODS) for keep in (0.1, 0.25)}
    assert points.keys() == {"no context", "full text", *sized}
    full = points["full text"]
    assert {p["positions"] for name, p in points.items() if name.endswith("0.25")} == {75}
    assert points["window 0.25"]["used_bytes"] == full["used_bytes"] / 4 == 75 * 2 * 2 * 2 * 16 * 4
    assert points["kvzip 0.25"]["used_bytes"] >= points["kvzip-equal 0.25"]["used_bytes"]
    assert points["kvzip 0.25"]["file_bytes"] == points["kvzip-equal 0.25"]["file_bytes"]
    assert full["tasks"].keys() == {"continuation", "passages", "needles", "questions"}
    assert full["tasks"]["passages"]["nats"] == pytest.approx(score_passages(results.parent), abs=1e-4)
    monkeypatch.setattr(suite, "score_probes", None)  # evaluating again would fail
    assert evaluate_json(run_cli, "tiny", *flags) == data
    assert run_cli("report", "tiny", "--out", "page.html").code == 0
    page = Path("page.html").read_text()
    assert "Compressed memories: books questions, documents of up to 300 tokens" in page
    assert "kvzip-equal 0.1" in page
    assert "published model tiny" in page


def load_tiny(folder: Path) -> LanguageModel:
    """Return the model with its tokenizer."""
    return LanguageModel(Decoder.from_pretrained(folder / "tiny"), load_tokenizer(folder / "tiny"))


def score_passages(folder: Path) -> float:
    """Return the nats per token of the passages after the whole document, read as one text."""
    model = load_tiny(folder)
    documents = load_probed_documents(model.tokenizer, str(folder / "books.jsonl"), None, 300, 2)[0]
    nats = list[float]()
    for document in documents:
        assert len(document.ids) == 300
        for probe in document.probes["passages"]:
            ids = torch.tensor([[*document.ids, *probe.ids]])
            logits = model.decoder.logits(model.decoder(model.decoder.embed(ids)).hidden_states)[0]
            n = probe.num_scored
            nats.append(float(F.cross_entropy(logits[-n - 1 : -1], ids[0, -n:])))
    return sum(nats) / len(nats)


def test_evaluate_memories_asks_questions_alone_about_short_texts(run_cli: RunCli, tmp_path: Path) -> None:
    """Without --tokens, documents are cut to what the context of 512 positions allows."""
    rows = [
        {"context": "The ball is red.", "question": "What color is it?", "answer": "red"},
        {"context": "The ball is red.", "question": "What size is it?", "answer": "small"},
    ]
    questions = tmp_path / "short.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("--tasks", "memories", "--questions", questions, "--keep", 0.5, "--methods", "window")
    data = evaluate_json(run_cli, "tiny", *command)
    assert data["notes"] == [
        "questions alone: needles, copied passages and a continuation need texts of 160 tokens or more",
        "left out 1 question whose answer is not in the document, cut to 400 tokens",
    ]
    assert {tuple(point["tasks"]) for point in data["comparisons"][0]["contexts"]} == {("questions",)}
    result = run_cli("evaluate", "tiny", *command, "--tokens", 401, "--device", "cpu")
    assert (result.code, "--tokens 401" in result.err, "the longest document has 400" in result.err) == (2, True, True)


@pytest.mark.medium
def test_evaluate_memories_fits_cartridges(run_cli: RunCli) -> None:
    flags = ("--limit", 1, "--methods", "window", "--keep", 0.1, "--fit", 1)
    points = evaluate_json(run_cli, "tiny", *FLAGS, *flags)["comparisons"][0]["contexts"]
    names = ["no context", "full text", "last tokens 0.1", "fit 1 steps 0.1", "window 0.1"]
    assert [point["name"] for point in points] == names
    assert points[3]["used_bytes"] == points[4]["used_bytes"]
    run_cli("evaluate", "tiny", *FLAGS, "--limit", 2, "--methods", "window", "--keep", 0.1, "--device", "cpu")
    assert run_cli("report", "tiny", "--out", "page.html").code == 0, "one document of fit, two of the others"


@pytest.mark.medium
def test_evaluate_memories_fits_from_the_selection_with_shared_heads(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress, configs = contexts.compress_document, list[tuple[str, bool]]()

    def record_config(decoder: Decoder, ids: list[int], config: KVCompressionConfig, *args: Any) -> DocumentCompression:
        configs.append((config.method, config.equal_heads))
        return compress(decoder, ids, config, *args)

    monkeypatch.setattr(contexts, "compress_document", record_config)
    flags = ("--limit", 1, "--methods", "kvzip-equal", "--keep", 0.1, "--fit", 2)
    evaluate_json(run_cli, "tiny", *FLAGS, *flags)
    assert configs == [("kvzip", True), ("kvzip", False)]


@pytest.mark.medium
def test_evaluate_memories_of_a_compressor(run_cli: RunCli) -> None:
    needs("matplotlib")
    (comparison,) = evaluate_json(run_cli, "runs/autocompressor", *FLAGS, "--limit", 2, "--keep", 0.1)["comparisons"]
    points = {point["name"]: point for point in comparison["contexts"]}
    assert list(points) == ["no context", "full text", "last tokens 0.1", "summary vectors"]
    vectors = points["summary vectors"]
    assert (vectors["positions"], vectors["file_bytes"]) == (20, 20 * 16 * 4)  # five segments of 64 tokens
    assert vectors["used_bytes"] == 20 * 2 * 1 * 16 * 4  # keys and values of one layer
    assert vectors["documents"] == 2
    assert run_cli("report", "runs/autocompressor", "--out", "compressor.html").code == 0
    assert "summary vectors" in Path("compressor.html").read_text()


@pytest.mark.parametrize("num_tokens", [273, 274])  # the longest document of one window, and one of two
@pytest.mark.parametrize("method", ["kvzip", "kvzip-equal", "snapkv"])
def test_iter_kv_memories_are_those_of_compress(folder: Path, method: str, num_tokens: int) -> None:
    model, (score, equal_heads), keeps = load_tiny(folder), KV_METHODS[method], (0.07, 0.29, 0.5)
    ids, prompt = model.tokenizer.encode("1, 2, 3, 4. " * 30)[:num_tokens], build_repeat_prompt(model.tokenizer)
    config = KVCompressionConfig(score, equal_heads=equal_heads)
    memories = list(contexts.iter_kv_memories(model.decoder, ids, config, keeps, prompt))
    for keep, memory in zip(keeps, memories, strict=True):
        expected = compress_document(model.decoder, ids, replace(config, keep=keep), prompt)
        assert len(expected.windows) == (2 if num_tokens > 273 and score == "kvzip" else 1)
        assert memory.is_equal(expected.memory)
        (context,) = contexts.iter_kv_contexts(model.decoder, model.tokenizer, ids, method, [keep])
        rows = torch.tensor([model.tokenizer.encode("5, 6.")])
        after = model.decoder(model.decoder.embed(rows), expected.memory.to_cache()).hidden_states
        assert torch.equal(context.hidden_states(rows, torch.ones_like(rows, dtype=torch.bool)), after)


def test_evaluate_memories_measures_what_compress_writes(
    run_cli: RunCli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a document that is read in several windows, whose memory takes the positions of its slots only."""
    text, memory = tmp_path / "text.txt", tmp_path / "memory.safetensors"
    model, book = load_tiny(folder), json.loads(Path("books.jsonl").read_text().splitlines()[0])["text"]
    measured = list[KVMemory]()
    build = contexts.build_kv_context
    monkeypatch.setattr(contexts, "build_kv_context", lambda *args: measured.append(args[2]) or build(*args))
    command = ("--tasks", "memories", "--documents", "books.jsonl", "--tokens", 320, "--limit", 1)
    evaluate_json(run_cli, "tiny", *command, "--methods", "kvzip", "--keep", 0.29)
    documents = load_probed_documents(model.tokenizer, str(folder / "books.jsonl"), None, 320, 1)[0]
    text.write_text(model.tokenizer.decode(documents[0].ids))
    assert book[:20] == text.read_text()[:20]
    assert run_cli("compress", "tiny", text, "--out", memory, "--keep", 0.29, "--device", "cpu").code == 0
    written = replace(KVMemory.load(memory), metadata=None)
    assert int(written.num_tokens) == 92, "two windows of 160 tokens, at consecutive positions"
    assert measured[-1].is_equal(written)


def test_evaluate_memories_cuts_documents_to_what_can_be_fitted(run_cli: RunCli) -> None:
    command = ("tiny", "--tasks", "memories", "--documents", "books.jsonl", "--fit", 1, "--tokens", 337)
    result = run_cli("evaluate", *command, "--device", "cpu")
    assert result.code == 2, result.err
    assert (
        "the 176 tokens after it need 513 positions, and the model has 512; the longest document has 336" in result.err
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tasks", "memories"), "pass --documents FILE.jsonl, --questions FILE.jsonl, or both"),
        ((*FLAGS, "--methods", "magic"), "--methods magic: choose from kvzip, kvzip-equal"),
        ((*FLAGS, "--keep", "2"), "--keep 2: expected numbers above 0 and at most 1"),
        ((*FLAGS, "--tokens", "500"), "need 612 positions, and the model has 512"),
        ((*FLAGS, "--protocol", "codi"), "--protocol: only for runs that answer questions"),
        ((*FLAGS, "--batch-size", "8"), "--batch-size: only for runs that answer questions"),
        ((*FLAGS[:2], *FLAGS[4:]), "about document a: there is no such document"),
        ((*FLAGS, "--prompt", "chat"), "has no chat template"),
        (("--tasks", "test", "--keep", "0.5"), "--keep: only for the task memories"),
    ],
)
def test_evaluate_memories_refuses(run_cli: RunCli, flags: tuple[object, ...], message: str) -> None:
    result = run_cli("evaluate", "tiny", *flags, "--device", "cpu")
    assert result.code in (2, 66)
    assert message in result.err


def test_evaluate_memories_refuses_methods_for_compressors(run_cli: RunCli) -> None:
    for option in (("--fit", 2), ("--methods", "window")):
        result = run_cli("evaluate", "runs/autocompressor", *FLAGS, *option, "--device", "cpu")
        check_refused(result, 2, "--methods, --fit: only for models")


def test_report_of_a_model_without_results(run_cli: RunCli) -> None:
    result = run_cli("report", "stories260k", "--out", "none.html")
    check_refused(result, 66, "run laconic evaluate on it first")


def test_build_kv_context_counts_the_bytes_of_the_file(folder: Path, tmp_path: Path) -> None:
    model = load_tiny(folder)
    config = KVCompressionConfig("kvzip", slots=60)
    memory = compress_text(model.decoder, model.tokenizer, "1, 2, 3, 4. " * 30, config).memory
    memory.save(tmp_path / "memory.safetensors")
    size, context = (tmp_path / "memory.safetensors").stat().st_size, build_kv_context(model.decoder, "kvzip", memory)
    assert 0 < size - context.file_bytes < 4000  # header and metadata
