"""The plan of a run: rows counted or assumed, memory against real updates, the largest micro-batch, FLOPs."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laconic.batches import DocumentBatch
from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.config.training import TrainingConfig
from laconic.data.synthetic.digits import build_digits_tokenizer
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import InputError
from laconic.experiment.from_recipe.build import build_optimizer
from laconic.experiment.from_recipe.dry_run import MemoryModel, format_plan, measure_matmul, plan_run, plan_with_step
from laconic.experiment.from_recipe.fake_update import CostCounter, count_update, estimate_update, with_num_layers
from laconic.experiment.from_recipe.sample_rows import MAX_ROWS, count_row_tokens, sample_training_rows
from laconic.experiment.load_run import load_config_and_tokenizer
from laconic.interfaces import StepOutput
from laconic.latent.cot import NoCot
from tests.conftest import REPO, needs
from tests.experiment.test_presets import folder_of
from tests.models.fixtures import fresh
from tests.tiny_recipes import TINY_DOCUMENT_RECIPE

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")
TOLERANCE = 0.3  # of the memory that updates really take
TINY = """method = "METHOD"
[model]
family = "llama"
tokenizer = "digits"
hidden_size = 32
num_hidden_layers = 3
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
    """A recipe of one method on three small layers, with keys changed."""

    def make(method: str, *keys: str) -> Recipe:
        (tmp_path / "tiny.toml").write_text(TINY.replace("METHOD", method))
        return load_recipe(tmp_path / "tiny.toml", keys)[0]

    return make


def widest(recipe: Recipe, micro: int = 16) -> Any:
    config, tokenizer = load_config_and_tokenizer(recipe)
    source = sample_training_rows(recipe, tokenizer, config.max_position_embeddings).source
    lengths = np.stack(list(count_row_tokens(source).values())).sum(0)
    return config, tokenizer, source.batch(lengths.argsort()[-micro:].tolist(), 0, 0)


@pytest.mark.medium
def test_plan_run_says_rows_steps_memory_time_and_threads(tiny: Any) -> None:
    plan = plan_run(tiny("nocot"), CPU)
    assert (plan["rows"], plan["steps"], plan["steps_per_epoch"], plan["assumed"]) == (400, 4, 25, False)
    assert plan["largest_micro_batch"]["80 GiB"] == 16
    assert plan["seconds"]["run"] == 4 * plan["seconds"]["step"]
    assert plan["threads"] == torch.get_num_threads()
    text = format_plan(plan)
    for words in (
        "micro-batches of 16 rows",
        "micro-batches of up to 16 rows",
        "16 on one of 24 GiB",
        "per checkpoint, 3 of them",
        " thread",
    ):
        assert words in text
    assert "assumed" not in text


def test_measure_matmul_uses_the_dtype_of_an_update(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: set[torch.dtype] = set()
    monkeypatch.setattr("laconic.experiment.from_recipe.dry_run.MATMUL_SECONDS", 0.0)
    monkeypatch.setattr(torch, "mm", lambda x, w: dtypes.add(x.dtype) or torch.zeros(1, 1))
    for keys, dtype in (
        ((), torch.float32),
        (("model.dtype=bfloat16",), torch.bfloat16),
        (("train.precision=bfloat16",), torch.bfloat16),
    ):
        recipe = tiny("nocot", *keys)
        measure_matmul(recipe, widest(recipe)[0], CPU)
        assert dtypes == {dtype}
        dtypes.clear()


@pytest.mark.medium
def test_plan_with_step_measures_a_real_update(tiny: Any) -> None:
    plan = plan_with_step(tiny("cot"), CPU)
    assert plan["measured"]["seconds"] > 0
    assert "measured     one update" in format_plan(plan)


@pytest.mark.medium
@pytest.mark.parametrize("method", [pytest.param("nocot", marks=pytest.mark.slow), "kava"])
def test_estimate_update_extrapolates_layers(tiny: Any, method: str) -> None:
    recipe = tiny(method)
    config, tokenizer, batch = widest(recipe)
    whole, estimate = (f(recipe, config, tokenizer, batch) for f in (count_update, estimate_update))
    assert estimate.flops == pytest.approx(whole.flops)
    assert estimate.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.1)


