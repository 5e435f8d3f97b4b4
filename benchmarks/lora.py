"""Time and memory of a LoRA training step on padded rows, compared with transformers and peft."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import ABSENT, PEERS, Scale, Table, clock, clock_name, peak_allocated, time_interleaved
from benchmarks.models import large_llama, model_pair, random_ids
from laconic.batches import IGNORE_INDEX
from laconic.experiment.lora.lora import add_adapter
from laconic.losses import masked_cross_entropy

MEBI, RANK = 2**20, 32


def build_rows(config: Any, scale: Scale) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and next-token targets of rows padded on the right: half to all of the length is real."""
    ids = random_ids(config, scale.batch, scale.length)
    lengths = torch.linspace(scale.length // 2, scale.length, scale.batch).long()
    mask = torch.arange(scale.length) < lengths[:, None]
    targets = torch.where(mask, ids, IGNORE_INDEX).roll(-1, 1)
    targets[:, -1] = IGNORE_INDEX
    return ids, mask, targets


def build_steps(ours: Any, theirs: Any, scale: Scale) -> dict[str, Callable[[], None]]:
    """Return forward and backward of a decoder and of transformers, both with an adapter on every linear layer."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    ids, mask, targets = build_rows(ours.config, scale)
    ours, steps = add_adapter(ours, settings).train(), {}

    def run_ours() -> None:
        ours.zero_grad(set_to_none=True)
        hidden = ours(ours.embed(ids), attention_mask=mask).hidden_states
        masked_cross_entropy(ours.logits, hidden, targets).loss.backward()

    steps["ours"] = run_ours
    if PEERS:
        model: nn.Module = get_peft_model(theirs, settings).train()  # pyright: ignore[reportArgumentType]
        labels = torch.where(mask, ids, IGNORE_INDEX)

        def run_theirs() -> None:
            model.zero_grad(set_to_none=True)
            model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()

        steps["theirs"] = run_theirs
    return steps


def lora(scale: Scale) -> Table:
    """Return the table of LoRA steps."""
    rows: list[tuple[str, ...]] = []
    for dtype in (torch.float32, torch.bfloat16):
        with model_pair("random Llama", large_llama(scale), dtype) as pair:
            steps = build_steps(pair.ours, pair.theirs, scale)
            times = {side: clock(t) for side, t in time_interleaved(steps, scale.rounds, 2 * scale.patience).items()}
            mebibytes = {side: peak_allocated(step) / MEBI for side, step in steps.items()}
        for what, form, values in (("time, s", "{:.2f}", times), ("allocated, MiB", "{:.0f}", mebibytes)):
            theirs = form.format(values["theirs"]) if "theirs" in values else ABSENT
            ratio = f"{values['ours'] / values['theirs']:.2f}" if "theirs" in values else ABSENT
            rows.append((str(dtype).removeprefix("torch."), what, form.format(values["ours"]), theirs, ratio))
    text = (
        f"One step of a random Llama with LoRA of rank {RANK} by peft on every linear layer, forward and backward with "
        f"cross-entropy, {scale.batch} rows of {scale.length // 2} to {scale.length} tokens, padded; no optimizer. "
        f"Time: seconds by {clock_name()}, best of {scale.rounds}, rounds interleaved. Memory: the peak above weights "
        "and adapter."
    )
    return Table("Training step with LoRA", text, ("dtype", "what", "laconic", "transformers, peft", "ratio"), rows)
