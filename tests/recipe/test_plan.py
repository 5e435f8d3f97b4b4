"""What a plan foretells: rows assumed or counted, memory against real updates, the largest micro-batch, time."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laconic.config.data import DataConfig
from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.data.synthetic.digits import build_digits_tokenizer
from laconic.errors import InputError, OutOfMemoryError
from laconic.experiment import build_model, pace, sketch
from laconic.experiment import dry_run as planning
from laconic.experiment.dry_run import plan, told
from laconic.experiment.lengths import SAMPLE, STEP, Blank, at_hand, foreseen, pieces
from laconic.experiment.load_run import load_config_and_tokenizer
from laconic.experiment.need import Need, counted, followed, need, tracked
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.conftest import REPO, needs
from tests.recipe.test_presets import folder_of
from tests.tolerances import FLOAT32, error

CPU = torch.device("cpu")
WITHIN = 0.15  # of the memory that updates really take, which the plan may be off by
TINY = """method = "METHOD"
[model]
family = "llama"
tokenizer = "digits"
hidden_size = 32
num_hidden_layers = 6
num_attention_heads = 4
num_key_value_heads = 2
[latents]
num_latents = 2
jacobi_iterations = 1
[data]
source = "digits"
format = "digits"
chain_steps = "all"
digits = { num_operations = 2, train_rows = 400 }
[train]
steps = 4
batch_size = 16
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    """A recipe of one method on six small layers, with keys changed."""

    def make(method: str, *keys: str) -> Recipe:
        (tmp_path / "tiny.toml").write_text(TINY.replace("METHOD", method))
        return load_recipe(tmp_path / "tiny.toml", keys)[0]

    return make


def wide(recipe: Recipe, micro: int = 16) -> Any:
    """The recipe's configuration, tokenizer, and widest micro-batch."""
    config, tokenizer = load_config_and_tokenizer(recipe)
    rows = foreseen(recipe, tokenizer, config.max_position_embeddings)
    return config, tokenizer, planning.batch(rows, pieces(rows.lengths, micro), 1.0, 0, 0)


def test_a_plan_tells_all_that_it_is_asked_for(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "tracked", lambda *_: 1000.0)
    found = plan(tiny("nocot"), CPU)
    assert (found["rows"], found["steps"], found["steps_per_epoch"], found["assumed"]) == (400, 4, 25, False)
    assert found["largest_micro"]["80 GiB"] == 16
    assert found["seconds"]["run"] == 4 * found["seconds"]["step"]
    assert "update of 16 rows, measured" in found["seconds"]["by"]
    text = told(found)
    for word in ("of which", "at the peak of micro-batches of 16", "rows fit the", "16 in 24 GiB", "a save, 3 kept"):
        assert word in text
    assert "assumed" not in text


