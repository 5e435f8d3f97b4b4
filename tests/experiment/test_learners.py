"""Method hope from a recipe: models new, on donors and as they were made; lanes; a resumed run and its fast weights."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from laconic.cli import main as cli
from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.data.documents.dataset import tokenize_documents
from laconic.data.documents.load import Document
from laconic.data.documents.stateful_batches import StatefulBatches
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import UsageError
from laconic.evaluation.validation_documents import score_lanes
from laconic.experiment import build_nested
from laconic.experiment.build import build_experiment
from laconic.experiment.load_run import load_initial_decoder, load_run
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested.hope.model import Hope, HopeAttention
from laconic.nested.language_model import NestedLanguageModel
from laconic.storage.run_dir import RunDirectory
from tests.training.toy_runs import runs_equal

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
[mixer]
num_heads = 2
[mixer.self_modifying]
memory_chunk_size = 8
projection_chunk_size = 8
[cms]
chunk_sizes = [8]
inner_objective = "associative"
[data]
source = "text"
path = "books.jsonl"
text = { row_tokens = 32, segment_tokens = 16 }
[validation]
max_rows = 4
batch_size = 2
[train]
steps = 4
batch_size = 2
learning_rate = 1e-2
stateful = true
save_every = 2
keep_every = 2
"""
ATTENTION = "mixer.kind=attention"
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
    return load_recipe("small.toml", more)[0]


def donor(folder: Path) -> Path:
    config = DecoderConfig.tiny(
        "llama", vocab_size=build_byte_tokenizer().vocab_size, hidden_size=16, num_hidden_layers=3, head_dim=8
    )
    Decoder(config, seed=1).save_pretrained(folder / "donor")
    build_byte_tokenizer().save(folder / "donor")
    return folder / "donor"


def test_a_resumed_run_is_the_one_that_never_stopped_fast_weights_included(run: Run, folder: Path) -> None:
    run("train", "small.toml", "--out", "never")
    shutil.copytree("never", "again")
    run("train", "small.toml", "--out", "again", "--resume", "step-2")
    assert runs_equal(folder / "never", folder / "again", 4)
    step = RunDirectory(folder / "never").step_path(4)
    assert (step / "state.safetensors").stat().st_size > 2 * 2 * 8 * 8 * 4
    lines = [json.loads(line) for line in (folder / "never/metrics.jsonl").read_text().splitlines()]
    assert {"nats", "right"} <= lines[-1]["validation"].keys()
    assert lines[0]["level0_fired"] > 0

    run("export", "never", "--out", "exported")
    whole = Hope.from_pretrained(folder / "exported")
    held = load_run(folder / "never", CPU)
    assert isinstance(held.parts.decoder, Hope)
    assert held.parts.decoder.hope_config == whole.hope_config
    ids = torch.arange(20)[None]
    assert torch.equal(whole.read_tokens(ids).hidden_states, held.parts.decoder.read_tokens(ids).hidden_states)
    again, _ = load_initial_decoder(load_recipe("small.toml", ["model.init_from_run=never"])[0], CPU)
    assert torch.equal(whole.read_tokens(ids).hidden_states, cast(Hope, again).eval().read_tokens(ids).hidden_states)


def test_a_new_model_is_what_its_tables_say(folder: Path) -> None:
    hope = load_initial_decoder(recipe(), CPU)[0]
    assert type(hope) is Hope
    assert hope.hope_config.chunk_sizes == ((8,),)
    titans = load_initial_decoder(recipe("mixer.kind=titans", "mixer.chunk_size=4", "cms.gated_mlp=false"), CPU)[0]
    assert isinstance(titans, Hope)
    assert (
        titans.hope_config.mixer,
        titans.hope_config.memory_chunk_size,
        len(titans.hope_config.mlp_projections),
    ) == ("titans", 4, 2)
    titans.save_pretrained(folder / "titans")
    assert Hope.from_pretrained(folder / "titans").hope_config == titans.hope_config
    assert type(load_initial_decoder(recipe(ATTENTION), CPU)[0]) is HopeAttention
    one, two = (load_initial_decoder(recipe(f"model.init={init}", ATTENTION), CPU)[0] for init in ("normal", "fan_in"))
    name = "model.layers.0.mlp.levels.0.gate_proj.weight"
    std = [float(model.get_parameter(name).detach().std()) for model in (one, two)]
    assert std == pytest.approx([0.02, 16**-0.5], rel=0.15)


