"""`laconic train`: train from a recipe, resume, show the plan, or re-run a failed update."""

import contextlib
import dataclasses
import importlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from laconic import __version__
from laconic.cli.arguments import (
    Device,
    OptionalInt,
    OptionalPath,
    OptionalTracker,
    OutputFormat,
    check_minimum,
    command_line,
)
from laconic.cli.files import print_json
from laconic.console import log_message, log_note, progress
from laconic.errors import BusyError, UsageError
from laconic.training.signals import StopSignal, handle_signals
from laconic.training.trackers import start_tracker

if TYPE_CHECKING:
    from laconic.config.recipe import Recipe
    from laconic.training.loop import TrainingResult

VALUELESS_FLAGS = ("plan", "schema", "help")  # take no value as a separate argument
VERSIONED_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "pydantic")


@dataclass(frozen=True)
class TrainCommand:
    """Train from a recipe; re-run the same command to resume.

    Recipe keys can be overridden as train.learning_rate=1e-3 or --train.learning_rate 1e-3.
    laconic recipes lists the recipes, laconic recipes keys explains their keys, and laconic data list lists the data
    sets that data.name accepts.

    Example: laconic train demo-kava --out runs/kava seed=1
    """

    recipe: Annotated[Positional[str | None], arg(metavar="RECIPE", help_behavior_hint="")] = None
    """TOML file, or name of a recipe that comes with laconic (see laconic recipes)"""
    overrides: Annotated[Positional[tuple[str, ...]], arg(metavar="[KEY=VALUE ...]", help_behavior_hint="")] = ()
    """recipe keys to override; KEY= removes a key, so that its default applies"""
    out: OptionalPath = None
    """run directory (default: runs/NAME of the recipe's file)"""
    resume: str = "auto"
    """auto: resume from the latest valid checkpoint, if any; never: refuse a directory with checkpoints; step-N: resume
    from this one"""
    num_seeds: OptionalInt = None
    """train seeds 0 … N-1, each in OUT/seed-N"""
    plan: Annotated[Literal["estimate", "step"] | None, arg(metavar="{estimate,step}", help_behavior_hint="")] = None
    """print tokens, memory and time of the run and exit; --plan=step runs and measures one update for it"""
    schema: bool = False
    """print the JSON Schema of recipes"""
    replay: OptionalPath = None
    """re-run the update saved in RUN/incidents/step-N for debugging"""
    track: OptionalTracker = None
    """also send the metrics to this tracker: trackio, wandb or tensorboard; metrics.jsonl is always written"""
    track_project: str = "laconic"
    """project of trackio or wandb"""
    device: Device = "auto"
    format: OutputFormat = "human"

    def run(self) -> int:
        """Return 0 when every run is finished."""
        from laconic.config.load import load_recipe

        if self.schema:
            from laconic.config.recipe import Recipe

            print(json.dumps(Recipe.model_json_schema(), indent=1, ensure_ascii=False))
            return 0
        if self.replay is not None:
            return self.print_replay(self.replay)
        if self.recipe is None:
            hint = "laconic recipes lists them, laconic recipes keys their keys"
            raise UsageError(f"no recipe given; laconic train RECIPE; {hint}")
        if self.track is not None:
            importlib.import_module(self.track)  # on every rank, before training starts
        recipe, notes = load_recipe(self.recipe, self.overrides)
        for text in [*notes, *(f"[{name}] is not used by method {recipe.method}" for name in recipe.unused_tables)]:
            log_note(text)
        if recipe.is_custom_method:
            from laconic.experiment.from_recipe.custom_method import describe_method_source

            log_note(describe_method_source(recipe, Path(self.recipe).parent))
        if self.plan:
            return self.print_plan(recipe)
        with handle_signals() as stop:
            results = [self.train_run(recipe, out, stop) for recipe, out in self.iterate_runs(recipe)]
        if self.format == "json" and os.environ.get("RANK", "0") == "0":
            print_json({"schema": 1, "runs": results})
        return 0

    def iterate_runs(self, recipe: "Recipe") -> "Iterator[tuple[Recipe, Path]]":
        out = self.out or self.default_run_dir()
        if out.is_file():
            raise BusyError(f"--out {out} is a file; name a directory for the run")
        if self.num_seeds is None:
            yield recipe, out
            return
        check_minimum(1, num_seeds=self.num_seeds)
        for seed in range(self.num_seeds):
            yield recipe.model_copy(update={"seed": seed}), out / f"seed-{seed}"

    def default_run_dir(self) -> Path:
        """Return runs/NAME, NAME being that of the recipe's file; raise `UsageError` (2) if it does not name a run."""
        from laconic.storage.run_dir import check_name

        name = Path(str(self.recipe)).stem
        if name == "recipe":
            raise UsageError(f"{self.recipe}: pass --out; the file name recipe.toml does not name a run")
        try:
            return Path("runs") / check_name(name)
        except UsageError as error:
            raise UsageError(f"{self.recipe}: pass --out, the directory of the run: {error}") from None

    def train_run(self, recipe: "Recipe", out: Path, stop: StopSignal) -> dict[str, Any]:
        with stop.preemptible():
            from laconic.evaluation.validation import build_validation
            from laconic.experiment.from_recipe.build import build_experiment
            from laconic.experiment.run_init import check_resume, check_same_rows, init_run
            from laconic.storage.run_dir import RunDirectory
            from laconic.training.distributed import init_ranks
            from laconic.training.loop import train
            from laconic.training.run import format_metrics

            resume = parse_resume(self.resume)
            run = RunDirectory(out)
            device = select_device(self.device)
        with init_ranks(recipe.train, device) as ranks, ranks.lock_run(run):
            is_main = ranks.rank == 0
            with (
                stop.preemptible(),
                progress(f"preparing {out.name},") if is_main else contextlib.nullcontext() as show,
            ):
                environment = describe_environment(str(device), ranks.world_size)
                ranks.run_on_rank_zero(lambda: check_resume(run, recipe, resume))  # before the rows are read
                built = build_experiment(recipe, device, show)
                ranks.run_on_rank_zero(lambda: check_same_rows(run, recipe, built.fingerprints["data"]))
                validate = build_validation(recipe, built.parts, built.method, device, ranks)
                notes = ranks.run_on_rank_zero(lambda: init_run(run, recipe, resume, environment))
            for text in (*notes, *built.notes, *(validate.notes if validate else ())) if is_main else ():
                log_note(text)
            with progress(f"training {out.name},") if is_main else contextlib.nullcontext() as show:
                tracker = None
                if is_main and self.track is not None:
                    settings = recipe.model_dump(mode="json", exclude_none=True)
                    tracker = start_tracker(self.track, out, self.track_project, settings)
                outcome = train(
                    built.build_training_setup(device, ranks),
                    run=run,
                    resume=resume,
                    validate=validate,
                    report_progress=show,
                    tracker=tracker,
                    stop=stop,
                )
        if is_main:
            parts = ", ".join([f"step {outcome.steps}", *format_metrics(outcome.metrics)])
            validation = ", ".join(format_metrics(outcome.validation, None))
            log_message(f"{out}: {parts}" + (f"; validation: {validation}" if validation else ""))
        return {"out": str(out), **outcome_to_json(outcome)}

    def print_plan(self, recipe: "Recipe") -> int:
        from laconic.experiment.from_recipe.dry_run import format_plan, plan_run, plan_with_step

        plan = (plan_with_step if self.plan == "step" else plan_run)(recipe, select_device(self.device))
        if self.format == "json":
            print_json(plan)
        else:
            print(format_plan(plan))
        return 0

    def print_replay(self, folder: Path) -> int:
        from laconic.experiment.from_recipe.build import replay_update

        recorded, repeated = replay_update(folder, select_device(self.device))
        if self.format == "json":
            print_json({"schema": 1, "recorded": recorded, "repeated": repeated})
            return 0
        print(f"step {repeated['step']}: {repeated['status']}, first in {repeated['first'] or 'nothing'}")
        for name, value in repeated["metrics"].items():
            print(f"{name}: {recorded['metrics'].get(name)} recorded, {value} now")
        return 0


