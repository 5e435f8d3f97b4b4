"""Several ranks: one trajectory however many there are, steps of all or none, the same end for all."""

import json
import os
import pathlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laconic.batches import ReasoningBatch
from laconic.config.data import TextConfig
from laconic.config.training import TrainingConfig
from laconic.data.documents.dataset import DocumentDataset, tokenize_documents
from laconic.data.documents.load import Document
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import BusyError, CorruptArtifactError, DiskError, InputError, LaconicError, UsageError
from laconic.interfaces import StepOutput
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.training import sharded
from laconic.training.checkpoint import StateDictIO, load_model, load_tensors
from laconic.training.distributed import check_config, init_ranks
from laconic.training.loop import train
from laconic.training.rank_sync import error_from_json, error_to_json
from laconic.training.ranks import SingleProcess, map_over_ranks
from tests.methods.batches import kava, reasoning
from tests.methods.documents import compressor
from tests.tolerances import RECOMPUTE, error
from tests.training.ground import how, lines, parameters, same, trained
from tests.training.several import ends, well
from tests.training.toy import Points, Rows, Toy

pytestmark = [pytest.mark.loopback, pytest.mark.usefixtures("unchecked")]
CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
SIZES = ((5, 6, 4), (3, 3, 3), (4, 0, 5), (2, 9, 4), (6, 1, 3), (3, 5, 4), (5, 2, 5), (4, 4, 4), (2, 0, 3), (3, 7, 5))


class Drawn:
    """Ten rows of questions, chains and answers."""

    fingerprint = "0" * 64

    def __init__(self) -> None:
        self.rows = reasoning(SIZES)

    def __len__(self) -> int:
        return len(SIZES)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> ReasoningBatch:
        return self.rows.select_rows(rows)