def test_a_donor_keeps_its_bits_until_its_levels_move(folder: Path) -> None:
    path = donor(folder)
    asked = (f"model.name={path}", ATTENTION, "cms.chunk_sizes=[4, 8]")
    made = load_initial_decoder(recipe(*asked), CPU)[0]
    assert isinstance(made, HopeAttention)
    assert made.hope_config.chunk_sizes == ((4,), (4,), (8,))
    ids = torch.arange(24)[None]
    still = cast(Hope, load_initial_decoder(recipe(*asked, "cms.inner_lr=0.0"), CPU)[0])
    plain = Decoder.from_pretrained(path)
    assert torch.equal(still.read_tokens(ids).hidden_states, plain(plain.embed(ids)).hidden)
    with pytest.raises(
        UsageError, match=r'memory\.mixer "self_modifying": a decoder that is given keeps its attention; set mixer = '
    ):
        load_initial_decoder(recipe(f"model.name={path}"), CPU)


def test_a_model_that_learns_is_what_it_was_made_as(folder: Path) -> None:
    cast(Hope, load_initial_decoder(recipe(), CPU)[0]).save_pretrained(folder / "made")
    build_byte_tokenizer().save(folder / "made")
    asked = f"model.name={folder}/made"
    assert cast(Hope, load_initial_decoder(recipe(asked), CPU)[0]).hope_config.chunk_sizes == ((8,),)
    assert build_nested.read_decoder_config(folder / "made").hidden_size == 16
    slower = cast(Hope, load_initial_decoder(recipe(asked, "cms.chunk_sizes=[8, 16]"), CPU)[0])
    assert slower.hope_config.chunk_sizes == ((8, 16),)
    made = Hope.from_pretrained(folder / "made")
    ids = torch.arange(7)[None]
    assert torch.equal(slower.eval().read_tokens(ids).hidden_states, made.read_tokens(ids).hidden_states)
    with pytest.raises(
        UsageError, match=r"\[levels\] differs from what the model was made with; leave the table out, or "
    ):
        load_initial_decoder(recipe(asked, "cms.chunk_sizes=[4]"), CPU)
    with pytest.raises(
        UsageError, match=r"\[memory\] differs from what the model was made with; leave the table out, or "
    ):
        load_initial_decoder(recipe(asked, "mixer.self_modifying.memory_chunk_size=16"), CPU)
    with pytest.raises(
        UsageError, match=r"method plain: the model it begins with learns while it reads; take method hope"
    ):
        load_initial_decoder(recipe(asked, "method=plain", "train.stateful=false"), CPU)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            "train.trainable=lora",
            ': "lora" with method hope: the starts of its fast weights are its weights, which no ada',
        ),
        ("train.parallel=fsdp", ': "fsdp" with method hope: its fast weights are no shards; take "ddp"'),
        (
            "train.activation_checkpointing=1",
            ": 1 with method hope: chunks are what is computed again; set mixer.self_modifying.activation_checkpointing",
        ),
        (
            "model.family=gpt2",
            ': "gpt2" with mixer.kind "self_modifying": a model without attention has Llama\'s norms and ML',
        ),
    ],
)
def test_what_does_not_go_together_is_said(folder: Path, asked: str, line: str) -> None:
    with pytest.raises(UsageError) as error:
        recipe(asked)
    assert asked + line in str(error.value)


def test_what_is_carried_is_learned(folder: Path) -> None:
    line = (
        r'true with method plain and data.source "text": what goes from batch to batch is what method hope has learned'
    )
    with pytest.raises(UsageError, match=line):
        recipe("method=plain")


def test_rows_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(
        UsageError, match=r"data\.text\.tokens 128: attention reads a row at once, and the model has 64 pos"
    ):
        load_initial_decoder(recipe(ATTENTION, "data.text.row_tokens=128"), CPU)
    assert load_initial_decoder(recipe("data.text.row_tokens=128"), CPU)
    with pytest.raises(
        UsageError, match=r"levels\.chunks: level 0 has chunk 64, rows have 32 tokens between two updates"
    ):
        build_experiment(recipe("cms.chunk_sizes=[64]"), CPU)


def test_lanes_are_validated_on_what_the_batch_before_gave(folder: Path) -> None:
    built = build_experiment(recipe(), CPU)
    assert isinstance(built.training_data, StatefulBatches)
    assert built.validate is not None
    told = built.validate(0)
    assert 0 < told["nats"] < 10
    method = cast(NestedLanguageModel, built.method)
    book = [Document("one", ("".join(chr(97 + i * i % 26) for i in range(97)),))]
    ids = tokenize_documents(book, build_byte_tokenizer())
    pieces, whole = (score_lanes(method, StatefulBatches(book, ids, tokens, 1, 0), CPU) for tokens in (32, 96))
    assert len(pieces) == 3
    assert sum(each.nll for each in pieces) == pytest.approx(whole[0].nll, rel=1e-5)
    assert sum(each.num_scored for each in pieces) == whole[0].num_scored == 96
    method.config = method.config.model_copy(update={"enabled": False})
    assert abs(score_lanes(method, StatefulBatches(book, ids, 96, 1, 0), CPU)[0].nll - whole[0].nll) > 1e-3
