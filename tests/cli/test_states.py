"""Models that learn while they read, as a user gives them to `compress`, `generate`, `inspect` and `laconic.load`."""

import io
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import laconic
from laconic.compression.memory_file import abbreviate_hash
from laconic.config.nested import CMSOptions
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import CorruptArtifactError, DiskError, UsageError
from laconic.experiment.text_models import nested_model
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.experiment.text_models.read_into_state import ReadDocument, StateReadingJob
from laconic.generation.config import GenerationConfig
from laconic.models.init import init_parameters
from laconic.nested import state as values
from laconic.nested import state_file
from laconic.nested.hope.model import Hope, HopeAttention
from laconic.nested.state import FastWeightState
from laconic.storage.tensor_tree import named_tensors
from tests.compression.compressors import reader
from tests.conftest import RunCli
from tests.models.fixtures import fresh
from tests.nested.helpers import states_equal
from tests.tolerances import FLOAT32, error

pytestmark = pytest.mark.usefixtures("unchecked")
BOOK = "Chapter one. " + " ".join(f"Sentence {i} stands here." for i in range(6))
LOCAL = CMSOptions(inner_objective="associative", inner_lr=0.5)


def hope(seed: int) -> Hope:
    return Hope(laconic.HopeConfig.attention_free(257, 8, 2, chunk_sizes=(8, 16), num_heads=2, cms=LOCAL), seed)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of saved models, another one's weights, one with attention; texts; a file of summary vectors."""
    folder = tmp_path_factory.mktemp("learners")
    donor = fresh("llama", vocab_size=257, max_position_embeddings=64)
    attending = HopeAttention.from_decoder(donor, (8, 16), options=LOCAL.model_copy(update={"target": "start"}))
    other_donor = fresh("llama", vocab_size=257, max_position_embeddings=64)
    init_parameters(dict(other_donor.named_parameters()), other_donor.config.initializer_range, seed=5)
    models = {"hope": hope(1), "other": hope(2), "attending": attending, "donor": donor, "other donor": other_donor}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        build_byte_tokenizer().save(folder / name)
    (folder / "book.txt").write_text(BOOK)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": BOOK[: 40 * n]}) + "\n" for n in (1, 3, 2)))
    reader().compress([BOOK]).save(folder / "vectors.safetensors")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, place: Path, tmp_path: Path) -> RunCli:
    """Run a command in an empty directory; arguments that are names in `place` become paths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nested_model, "READING_CHUNK", 32)
    return lambda *args: run_cli(*(place / str(arg) if (place / str(arg)).exists() else arg for arg in args))


@pytest.fixture
def me(run: RunCli, place: Path) -> str:
    """The state of the book, in a file of its own; read once."""
    read = place / "read.safetensors"
    if not read.exists():
        assert run("compress", "hope", "book.txt", "--out", read)[0] == 0
    shutil.copy(read, "me.safetensors")
    return "me.safetensors"


def learner(place: Path, name: str = "hope") -> NestedTextModel:
    model = laconic.load(place / name)
    assert isinstance(model, NestedTextModel)
    return model


def donor_model(place: Path) -> NestedTextModel:
    return NestedTextModel.from_pretrained(place / "donor")


def once(model: NestedTextModel, ids: list[int]) -> FastWeightState:
    with torch.no_grad():
        return cast(FastWeightState, model.model.read_tokens(torch.tensor([ids])).cache)


def near(mine: FastWeightState, theirs: FastWeightState) -> None:
    """The memories of both, in float32 and over hundreds of writes."""
    for one, other in zip(mine.layers, theirs.layers, strict=True):
        for name in one.memory:
            x, y = cast(Any, one.memory[name]).change, cast(Any, other.memory[name]).change
            assert error(x, y) < 100 * FLOAT32


def refused(run: RunCli, code: int, message: str, *args: object) -> None:
    before = {path: path.read_bytes() for path in Path().iterdir()}
    ended, out, err = run(*args)
    assert (ended, out) == (code, ""), err
    last = err.strip().splitlines()[-1]
    assert last.startswith("laconic: ")
    assert message in last
    assert {path: path.read_bytes() for path in Path().iterdir()} == before, "nothing is left, and nothing changed"


@pytest.mark.medium
def test_compress_file_stream_and_python_agree(run: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("compress", "hope", "book.txt", "--out", "me.safetensors")
    assert code == 0, err
    assert out.startswith(f"read       {len(BOOK)} tokens\nbytes      ")
    assert f"level      chunk 8 in 2 layers: {len(BOOK) // 8} updates, norm of the change " in out
    assert f"level      chunk 16 in 2 layers: {len(BOOK) // 16} updates, norm of the change " in out
    assert "memory     memory in 2 layers: " in out
    assert "wrote me.safetensors" in err
    model = learner(place)
    state = model.load_memory("me.safetensors")
    near(state, once(model, model.tokenizer.encode(BOOK)))
    assert states_equal(model.compress([BOOK]), state)
    assert states_equal(model.stream([BOOK[:50], BOOK[50:]]), state)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BOOK.encode())))
    assert run("compress", "hope", "-", "--out", "live.safetensors")[0] == 0
    assert states_equal(model.load_memory("live.safetensors"), state)


@pytest.mark.medium
def test_compress_cost_and_rows(run: RunCli, place: Path) -> None:
    code, out, _ = run(
        "compress", "hope", "rows.jsonl", "--out", "x.safetensors", "--batch-size", "2", "--format", "json"
    )
    report = json.loads(out)
    assert code == 0
    assert (report["kind"], report["bytes"]) == ("state", Path("x.safetensors").stat().st_size)
    cost, model = report["cost"], learner(place)
    state = model.load_memory("x.safetensors")
    assert (cost["num_texts"], cost["num_tokens"], cost["num_state_tokens"]) == (3, 240, 240)
    assert cost["state_bytes"] == values.num_bytes(state)
    assert cost["text_cache_bytes"] == 240 * 2 * 2 * 8 * 4
    assert [(x["chunk_size"], x["num_layers"]) for x in cost["levels"]] == [(8, 2), (16, 2)]
    assert cost["levels"][0]["updates_per_layer"] == (40 // 8 + 120 // 8 + 80 // 8) / 3
    assert state.position.tolist() == [40, 120, 80]
    alone = model.compress([BOOK[:120]])
    near(values.select_rows(state, [1]), alone)
    Path("more.txt").write_text(BOOK[:40])
    for memory, total in ((None, 40), ("more.safetensors", 80)):
        flags = () if memory is None else ("--memory", memory)
        out = run("compress", "hope", "more.txt", "--out", "more.safetensors", *flags)[1]
        assert "read       40 tokens\n" in out
        assert f"a KV cache of all that it has read ({total} tokens) takes {total * 128 / 1024:.1f} KiB" in out


@pytest.mark.medium
@pytest.mark.parametrize(("source", "after"), [("book.txt", 4), ("rows.jsonl", 6)])
def test_compress_resume_equals_uninterrupted(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, place: Path, source: str, after: int
) -> None:
    arguments = ("compress", "hope", source, "--batch-size", "2")
    code, whole, _ = run(*arguments, "--out", "whole.safetensors")
    assert code == 0
    taken, step = 0, StateReadingJob.advance

    def counted(self: StateReadingJob, piece: Any) -> FastWeightState:
        nonlocal taken
        taken += 1
        if taken == after:
            raise KeyboardInterrupt
        return step(self, piece)

    monkeypatch.setattr(StateReadingJob, "advance", counted)
    code, _, err = run(*arguments, "--out", "part.safetensors", "--save-every", "2")
    assert code == 130
    assert "tokens are in part.safetensors.part; the same command with --resume continues" in err
    assert not Path("part.safetensors").exists()
    assert "is a state in progress, expected a memory (summary vectors)" in run("inspect", "part.safetensors.part")[2]
    code, out, err = run(*arguments, "--out", "part.safetensors", "--resume")
    assert code == 0
    assert "resuming after " in err
    assert " nats per token while reading" in out
    assert out == whole
    model = learner(place)
    assert states_equal(model.load_memory("whole.safetensors"), model.load_memory("part.safetensors"))
    assert nested_model.load_read_documents("whole.safetensors") == nested_model.load_read_documents("part.safetensors")
    assert not Path("part.safetensors.part").exists()


def test_compress_resume_checks_text_and_weights(run: RunCli, place: Path) -> None:
    model = learner(place)
    study = model.start_reading()
    next(study.run([[model.token_stream("a.txt", [BOOK])]]))
    key = {"batch_size": None, "weights": model.model.weights_fingerprint, "tokenizer": model.tokenizer.fingerprint}
    study.save(Path("x.safetensors.part"), key)
    arguments = ("a.txt", "--out", "x.safetensors", "--resume")
    Path("a.txt").write_text(BOOK.replace("one", "two"))
    refused(run, 66, "--resume", "compress", "hope", *arguments)
    Path("a.txt").write_text(BOOK)
    refused(run, 73, "weights", "compress", "other", *arguments)


@pytest.mark.medium
def test_generate_learn_saves_the_state(run: RunCli, place: Path, me: str) -> None:
    before = Path(me).read_bytes()
    arguments = ("generate", "hope", "Who", "--memory", me, "--max-tokens", "4")
    code, out, err = run(*arguments, "--learn", "--save-state", "new.safetensors")
    assert code == 0
    assert "4 generated in" in err
    assert f"wrote new.safetensors, {Path('new.safetensors').stat().st_size:,} bytes: {len(BOOK) + 7} tokens" in err
    assert Path(me).read_bytes() == before
    model = learner(place)
    (generation,) = model.generate(
        ["Who"], GenerationConfig(update_on_prompt=True, max_tokens=4), memory=model.load_memory(me)
    )
    assert out == "Who" + generation.text + "\n"
    new = model.load_memory("new.safetensors")
    assert states_equal(new, generation.state)
    near(new, once(model, model.tokenizer.encode(BOOK + "Who") + generation.token_ids))
    names = [[document.name for document in row] for row in nested_model.load_read_documents("new.safetensors")]
    assert names == [["book.txt", "prompt and answer"]]
    assert run(*arguments, "--learn", "--save-state", me)[0] == 0, "--save-state writes over a file, as --out does"
    assert states_equal(model.load_memory(me), new)
    assert run("generate", "hope", "a", "bc", "--memory", me, "--max-tokens", "2")[0] == 0


def test_generate_save_state_does_not_replace_a_text(run: RunCli) -> None:
    Path("letter.txt").write_text(BOOK)
    message = "--save-state letter.txt exists and is not a memory; delete it or choose another file"
    arguments = ("generate", "hope", "--file", "letter.txt", "--learn", "--save-state", "letter.txt")
    refused(run, 73, message, *arguments, "--max-tokens", "0")


def test_generate_escapes_names_of_documents(run: RunCli, place: Path) -> None:
    model = learner(place)
    texts = [[ReadDocument(name, "", 3)] for name in ("one", "two\x1b[2J")]
    model.save(model.compress(["abc", "def"]), "rows.safetensors", texts)
    code, out, err = run("generate", "hope", "x", "--memory", "rows.safetensors", "--max-tokens", "2")
    assert code == 0, err
    assert "[two\\u001b[2J] x" in out


@pytest.mark.medium
def test_generate_prompts_and_rows(run: RunCli, place: Path) -> None:
    assert run("compress", "hope", "rows.jsonl", "--out", "rows.safetensors")[0] == 0
    arguments = ("generate", "hope", "x", "--memory", "rows.safetensors", "--max-tokens", "2", "--format", "json")
    report = json.loads(run(*arguments, "--learn", "--save-state", "after.safetensors")[1])["generations"]
    assert [(row["title"], row["prompt"]) for row in report] == [(f"[rows.jsonl:{i}]", "x") for i in (1, 2, 3)]
    model = learner(place)
    assert model.load_memory("after.safetensors").position.tolist() == [43, 123, 83]
    alone = model.generate(
        ["x"],
        GenerationConfig(update_on_prompt=True, max_tokens=2),
        memory=values.select_rows(model.load_memory("rows.safetensors"), [1]),
    )
    assert report[1]["ids"] == alone[0].token_ids
    refused(run, 2, "2 prompts", "generate", "hope", "x", "y", "--memory", "rows.safetensors", "--max-tokens", "2")
    with pytest.raises(UsageError, match=r"state of 3 texts.*; 1 given"):
        model.compress(["a"], model.load_memory("rows.safetensors"))
    with pytest.raises(UsageError, match="text"):
        model.compress([])
    on = model.compress(["abc"], values.select_rows(model.load_memory("rows.safetensors"), [0]))
    assert on.position.tolist() == [43]


def test_generate_rows_continue_a_state(run: RunCli, me: str, place: Path) -> None:
    """Each row begins with the state, whatever the size of a batch."""
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Who", "x", "Chapter")))
    arguments = ("generate", "hope", "--memory", me, "--max-tokens", "3")
    for flags in ((), ("--learn",)):
        single = json.loads(run(*arguments, *flags, "Who", "x", "Chapter", "--format", "json")[1])["generations"]
        for size in (1, 2):
            code, out, err = run(*arguments, *flags, "--input", "prompts.jsonl", "--batch-size", size)
            assert code == 0, err
            ids = [json.loads(line)["generation"]["ids"] for line in out.splitlines()]
            assert ids == [row["ids"] for row in single]


@pytest.mark.medium
def test_attention_cache_stays_within_the_positions(run: RunCli, place: Path) -> None:
    """Its caches stay within the model's positions, and the levels go on."""
    assert run("compress", "attending", "book.txt", "--out", "a.safetensors")[0] == 0
    model = learner(place, "attending")
    state = model.load_memory("a.safetensors")
    assert state.position.tolist() == [len(BOOK)]
    assert all(layer.cache is not None and layer.cache.S <= 64 for layer in state.layers)
    assert all(level.num_updates.item() for layer in state.layers for level in cast(Any, layer.cms).levels)
    assert run("generate", "attending", "Who", "--memory", "a.safetensors", "--max-tokens", "50").code == 0
    still = model.generate(["Who"], GenerationConfig(max_tokens=50), memory=state)[0].state
    for layer, before in zip(cast(FastWeightState, still).layers, state.layers, strict=True):
        assert states_equal(layer.cms, before.cms), "without --learn the levels stand still"
    moved = model.generate(["Who stands here?"], GenerationConfig(update_on_prompt=True, max_tokens=2), memory=state)[
        0
    ].state
    levels = cast(Any, cast(FastWeightState, moved).layers[0].cms).levels
    assert int(levels[0].num_updates) > int(cast(Any, state.layers[0].cms).levels[0].num_updates)