class Picky(Toy):
    """A toy with a vector that nothing uses, and one that only some rows use."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.never, self.seldom = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 1))

    def forward(self, batch: Rows, state: Any = None) -> StepOutput:
        step = super().forward(batch, state)
        odd = [i for i, name in enumerate(batch.ids) if name in ("7", "12")]
        if not odd:
            return step
        totals = batch.totals or self.totals(batch)
        return step._replace(loss=step.loss + (batch.y[odd] @ self.seldom).square().sum() / totals["rows"])


def several(path: Path, settings: TrainingConfig, method: nn.Module, **named: Any) -> dict[str, Any]:
    """The run of one rank, from wherever it was to its end; the parameters that all ranks then have."""
    with init_ranks(settings, CPU) as ranks:
        run = RunDirectory(path)
        with ranks.lock_run(run):
            source = named.pop("source", None) or Points()
            train(method, source, settings, run=run, seed=5, ranks=ranks, **named)
            return {name: ranks.full_tensor(p.detach()).tolist() for name, p in method.named_parameters()}


def numbers(path: Path) -> list[list[float]]:
    """Loss and parts of every step."""
    return [[line[name] for name in sorted(line) if name not in ("lr", "grad_norm")] for line in lines(path)]


def every(step: Path) -> dict[str, torch.Tensor]:
    """All tensors of a step; safetensors orders its metadata as it likes, so files of shards differ in their bytes."""
    found = {
        f"{folder.name} {name}": t
        for folder in step.iterdir()
        if folder.is_dir()
        for name, t in sharded.read_shards(folder).items()
    }
    return found | {
        f"{file.name} {name}": t for file in step.glob("*.safetensors") for name, t in load_tensors(file).items()
    }


def alike(one: Path, other: Path) -> bool:
    """Whether every number of every step of two runs is the same but for rounding."""
    found, asked = (torch.tensor(numbers(path), dtype=torch.float64) for path in (one, other))
    return found.shape == asked.shape and bool(((found - asked).abs() <= RECOMPUTE * asked.abs().clamp(min=1)).all())


@BOTH
def test_rows_and_losses_of_two_ranks_are_those_of_one(tmp_path: Path, parallel: Any) -> None:
    def work() -> Any:
        points = Points()
        several(tmp_path / "two", how(parallel=parallel, micro=3), Toy(0.0), source=points)
        return points.read

    trained(tmp_path / "one", method=Toy(0.0), source=(points := Points()))
    rows: dict[tuple[int, int], list[int]] = {}
    for piece, epoch, step in points.read:
        rows.setdefault((epoch, step), []).extend(piece)
    read = well(tmp_path, work)
    for rank in range(2):
        for (epoch, step), asked in rows.items():
            assert [row for piece, *at in read[rank] if at == [epoch, step] for row in piece] == asked[rank::2]
    assert alike(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    ("parallel", "micro", "family"),
    [("ddp", 8, "gpt2"), pytest.param("ddp", 1, "llama", marks=pytest.mark.slow), ("fsdp", 2, "llama")],
)
def test_kava_on_two_ranks(tmp_path: Path, parallel: Any, micro: int, family: str) -> None:
    def settings(**more: Any) -> TrainingConfig:
        return how(steps=2, micro=micro, lr=1e-3, warmup=0.0, recompute=1, **more)

    def work() -> Any:
        several(tmp_path / "two", settings(parallel=parallel), method(), source=Drawn())

    def method() -> nn.Module:
        return kava(family, distilling={"codi_norm": "none"}).float()  # a norm is of the rows of a micro-batch

    trained(tmp_path / "one", settings(), method=method(), source=Drawn())
    well(tmp_path, work)
    assert alike(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    "reading",
    [
        {"length": "stop"},
        pytest.param({"generator": "self"}, marks=pytest.mark.slow),
        pytest.param({"generator": "select", "memory": "replace"}, marks=pytest.mark.slow),
        pytest.param({"length": "nested", "adapter": "scale"}, marks=pytest.mark.slow),
    ],
)
def test_documents_of_any_length_in_shards(tmp_path: Path, reading: dict[str, Any]) -> None:
    """Ranks whose rows end after other numbers of segments make equally many passes, and learn as one process does."""

    def method() -> nn.Module:
        head = {"joint": True, "price": 0.1} if reading.get("length") == "stop" else None
        return compressor("llama", head, sizes={"vocab_size": 257}, steps=3, **reading).float()

    def source(whole: bool) -> DocumentDataset:
        books = [Document(str(i), (chr(97 + i) * n,)) for i, n in enumerate((40, 12, 9, 33, 21, 6))]
        text = TextConfig(
            row_tokens=40, segment_tokens=10, segment_lengths="fixed", segments_per_window=2, segment_overlap=0
        )
        return DocumentDataset(
            books, tokenize_documents(books, build_byte_tokenizer()), text, 0, 100, pad_to_row_tokens=whole
        )

    def settings(**more: Any) -> TrainingConfig:
        return how(steps=3, batch=2, micro=1, lr=1e-3, weight_decay=0.0, **more)

    def work() -> Any:
        several(tmp_path / "two", settings(parallel="fsdp"), method(), source=source(True))

    trained(tmp_path / "one", settings(), method=method(), source=source(False))
    well(tmp_path, work)
    assert alike(tmp_path / "two", tmp_path / "one")


@BOTH
def test_what_only_some_ranks_use(tmp_path: Path, parallel: Any) -> None:
    settings = how(parallel=parallel, batch=3, micro=1, weight_decay=0.5, lr=0.1, last_batch="keep")

    def work() -> Any:
        return several(tmp_path / "two", settings, Picky())

    _, one = trained(tmp_path / "one", settings, method=Picky())
    found = well(tmp_path, work)[0]
    assert found["never"] == torch.ones(3, 2).tolist()  # neither moved nor decayed
    assert found["seldom"] != torch.ones(3, 1).tolist()
    flat = torch.cat([torch.tensor(p).reshape(-1) for p in found.values()])
    assert error(flat, parameters(one)) <= 10 * RECOMPUTE


@BOTH
def test_a_run_of_two_ranks_goes_on_bit_for_bit(tmp_path: Path, parallel: Any) -> None:
    def settings(steps: int) -> TrainingConfig:
        return how(parallel=parallel, warmup=0, warmup_steps=3, schedule="constant", steps=steps)

    def work() -> None:
        several(tmp_path / "whole", settings(12), Toy())
        several(tmp_path / "cut", settings(8), Toy())

    def rest() -> None:
        several(tmp_path / "cut", settings(12), Toy())

    well(tmp_path, work)
    well(tmp_path, rest)
    if parallel == "ddp":
        assert same(tmp_path / "whole", tmp_path / "cut")
    assert lines(tmp_path / "whole") == lines(tmp_path / "cut")
    whole, cut = (every(RunDirectory(tmp_path / name).get_step(12).path) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() >= {"rng-00000.safetensors torch", "rng-00001.safetensors torch"}
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize(("first", "then"), [("fsdp", 1), ("ddp", 1), ("one", 2)])
def test_a_run_goes_on_with_other_ranks(tmp_path: Path, first: Any, then: int) -> None:
    plain = how(warmup=0, warmup_steps=3, schedule="constant")

    def settings(parallel: Any, steps: int) -> TrainingConfig:
        return plain.model_copy(update={"parallel": parallel, "steps": steps})

    def two(parallel: Any, steps: int) -> None:
        several(tmp_path / "run", settings(parallel, steps), Toy(0.0))

    if first == "one":
        trained(tmp_path / "run", settings("ddp", 8), method=Toy(0.0))
    else:
        well(tmp_path, lambda: two(first, 8))
    if then == 1:
        trained(tmp_path / "run", settings("ddp", 12), method=Toy(0.0))
    else:
        well(tmp_path, lambda: two("fsdp", 12))
    trained(tmp_path / "whole", plain, method=Toy(0.0))
    assert alike(tmp_path / "run", tmp_path / "whole")


def test_shards_are_the_tensors(tmp_path: Path) -> None:
    """Two ranks write, one rank reads."""

    def work() -> Any:
        return several(tmp_path / "run", how(parallel="fsdp"), Toy(0.0))

    asked = well(tmp_path, work)[0]
    folder = RunDirectory(tmp_path / "run").get_step(12).path
    found = sharded.read_shards(folder / "model")
    assert found.keys() == asked.keys()
    assert all(torch.equal(found[name], torch.tensor(asked[name])) for name in asked)
    assert len(list(folder.glob("model/shard-*.safetensors"))) == len(list(folder.glob("optimizer/shard-*"))) == 2
    assert not list(folder.glob("**/.metadata"))
    other, model = Toy(0.0), StateDictIO(Toy(0.0))
    other.first.requires_grad_(False)
    with pytest.raises(
        CorruptArtifactError, match=r"first.bias is in its shards or among what is trained, not in both; take its "
    ):
        load_model(folder, model, other)
    with pytest.raises(CorruptArtifactError, match=r"first.bias is \[8\], the run has \[9\]; take its recipe"):
        sharded.read_shards(folder / "model", lambda name, shape: torch.empty([n + 1 for n in shape]))


@BOTH
def test_a_signal_to_one_rank_ends_both(tmp_path: Path, parallel: Any) -> None:
    class Signalled(Points):
        def batch(self, rows: Sequence[int], epoch: int, step: int) -> Rows:
            if step == 5 and os.environ["RANK"] == "1" and self.read[-1][2] == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().batch(rows, epoch, step)

    found = ends(tmp_path, lambda: several(tmp_path / "run", how(parallel=parallel), Toy(), source=Signalled()))
    assert [end.code for end in found] == [75, 75]
    assert RunDirectory(tmp_path / "run").step_numbers() == [4, 6]
    assert {end.message.partition(":")[0] for end in found} == {"SIGTERM", "a signal to another rank"}


@pytest.mark.parametrize(
    ("parallel", "rank", "name"),
    [
        ("ddp", "0", "optimizer.json"),
        ("ddp", "1", "rng-00001.safetensors"),
        ("fsdp", "1", "shard-00002-model"),
        ("fsdp", "0", "progress.json"),
    ],
)
def test_a_failing_disk_of_one_rank_commits_nothing(tmp_path: Path, parallel: Any, rank: str, name: str) -> None:
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
        several(tmp_path / "run", how(parallel=parallel), Toy())

    found = ends(tmp_path, work)
    assert [end.code for end in found] == [DiskError.exit_code] * 2, found
    assert "No space left on device" in found[1 - int(rank)].message
    assert os.listdir(tmp_path / "run" / "steps") == []


def test_an_error_on_one_rank_is_the_error_of_both(tmp_path: Path) -> None:
    class Broken(Points):
        def batch(self, rows: Sequence[int], epoch: int, step: int) -> Rows:
            if step == 3 and os.environ["RANK"] == "1":
                raise InputError("row 17 cannot be read")
            return super().batch(rows, epoch, step)

    found = ends(tmp_path, lambda: several(tmp_path / "run", how(), Toy(), source=Broken()))
    assert [(end.code, end.message) for end in found] == [(66, "row 17 cannot be read")] * 2


def test_an_error_is_of_the_class_it_was_whatever_else_is_imported() -> None:
    """The demo's own error has two arguments and the code of a bug until it is made."""
    from laconic.cli.jobs import Failed

    assert issubclass(Failed, LaconicError)
    for raised in (LaconicError("a bug"), InputError("a row"), BusyError("a run")):
        again = error_from_json(json.loads(json.dumps(error_to_json(raised))))
        assert (type(again), str(again)) == (type(raised), str(raised))


