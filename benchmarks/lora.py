"""LoRA: time and memory of a training step on padded rows, and decoding, compared with transformers and peft."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoding import generate_laconic, generate_transformers
from benchmarks.measure import ABSENT, PEERS, Scale, Table, clock, clock_name, peak_allocated, time_interleaved
from benchmarks.models import Pair, large_llama, model_pair, random_ids
from laconic.batches import IGNORE_INDEX
from laconic.experiment.lora.lora import add_adapter, merge_adapter
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


def add_adapters(pair: Pair) -> tuple[Any, Any]:
    """Return both models with an adapter on every linear layer."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    return add_adapter(pair.ours, settings), get_peft_model(pair.theirs, settings) if PEERS else None


def build_steps(ours: Any, theirs: Any, scale: Scale) -> dict[str, Callable[[], None]]:
    """Return forward and backward of both models."""
    ids, mask, targets = build_rows(ours.config, scale)
    labels = torch.where(mask, ids, IGNORE_INDEX)

    def run_ours() -> None:
        ours.train().zero_grad(set_to_none=True)
        hidden = ours(ours.embed(ids), attention_mask=mask).hidden_states
        masked_cross_entropy(ours.logits, hidden, targets).loss.backward()

    def run_theirs() -> None:
        theirs.train().zero_grad(set_to_none=True)
        theirs(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()

    return {"ours": run_ours, "theirs": run_theirs} if PEERS else {"ours": run_ours}


def time_decoding(pair: Pair, ours: Any, theirs: Any, scale: Scale) -> dict[str, float]:
    """Return the seconds of greedy decoding of one row: by us with the adapter apart and merged, and by peft."""
    ours.eval()
    ids = random_ids(pair.ours.config, 1, scale.prompt)
    merged = merge_adapter(copy.deepcopy(ours))
    workloads: dict[str, Callable[[], object]] = {
        "apart": partial(generate_laconic, pair, ids, scale.new),
        "merged": partial(generate_laconic, pair._replace(ours=merged), ids, scale.new),
    }
    if PEERS:
        workloads["theirs"] = partial(generate_transformers, pair._replace(theirs=theirs.eval()), ids, scale.new)
    times = time_interleaved(workloads, scale.rounds, scale.patience)
    return {name: clock(elapsed) for name, elapsed in times.items()}


def lora(scale: Scale) -> Table:
    """Return the table of LoRA steps and decoding."""
    rows: list[tuple[str, ...]] = []

    def add_row(dtype: torch.dtype, what: str, form: str, ours: float, theirs: float | None) -> None:
        compared = (ABSENT, ABSENT) if theirs is None else (form.format(theirs), f"{ours / theirs:.2f}")
        rows.append((str(dtype).removeprefix("torch."), what, form.format(ours), *compared))

    for dtype in (torch.float32, torch.bfloat16):
        with model_pair("random Llama", large_llama(scale), dtype) as pair:
            ours, theirs = add_adapters(pair)
            steps = build_steps(ours, theirs, scale)
            times = {side: clock(t) for side, t in time_interleaved(steps, scale.rounds, 2 * scale.patience).items()}
            mebibytes = {side: peak_allocated(step) / MEBI for side, step in steps.items()}
            add_row(dtype, "step, s", "{:.2f}", times["ours"], times.get("theirs"))
            add_row(dtype, "step, MiB", "{:.0f}", mebibytes["ours"], mebibytes.get("theirs"))
            if dtype == torch.float32:
                seconds = time_decoding(pair, ours, theirs, scale)
                for form in ("apart", "merged"):
                    add_row(dtype, f"decoding, adapter {form}, s", "{:.2f}", seconds[form], seconds.get("theirs"))
    text = (
        f"A random Llama with LoRA of rank {RANK} by peft on every linear layer. A step is forward and backward with "
        f"cross-entropy, {scale.batch} rows of {scale.length // 2} to {scale.length} tokens, padded; no optimizer. "
        f"Decoding: {scale.new} tokens after a prompt of {scale.prompt}, greedy, one row; loaded runs have the adapter "
        "merged, and transformers has it apart. "
        f"Time: seconds by {clock_name()}, best of {scale.rounds}, rounds interleaved. Memory: the peak above weights "
        "and adapter."
    )
    return Table("LoRA", text, ("dtype", "what", "laconic", "transformers, peft", "ratio"), rows)