def test_inspect_state_file(run: RunCli, place: Path, me: str) -> None:
    code, out, _ = run("inspect", me)
    assert code == 0
    assert out.startswith(f"me.safetensors: fast-weight state of hope, 1 row, {len(BOOK)} tokens read, ")
    for line in (
        f"model      {abbreviate_hash(learner(place).model.weights_fingerprint)}",
        "level      chunk 8 in 2 layers: ",
        "memory     projections in 2 layers: ",
        f"text       book.txt: {len(BOOK)} tokens",
    ):
        assert line in out
    report = json.loads(run("inspect", me, "--format", "json")[1])["state"]
    assert (report["kind"], report["tokens"]) == ("state", len(BOOK))
    assert report["model"] == learner(place).model.weights_fingerprint
    assert report["levels"][0]["update_norm"] > 0
    assert report["memories"][0]["update_norm"] > 0
    refused(run, 2, "is a memory or state, which takes no question", "inspect", me, "What?")


def test_generate_refuses_foreign_and_damaged_states(run: RunCli, place: Path, me: str) -> None:
    arguments = ("Who", "--max-tokens", "2", "--memory")
    mine = learner(place).model.weights_fingerprint[:12]
    refused(run, 76, f"{mine}…", "generate", "other", *arguments, me)
    refused(run, 76, "memory (summary vectors)", "generate", "hope", *arguments, "vectors.safetensors")
    with pytest.raises(CorruptArtifactError, match=r"state \(fast weights\)"):
        reader().load_memory(me)
    content = bytearray(Path(me).read_bytes())
    content[-1] ^= 1
    Path("bad.safetensors").write_bytes(content)
    refused(run, 76, "bad.safetensors is damaged", "generate", "hope", *arguments, "bad.safetensors")
    refused(run, 76, "bad.safetensors is damaged", "inspect", "bad.safetensors")
    refused(run, 66, "no file gone.safetensors; give one", "generate", "hope", *arguments, "gone.safetensors")


