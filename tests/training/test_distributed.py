"""Several ranks: same trajectory as one process, steps of all ranks or none, the same exit code on all."""

import json
import os
import pathlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from laconic.batches import ReasoningBatch
from laconic.config.data import TextConfig
from laconic.config.nested import CMSOptions, SelfModifyingOptions
from laconic.config.training import TrainingConfig
from laconic.data.documents.dataset import DocumentDataset, tokenize_documents
from laconic.data.documents.load import Document
from laconic.data.documents.stateful_batches import StatefulBatches
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import BusyError, CorruptArtifactError, DiskError, InputError, LaconicError, UsageError
from laconic.evaluation.validation import split_over_ranks
from laconic.interfaces import StepOutput
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope
from laconic.nested.language_model import NestedLanguageModel
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.training import sharded
from laconic.training.checkpoint import StateDictIO, load_model, load_tensors
from laconic.training.distributed import (
    ENDED_GROUPS,
    check_distributed_config,
    error_from_json,
    error_to_json,
    init_ranks,
)
from laconic.training.loop import train
from laconic.training.ranks import Ranks
from laconic.training.run import TrainingSetup
from laconic.training.sharded import full_tensor
from tests.compression.documents import compressor, distilled_compressor, short_books
from tests.latent.batches import build_kava, reasoning_batch
from tests.tolerances import RECOMPUTE, error
from tests.training.multi_rank import run_ranks, run_ranks_ok
from tests.training.toy import ToyBatch, ToyData, ToyMethod
from tests.training.toy_runs import flat_parameters, read_metrics, run_training, runs_equal, toy_config

pytestmark = [pytest.mark.loopback, pytest.mark.usefixtures("unchecked"), pytest.mark.medium]
CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
SIZES = ((5, 6, 4), (3, 3, 3), (4, 0, 5), (2, 9, 4), (6, 1, 3), (3, 5, 4), (5, 2, 5), (4, 4, 4), (2, 0, 3), (3, 7, 5))


class ReasoningData:
    """Ten rows of questions, chains and answers."""

    fingerprint = "0" * 64

    def __init__(self) -> None:
        self.rows = reasoning_batch(SIZES)

    def __len__(self) -> int:
        return len(SIZES)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> ReasoningBatch:
        return self.rows.select_rows(rows)


