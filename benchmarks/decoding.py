"""Tokens per second of greedy decoding, and seconds of prefill, beside transformers."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import laconic
from benchmarks.measure import ABSENT, PEERS, STORIES, Scale, Table, clock, clock_name, race, verdict
from benchmarks.models import Pair, pairs, random_ids

GOAL = 1.5  # where the least ratio asked of a model is smaller


def ours_generate(models: Pair, ids: Tensor, new: int) -> list[list[int]]:
    """Greedy continuations by `laconic.generate`, no id ending them."""
    return [
        g.token_ids
        for g in laconic.generate(
            models.ours, input_ids=ids, config=laconic.GenerationConfig(max_tokens=new, eos_token_ids=())
        )
    ]


def theirs_generate(models: Pair, ids: Tensor, new: int, cache: str | None = None) -> list[list[int]]:
    """The same by transformers' `generate`; a dynamic cache unless another is asked for."""
    more = {} if cache is None else {"cache_implementation": cache}
    with torch.inference_mode():
        rows = models.theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, use_cache=True, **more
        )
    return rows[:, ids.shape[1] :].tolist()


def targets(models: Pair, scale: Scale, batch: int) -> tuple[float, float | None]:
    """The least ratio asked of a model at a batch, and the goal beyond it."""
    if models.name == "stories260k":
        return 1.5, None
    if models.size >= 110e6:
        return 1.0, None
    few = models.ours.config.vocab_size == scale.few_words
    least = (1.25 if few else 1.5) if batch == 1 else (1.1 if few else 1.25)
    return least, GOAL if least < GOAL else None


def decoding(scale: Scale) -> Table:
    """The table of decoding."""
    rows = [] if STORIES.is_dir() else [("stories260k", *[ABSENT] * 6)]
    for models in pairs(scale):
        for batch in (1, scale.batch):
            rows.append(decoding_row(models, scale, batch))
    text = (
        f"Greedy, float32, {scale.new} new tokens on a prompt of {scale.prompt}, prefill included; tokens per second "
        f"of all rows together, by {clock_name()}, best of {scale.rounds} (of three where five take longer than "
        f"{scale.patience:g} s), rounds interleaved. laconic: `laconic.generate(decoder, ids=…, max_tokens=…, "
        "eos=())`. "
        "transformers: `generate` with SDPA, eval, `inference_mode`, `use_cache` and its default dynamic cache "
        "(the static one, made for compiled graphs, had 0.94 and 1.02 times its speed in a single trial on stories260k "
        "and on 8 × 512, V 1,024; it is not raced here), no streamer, no eos, attention mask given, float32. Both read "
        "the same folder of weights; neither is compiled."
    )
    head = ("model", "batch", "laconic tokens/s", "transformers tokens/s", "ratio", "target", "same tokens")
    return Table("Decoding", text, head, rows)


def decoding_row(models: Pair, scale: Scale, batch: int) -> tuple[str, ...]:
    """One model at one batch."""
    ids = random_ids(models.ours.config, batch, scale.prompt)
    ways: dict[str, Callable[[], object]] = {"ours": partial(ours_generate, models, ids, scale.new)}
    same = ABSENT
    if PEERS:
        ways["theirs"] = partial(theirs_generate, models, ids, scale.new)
        mine, other = ours_generate(models, ids, scale.new), theirs_generate(models, ids, scale.new)
        apart = sum(a != b for a, b in zip(mine, other, strict=True))
        same = "yes" if not apart else f"no: {apart} of {batch} rows differ"
    times = race(ways, scale.rounds, scale.patience, warm=0 if PEERS else 1)
    speed = {name: batch * scale.new / clock(times[name]) for name in ways}
    name = f"{models.name} ({models.size / 1e6:.3g} M)"
    if not PEERS:
        return name, str(batch), f"{speed['ours']:,.0f}", *[ABSENT] * 4
    ratio = speed["ours"] / speed["theirs"]
    least, goal = targets(models, scale, batch)
    return (
        name,
        str(batch),
        f"{speed['ours']:,.0f}",
        f"{speed['theirs']:,.0f}",
        f"{ratio:.2f}",
        verdict(ratio, least=least, goal=goal),
        same,
    )


def prefill(scale: Scale) -> Table:
    """The table of prefill."""
    rows = [] if STORIES.is_dir() else [("stories260k", *[ABSENT] * 4)]
    for models in pairs(scale):
        rows.append(prefill_row(models, scale))
    text = (
        f"A prompt of {scale.prefill} tokens, batch 1, with its cache and the logits of the last position, under "
        f"`inference_mode`; milliseconds by {clock_name()}, best of {scale.rounds}, rounds interleaved. "
        "transformers: `model(ids, use_cache=True, logits_to_keep=1)`, SDPA."
    )
    return Table("Prefill", text, ("model", "laconic ms", "transformers ms", "ratio of times", "target"), rows)


def prefill_row(models: Pair, scale: Scale) -> tuple[str, ...]:
    """One model."""
    ids = random_ids(models.ours.config, 1, scale.prefill)

    def ours() -> None:
        with torch.inference_mode():
            models.ours.logits(models.ours(models.ours.embed(ids)).hidden_states[:, -1])

    def theirs() -> None:
        with torch.inference_mode():
            _ = models.theirs(ids, use_cache=True, logits_to_keep=1).logits

    ways = {"ours": ours, "theirs": theirs} if PEERS else {"ours": ours}
    times = race(ways, scale.rounds, scale.patience)
    ms = {name: 1e3 * clock(times[name]) for name in ways}
    if not PEERS:
        return models.name, f"{ms['ours']:.1f}", *[ABSENT] * 3
    ratio = ms["ours"] / ms["theirs"]
    return models.name, f"{ms['ours']:.1f}", f"{ms['theirs']:.1f}", f"{ratio:.2f}", verdict(ratio, most=1.05)