def test_state_file_checks_tokenizer(place: Path, me: str) -> None:
    model = learner(place)
    other = NestedTextModel(model.model, build_byte_tokenizer())
    other.tokenizer.fingerprint = "0123456789abcdef"
    with pytest.raises(CorruptArtifactError, match=r"tokenizer 0123456789ab; use"):
        other.load_memory(me)


@pytest.mark.parametrize(
    ("message", "args"),
    [
        ("--save-state: needs --learn", ["--save-state", "new.safetensors"]),
        ("--save-state no/x.safetensors", ["--learn", "--save-state", "no/x.safetensors"]),
        ("--memory: 2 files", ["--memory", "hope", "--memory", "hope"]),
        ("--sample: not available", ["--sample"]),
        ("--inner-lr", ["--learn", "--inner-lr", "0.5"]),
        ("--max-tokens 0: only with --learn and --save-state", ["--learn", "--max-tokens", "0"]),
        ("--allow-missing: not available", ["--allow-missing", "x"]),
    ],
)
def test_generate_invalid_flags(run: RunCli, message: str, args: list[str]) -> None:
    refused(run, 2, message, "generate", "hope", "x", "--max-tokens", "1", *args)


def test_flags_of_other_models_are_refused(run: RunCli, place: Path) -> None:
    message = "--save-state: needs --learn; add it, or remove --save-state"
    refused(run, 2, message, "generate", "donor", "x", "--save-state", "a")
    message = "--keep: cannot be used with --learn"
    refused(run, 2, message, "compress", "donor", "book.txt", "--out", "a", "--learn", "--keep", "0.5")
    for inner_lr in (0, 1):
        refused(
            run, 2, "--inner-lr: needs --learn", "compress", "donor", "book.txt", "--out", "a", "--inner-lr", inner_lr
        )
    arguments = ("--input", "rows.jsonl", "--learn", "--save-state", "a.safetensors")
    refused(run, 2, "--input: not available with --save-state", "generate", "hope", *arguments)
    message = "--vectors: not available with a fast-weight state"
    refused(run, 2, message, "compress", "hope", "book.txt", "--out", "x.safetensors", "--vectors", "2")
    Path("empty.txt").write_text("")
    refused(run, 66, "empty.txt", "compress", "hope", "empty.txt", "--out", "x.safetensors")
    Path("none.jsonl").write_text("")
    refused(run, 66, "contains no rows", "compress", "hope", "none.jsonl", "--out", "x.safetensors")
    still = NestedTextModel(hope(1), build_byte_tokenizer(), update_weights=False)
    with pytest.raises(UsageError, match=r"inner_loop.enabled is false"):
        still.compress(["a"])
    assert states_equal(
        still.generate(["ab"], config=GenerationConfig(max_tokens=2))[0].state.layers[0].cms,  # pyright: ignore[reportAttributeAccessIssue]
        still.model.initial_state(1).layers[0].cms,
    )
    with pytest.raises(UsageError, match="checkpoint"):
        laconic.load(place / "hope", step=3)
    with pytest.raises(UsageError, match="step: give the number of a step, not str"):
        laconic.load(place / "hope", step="3")  # type: ignore[arg-type]