class PartlyUsed(ToyMethod):
    """A method with a parameter that nothing uses, and one that only some rows use."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.unused, self.rare = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 1))

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        step = super().forward(batch, state)
        odd = [i for i, name in enumerate(batch.ids) if name in ("7", "12")]
        if not odd:
            return step
        totals = batch.loss_denominators or self.loss_denominators(batch)
        return step._replace(loss=step.loss + (batch.y[odd] @ self.rare).square().sum() / totals["rows"])


def train_on_ranks(path: Path, settings: TrainingConfig, method: nn.Module, **named: Any) -> dict[str, Any]:
    """Run training on this rank to its end; return the parameters, which are equal on all ranks."""
    with init_ranks(settings, CPU) as ranks:
        run = RunDirectory(path)
        with ranks.lock_run(run):
            data = named.pop("data", None) or ToyData()
            train(TrainingSetup(method, data, settings, seed=5, ranks=ranks), run=run, **named)
            return {name: full_tensor(p.detach()).tolist() for name, p in method.named_parameters()}


def loss_terms(path: Path) -> list[list[float]]:
    """Loss and terms of every step."""
    return [[line[name] for name in sorted(line) if name not in ("lr", "grad_norm")] for line in read_metrics(path)]


def load_step(step: Path) -> dict[str, torch.Tensor]:
    """All tensors of a step; files of shards may differ in the order of their metadata."""
    results = {
        f"{folder.name} {name}": t
        for folder in step.iterdir()
        if folder.is_dir()
        for name, t in sharded.read_shards(folder).items()
    }
    return results | {
        f"{file.name} {name}": t for file in step.glob("*.safetensors") for name, t in load_tensors(file).items()
    }


def trajectories_agree(one: Path, other: Path) -> bool:
    """Whether loss and terms of every step of two runs agree up to rounding."""
    actual, expected = (torch.tensor(loss_terms(path), dtype=torch.float64) for path in (one, other))
    return actual.shape == expected.shape and bool(
        ((actual - expected).abs() <= RECOMPUTE * expected.abs().clamp(min=1)).all()
    )


@BOTH
def test_ranks_split_rows_and_match_one_process(tmp_path: Path, parallel: Any) -> None:
    def work() -> Any:
        points = ToyData()
        train_on_ranks(tmp_path / "two", toy_config(parallel=parallel, steps=6), ToyMethod(0.0), data=points)
        return points.requests

    run_training(tmp_path / "one", toy_config(steps=6), method=ToyMethod(0.0), data=(points := ToyData()))
    rows: dict[tuple[int, int], list[int]] = {}
    for piece, epoch, step in points.requests:
        rows.setdefault((epoch, step), []).extend(piece)
    read = run_ranks_ok(tmp_path, work)
    for rank in range(2):
        for (epoch, step), expected in rows.items():
            assert [row for piece, *at in read[rank] if at == [epoch, step] for row in piece] == expected[rank::2]
    assert trajectories_agree(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    ("parallel", "micro", "family"),
    [("ddp", 8, "gpt2"), pytest.param("ddp", 1, "llama", marks=pytest.mark.slow), ("fsdp", 2, "llama")],
)
def test_ranks_kava_matches_one_process(tmp_path: Path, parallel: Any, micro: int, family: str) -> None:
    def settings(**more: Any) -> TrainingConfig:
        return toy_config(
            steps=2, micro_batch_size=micro, learning_rate=1e-3, warmup_ratio=0.0, activation_checkpointing=1, **more
        )

    def work() -> Any:
        train_on_ranks(tmp_path / "two", settings(parallel=parallel), method(), data=ReasoningData())

    def method() -> nn.Module:
        return build_kava(
            family, distillation={"hidden_scale": "none"}
        ).float()  # a scale would be that of each micro-batch

    run_training(tmp_path / "one", settings(), method=method(), data=ReasoningData())
    run_ranks_ok(tmp_path, work)
    assert trajectories_agree(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    "compression",
    [
        {"length_policy": "stop_head"},
        pytest.param({"summary": "autoregressive"}, marks=pytest.mark.slow),
        pytest.param({"summary": "select", "memory_policy": "replace"}, marks=pytest.mark.slow),
        pytest.param({"length_policy": "nested_dropout", "summary_map": "scale"}, marks=pytest.mark.slow),
    ],
)
def test_ranks_fsdp_with_documents_of_any_length(tmp_path: Path, compression: dict[str, Any]) -> None:
    """Ranks whose rows end after other numbers of segments make equally many passes, and learn as one process does."""

    def method() -> nn.Module:
        head = {"estimator": "soft", "length_cost": 0.1} if compression.get("length_policy") == "stop_head" else None
        return compressor("llama", head, sizes={"vocab_size": 257}, total_steps=3, **compression).float()

    def source(whole: bool) -> DocumentDataset:
        books = [Document(str(i), (chr(97 + i) * n,)) for i, n in enumerate((40, 12, 9, 33, 21, 6))]
        text = TextConfig(
            row_tokens=40, segment_tokens=10, segment_lengths="fixed", segments_per_window=2, segment_overlap=0
        )
        return DocumentDataset(
            books, tokenize_documents(books, build_byte_tokenizer()), text, 0, 100, pad_to_row_tokens=whole
        )

    def settings(**more: Any) -> TrainingConfig:
        return toy_config(steps=3, batch_size=2, micro_batch_size=1, learning_rate=1e-3, weight_decay=0.0, **more)

    def work() -> Any:
        train_on_ranks(tmp_path / "two", settings(parallel="fsdp", reshard=True), method(), data=source(True))

    run_training(tmp_path / "one", settings(), method=method(), data=source(False))
    run_ranks_ok(tmp_path, work)
    assert trajectories_agree(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@BOTH
def test_ranks_distillation_matches_one_process(tmp_path: Path, parallel: Any) -> None:
    def settings(**more: Any) -> TrainingConfig:
        return toy_config(
            batch_size=4, micro_batch_size=1, steps=3, learning_rate=1e-3, weight_decay=0.0, warmup_ratio=0.0, **more
        )

    def work() -> None:
        rows = short_books(pad_to_row_tokens=parallel == "fsdp")
        train_on_ranks(tmp_path / "two", settings(parallel=parallel), distilled_compressor(with_lora=True), data=rows)

    run_training(tmp_path / "one", settings(), method=distilled_compressor(with_lora=True), data=short_books())
    run_ranks_ok(tmp_path, work)
    assert trajectories_agree(tmp_path / "two", tmp_path / "one")


@BOTH
def test_ranks_parameters_used_by_some_ranks_only(tmp_path: Path, parallel: Any) -> None:
    settings = toy_config(
        parallel=parallel, steps=5, batch_size=3, micro_batch_size=1, weight_decay=0.5, learning_rate=0.1,
        last_batch="keep",
    )  # fmt: skip

    def work() -> Any:
        return train_on_ranks(tmp_path / "two", settings, PartlyUsed(), data=ToyData(14))

    _, one = run_training(tmp_path / "one", settings, method=PartlyUsed(), data=ToyData(14))
    results = run_ranks_ok(tmp_path, work)[0]
    assert results["unused"] == torch.ones(3, 2).tolist()  # neither moved nor decayed
    assert results["rare"] != torch.ones(3, 1).tolist()
    flat = torch.cat([torch.tensor(p).reshape(-1) for p in results.values()])
    assert error(flat, flat_parameters(one)) <= 10 * RECOMPUTE


@BOTH
def test_ranks_resume_bit_for_bit(tmp_path: Path, parallel: Any) -> None:
    def settings(steps: int) -> TrainingConfig:
        return toy_config(parallel=parallel, warmup_ratio=0, warmup_steps=3, lr_schedule="constant", steps=steps)

    def work() -> None:
        train_on_ranks(tmp_path / "whole", settings(6), ToyMethod())
        train_on_ranks(tmp_path / "cut", settings(4), ToyMethod())

    def rest() -> None:
        train_on_ranks(tmp_path / "cut", settings(6), ToyMethod())

    run_ranks_ok(tmp_path, work)
    run_ranks_ok(tmp_path, rest)
    if parallel == "ddp":
        assert runs_equal(tmp_path / "whole", tmp_path / "cut", 6)
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "cut")
    whole, cut = (load_step(RunDirectory(tmp_path / name).get_step(6).path) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() >= {"rng-00000.safetensors torch", "rng-00001.safetensors torch"}
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@BOTH
def test_ranks_carry_states_like_one_process(tmp_path: Path, parallel: Any) -> None:
    """Hope reads documents in order on two ranks, is interrupted, and follows the trajectory of one process."""
    texts = [Document(str(i), (chr(97 + i) * n,)) for i, n in enumerate((35, 20, 27, 31))]
    data = StatefulBatches(texts, tokenize_documents(texts, build_byte_tokenizer()), 9, num_lanes=4, seed=1)

    def settings(steps: int, **more: Any) -> TrainingConfig:
        schedule = {"warmup_ratio": 0, "warmup_steps": 3, "lr_schedule": "constant"}
        return toy_config(stateful=True, steps=steps, batch_size=4, save_every=2, **schedule, **more)

    def method() -> nn.Module:
        memory = SelfModifyingOptions(memory_chunk_size=3, projection_chunk_size=3, projection_lr_init=0.3)
        config = HopeConfig.attention_free(
            257,
            8,
            1,
            chunk_sizes=(4, 8),
            num_heads=2,
            memory=memory,
            cms=CMSOptions(inner_lr=0.5),
        )
        return NestedLanguageModel(Hope(config, 1).double())

    def losses(path: Path) -> list[float]:
        return [line["loss"] for line in read_metrics(path)]

    def work(steps: int) -> None:
        train_on_ranks(tmp_path / "two", settings(steps, micro_batch_size=1, parallel=parallel), method(), data=data)

    run_training(tmp_path / "one", settings(3), method=method(), data=data)
    run_ranks_ok(tmp_path, lambda: work(2))
    run_ranks_ok(tmp_path, lambda: work(3))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=RECOMPUTE)
    run_training(tmp_path / "forgets", settings(3).model_copy(update={"stateful": False}), method=method(), data=data)
    assert losses(tmp_path / "forgets") != pytest.approx(losses(tmp_path / "one"), rel=RECOMPUTE)
    with pytest.raises(UsageError, match="states that 2 processes carried, not 1"):
        run_training(tmp_path / "two", settings(8, micro_batch_size=1, parallel=parallel), method=method(), data=data)


@pytest.mark.parametrize(("first", "then"), [("fsdp", 1), ("ddp", 1), ("one", 2)])
def test_ranks_resume_with_another_number(tmp_path: Path, first: Any, then: int) -> None:
    plain = toy_config(steps=6, warmup_ratio=0, warmup_steps=3, lr_schedule="constant")

    def settings(parallel: Any, steps: int) -> TrainingConfig:
        return plain.model_copy(update={"parallel": parallel, "steps": steps})

    def two(parallel: Any, steps: int) -> None:
        train_on_ranks(tmp_path / "run", settings(parallel, steps), ToyMethod(0.0))

    if first == "one":
        run_training(tmp_path / "run", settings("ddp", 4), method=ToyMethod(0.0))
    else:
        run_ranks_ok(tmp_path, lambda: two(first, 4))
    if then == 1:
        run_training(tmp_path / "run", settings("ddp", 6), method=ToyMethod(0.0))
    else:
        run_ranks_ok(tmp_path, lambda: two("fsdp", 6))
    run_training(tmp_path / "whole", plain, method=ToyMethod(0.0))
    assert trajectories_agree(tmp_path / "run", tmp_path / "whole")


def test_shards_hold_the_tensors(tmp_path: Path) -> None:
    """Two ranks write, one rank reads."""

    def work() -> Any:
        return train_on_ranks(tmp_path / "run", toy_config(parallel="fsdp", steps=2), ToyMethod(0.0))

    expected = run_ranks_ok(tmp_path, work)[0]
    folder = RunDirectory(tmp_path / "run").get_step(2).path
    results = sharded.read_shards(folder / "model")
    assert results.keys() == expected.keys()
    assert all(torch.equal(results[name], torch.tensor(expected[name])) for name in expected)
    assert len(list(folder.glob("model/shard-*.safetensors"))) == len(list(folder.glob("optimizer/shard-*"))) == 2
    assert not list(folder.glob("**/.metadata"))
    other, model = ToyMethod(0.0), StateDictIO(ToyMethod(0.0))
    other.first.requires_grad_(False)
    with pytest.raises(CorruptArtifactError, match=r"first.bias is either stored or trainable"):
        load_model(folder, model, other)
    with pytest.raises(CorruptArtifactError, match=r"first.bias is \[8\], this run has \[9\]"):
        sharded.read_shards(folder / "model", lambda name, shape: torch.empty([n + 1 for n in shape]))


@BOTH
def test_ranks_signal_to_one_stops_both(tmp_path: Path, parallel: Any) -> None:
    class Signalled(ToyData):
        def batch(self, rows: Sequence[int], epoch: int, step: int) -> ToyBatch:
            if step == 5 and os.environ["RANK"] == "1" and self.requests[-1][2] == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().batch(rows, epoch, step)

    results = run_ranks(
        tmp_path, lambda: train_on_ranks(tmp_path / "run", toy_config(parallel=parallel), ToyMethod(), data=Signalled())
    )
    assert [result.code for result in results] == [75, 75]
    assert RunDirectory(tmp_path / "run").step_numbers() == [4, 6]
    assert {result.message.partition(":")[0] for result in results} == {"SIGTERM", "a signal to another rank"}


@pytest.mark.parametrize(
    ("parallel", "rank", "name"),
    [
        ("ddp", "0", "optimizer.json"),
        ("ddp", "1", "rng-00001.safetensors"),
        ("fsdp", "1", "shard-00002-model"),
        ("fsdp", "0", "progress.json"),
    ],
)
def test_ranks_disk_error_of_one_commits_nothing(tmp_path: Path, parallel: Any, rank: str, name: str) -> None:
    def work() -> None:
        before, touched = pathlib.Path.open, pathlib.Path.touch

        def full(path: Path) -> None:
            if name in path.name and path.parent.name != "steps" and os.environ["RANK"] == rank:
                raise OSError(28, "No space left on device")

        def open_(path: Path, *rest: Any, **named: Any) -> Any:
            full(path)
            return before(path, *rest, **named)

        def touch(path: Path, *rest: Any, **named: Any) -> Any:
            full(path)
            return touched(path, *rest, **named)

        pathlib.Path.open, pathlib.Path.touch = open_, touch  # type: ignore[method-assign,assignment]
        train_on_ranks(tmp_path / "run", toy_config(parallel=parallel, save_every=1), ToyMethod())

    results = run_ranks(tmp_path, work)
    assert [result.code for result in results] == [DiskError.exit_code] * 2, results
    assert "No space left on device" in results[1 - int(rank)].message
    assert os.listdir(tmp_path / "run" / "steps") == []


def test_ranks_error_of_one_ends_both(tmp_path: Path) -> None:
    class Broken(ToyData):
        def batch(self, rows: Sequence[int], epoch: int, step: int) -> ToyBatch:
            if step == 3 and os.environ["RANK"] == "1":
                raise InputError("row 17 cannot be read")
            return super().batch(rows, epoch, step)

    results = run_ranks(tmp_path, lambda: train_on_ranks(tmp_path / "run", toy_config(), ToyMethod(), data=Broken()))
    assert [(result.code, result.message) for result in results] == [(66, "row 17 cannot be read")] * 2


def test_errors_keep_their_class_between_ranks() -> None:
    for raised in (LaconicError("a bug"), InputError("a row"), BusyError("a run")):
        received = error_from_json(json.loads(json.dumps(error_to_json(raised))))
        assert (type(received), str(received)) == (type(raised), str(raised))


def test_ranks_bug_of_one_ends_both(tmp_path: Path) -> None:
    class Bug(ToyData):
        def batch(self, rows: Sequence[int], epoch: int, step: int) -> ToyBatch:
            return super().batch(rows, epoch, 1 // (1 - int(os.environ["RANK"])))

    results = run_ranks(tmp_path, lambda: train_on_ranks(tmp_path / "run", toy_config(), ToyMethod(), data=Bug()))
    assert [result.code for result in results] == [70, 70]
    assert all("ZeroDivisionError" in result.message for result in results), results


def test_ranks_nonfinite_on_one_ends_both(tmp_path: Path) -> None:
    class Spoilt(ToyData):
        def batch(self, rows: Sequence[int], epoch: int, step: int) -> ToyBatch:
            results = super().batch(rows, epoch, step)
            if step == 6 and os.environ["RANK"] == "1":
                results.x[0, 0] = float("nan")
            return results

    results = run_ranks(
        tmp_path, lambda: train_on_ranks(tmp_path / "run", toy_config(parallel="fsdp"), ToyMethod(), data=Spoilt())
    )
    assert [result.code for result in results] == [65, 65], results
    assert all("step 7: " in result.message for result in results)
    assert RunDirectory(tmp_path / "run").step_numbers() == [4, 6]


def test_ranks_locked_run_is_refused_to_all(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").lock():
        results = run_ranks(tmp_path, lambda: train_on_ranks(tmp_path / "run", toy_config(), ToyMethod()))
    assert [result.code for result in results] == [73, 73]


@BOTH
def test_ranks_validate_independently(tmp_path: Path, parallel: Any) -> None:
    """A rank calls the method as often as its questions ask; all get all answers, in the order of the questions."""

    def work() -> Any:
        settings, method = (
            toy_config(parallel=parallel, steps=4, validate_every=1, best_metric=None, keep_best=0),
            ToyMethod(0.0),
        )
        with init_ranks(settings, CPU) as ranks:

            def answers(mine: list[int]) -> list[float]:
                with torch.no_grad():
                    return [float(sum(method(ToyData().batch([i], 0, 0)).loss for _ in range(i + 1))) for i in mine]

            def validate(epoch: int) -> dict[str, float]:
                results = split_over_ranks(ranks, 5, answers)
                assert results == sorted(results, key=results.index)
                return {f"{i}": loss for i, loss in enumerate(results)}

            return dict(
                train(TrainingSetup(method, ToyData(), settings, seed=5, ranks=ranks), validate=validate).validation
            )

    one, two = run_ranks_ok(tmp_path, work)
    assert one == two
    method = ToyMethod(0.0)
    train(TrainingSetup(method, ToyData(), toy_config(steps=4), seed=5))
    with torch.no_grad():
        alone = split_over_ranks(
            Ranks(), 5, lambda mine: [float(method.eval()(ToyData().batch([i], 0, 0)).loss) for i in mine]
        )
    assert [one[f"{i}"] / (i + 1) for i in range(5)] == pytest.approx(alone, rel=RECOMPUTE)


def test_init_ranks_keeps_the_group_that_ended(tmp_path: Path) -> None:
    """Its destructor can wait for ever, as it holds the GIL that its own thread needs."""

    def work() -> Any:
        with init_ranks(toy_config(), CPU):
            group = dist.group.WORLD
        return [any(group is ended for ended in ENDED_GROUPS), dist.is_initialized()]

    assert run_ranks_ok(tmp_path, work) == [[True, False]] * 2


def test_ranks_check_config() -> None:
    with pytest.raises(UsageError, match="batch_size = 1"):
        check_distributed_config(toy_config(batch_size=1, micro_batch_size=1), 2)
    with pytest.raises(UsageError, match="not a multiple of the 3 ranks"):
        check_distributed_config(toy_config(stateful=True), 3)
    with pytest.raises(UsageError, match="float16"):
        check_distributed_config(toy_config(parallel="fsdp", precision="float16"), 2)


def test_init_ranks_refuses_an_incomplete_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(UsageError, match="torchrun"),
        init_ranks(toy_config(), CPU),
    ):
        pass


def test_write_shards_refuses_a_value_that_is_not_a_tensor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0\.lr is a float, not a tensor"):
        sharded.write_shards(ManifestWriter(tmp_path), "optimizer", {"0.exp_avg": torch.ones(2), "0.lr": 0.1}, 0)  # type: ignore[dict-item]
    assert os.listdir(tmp_path) == []
