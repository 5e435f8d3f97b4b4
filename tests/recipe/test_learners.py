"""Method hope from a recipe: models new, on donors and as they were made; lanes; a resumed run and its fast weights."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from laconic import cli
from laconic.core import state as values
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.families import DecoderConfig
from laconic.core.runs import RunFolder
from laconic.data.lanes import Lanes
from laconic.data.passages import tokenized
from laconic.data.text import Document
from laconic.data.tokens import byte_tokenizer
from laconic.methods.hope_config import HopeConfig
from laconic.methods.hope_model import Hope, HopeAttention
from laconic.methods.learner import Learner
from laconic.methods.learning_settings import ContinuumOptions, Learning, SelfTitansOptions, TitansOptions
from laconic.recipe import learners
from laconic.recipe.build import build
from laconic.recipe.need_learning import kept, state_bytes
from laconic.recipe.opened import opened, start
from laconic.recipe.plan import plan, told
from laconic.recipe.read import read
from laconic.recipe.schema import Recipe
from laconic.recipe.watching import in_lanes
from tests.training.ground import same

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")
SMALL = """method = "hope"
seed = 5
[model]
family = "llama"
tokenizer = "bytes"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[memory]
heads = 2
[memory.self]
chunk_memory = 8
chunk_projections = 8
[levels]
chunks = [8]
inner = "associative"
[data]
kind = "text"
path = "books.jsonl"
text = { tokens = 32, segment = 16 }
[validation]
rows = 4
batch = 2
[train]
steps = 4
batch = 2
lr = 1e-2
carry = true
save_every = 2
keep_every = 2
"""
ATTENTION = "memory.mixer=attention"
Run = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small recipe and its books, in which a user stands."""
    rows = [{"book": f"b{i % 6}", "text": f"{i} " + chr(97 + i % 26) * 90} for i in range(30)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A command that succeeds: its standard output."""

    def call(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["laconic", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        told = capsys.readouterr()
        assert not end.value.code, told.err
        return told.out

    return call


def recipe(*more: str) -> Recipe:
    return read("small.toml", more)[0]


def donor(folder: Path) -> Path:
    config = DecoderConfig.small(
        "llama", vocab_size=byte_tokenizer().vocab_size, hidden_size=16, num_hidden_layers=3, head_dim=8
    )
    Decoder(config, seed=1).save_pretrained(folder / "donor")
    byte_tokenizer().save(folder / "donor")
    return folder / "donor"


def test_a_resumed_run_is_the_one_that_never_stopped_fast_weights_included(run: Run, folder: Path) -> None:
    run("train", "small.toml", "--out", "never")
    shutil.copytree("never", "again")
    run("train", "small.toml", "--out", "again", "--resume", "step-2")
    assert same(folder / "never", folder / "again", 4)
    step = RunFolder(folder / "never").step(4)
    assert (step / "state.safetensors").stat().st_size > 2 * 2 * 8 * 8 * 4
    lines = [json.loads(line) for line in (folder / "never/metrics.jsonl").read_text().splitlines()]
    assert {"nats", "right"} <= lines[-1]["validation"].keys()
    assert lines[0]["level0_fired"] > 0

    run("export", "never", "--out", "exported")
    whole = Hope.from_pretrained(folder / "exported")
    held = opened(folder / "never", CPU)
    assert isinstance(held.parts.decoder, Hope)
    assert held.parts.decoder.shape == whole.shape
    ids = torch.arange(20)[None]
    assert torch.equal(whole.advance(ids).hidden, held.parts.decoder.advance(ids).hidden)
    again, _ = start(read("small.toml", ["model.start=never"])[0], CPU)
    assert torch.equal(whole.advance(ids).hidden, cast(Hope, again).eval().advance(ids).hidden)


def test_a_new_model_is_what_its_tables_say(folder: Path) -> None:
    hope = start(recipe(), CPU)[0]
    assert type(hope) is Hope
    assert hope.shape.chunks == ((8,),)
    titans = start(recipe("memory.mixer=titans", "memory.chunk=4", "levels.gated=false"), CPU)[0]
    assert isinstance(titans, Hope)
    assert (titans.shape.mixer, titans.shape.chunk, len(titans.shape.maps)) == ("titans", 4, 2)
    titans.save_pretrained(folder / "titans")
    assert Hope.from_pretrained(folder / "titans").shape == titans.shape
    assert type(start(recipe(ATTENTION), CPU)[0]) is HopeAttention
    one, two = (start(recipe(f"model.init={init}", ATTENTION), CPU)[0] for init in ("range", "fan_in"))
    name = "model.layers.0.mlp.levels.0.gate_proj.weight"
    std = [float(model.get_parameter(name).detach().std()) for model in (one, two)]
    assert std == pytest.approx([0.02, 16**-0.5], rel=0.15)


def test_a_donor_keeps_its_bits_until_its_levels_move(folder: Path) -> None:
    path = donor(folder)
    asked = (f"model.name={path}", ATTENTION, "levels.chunks=[4, 8]")
    made = start(recipe(*asked), CPU)[0]
    assert isinstance(made, HopeAttention)
    assert made.shape.chunks == ((4,), (4,), (8,))
    ids = torch.arange(24)[None]
    still = cast(Hope, start(recipe(*asked, "levels.eta=0.0"), CPU)[0])
    plain = Decoder.from_pretrained(path)
    assert torch.equal(still.advance(ids).hidden, plain(plain.embed(ids)).hidden)
    with pytest.raises(Usage, match=r'memory\.mixer "self": a decoder that is given keeps its attention; set mixer = '):
        start(recipe(f"model.name={path}"), CPU)


def test_a_model_that_learns_is_what_it_was_made_as(folder: Path) -> None:
    cast(Hope, start(recipe(), CPU)[0]).save_pretrained(folder / "made")
    byte_tokenizer().save(folder / "made")
    asked = f"model.name={folder}/made"
    assert cast(Hope, start(recipe(asked), CPU)[0]).shape.chunks == ((8,),)
    assert learners.config_of(folder / "made").hidden_size == 16
    slower = cast(Hope, start(recipe(asked, "levels.chunks=[8, 16]"), CPU)[0])
    assert slower.shape.chunks == ((8, 16),)
    made = Hope.from_pretrained(folder / "made")
    ids = torch.arange(7)[None]
    assert torch.equal(slower.eval().advance(ids).hidden, made.advance(ids).hidden)
    with pytest.raises(Usage, match=r"\[levels\] differs from what the model was made with; leave the table out, or "):
        start(recipe(asked, "levels.chunks=[4]"), CPU)
    with pytest.raises(Usage, match=r"\[memory\] differs from what the model was made with; leave the table out, or "):
        start(recipe(asked, "memory.self.chunk_memory=16"), CPU)
    with pytest.raises(Usage, match=r"method plain: the model it begins with learns while it reads; take method hope"):
        start(recipe(asked, "method=plain", "train.carry=false"), CPU)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("train.what=lora", ': "lora" with method hope: the starts of its fast weights are its weights, which no ada'),
        ("train.parallel=fsdp", ': "fsdp" with method hope: its fast weights are no shards; take "ddp"'),
        ("train.recompute=1", ": 1 with method hope: chunks are what is computed again; set memory.self.checkpoint"),
        ("model.family=gpt2", ': "gpt2" with memory.mixer "self": a model without attention has Llama\'s norms and ML'),
    ],
)
def test_what_does_not_go_together_is_said(folder: Path, asked: str, line: str) -> None:
    with pytest.raises(Usage) as error:
        recipe(asked)
    assert asked + line in str(error.value)


def test_what_is_carried_is_learned(folder: Path) -> None:
    line = r'true with method plain and data.kind "text": what goes from batch to batch is what method hope has learned'
    with pytest.raises(Usage, match=line):
        recipe("method=plain")


def test_rows_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(Usage, match=r"data\.text\.tokens 128: attention reads a row at once, and the model has 64 pos"):
        start(recipe(ATTENTION, "data.text.tokens=128"), CPU)
    assert start(recipe("data.text.tokens=128"), CPU)
    with pytest.raises(Usage, match=r"levels\.chunks: level 0 has chunk 64, rows have 32 tokens between two updates"):
        build(recipe("levels.chunks=[64]"), CPU)


def test_lanes_are_validated_on_what_the_batch_before_gave(folder: Path) -> None:
    built = build(recipe(), CPU)
    assert isinstance(built.source, Lanes)
    assert built.validate is not None
    told = built.validate(0)
    assert 0 < told["nats"] < 10
    method = cast(Learner, built.method)
    book = [Document("one", ("".join(chr(97 + i * i % 26) for i in range(97)),))]
    ids = tokenized(book, byte_tokenizer())
    pieces, whole = (in_lanes(method, Lanes(book, ids, tokens, 1, 0), CPU) for tokens in (32, 96))
    assert len(pieces) == 3
    assert sum(each.nats for each in pieces) == pytest.approx(whole[0].nats, rel=1e-5)
    assert sum(each.scored for each in pieces) == whole[0].scored == 96
    method.learning = method.learning.model_copy(update={"learn": False})
    assert abs(in_lanes(method, Lanes(book, ids, 96, 1, 0), CPU)[0].nats - whole[0].nats) > 1e-3


def test_a_plan_counts_what_learns_and_what_is_carried(folder: Path) -> None:
    found = plan(recipe(), CPU)
    model = cast(Hope, start(recipe(), CPU)[0])
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    built = build(recipe(), CPU)
    assert found["rows"] == len(built.source)
    assert found["lengths"]["document"]["max"] == 33
    assert found["memory"]["by"] == "by formula"
    assert found["state"] == state_bytes(model.shape)
    assert "state        " in told(found)


def held(shape: HopeConfig, tokens: int) -> float:
    """Numbers that a pass keeps for its backward pass, parameters left out."""
    model, found = learners.kind(shape)(shape, 0), dict[int, int]()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes() // 4
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        total = model.advance(torch.randint(64, (1, tokens))).hidden.sum()
    assert total.requires_grad
    return float(sum(found.values()))


SHAPES: dict[str, dict[str, Any]] = {
    "still": {"cms": ContinuumOptions(eta=0.0)},
    "levels": {"cms": ContinuumOptions(inner="associative")},
    "recomputed": {"cms": ContinuumOptions(eta=0.0), "memory": SelfTitansOptions(checkpoint=True, chunk_memory=16,
                                                                               chunk_projections=16)},
    "titans": {"cms": ContinuumOptions(eta=0.0), "memory": TitansOptions(), "chunk": 16},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_formula_of_memory_is_near_what_a_pass_keeps(name: str) -> None:
    memory = SelfTitansOptions(chunk_memory=16, chunk_projections=16)
    shape = HopeConfig.of(64, 32, 1, **({"chunks": (16,), "heads": 2, "memory": memory} | SHAPES[name]))
    counted = (held(shape, 64) - held(shape, 32)) / 32
    assert kept(shape, Learning()) == pytest.approx(counted, rel=0.35)


@pytest.mark.parametrize("name", ["still", "levels", "titans"])
def test_the_bytes_of_a_state_are_those_it_comes_to(name: str) -> None:
    memory = SelfTitansOptions(chunk_memory=8, chunk_projections=8)
    given: dict[str, Any] = {"chunks": (4,), "heads": 2, "memory": memory} | SHAPES[name]
    model = Hope(HopeConfig.of(64, 16, 1, **given), 0)
    with torch.no_grad():
        state = model.advance(torch.randint(64, (1, 75))).state
    assert values.bytes(state) == pytest.approx(state_bytes(model.shape), rel=0.1)