def test_plain_checkpoint_gives_the_logits_of_the_checkpoint_before_it_learns(place: Path) -> None:
    decoder, model = laconic.Decoder.from_pretrained(place / "donor"), donor_model(place)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = decoder.logits(decoder(decoder.embed(ids)).hidden_states)
        assert torch.equal(model.model.logits(model.model.read_tokens(ids).hidden_states), expected)
        assert torch.equal(
            model.model.logits(model.model.read_tokens(ids, update_weights=False).hidden_states), expected
        )


@pytest.mark.medium
def test_plain_checkpoint_learns_and_goes_on_from_its_state(run: RunCli, place: Path) -> None:
    first, second = BOOK[:110], BOOK[110:]
    Path("first.txt").write_text(first)
    Path("second.txt").write_text(second)
    code, out, err = run("compress", "donor", "first.txt", "--learn", "--out", "first.safetensors")
    assert code == 0, err
    assert "level      chunk 64 in 2 layers: 1 update, norm of the change " in out
    assert " nats per token while reading" in out
    assert run("compress", "donor", "second.txt", "--memory", "first.safetensors", "--out", "both.safetensors")[0] == 0
    assert "; checkpoint " in run("inspect", "both.safetensors")[1]
    model = donor_model(place)
    state = model.compress([second], model.compress([first]))
    assert states_equal(model.load_memory("both.safetensors"), state)
    names = [[document.name for document in row] for row in nested_model.load_read_documents("both.safetensors")]
    assert names == [["first.txt", "second.txt"]]
    arguments = ("--memory", "first.safetensors", "--learn", "--max-tokens", "0", "--save-state", "again.safetensors")
    code, out, err = run("generate", "donor", "--file", "second.txt", *arguments)
    assert (code, out) == (0, ""), err
    assert states_equal(model.load_memory("again.safetensors"), state)
    out = run("generate", "donor", "Who", "--memory", "both.safetensors", "--max-tokens", "3")[1]
    assert out == f"Who{model.generate(['Who'], GenerationConfig(max_tokens=3), memory=state)[0].text}\n"