@pytest.mark.medium
def test_estimate_update_with_checkpointing_takes_less_memory_and_more_flops(tiny: Any) -> None:
    config, tokenizer, batch = widest(tiny("nocot"))
    plain, checkpointed = (
        estimate_update(tiny("nocot", f"train.activation_checkpointing={n}"), config, tokenizer, batch) for n in (0, 1)
    )
    assert checkpointed.peak_bytes < 0.6 * plain.peak_bytes
    assert checkpointed.flops > plain.flops


def test_count_update_allocates_nothing_and_counts_every_byte(tiny: Any) -> None:
    recipe = tiny("nocot")
    config, tokenizer, batch = widest(recipe)
    huge = replace(with_num_layers(recipe, config, 1)[1], vocab_size=10_000_000)  # 3.6 GB of logits
    scored = int((batch.answer_targets >= 0).sum()) + batch.B
    assert count_update(recipe, huge, tokenizer, batch).peak_bytes > scored * 10_000_000 * 4


def test_count_update_selects_by_masks(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real mask selects its rows, a fake one all."""
    recipe = tiny("nocot")
    config, tokenizer, batch = widest(recipe)
    shapes: list[tuple[int, ...]] = []

    def forward(self: NoCot, batch: Any, state: Any = None) -> StepOutput:
        x = self.decoder.embed(batch.answer_ids)
        mask = x.sum(-1) > 0
        selected = (
            x[batch.answer_mask], x[mask], x[mask.nonzero(as_tuple=True)], x.masked_select(mask[:, :, None]),
            x[:, mask[0]], x[(~mask[:, 0]).nonzero()[:, 0]],
        )  # fmt: skip
        shapes.extend(tuple(y.shape) for y in selected)
        return StepOutput(sum(y.mean() for y in selected))

    monkeypatch.setattr(NoCot, "forward", forward)
    count_update(recipe, config, tokenizer, batch)
    (B, N), D = batch.answer_ids.shape, config.hidden_size
    assert shapes == [(int(batch.answer_mask.sum()), D), (B * N, D), (B * N, D), (B * N * D,), (B, N, D), (B, N, D)]


@pytest.mark.medium
@pytest.mark.parametrize("recipe", ["hope-tiny-recall", "titans-tiny-recall", "hope-tiny-parity", "read-recall-compat"])
def test_count_update_follows_models_that_branch_on_masks(recipe: str) -> None:
    short = ["data.mqar.num_pairs=[4]", "data.mqar.row_tokens=32"] if "tiny-recall" in recipe else []
    loaded = load_recipe(recipe, ["model.num_hidden_layers=1", *short])[0]
    config, tokenizer, batch = widest(loaded, 2)
    assert isinstance(batch, DocumentBatch)
    cost = count_update(loaded, config, tokenizer, batch)
    assert cost.peak_bytes > 0
    assert cost.flops > 0


def test_memory_model_finds_the_largest_micro_batch_that_fits() -> None:
    model = MemoryModel(fixed=1000, gradients=100, copies=100, per_row=50.0, overhead=1.1)
    for room in (0, 1100, 1400, 1900, 2500, 7000, 10**6):
        n = model.largest_micro_batch(room, 128)
        assert n == 0 or model.peak(n, 128) <= room
        assert n == 128 or model.peak(n + 1, 128) > room
    assert model.peak(128, 128) == round(1.1 * (1000 + 128 * 50))
    assert model.peak(64, 128) == round(1.1 * (1000 + 100 + 64 * 50))
    assert model.peak(1, 1) == round(1.1 * (1000 + 200))


@pytest.mark.medium
def test_plan_run_of_an_adapter_that_only_writes(tmp_path: Path) -> None:
    """The plan reads with the adapter disabled, as a run does."""
    keys = ["model.name=stories260k", "model.dtype=float32", "train.precision=float32", "data.path=none.jsonl"]
    keys += ["train.activation_checkpointing=0"]
    plan = plan_run(load_recipe("read-smollm2", keys)[0], CPU)
    both = plan_run(load_recipe("read-smollm2", [*keys, "compression.adapter_scope=both"])[0], CPU)
    assert plan["trainable"] == both["trainable"]
    assert 0 < plan["flops_per_step"] < both["flops_per_step"]


def test_plan_run_refuses_documents_without_held_out_ones(tmp_path: Path) -> None:
    """As training does, which needs some for validation."""
    rows = [{"text": f"Book {b}. " + "A sentence of a book. " * 40} for b in range(4)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lm.toml").write_text(TINY_DOCUMENT_RECIPE + "[validation]\nmax_rows = 2\n")
    plan_run(load_recipe(tmp_path / "lm.toml", ["data.text.held_out_fraction=0.25"])[0], CPU)
    recipe = load_recipe(tmp_path / "lm.toml", ["data.text.held_out_fraction=0"])[0]
    with pytest.raises(InputError, match=r"^data\.valid: [1-4] different texts with .* = 0\.0 leaves no document"):
        plan_run(recipe, CPU)


@pytest.mark.parametrize("suffix", [".parquet", ".PARQUET"])
def test_sample_training_rows_does_not_count_the_lines_of_parquet(tmp_path: Path, suffix: str) -> None:
    needs("pyarrow")
    import pyarrow
    from pyarrow import parquet

    rows = [{"question": f"{n}?", "steps": ["1+1=2"], "answer": "2"} for n in range(50)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"rows{suffix}")
    recipe = Recipe.model_validate(
        {
            "method": "cot",
            "model": {"name": "stories260k"},
            "data": {"source": "catalog", "name": [str(tmp_path / f"rows{suffix}")], "chain_steps": "all"},
            "train": {"steps": 1, "batch_size": 2},
        }
    )
    assert sample_training_rows(recipe, build_byte_tokenizer(), 1000).num_rows == 50


def test_sample_training_rows_assumes_rows_of_known_sets(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "openai-community/gpt2")
    recipe, _ = load_recipe("codi-gpt2-aug-nl", [f"model.name={folder}", "data.max_tokens=256"])
    config, tokenizer = load_config_and_tokenizer(recipe)
    rows = sample_training_rows(recipe, tokenizer, config.max_position_embeddings)
    assert rows.is_assumed
    assert "zen-E/GSM8k-Aug-NL is not local" in rows.notes[0]
    assert "rows left out: " in rows.notes[1]
    assert "too long" in rows.notes[1]
    assert rows.num_rows == 385_620 * len(rows.source) // MAX_ROWS < 385_620
    tokens = count_row_tokens(rows.source)
    assert 200 < max(map(sum, zip(*tokens.values(), strict=True))) <= 256
    assert np.median(tokens["chain"]) == pytest.approx(40, abs=4)  # as published, without the last step
    generated = load_recipe("icot-gpt2-mult4", [f"model.name={folder}"])[0]
    assert sample_training_rows(generated, tokenizer, 1024).num_rows == 808_000
    fewer = generated.model_copy(update={"data": generated.data.model_copy(update={"max_train_rows": 99})})
    assert sample_training_rows(fewer, tokenizer, 1024).num_rows == 99
    none = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_tokens": 10})})
    with pytest.raises(InputError, match=r"0 of [\d,]+ rows are usable, fewer than a batch of"):
        sample_training_rows(none, tokenizer, 1024)


def test_sample_training_rows_refuses_a_missing_file_of_unknown_rows(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "openai-community/gpt2")
    recipe, _ = load_recipe("cot-gpt2-aug", [f"model.name={folder}", f"data.name={tmp_path}/mine.jsonl"])
    config, tokenizer = load_config_and_tokenizer(recipe)
    with pytest.raises(InputError, match=r"mine\.jsonl"):
        sample_training_rows(recipe, tokenizer, config.max_position_embeddings)


def test_sample_training_rows_counts_local_files_and_tokenizes_the_first_rows(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "openai-community/gpt2")
    rows = ({"id": str(i), "question": f"Question {i} of many, how much?", "steps": ["<<1+1=2>>"], "answer": "2"}
            for i in range(MAX_ROWS + 500))  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe, _ = load_recipe("cot-gpt2-aug", [f"model.name={folder}", f"data.name={tmp_path}/rows.jsonl"])
    config, tokenizer = load_config_and_tokenizer(recipe)
    rows_read = sample_training_rows(recipe, tokenizer, config.max_position_embeddings)
    assert (rows_read.num_rows, len(rows_read.source), rows_read.is_assumed) == (MAX_ROWS + 500, MAX_ROWS, False)
    large, _ = load_recipe("cot-gpt2-aug", [
        f"model.name={folder}", f"data.name={tmp_path}/rows.jsonl", f"train.batch_size={MAX_ROWS + 100}"
    ])  # fmt: skip
    assert sample_training_rows(large, tokenizer, config.max_position_embeddings).num_rows == MAX_ROWS + 500
    fewer = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_train_rows": MAX_ROWS + 9})})
    assert sample_training_rows(fewer, tokenizer, config.max_position_embeddings).num_rows == MAX_ROWS + 9
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text + "no row\n")  # the end of a large file is only counted
    assert sample_training_rows(recipe, tokenizer, config.max_position_embeddings).num_rows == MAX_ROWS + 501
    (tmp_path / "rows.jsonl").write_text(text.replace("\n", "\n\n").rstrip())  # blank lines, and no final newline
    assert sample_training_rows(recipe, tokenizer, config.max_position_embeddings).num_rows == MAX_ROWS + 500


def test_sample_training_rows_of_documents_counts_rows_or_assumes_the_steps(tmp_path: Path) -> None:
    keys = ["train.steps=3"]
    recipe, _ = load_recipe("read-books", [f"data.path={tmp_path}/none.jsonl", *keys])
    tokenizer = load_config_and_tokenizer(recipe)[1]
    assumed = sample_training_rows(recipe, tokenizer, 512)
    assert assumed.is_assumed
    assert assumed.num_rows == 3 * recipe.train.batch_size
    assert count_row_tokens(assumed.source).keys() == {"document"}
    folder, _ = load_recipe("read-books", [f"data.path={tmp_path}", *keys])
    with pytest.raises(InputError, match="is a folder; give a file"):
        sample_training_rows(folder, tokenizer, 512)
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"text": f"Book {i}. " * 600}) + "\n" for i in range(8)))
    recipe, _ = load_recipe("read-books", [f"data.path={tmp_path}/two.jsonl", *keys])
    note = sample_training_rows(recipe, tokenizer, 512).notes[-1]
    assert re.fullmatch(r"\d documents, about [\d,]+ tokens in all", note)
    texts = [f"{i} short " * 8 for i in range(8000)] + [f"{i} long text " * 900 for i in range(9)]  # some are held out
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = sample_training_rows(recipe, tokenizer, 512).source
    assert count_row_tokens(source)["document"].max() == recipe.data.text.row_tokens


def test_count_row_tokens_counts_every_row(tmp_path: Path) -> None:
    rows = [{"text": "word " * n} for n in range(1, 101)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lm.toml").write_text(TINY_DOCUMENT_RECIPE)
    recipe = load_recipe(tmp_path / "lm.toml", ["data.text.held_out_fraction=0"])[0]
    source = sample_training_rows(recipe, load_config_and_tokenizer(recipe)[1], 512).source
    whole = source.batch(range(len(source)), 0, 0)
    assert isinstance(whole, DocumentBatch)
    assert count_row_tokens(source)["document"].tolist() == whole.attention_mask.sum(1).tolist()


def test_plan_of_a_recipe_whose_initial_run_does_not_exist_yet(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "openai-community/gpt2")
    recipe, notes = load_recipe("coconut-gpt2-aug", [f"model.name={folder}"])
    assert notes == ["model.name replaces model.init_from_run"]
    assert recipe.model.init_from_run is None
    planned = load_recipe("demo-kava", [f"model.init_from_run={tmp_path}/demo-cot"])[0]
    assert load_config_and_tokenizer(planned)[1].fingerprint == build_digits_tokenizer().fingerprint
    with pytest.raises(InputError, match=r"no run, and no recipe of its name"):
        load_config_and_tokenizer(load_recipe("demo-kava", [f"model.init_from_run={tmp_path}/mine"])[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "layers", "keys"),
    [
        ("codi-gpt2-aug", "openai-community/gpt2", {"n_layer": 3}, ("train.batch_size=8", "train.micro_batch_size=8")),
        (
            "cot-coconut-gpt2-aug", "openai-community/gpt2", {"n_layer": 3},
            ("train.batch_size=16", "train.micro_batch_size=8"),
        ),
        (
            "kava-qwen05b-aug", "Qwen/Qwen2.5-0.5B-Instruct", {"num_hidden_layers": 3, "vocab_size": 50304},
            ("train.batch_size=8",),
        ),
    ],
)  # fmt: skip
def test_plan_memory_is_the_memory_that_updates_take(
    tmp_path: Path, name: str, model: str, layers: dict[str, int], keys: tuple[str, ...]
) -> None:
    if not Path("/proc/self/status").is_file():
        pytest.skip("counts resident memory by /proc")
    folder = folder_of(tmp_path, model)
    config = json.loads((folder / "config.json").read_text()) | layers
    (folder / "config.json").write_text(json.dumps(config))
    planned = plan_run(load_recipe(name, [f"model.name={folder}", *keys])[0], CPU)["memory"]["bytes"]
    command = [sys.executable, "-m", "tests.experiment.peak_memory", name, str(folder), *keys]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    taken = int(done.stdout)
    assert abs(planned / taken - 1) <= TOLERANCE, f"{planned / 2**20:.0f} MiB planned, {taken / 2**20:.0f} taken"


@pytest.mark.medium
def test_adamw_on_a_cpu_copies_one_tensor_at_a_time() -> None:
    """As the plan says: beside its state, a step takes copies of one parameter, and not of all."""
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = build_optimizer(module, TrainingConfig(steps=1))
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    with CostCounter(module) as counter:
        optimizer.step()
    sizes = [p.nbytes for p in module.parameters()]
    assert max(sizes) < counter.peak_bytes - 2 * sum(sizes) < 4 * max(sizes)


@pytest.mark.parametrize(
    ("stored", "keys", "note"),
    [
        ("bfloat16", ["model.dtype=float32"], "model.dtype=bfloat16 keeps the frozen weights as they are stored"),
        ("float16", ["model.dtype=float32"], "model.dtype=float16 keeps the frozen weights as they are stored"),
        ("float32", ["model.dtype=float32"], None),
        ("bfloat16", ["model.dtype=bfloat16"], None),
        ("bfloat16", ["train.trainable=full"], None),
        ("float32", ["train.trainable=full", "model.dtype=bfloat16"], "model.dtype=bfloat16: small updates round"),
    ],
)
@pytest.mark.medium
def test_plan_notes_a_better_dtype(tmp_path: Path, stored: str, keys: list[str], note: str | None) -> None:
    decoder = fresh("llama", vocab_size=build_digits_tokenizer().vocab_size, max_position_embeddings=256)
    decoder.save_pretrained(tmp_path / "model")
    build_digits_tokenizer().save(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text()) | {"torch_dtype": stored, "dtype": stored}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "tiny.toml").write_text(TINY.replace("METHOD", "cot"))
    model = [f"model.name={tmp_path / 'model'}", "train.trainable=lora"]
    plan = plan_run(load_recipe(tmp_path / "tiny.toml", [*model, *keys])[0], CPU)
    notes = [note for note in plan["notes"] if "model.dtype=" in note]
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]