def test_without_the_tracker_memory_comes_by_formula(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> float:
        raise AttributeError("no MemTracker")

    tracks = plan(tiny("nocot"), CPU)["memory"]
    monkeypatch.setattr(planning, "tracked", gone)
    found = plan(tiny("nocot"), CPU)["memory"]
    assert tracks["by"] == "followed through fake tensors"
    assert found["by"] == "by formula, since torch's tracker failed: AttributeError"
    assert 0.4 < found["bytes"] / tracks["bytes"] < 2.5


@pytest.mark.parametrize(("recompute", "off"), [(0, 0.02), (1, 0.1)])
def test_two_layers_tell_what_all_take(tiny: Any, recompute: int, off: float) -> None:
    recipe = tiny("nocot", f"train.activation_checkpointing={recompute}")
    config, tokenizer, batch = wide(recipe)
    whole, _ = followed(recipe, config, tokenizer, batch, CPU)
    found = tracked(recipe, config, tokenizer, [batch], CPU) * batch.B
    assert abs(found / whole - 1) < off
    by_formula = counted(recipe, config, pace.reads(recipe, batch)) * batch.B
    assert 0.3 < by_formula / whole < 3


def test_what_lies_in_fake_tensors_lies_nowhere_and_every_byte_is_counted(tiny: Any) -> None:
    recipe = tiny("nocot")
    config, tokenizer, batch = wide(recipe)
    one = replace(config, num_hidden_layers=1, windows=config.windows[:1], attention_scales=config.attention_scales[:1])
    big = replace(one, vocab_size=10_000_000)  # 1.3 GB of words, 3.6 GB of logits
    scored = int((batch.answer_targets >= 0).sum()) + batch.B
    took, _ = followed(recipe, big, tokenizer, batch, CPU)
    assert took > scored * 10_000_000 * 4


def test_the_largest_micro_batch_is_the_largest_that_fits() -> None:
    asked = Need(held=1000, grads=100, row=50.0, update=30, factor=1.1)
    for room in (0, 1100, 1300, 1900, 2500, 7000, 10**6):
        n = asked.largest(room, 128)
        assert n == 0 or asked.peak(n, 128) <= room
        assert n == 128 or asked.peak(n + 1, 128) > room
    assert asked.peak(128, 128) == round(1.1 * (1000 + 128 * 50))
    assert asked.peak(64, 128) == round(1.1 * (1000 + 100 + 64 * 50))
    assert asked.peak(1, 1) == round(1.1 * (1000 + 100 + 30))


def test_what_is_held_is_weights_and_moments(tiny: Any) -> None:
    recipe = tiny("nocot")
    config, tokenizer = load_config_and_tokenizer(recipe)
    method = sketch.sketched(recipe, config, tokenizer, 1)
    sizes = [p.nbytes for p in method.parameters()]
    found = need(method, 1.0, CPU)
    assert (found.held, found.grads, found.update) == (3 * sum(sizes), sum(sizes), 2 * max(sizes))


@pytest.mark.parametrize("modules", ["all", "attention"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora_stands_as_peft_puts_it(tiny: Any, family: str, modules: str) -> None:
    needs("peft")
    keys = ["train.trainable=lora", "lora.rank=4", f"lora.target_modules={modules}", "lora.dropout=0"]
    recipe = tiny(
        "nocot", f"model.family={family}", *(["model.num_key_value_heads=4"] if family == "gpt2" else []), *keys
    )
    config, tokenizer = load_config_and_tokenizer(recipe)
    theirs = build_model.build_parts(recipe, Decoder(config, seed=0), tokenizer, "").decoder
    method = sketch.filled(sketch.sketched(recipe, config, tokenizer, 1), CPU)
    ours: Any = method.decoder
    learn = [sorted(tuple(p.shape) for p in each.parameters() if p.requires_grad) for each in (theirs, ours)]
    assert learn[0] == learn[1]
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            near = name.replace("base_layer", "base").replace(".lora_A.default.weight", ".A")
            p.copy_(ours.get_parameter(near.replace(".lora_B.default.weight", ".B")))
    ids = torch.arange(6)[None]
    seen = [each.eval()(each.embed(ids)).hidden for each in (theirs, ours)]
    assert error(seen[0], seen[1]) <= FLOAT32


def test_rows_that_are_not_at_hand_are_assumed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "openai-community/gpt2")
    recipe, _ = load_recipe("codi-gpt2-aug-nl", [f"model.name={folder}", "data.max_tokens=256"])
    config, tokenizer = load_config_and_tokenizer(recipe)
    found = foreseen(recipe, tokenizer, config.max_position_embeddings)
    assert found.assumed
    assert "zen-E/GSM8k-Aug-NL is not at hand" in found.notes[0]
    assert found.notes[1].endswith("of the rows are over 256 tokens: left out")
    assert found.rows == 385_620 * len(found.lengths) // SAMPLE < 385_620
    assert int(found.lengths.sum(1).max()) <= 256
    batch: Any = found.source.batch([0, 5], 3, 7)
    live = [getattr(batch, f"{part}_live").sum(1).tolist() for part in ("question", "chain", "answer")]
    assert live == found.lengths[[0, 5]].T.tolist()
    assert (batch.epoch, batch.step) == (3, 7)
    made = load_recipe("icot-gpt2-mult4", [f"model.name={folder}"])[0]
    assert foreseen(made, tokenizer, 1024).rows == 808_000
    assert (
        foreseen(made.model_copy(update={"data": made.data.model_copy(update={"rows": 99})}), tokenizer, 1024).rows
        == 99
    )


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("gsm8k", True), ("gsm-union", True), ("gsm8k-aug", True), ("rows.jsonl", False),
        ("gsm8k-aug-nl", False), ("openai/gsm8k", False), ("svamp-300", False), ("prosqa", False), ("a/b", False),
    ],
)  # fmt: skip
def test_at_hand_is_what_lies_there(shared: Path, tmp_path: Path, name: str, here: bool) -> None:
    data = DataConfig.model_validate({"kind": "maths", "name": name})
    found = {root: at_hand(data.model_copy(update={"root": root})) for root in (str(shared / "data"), str(tmp_path))}
    assert list(found.values()) == [here, False]
    assert not at_hand(data)


def test_rows_nobody_knows_are_asked_for(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "openai-community/gpt2")
    recipe, _ = load_recipe("cot-gpt2-aug", [f"model.name={folder}", f"data.name={tmp_path}/mine.jsonl"])
    config, tokenizer = load_config_and_tokenizer(recipe)
    with pytest.raises(InputError, match=r"mine\.jsonl"):
        foreseen(recipe, tokenizer, config.max_position_embeddings)


def test_rows_at_hand_are_counted_and_the_first_looked_at(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "openai-community/gpt2")
    rows = ({"id": str(i), "question": f"Question {i} of many, how much?", "steps": ["<<1+1=2>>"], "answer": "2"}
            for i in range(SAMPLE + 500))  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe, _ = load_recipe("cot-gpt2-aug", [f"model.name={folder}", f"data.name={tmp_path}/rows.jsonl"])
    config, tokenizer = load_config_and_tokenizer(recipe)
    found = foreseen(recipe, tokenizer, config.max_position_embeddings)
    assert (found.rows, len(found.lengths), found.assumed) == (SAMPLE + 500, SAMPLE, False)
    assert found.notes[0] == f"of the first {SAMPLE:,} rows:"
    batch: Any = found.source.batch([3], 0, 0)
    assert found.lengths[3].tolist() == [batch.question.shape[1], batch.chain.shape[1], batch.answer.shape[1]]


