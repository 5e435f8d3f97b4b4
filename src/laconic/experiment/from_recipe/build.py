"""Build a training run from a recipe: decoder, tokenizer, method, rows, optimizer, checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.config.training import TrainingConfig
from laconic.console import ProgressFn
from laconic.errors import InputError, UsageError
from laconic.experiment import load_run
from laconic.experiment.from_recipe import build_model, build_nested
from laconic.experiment.from_recipe.build_data import load_training_rows
from laconic.experiment.from_recipe.build_model import ModelParts
from laconic.experiment.from_recipe.custom_method import check_code_allowed
from laconic.experiment.from_recipe.methods import build_meta_method, build_method
from laconic.experiment.model_checkpoint import ModelCheckpoint
from laconic.generation.config import check_type
from laconic.interfaces import TrainingData
from laconic.nested.optim.dgd import DGD
from laconic.nested.optim.input_recording import record_inputs
from laconic.nested.optim.m3 import M3
from laconic.storage.run_dir import RunDirectory
from laconic.storage.strict_json import read_json
from laconic.training.loop import replay
from laconic.training.optim import build_adamw
from laconic.training.ranks import Ranks
from laconic.training.run import TrainingSetup

INCIDENT_FILE = "incident.json"


def build_optimizer(method: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters: AdamW, M3 or DGD (Nested Learning, arXiv:2512.24695).

    M3 and DGD update matrices; AdamW updates all other parameters, and with M3 also embeddings and output head. With M3
    only the matrices it updates have weight decay.
    """
    if config.optimizer == "adamw":
        return build_adamw(method, config)
    if config.eps != TrainingConfig.model_fields["eps"].default:
        raise UsageError(
            f"train.eps {config.eps:g}: {config.optimizer} and the AdamW beside it use 1e-8; remove the key"
        )
    adam: dict[str, Any] = {"adam_betas": config.betas, "adam_weight_decay": 0.0}
    if config.optimizer == "m3":
        return M3(M3.build_param_groups(method), config.learning_rate, weight_decay=config.weight_decay, **adam)
    if config.weight_decay:
        raise UsageError(f"train.weight_decay {config.weight_decay}: dgd has a decay of its own; remove the key")
    named = [(name, p) for name, p in record_inputs(method).named_parameters() if p.requires_grad]
    return DGD(named, config.learning_rate, adam_lr=config.learning_rate, **adam)


@dataclass(frozen=True)
class Experiment:
    """Everything that a training run needs; `fingerprints` are hashes that every step of the run is bound to."""

    recipe: Recipe
    parts: ModelParts
    method: nn.Module
    training_data: TrainingData
    checkpoint: ModelCheckpoint
    fingerprints: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def build_training_setup(self, device: torch.device, ranks: Ranks | None = None) -> TrainingSetup:
        return TrainingSetup(
            self.method,
            self.training_data,
            self.recipe.train,
            seed=self.recipe.seed,
            model_io=self.checkpoint,
            fingerprints=self.fingerprints,
            ranks=ranks or Ranks(),
            device=device,
            build_optimizer=build_optimizer,
        )


def build_experiment(recipe: Recipe, device: torch.device, progress: ProgressFn | None = None) -> Experiment:
    """Build a run from its recipe; UsageError for settings that do not fit, InputError for rows or checkpoints."""
    check_type("recipe", recipe, Recipe, "the recipe alone: recipe, notes = load_recipe(…)")
    goal = recipe.train.early_stop
    if goal and goal.metric.startswith("nats"):
        raise UsageError(f'train.early_stop "{goal.metric}": a loss falls; give a metric that rises')
    decoder, tokenizer, earlier = load_run.load_initial_model(recipe, device)
    if not recipe.is_custom_method:
        build_meta_method(recipe, decoder.config, tokenizer)  # refuses what does not fit before the rows are read
    rows = load_training_rows(recipe, tokenizer, decoder.config.max_position_embeddings, progress)
    data = rows.source
    build_nested.check_levels_trainable(recipe, data.max_length)
    parts = build_model.build_parts(recipe, decoder.to(device), tokenizer, decoder.fingerprint)
    if recipe.reads_documents and earlier is not None and parts.summary_parameters is not None:
        try:
            parts.summary_parameters.load_state_dict(earlier.state_dict())
        except RuntimeError:
            run = recipe.model.init_from_run
            raise UsageError(f"compression: {run} has other sizes; copy its table [compression]") from None
    method = build_method(parts, recipe, recipe.train.updates_per_epoch(len(data)), data.max_length).to(device)
    fingerprints = {
        "recipe": load_run.recipe_fingerprint(recipe),
        "held_out": load_run.held_out_fingerprint(recipe),
        "data": data.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "base": parts.base,
    }
    checkpoint = ModelCheckpoint(parts, recipe.method, recipe.train.trainable)
    return Experiment(recipe, parts, method, data, checkpoint, fingerprints, rows.notes)


def replay_update(folder: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Repeat the update of RUN/incidents/step-N, without writing; return the recorded incident and the repeated one."""
    run = folder.resolve().parent.parent
    if not (folder / INCIDENT_FILE).is_file() or not load_run.is_run_dir(run):
        raise InputError(f"{folder} is not an incident of a run; give RUN/incidents/step-N")
    recorded = read_json(folder / INCIDENT_FILE)
    recipe, _ = load_recipe(run / load_run.RECIPE_FILE)
    check_code_allowed(recipe, run, False)
    setup = build_experiment(recipe, device).build_training_setup(device)
    repeated = replay(setup, RunDirectory(run), int(recorded["step"]))
    return recorded, repeated
