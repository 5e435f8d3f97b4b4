"""`laconic train`: a recipe becomes a run, is continued, planned, or repeated at a step that failed."""

import contextlib
import dataclasses
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from laconic.cli.arguments import to_utf8
from laconic.console import log_message, progress
from laconic.errors import UsageError

if TYPE_CHECKING:
    from laconic.config.recipe import Recipe
    from laconic.training.loop import TrainingResult


@dataclass(frozen=True)
class TrainCommand:
    """Trains what a recipe describes, in a run directory; the same command again goes on where it ended.

    Any key of the recipe may follow, as train.learning_rate=1e-3 or --train.lr 1e-3; --schema lists them all.

    Example: laconic train demo-kava --out runs/kava --seed 1
    """

    recipe: Annotated[Positional[str | None], arg(metavar="RECIPE")] = None
    """a file, or the name of a recipe that comes with laconic"""
    overrides: Annotated[Positional[tuple[str, ...]], arg(metavar="KEY=VALUE")] = ()
    """keys of the recipe, with the values that hold in their place"""
    out: Path | None = None
    """directory of the run; by default runs/NAME, of the recipe's file"""
    resume: str = "auto"
    """auto: go on from the newest good step, or start; never: refuse a directory with steps; step-N: that one"""
    num_seeds: int | None = None
    """so many runs, seeds 0, 1, …, each in a directory OUT/seed-N of its own"""
    plan: Literal["estimate", "step"] | None = None
    """print tokens, memory and time of the run instead of training, without reading weights; --plan=step also runs and
    measures one update"""
    schema: bool = False
    """print what a recipe may hold as JSON Schema"""
    replay: Path | None = None
    """repeat the one step that an incident kept: RUN/incidents/step-N"""
    track: str | None = None
    """project of trackio that gets a copy of the metrics"""
    device: str | None = None
    """cpu, cuda, cuda:1, …; by default the first GPU, else the CPU"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """0 when every run asked for is done and on disk."""
        from laconic.config.load import load_recipe

        if self.schema:
            from laconic.config.recipe import Recipe

            print(json.dumps(Recipe.model_json_schema(), indent=1, ensure_ascii=False))
            return 0
        if self.replay is not None:
            return self.print_replay(self.replay)
        if self.recipe is None:
            raise UsageError("no recipe given; laconic train RECIPE, or --schema for what one holds")
        if self.track is not None:
            importlib.import_module("trackio")  # on every rank, before anything is begun
        recipe, notes = load_recipe(self.recipe, [to_utf8(key) for key in self.overrides], flag_names())
        for text in [*notes, *(f"[{name}] is not read by method {recipe.method}" for name in recipe.unused_tables)]:
            log_message(f"laconic: {text}")
        if self.plan:
            return self.print_plan(recipe)
        ends = [self.train_run(recipe, out) for recipe, out in self.iterate_runs(recipe)]
        if self.format == "json" and os.environ.get("RANK", "0") == "0":
            print(json.dumps({"schema": 1, "runs": ends}, ensure_ascii=False, allow_nan=False))
        return 0

    def iterate_runs(self, recipe: "Recipe") -> "Iterator[tuple[Recipe, Path]]":
        """Each run with its directory."""
        out = self.out or self.default_run_dir()
        if self.num_seeds is None:
            yield recipe, out
            return
        if self.num_seeds < 1:
            raise UsageError(f"--num-seeds {self.num_seeds}: give at least one")
        for seed in range(self.num_seeds):
            yield recipe.model_copy(update={"seed": seed}), out / f"seed-{seed}"

    def default_run_dir(self) -> Path:
        """runs/NAME, of the recipe's file."""
        name = Path(str(self.recipe)).stem
        if name == "recipe":
            raise UsageError(
                f"{self.recipe}: --out DIR is asked for; its name says nothing of where the run should lie"
            )
        return Path("runs") / name

    def train_run(self, recipe: "Recipe", out: Path) -> dict[str, Any]:
        """One run, to its end."""
        from laconic.experiment.build import build_experiment
        from laconic.experiment.optimizers import build_optimizer
        from laconic.experiment.run_init import init_run
        from laconic.storage.run_dir import RunDirectory
        from laconic.training.distributed import init_ranks
        from laconic.training.loop import train

        resume = parse_resume(self.resume)
        run, device = RunDirectory(out), resolve_device(self.device)
        with init_ranks(recipe.train, device) as ranks, ranks.lock_run(run):
            ranks.run_on_rank_zero(
                lambda: init_run(run, recipe, resume, describe_environment(str(device), ranks.world_size))
            )
            first = ranks.rank == 0
            with progress(out.name) if first else contextlib.nullcontext() as show:
                built = build_experiment(recipe, device, ranks, show)
            for text in built.notes if first else ():
                log_message(f"laconic: {text}")
            with progress(out.name) if first else contextlib.nullcontext() as show:
                outcome = train(
                    built.method,
                    built.training_data,
                    recipe.train,
                    run=run,
                    seed=recipe.seed,
                    model_io=built.checkpoint,
                    fingerprints=built.fingerprints,
                    validate=built.validate,
                    report_progress=show,
                    ranks=ranks,
                    device=device,
                    build_optimizer=build_optimizer,
                    resume=resume,
                    tracker_project=self.track,
                )
        if first:
            self.print_outcome(out, outcome)
        return {"out": str(out), **outcome_to_json(outcome)}

    def print_outcome(self, out: Path, outcome: "TrainingResult") -> None:
        """Where the run ended: the first numbers of the last update, and what the validation gave."""
        from laconic.training.run import MAX_PROGRESS_METRICS

        numbers = {**dict([*outcome.metrics.items()][:MAX_PROGRESS_METRICS]), **outcome.validation}
        log_message(
            f"{out}: step {outcome.steps}" + "".join(f", {name} {value:.4g}" for name, value in numbers.items())
        )

    def print_plan(self, recipe: "Recipe") -> int:
        """Print what the run would take."""
        from laconic.experiment.dry_run import format_plan, plan_run, plan_with_step

        plan = (plan_with_step if self.plan == "step" else plan_run)(recipe, resolve_device(self.device))
        print(json.dumps(plan, ensure_ascii=False) if self.format == "json" else format_plan(plan))
        return 0

    def print_replay(self, folder: Path) -> int:
        """What the step of an incident gave then, and gives now."""
        from laconic.experiment.replay import replay_update

        then, now = replay_update(folder, resolve_device(self.device))
        if self.format == "json":
            print(json.dumps({"schema": 1, "then": then, "now": now}, ensure_ascii=False, allow_nan=False))
            return 0
        print(f"step {now['step']}: {now['outcome']}, first in {now['first'] or 'nothing'}")
        for name, value in now["numbers"].items():
            print(f"{name}: {then['numbers'].get(name)} then, {value} now")
        return 0


