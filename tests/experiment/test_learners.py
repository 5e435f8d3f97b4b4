"""Method hope: new models, pretrained decoders, nested models; stateful batches; resumed runs and fast weights."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from laconic.cli.main import main
from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.data.documents.dataset import tokenize_documents
from laconic.data.documents.load import Document
from laconic.data.documents.stateful_batches import StatefulBatches
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import UsageError
from laconic.evaluation.validation import build_validation, score_lanes
from laconic.experiment.from_recipe import build_nested
from laconic.experiment.from_recipe.build import build_experiment
from laconic.experiment.load_run import load_initial_model, load_run
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
    """Return the current directory, with a small recipe and its books."""
    rows = [{"book": f"b{i % 6}", "text": f"{i} " + chr(97 + i % 26) * 90} for i in range(30)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_new_model_initialises_position_embeddings_as_a_plain_decoder(folder: Path) -> None:
    overrides = [ATTENTION, "model.family=gpt2", "model.embedding_init_std=0.7", "mixer.num_heads=2"]
    model = build_experiment(load_recipe(folder / "small.toml", overrides)[0], CPU).parts.decoder
    embedding = model.get_submodule(str(model.weight_names.position_embedding)).get_parameter("weight")
    assert embedding.std().item() == pytest.approx(0.7, rel=0.1)


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command, which must succeed, and returns its output."""

    def call(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["laconic", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        assert not end.value.code, output.err
        return output.out

    return call


def recipe(*more: str) -> Recipe:
    return load_recipe("small.toml", more)[0]


def save_donor(folder: Path) -> Path:
    config = DecoderConfig.tiny(
        "llama", vocab_size=build_byte_tokenizer().vocab_size, hidden_size=16, num_hidden_layers=3, head_dim=8
    )
    Decoder(config, seed=1).save_pretrained(folder / "donor")
    build_byte_tokenizer().save(folder / "donor")
    return folder / "donor"


@pytest.mark.medium
def test_resumed_run_equals_uninterrupted_run_with_fast_weights(run: Run, folder: Path) -> None:
    run("train", "small.toml", "--out", "whole")
    shutil.copytree("whole", "resumed")
    run("train", "small.toml", "--out", "resumed", "--resume", "step-2")
    assert runs_equal(folder / "whole", folder / "resumed", 4)
    step = RunDirectory(folder / "whole").step_path(4)
    assert (step / "state.safetensors").stat().st_size > 2 * 2 * 8 * 8 * 4
    lines = [json.loads(line) for line in (folder / "whole/metrics.jsonl").read_text().splitlines()]
    assert {"nats", "accuracy"} <= lines[-1]["validation"].keys()
    assert lines[0]["level0_updates"] > 0

    run("export", "whole", "--out", "exported")
    exported = Hope.from_pretrained(folder / "exported")
    loaded = load_run(folder / "whole", CPU)
    assert isinstance(loaded.parts.decoder, Hope)
    assert loaded.parts.decoder.hope_config == exported.hope_config
    ids = torch.arange(20)[None]
    assert torch.equal(exported.read_tokens(ids).hidden_states, loaded.parts.decoder.read_tokens(ids).hidden_states)
    initial, _, _ = load_initial_model(load_recipe("small.toml", ["model.init_from_run=whole"])[0], CPU)
    assert torch.equal(
        exported.read_tokens(ids).hidden_states, cast(Hope, initial).eval().read_tokens(ids).hidden_states
    )


def test_new_model_follows_its_tables(folder: Path) -> None:
    hope = load_initial_model(recipe(), CPU)[0]
    assert type(hope) is Hope
    assert hope.hope_config.chunk_sizes == ((8,),)
    titans = load_initial_model(recipe("mixer.kind=titans", "mixer.chunk_size=4", "cms.gated_mlp=false"), CPU)[0]
    assert isinstance(titans, Hope)
    assert (
        titans.hope_config.mixer,
        titans.hope_config.memory_chunk_size,
        len(titans.hope_config.mlp_projections),
    ) == ("titans", 4, 2)
    titans.save_pretrained(folder / "titans")
    assert Hope.from_pretrained(folder / "titans").hope_config == titans.hope_config
    assert type(load_initial_model(recipe(ATTENTION), CPU)[0]) is HopeAttention
    one, two = (load_initial_model(recipe(f"model.init={init}", ATTENTION), CPU)[0] for init in ("normal", "fan_in"))
    name = "model.layers.0.mlp.levels.0.gate_proj.weight"
    std = [float(model.get_parameter(name).detach().std()) for model in (one, two)]
    assert std == pytest.approx([0.02, 16**-0.5], rel=0.15)


def test_hope_on_a_pretrained_decoder_without_inner_updates_equals_it(folder: Path) -> None:
    path = save_donor(folder)
    keys = (f"model.name={path}", ATTENTION, "cms.chunk_sizes=[4, 8]")
    model = load_initial_model(recipe(*keys), CPU)[0]
    assert isinstance(model, HopeAttention)
    assert model.hope_config.chunk_sizes == ((4,), (4,), (8,))
    ids = torch.arange(24)[None]
    static = cast(Hope, load_initial_model(recipe(*keys, "cms.inner_lr=0.0"), CPU)[0])
    decoder = Decoder.from_pretrained(path)
    assert torch.equal(static.read_tokens(ids).hidden_states, decoder(decoder.embed(ids)).hidden_states)
    with pytest.raises(UsageError, match=r"mixer\.kind"):
        load_initial_model(recipe(f"model.name={path}"), CPU)


def test_saved_nested_model_as_initial_model(folder: Path) -> None:
    cast(Hope, load_initial_model(recipe(), CPU)[0]).save_pretrained(folder / "made")
    build_byte_tokenizer().save(folder / "made")
    key = f"model.name={folder}/made"
    assert cast(Hope, load_initial_model(recipe(key), CPU)[0]).hope_config.chunk_sizes == ((8,),)
    assert build_nested.read_decoder_config(folder / "made").hidden_size == 16
    slower = cast(Hope, load_initial_model(recipe(key, "cms.chunk_sizes=[8, 16]"), CPU)[0])
    assert slower.hope_config.chunk_sizes == ((8, 16),)
    saved = Hope.from_pretrained(folder / "made")
    ids = torch.arange(7)[None]
    assert torch.equal(slower.eval().read_tokens(ids).hidden_states, saved.read_tokens(ids).hidden_states)
    with pytest.raises(UsageError, match=r"\[cms\] differs"):
        load_initial_model(recipe(key, "cms.chunk_sizes=[4]"), CPU)
    with pytest.raises(UsageError, match=r"\[mixer\] differs"):
        load_initial_model(recipe(key, "mixer.self_modifying.memory_chunk_size=16"), CPU)
    with pytest.raises(UsageError, match="use method hope"):
        load_initial_model(recipe(key, "method=lm", "train.stateful=false"), CPU)


@pytest.mark.parametrize(
    "override",
    ["train.trainable=lora", "train.activation_checkpointing=1", "model.family=gpt2"],
)
def test_hope_unsupported_options(folder: Path, override: str) -> None:
    with pytest.raises(UsageError, match=re.escape(override)):
        recipe(override)


def test_stateful_batches_need_hope(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.stateful.*method hope"):
        recipe("method=lm")


def test_rows_that_do_not_fit_the_model(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.text\.row_tokens 128.*64 positions"):
        load_initial_model(recipe(ATTENTION, "data.text.row_tokens=128"), CPU)
    load_initial_model(recipe("data.text.row_tokens=128"), CPU)
    with pytest.raises(UsageError, match=r"cms\.chunk_sizes.*64.*32 tokens"):
        build_experiment(recipe("cms.chunk_sizes=[64]"), CPU)


def test_stateful_validation_carries_state_between_batches(folder: Path) -> None:
    experiment = build_experiment(recipe(), CPU)
    assert isinstance(experiment.training_data, StatefulBatches)
    validate = build_validation(experiment.recipe, experiment.parts, experiment.method, CPU)
    assert validate is not None
    assert 0 < validate(0)["nats"] < 10
    method = cast(NestedLanguageModel, experiment.method)
    book = [Document("one", ("".join(chr(97 + i * i % 26) for i in range(97)),))]
    ids = tokenize_documents(book, build_byte_tokenizer())
    pieces, at_once = (score_lanes(method, StatefulBatches(book, ids, tokens, 1, 0), CPU) for tokens in (32, 96))
    assert len(pieces) == 3
    assert sum(score.nll for score in pieces) == pytest.approx(at_once[0].nll, rel=1e-5)
    assert sum(score.num_scored for score in pieces) == at_once[0].num_scored == 96
    method.config = method.config.model_copy(update={"enabled": False})
    assert abs(score_lanes(method, StatefulBatches(book, ids, 96, 1, 0), CPU)[0].nll - at_once[0].nll) > 1e-3