def test_state_in_bfloat16_is_half_as_large(run: RunCli, place: Path) -> None:
    model, sizes, states = donor_model(place), list[int](), list[FastWeightState]()
    for dtype in ("float32", "bfloat16"):
        arguments = ("compress", "donor", "book.txt", "--learn", "--out", "s.safetensors", "--dtype", dtype)
        assert run(*arguments)[0] == 0
        sizes.append(values.num_bytes(load_state("s.safetensors")))
        states.append(model.load_memory("s.safetensors"))
    assert sizes[1] < 0.6 * sizes[0]
    exact, rounded = (dict(named_tensors(state)) for state in states)
    assert {name: x.dtype for name, x in rounded.items()} == {name: x.dtype for name, x in exact.items()}
    assert all(torch.allclose(rounded[name], x, rtol=1e-2, atol=1e-2) for name, x in exact.items())


def test_state_of_weights_in_another_dtype_is_refused_with_that_dtype(run: RunCli, place: Path) -> None:
    learn = ("generate", "donor", "--file", "book.txt", "--learn", "--max-tokens", "1", "--save-state", "s.safetensors")
    assert run(*learn, "--dtype", "bfloat16").code == 0
    message = (
        'belongs to weights in bfloat16, this is weights in float32; load the model with dtype="bfloat16" '
        "(on the command line --dtype bfloat16)"
    )
    refused(run, 76, message, "generate", "donor", "x", "--memory", "s.safetensors")
    arguments = ("generate", "donor", "x", "--memory", "s.safetensors", "--dtype", "bfloat16", "--max-tokens", "1")
    assert run(*arguments)[0] == 0
    model = NestedTextModel.from_pretrained(place / "donor", dtype="bfloat16")
    state, message = donor_model(place).compress(["ab"]), 'read with weights in float32, .* bfloat16; load .*"float32"'
    with pytest.raises(UsageError, match=message):
        model.compress(["a"], state)
    with pytest.raises(UsageError, match=message):
        model.generate(["a"], memory=state)
    with pytest.raises(UsageError, match="config"):
        model.generate(["a"], state)  # type: ignore[arg-type]