def outcome_to_json(outcome: "TrainingResult") -> dict[str, Any]:
    """An outcome as JSON holds it."""
    return {
        "steps": outcome.steps,
        "numbers": dict(outcome.metrics),
        "validation": dict(outcome.validation),
        "best": None if outcome.best is None else {"value": outcome.best[0], "step": outcome.best[1]},
        "skipped": outcome.num_skipped,
        "folder": None if outcome.step_path is None else str(outcome.step_path),
    }


def parse_resume(text: str) -> Any:
    """What --resume says: auto, never, or the number of a step."""
    if text in ("auto", "never"):
        return text
    number = text.removeprefix("step-")
    if not number.isdecimal():
        raise UsageError(f"--resume {text}: write auto, never, or step-N")
    return int(number)


def resolve_device(device: str | None) -> Any:
    """The device meant; by default the first GPU, else the CPU."""
    import torch

    from laconic.models.weights import resolve_device

    mine = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # torchrun numbers the processes of a machine
    return resolve_device(device or (mine if torch.cuda.is_available() else "cpu"))


def describe_environment(device: str, ranks: int) -> dict[str, Any]:
    """What env.json says: versions, machine, command, and when."""
    from importlib.metadata import version

    packages = ("torch", "numpy", "safetensors", "tokenizers", "pydantic")
    return {
        "versions": {"laconic": version("laconic"), **{name: version(name) for name in packages}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "ranks": ranks,
        "commit": current_commit(),
        "command": shlex.join(["laconic", *sys.argv[1:]]),
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def current_commit() -> str | None:
    """The commit of the checkout that this code lies in, if it is one."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def flag_names() -> list[str]:
    """The names of this verb's own flags, which a mistyped key may have been meant for."""
    return [field.name for field in dataclasses.fields(TrainCommand) if field.name not in ("recipe", "overrides")]


VALUELESS_FLAGS = ("plan", "schema", "help")  # flags that take no value as a separate word


def normalise_args(args: list[str]) -> list[str]:
    """Flags first, then the recipe and its keys; `--key.sub value` of a recipe is `key.sub=value`."""
    words, own, found, keys = list(args), {*flag_names(), "help"}, list[str](), list[str]()
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        flag = name.removeprefix("--").replace("-", "_")
        if not word.startswith("--"):
            (found if word == "-h" else keys).append(word)
        elif flag in own:
            found.append("--plan=estimate" if word == "--plan" else word)
            if not equals and flag not in VALUELESS_FLAGS and words:
                found.append(words.pop(0))
        elif equals or words:
            keys.append(f"{flag}={value if equals else words.pop(0)}")
        else:
            raise UsageError(f"{word}: no value; write {word} VALUE")
    return [*found, *keys]