def outcome_to_json(outcome: "TrainingResult") -> dict[str, Any]:
    from laconic.training.metrics import replace_nonfinite

    return {
        "steps": outcome.steps,
        "metrics": dict(outcome.metrics),
        "validation": replace_nonfinite(outcome.validation),
        "best": None if outcome.best is None else {"value": outcome.best[0], "step": outcome.best[1]},
        "skipped": outcome.num_skipped,
        "folder": None if outcome.step_path is None else str(outcome.step_path),
    }


def parse_resume(text: str) -> Any:
    if text in ("auto", "never"):
        return text
    number = text.removeprefix("step-")
    if not number.isdecimal():
        raise UsageError(f"--resume {text}: expected auto, never, or step-N")
    return int(number)


def select_device(device: str) -> Any:
    """Return the torch device, which is this rank's for "cuda", and for "auto" if there is a GPU."""
    import torch

    from laconic.models.checkpoints.weights import resolve_device

    is_local = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if is_local else device)  # set by torchrun


def describe_environment(device: str, ranks: int) -> dict[str, Any]:
    """Return the content of env.json."""
    from importlib.metadata import version

    return {
        "versions": {"laconic": __version__, **{name: version(name) for name in VERSIONED_PACKAGES}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "ranks": ranks,
        "commit": current_commit(),
        "command": command_line(),
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def current_commit() -> str | None:
    """Return the commit of laconic's checkout; None for an installed package, also below another repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def normalise_args(args: list[str]) -> list[str]:
    """Move flags to the front, and rewrite `--key.sub value` of a recipe to `key.sub=value`."""
    names = (field.name for field in dataclasses.fields(TrainCommand) if field.name not in ("recipe", "overrides"))
    remaining = list(args)
    train_flags = [*names, "help"]
    flags: list[str] = []
    positionals: list[str] = []
    while remaining:
        item = remaining.pop(0)
        name, equals, value = item.partition("=")
        flag = name.removeprefix("--").replace("-", "_")
        if not item.startswith("--"):
            (flags if item == "-h" else positionals).append(item)
        elif flag in train_flags:
            if item == "--plan":
                item = f"--plan={remaining.pop(0) if remaining[:1] in (['estimate'], ['step']) else 'estimate'}"
            flags.append(item)
            if not equals and flag not in VALUELESS_FLAGS:
                flags.append(pop_value(item, remaining))
        elif item != "--":
            check_is_key(name, flag, train_flags)
            positionals.append(f"{flag}={value if equals else pop_value(item, remaining)}")
    return [*flags, *positionals]


def check_is_key(option: str, key: str, flags: list[str]) -> None:
    """Raise `UsageError` (2) for an option that is neither a flag nor, since it has no table, a key of a recipe."""
    from laconic.config.load import closest_key
    from laconic.config.recipe_keys import find_field, known_keys

    if "." in key or find_field(key) is not None:
        return
    close = closest_key(key, [*known_keys(), *flags])
    hint = f"did you mean --{close.replace('_', '-') if close in flags else close}?" if close else ""
    raise UsageError(f"train has no option {option}; {hint or 'see laconic train --help'}")


def pop_value(flag: str, remaining: list[str]) -> str:
    """Remove the value of a flag from the arguments after it; raise `UsageError` (2) if another flag follows."""
    if not remaining or remaining[0].startswith("--"):
        raise UsageError(f"{flag}: missing value; one that begins with -- follows as {flag}=VALUE")
    return remaining.pop(0)