def load_state(path: str) -> FastWeightState:
    return state_file.read_state_file(path).state


@pytest.mark.medium
def test_plain_checkpoint_state_is_refused_by_other_models(run: RunCli, place: Path, me: str) -> None:
    assert run("compress", "donor", "book.txt", "--learn", "--inner-lr", "0.5", "--out", "s.safetensors")[0] == 0
    refused(run, 76, "belongs to plain checkpoint ", "generate", "other donor", "x", "--memory", "s.safetensors")
    refused(run, 76, "belongs to plain checkpoint ", "generate", "hope", "x", "--memory", "s.safetensors")
    refused(run, 76, "belongs to a trained nested model", "generate", "donor", "x", "--memory", me)
    Path("note.txt").write_text("A short note.")
    assert run("compress", "donor", "note.txt", "--method", "window", "--out", "kv.safetensors")[0] == 0
    for memory, kind in (("kv.safetensors", "keys and values"), ("vectors.safetensors", "summary vectors")):
        message = f"is a memory ({kind}), expected a state (fast weights)"
        refused(run, 76, message, "generate", "donor", "x", "--memory", memory, "--learn")
    refused(run, 66, "donor has no chat template", "chat", "donor", "--memory", "s.safetensors")
    message = "--memory: 2 files; a conversation continues one fast-weight state"
    refused(run, 2, message, "chat", "donor", "--memory", "s.safetensors", "--memory", "s.safetensors")
    refused(run, 2, "--inner-lr: s.safetensors has learned with 0.5", "compress", "donor", "book.txt", "--memory",
            "s.safetensors", "--inner-lr", "0", "--out", "t.safetensors")  # fmt: skip
    with pytest.raises(CorruptArtifactError, match=r"inner_lr is 0.1, expected 0.5"):
        donor_model(place).load_memory("s.safetensors")
    with pytest.raises(UsageError, match=r"inner_lr=-1 must be at least 0 \(default: 0.1\)"):
        NestedTextModel.from_pretrained(place / "donor", inner_lr=-1)
    with pytest.raises(UsageError, match=r"texts: give text .*, not NoneType"):
        donor_model(place).compress(None)  # type: ignore[arg-type]
    for chunk_sizes, match in (((64, 96), "must divide"), (32, "chunk_sizes=32: should be a valid array")):
        with pytest.raises(UsageError, match=match):
            NestedTextModel.from_pretrained(place / "donor", chunk_sizes=chunk_sizes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"give a state and then its path, save\(state, path\), not str"):
        donor_model(place).save("s.safetensors", donor_model(place).compress(["a"]))  # type: ignore[arg-type]


