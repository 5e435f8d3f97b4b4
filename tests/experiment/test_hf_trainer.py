"""`transformers.Trainer` trains a method exactly as a plain loop over the same batches does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from laconic.config.load import load_recipe
from laconic.errors import UsageError
from laconic.experiment.from_recipe.build import Experiment, build_experiment
from laconic.experiment.hf_trainer import RowCollator, TrainerModel
from laconic.models.decoder import Decoder
from tests.conftest import needs
from tests.runs import LATENTS
from tests.tiny_recipes import TINY_DOCUMENT_RECIPE, TINY_RECIPE

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.medium]
BATCH, UPDATES, ACCUMULATION, RATE = 4, 3, 2, 1e-2


def build(folder: Path, text: str = TINY_RECIPE, *overrides: str) -> Experiment:
    """Build the experiment of a recipe."""
    (folder / "recipe.toml").write_text(text)
    return build_experiment(load_recipe(folder / "recipe.toml", overrides)[0], torch.device("cpu"))


def build_trainer(built: Experiment, folder: Path, collate: RowCollator | None = None, **options: Any) -> Any:
    """Return a Trainer of an experiment's method on the CPU, which evaluates on the first batch of rows."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=RATE,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    data, model = built.training_data, TrainerModel(built.method)
    rows: Any = range(len(data))
    return Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:BATCH], data_collator=collate or RowCollator(data)
    )


class RecordingCollator(RowCollator):
    """Stores the rows of each batch."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.batches: list[list[int]] = []

    def __call__(self, rows: Any) -> dict[str, torch.Tensor]:
        self.batches.append(list(rows))
        return super().__call__(rows)


def test_trainer_model_equals_a_plain_loop(tmp_path: Path) -> None:
    needs("transformers")
    ours, theirs = build(tmp_path), build(tmp_path)
    collate = RecordingCollator(theirs.training_data)
    build_trainer(
        theirs,
        tmp_path,
        collate,
        max_steps=UPDATES,
        gradient_accumulation_steps=ACCUMULATION,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=1.0,
        save_strategy="no",
    ).train()

    method = ours.method.train()
    optimizer = torch.optim.AdamW(method.parameters(), lr=RATE, weight_decay=0.0)
    batches = collate.batches[: UPDATES * ACCUMULATION]
    assert len({tuple(batch) for batch in batches}) == UPDATES * ACCUMULATION
    for update in range(UPDATES):
        optimizer.zero_grad()
        for batch in batches[update * ACCUMULATION : (update + 1) * ACCUMULATION]:
            (method(ours.training_data.batch(batch, 0, 0)).loss / ACCUMULATION).backward()
        clip_grad_norm_(method.parameters(), 1.0)
        optimizer.step()
    trained = dict(theirs.method.named_parameters())
    initial = dict(build(tmp_path).method.named_parameters())
    assert any((initial[name] - p).abs().max() > RATE for name, p in trained.items())
    for name, p in method.named_parameters():
        torch.testing.assert_close(trained[name], p, rtol=1e-5, atol=1e-6)


def test_trainer_model_evaluates_and_loads_the_best_step(tmp_path: Path) -> None:
    needs("transformers")
    built = build(tmp_path)
    trainer = build_trainer(
        built,
        tmp_path,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    with torch.no_grad():
        expected = built.method.eval()(built.training_data.batch(range(BATCH), 0, 0)).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert trainer.state.best_metric == pytest.approx(min(losses[1:]))


def test_trainer_model_checkpoints_activations(tmp_path: Path) -> None:
    needs("transformers")
    trained: list[dict[str, torch.Tensor]] = []
    for is_enabled in (False, True):
        built = build(tmp_path)
        (decoder,) = {module for module in built.method.modules() if isinstance(module, Decoder)}
        trainer = build_trainer(built, tmp_path, max_steps=1, gradient_checkpointing=is_enabled, save_strategy="no")
        trainer.train()
        model = trainer.model
        assert decoder.activation_checkpointing == is_enabled
        trained.append({name: p.detach() for name, p in built.method.named_parameters()})
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-5, atol=1e-6)
    model.gradient_checkpointing_disable()
    assert decoder.activation_checkpointing == 0
    model.gradient_checkpointing_enable()
    assert decoder.activation_checkpointing == 1
    with pytest.raises(UsageError, match="offload is not supported"):
        model.activation_checkpointing_enable(offload=True)
    with pytest.raises(UsageError, match=r"Linear has no laconic\.Decoder"):
        TrainerModel(torch.nn.Linear(1, 1)).gradient_checkpointing_enable()


def test_trainer_model_refusals(tmp_path: Path) -> None:
    coconut = build(tmp_path, TINY_RECIPE.replace("jacobi_iterations = 1", LATENTS["coconut"]), "method=coconut")
    with pytest.raises(UsageError, match="Coconut go through stages"):
        TrainerModel(coconut.method)
    sampled = build(tmp_path, TINY_RECIPE, "latents.length_policy=nested_dropout")
    with pytest.raises(UsageError, match=r'a length_policy other than "fixed" depends on the steps'):
        TrainerModel(sampled.method)
    (tmp_path / "books.jsonl").write_text('{"text": "' + "A sentence of a book. " * 20 + '"}\n' * 1)
    documents = build(tmp_path, TINY_DOCUMENT_RECIPE)
    with pytest.raises(UsageError, match="windows of documents"):
        RowCollator(documents.training_data)([0])
