"""Train latent thoughts (KaVa) with transformers.Trainer, save them, and answer a question with the result."""

import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import laconic
from laconic.config.load import load_recipe
from laconic.experiment.export import export_run
from laconic.experiment.from_recipe.build import build_experiment
from laconic.experiment.hf_trainer import RowCollator, TrainerModel
from laconic.experiment.load_run import LoadedRun

recipe, _ = load_recipe(Path(__file__).parent / "own.toml", ["model.name=stories260k"])
built = build_experiment(recipe, torch.device("cpu"))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=20, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=5,
        report_to="none", save_strategy="no", use_cpu=True,
    )  # fmt: skip
    data = built.training_data
    trainer = Trainer(
        TrainerModel(built.method), arguments, train_dataset=range(len(data)), data_collator=RowCollator(data)
    )
    trainer.train()
    for line in trainer.state.log_history[:-1]:
        print(f"step {line['step']:2}: loss {line['loss']:.3f}")

    run = LoadedRun(Path("trainer"), recipe, trainer.state.global_step, built.parts, built.method)
    export_run(run, Path(folder) / "exported")
    model = laconic.load(Path(folder) / "exported")  # as after laconic train and laconic export
    answer = model.generate(["How many apples do 3 boxes of 4 apples hold?"], laconic.GenerationConfig(max_tokens=8))[0]
    print("answer after 20 updates:", answer.text, f"({answer.passes.latent} latent passes)")