def test_pieces_go_from_the_narrowest_to_the_widest() -> None:
    lengths = np.stack([np.arange(1, 101), np.full(100, 7), np.full(100, 5)], 1)
    found = pieces(lengths, 10)
    widths = [int(lengths[rows].max(0).sum()) for rows in found]
    assert (widths, widths[-1], len(found)) == (sorted(widths), 112, 10)
    assert sorted(row for rows in found for row in rows) == list(range(100))
    assert [len(rows) for rows in pieces(lengths[:3], 10)] == [10]
    steps = Blank(lengths).batch([99], 0, 0).chain_step_index
    assert steps.max() == 6 // STEP


def test_time_goes_by_rows_or_by_a_product(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny("nocot", "train.batch_size=64")
    config, tokenizer, batch = wide(recipe)
    sketched = sketch.sketched(recipe, config, tokenizer, 1)
    found = pace.pace(recipe, config, sketched, batch, CPU, 8)
    assert found.by == "an update of 8 rows, measured"
    monkeypatch.setitem(pace.QUICK, "cpu", 1.0)
    slow = pace.pace(recipe, config, sketched, batch, CPU, 8)
    assert slow.by == "the speed of one product of its sizes"
    speed = pace.flop(recipe, config, batch, 64) / slow.seconds
    assert 1e7 < speed < 1e14
    monkeypatch.setitem(pace.QUICK, "cpu", 1e12)

    def full(*_: Any) -> float:
        raise OutOfMemoryError("no memory for a micro-batch of 8 rows")

    monkeypatch.setattr(pace, "measured", full)
    assert pace.pace(recipe, config, sketched, batch, CPU, 8).by == "the speed of one product of its sizes"


def test_a_run_to_begin_with_may_still_be_made(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "openai-community/gpt2")
    recipe, notes = load_recipe("coconut-gpt2-aug", [f"model.name={folder}"])
    assert notes == ["model.name takes the place of model.init_from_run"]
    assert recipe.model.init_from_run is None
    assert (
        load_config_and_tokenizer(load_recipe("demo-kava", [f"model.init_from_run={tmp_path}/demo-cot"])[0])[
            1
        ].fingerprint
        == build_digits_tokenizer().fingerprint
    )
    with pytest.raises(InputError, match=r"no run, and no recipe of its name; train it first, or give model\.name"):
        load_config_and_tokenizer(load_recipe("demo-kava", [f"model.init_from_run={tmp_path}/mine"])[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "layers", "keys"),
    [
        ("codi-gpt2-aug", "openai-community/gpt2", {"n_layer": 3}, ("train.batch_size=8", "train.micro_batch_size=8")),
        ("cot-coconut-gpt2-aug", "openai-community/gpt2", {"n_layer": 3}, ("train.batch_size=16", "train.micro_batch_size=8")),
        (
            "kava-qwen05b-aug", "Qwen/Qwen2.5-0.5B-Instruct", {"num_hidden_layers": 3, "vocab_size": 50304},
            ("train.batch_size=8",),
        ),
    ],
)  # fmt: skip
def test_memory_foretold_is_memory_taken(
    tmp_path: Path, name: str, model: str, layers: dict[str, int], keys: tuple[str, ...]
) -> None:
    if not Path("/proc/self/status").is_file():
        pytest.skip("counts resident memory by /proc")
    folder = folder_of(tmp_path, model)
    config = json.loads((folder / "config.json").read_text()) | layers
    (folder / "config.json").write_text(json.dumps(config))
    foretold = plan(load_recipe(name, [f"model.name={folder}", *keys])[0], CPU)["memory"]["bytes"]
    command = [sys.executable, "-m", "tests.recipe.taken", name, str(folder), *keys]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    taken = int(done.stdout)
    assert abs(foretold / taken - 1) <= WITHIN, f"{foretold / 2**20:.0f} MiB foretold, {taken / 2**20:.0f} taken"


def test_configurations_of_other_depth_are_the_same_but_for_it(tiny: Any) -> None:
    recipe = tiny("kava", "kv_distillation.layers=[1, 5]")
    config = load_config_and_tokenizer(recipe)[0]
    few, small = sketch.shallow(recipe, config, 2)
    assert small == replace(
        config,
        num_hidden_layers=2,
        sliding_windows=config.sliding_windows[:2],
        attention_scales=config.attention_scales[:2],
    )
    assert few.kv_distillation is not None
    assert few.kv_distillation.layers == (1,)
    assert sketch.shallow(recipe, config, 1)[0].kv_distillation.layers == (0,)  # type: ignore[union-attr]
    assert isinstance(config, DecoderConfig)