def test_a_bug_on_one_rank_ends_both(tmp_path: Path) -> None:
    class Bug(Points):
        def batch(self, rows: Sequence[int], epoch: int, step: int) -> Rows:
            return super().batch(rows, epoch, 1 // (1 - int(os.environ["RANK"])))

    found = ends(tmp_path, lambda: several(tmp_path / "run", how(), Toy(), source=Bug()))
    assert [end.code for end in found] == [70, 70]
    assert all("ZeroDivisionError" in end.message for end in found), found


def test_a_number_that_is_not_finite_on_one_rank(tmp_path: Path) -> None:
    class Spoilt(Points):
        def batch(self, rows: Sequence[int], epoch: int, step: int) -> Rows:
            found = super().batch(rows, epoch, step)
            if step == 6 and os.environ["RANK"] == "1":
                found.x[0, 0] = float("nan")
            return found

    found = ends(tmp_path, lambda: several(tmp_path / "run", how(parallel="fsdp"), Toy(), source=Spoilt()))
    assert [end.code for end in found] == [65, 65], found
    assert all("step 7: " in end.message for end in found)
    assert RunDirectory(tmp_path / "run").step_numbers() == [4, 6]


def test_a_run_that_is_held_is_refused_to_all(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").lock():
        found = ends(tmp_path, lambda: several(tmp_path / "run", how(), Toy()))
    assert [end.code for end in found] == [73, 73]


@BOTH
def test_ranks_answer_at_their_own_pace(tmp_path: Path, parallel: Any) -> None:
    """A rank calls the method as often as its questions ask; all get all answers, in the order of the questions."""

    def work() -> Any:
        settings, method = how(parallel=parallel, steps=4, validate_every=1, best=None, keep_best=0), Toy(0.0)
        with init_ranks(settings, CPU) as ranks:

            def answers(mine: list[int]) -> list[float]:
                with torch.no_grad():
                    return [float(sum(method(Points().batch([i], 0, 0)).loss for _ in range(i + 1))) for i in mine]

            def validate(epoch: int) -> dict[str, float]:
                found = map_over_ranks(ranks, 5, answers)
                assert found == sorted(found, key=found.index)
                return {f"{i}": loss for i, loss in enumerate(found)}

            return dict(train(method, Points(), settings, seed=5, ranks=ranks, validate=validate).validation)

    one, two = well(tmp_path, work)
    assert one == two
    method = Toy(0.0)
    train(method, Points(), how(steps=4), seed=5)
    with torch.no_grad():
        alone = map_over_ranks(
            SingleProcess(), 5, lambda mine: [float(method.eval()(Points().batch([i], 0, 0)).loss) for i in mine]
        )
    assert [one[f"{i}"] / (i + 1) for i in range(5)] == pytest.approx(alone, rel=RECOMPUTE)


def test_what_several_ranks_cannot_have() -> None:
    with pytest.raises(UsageError, match="batch 1: fewer rows than the 2 ranks; take a larger batch or fewer ranks"):
        check_config(how(batch=1, micro=1), 2)
    with pytest.raises(UsageError, match="carry: the state goes from step to step in one process, there are 2 ranks; "):
        check_config(how(carry=True), 2)
    with pytest.raises(UsageError, match='precision "float16" with parallel "fsdp": the scaler sees one shard; take '):
        check_config(how(parallel="fsdp", precision="float16"), 2)


def test_an_environment_that_is_not_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 2: .*start the ranks with torchrun"), init_ranks(how(), CPU):
        pass


def test_a_value_that_is_no_tensor_is_not_handed_to_the_writer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer: 0\.lr is a float, no tensor; it goes into a JSON file"):
        sharded.write_shards(ManifestWriter(tmp_path), "optimizer", {"0.exp_avg": torch.ones(2), "0.lr": 0.1}, 0)  # type: ignore[dict-item]
    assert os.listdir(tmp_path) == []