@pytest.mark.medium
def test_state_in_memory_with_more_waiting_tokens_than_a_chunk_is_refused(place: Path) -> None:
    other = NestedTextModel.from_pretrained(place / "donor", chunk_sizes=[32])
    config = laconic.GenerationConfig(max_tokens=1)
    with pytest.raises(UsageError, match=r"read by a model with other chunk sizes, this one has 32"):
        other.generate(["a"], config, memory=donor_model(place).compress(["a" * 50]))
    for num_bytes in (1, 31, 32, 33, 63, 64, 65, 100):
        assert other.generate(["a"], config, memory=other.compress(["a" * num_bytes]))


@pytest.mark.medium
def test_reading_warns_if_learning_does_harm() -> None:
    """Unclipped steps ruin a trained model; the default clipping prevents that whatever the learning rate is."""
    story = "Once upon a time there was a little girl named Lily. She loved to play with her toys in the park. " * 8
    clipped = NestedTextModel.from_pretrained("stories260k", inner_lr=1e3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = clipped.compress([story])
    ids = clipped.tokenizer.encode(story)
    assert ids[0] == clipped.tokenizer.bos_token_id
    assert state.position.tolist() == [len(ids)]
    assert clipped.compress([story], state).position.tolist() == [2 * len(ids) - 1], "BOS only at the beginning"
    unclipped = NestedTextModel.from_pretrained("stories260k", inner_lr=1e3, max_update_ratio=0)
    with pytest.warns(UserWarning, match="learning does harm"):
        unclipped.compress([story])


@pytest.mark.medium
def test_a_full_disk_leaves_what_was_there(run: RunCli, place: Path, me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskError("x.safetensors: No space left on device; 900 bytes to write, 0 free")

    with monkeypatch.context() as patch:
        patch.setattr("laconic.storage.atomic.save_artifact", full)
        ended = run("compress", "hope", "book.txt", "--out", "x.safetensors")
        assert (ended[0], ended[1]) == (74, "")
        assert "No space left on device" in ended[2]
        before = Path(me).read_bytes()
        ended = run("generate", "hope", "x", "--memory", me, "--learn", "--save-state", me, "--max-tokens", "1")
        assert ended[0] == 74
        assert Path(me).read_bytes() == before


@pytest.mark.medium
def test_compress_continues_each_text_of_a_state(run: RunCli, place: Path) -> None:
    """Each row of a .jsonl continues the row of the state at the same place; batches change nothing."""
    assert run("compress", "hope", "rows.jsonl", "--out", "rows.safetensors")[0] == 0
    more = [BOOK[10:60], BOOK[:70], BOOK[5:25]]
    Path("more.jsonl").write_text("".join(json.dumps({"text": text, "id": text[:3]}) + "\n" for text in more))
    flags = ("--memory", "rows.safetensors", "--out", "both.safetensors", "--batch-size", "2")
    assert run("compress", "hope", "more.jsonl", *flags).code == 0
    model = learner(place)
    first, both = model.load_memory("rows.safetensors"), model.load_memory("both.safetensors")
    assert both.position.tolist() == [40 + 50, 120 + 70, 80 + 20]
    for row, text in enumerate(more):
        near(values.select_rows(both, [row]), model.compress([text], values.select_rows(first, [row])))
    assert states_equal(model.compress(more, "rows.safetensors"), model.compress(more, first))
    documents = nested_model.load_read_documents("both.safetensors")
    assert [document.name for document in documents[1]] == ["rows.jsonl:2", more[1][:3]]
    Path("two.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in more[:2]))
    refused(run, 2, "texts is continued by as many", "compress", "hope", "two.jsonl", *flags[:2], "--out", "x")
    refused(run, 2, "1 given", "compress", "hope", "book.txt", *flags[:2], "--out", "x")


def test_generate_from_the_file_of_a_state(place: Path, me: str) -> None:
    model, config = learner(place), GenerationConfig(max_tokens=4, eos_token_ids=())
    expected = model.generate("More", config, memory=model.load_memory(me))[0].token_ids
    assert model.generate("More", config, memory=me)[0].token_ids == expected
    assert model.generate("More", config, memory=Path(me))[0].token_ids == expected
    vectors = cast(Any, reader().compress([BOOK]))
    with pytest.raises(UsageError, match="this model reads a FastWeightState or its file, not SummaryMemory"):
        model.generate("More", memory=vectors)


def test_compress_checks_the_disk_with_the_first_segment(
    run: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    advance = StateReadingJob.advance
    monkeypatch.setattr(StateReadingJob, "advance", lambda self, piece: steps.append(1) or advance(self, piece))
    monkeypatch.setattr("laconic.storage.atomic.free_bytes", lambda path: 1000)
    refused(run, 74, "1,000 are free", "compress", "hope", "book.txt", "--out", "x.safetensors")
    assert len(steps) == 1
