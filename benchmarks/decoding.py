"""Speed of greedy decoding and of prefill, compared with transformers."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import laconic
from benchmarks.measure import ABSENT, PEERS, STORIES, Scale, Table, clock, clock_name, time_interleaved, verdict
from benchmarks.models import Pair, model_pairs, random_ids

GOAL = 1.5  # second target of models whose required ratio is smaller


def generate_laconic(pair: Pair, ids: Tensor, new: int) -> list[list[int]]:
    """Generate greedily with laconic, without eos."""
    return [
        g.token_ids
        for g in laconic.generate(
            pair.ours, input_ids=ids, config=laconic.GenerationConfig(max_tokens=new, eos_token_ids=())
        )
    ]


def generate_transformers(pair: Pair, ids: Tensor, new: int, cache: str | None = None) -> list[list[int]]:
    """Generate greedily with transformers; the default is its dynamic cache."""
    more = {} if cache is None else {"cache_implementation": cache}
    with torch.inference_mode():
        rows = pair.theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, use_cache=True, **more
        )
    return rows[:, ids.shape[1] :].tolist()


def targets(pair: Pair, scale: Scale, batch: int) -> tuple[float, float | None]:
    """Return the required ratio for a model and batch size, and a second, harder target."""
    if pair.name == "stories260k":
        return 1.5, None
    if pair.num_parameters >= 110e6:
        return 1.0, None
    has_small_vocab = pair.ours.config.vocab_size == scale.small_vocab
    if batch == 1:
        least = 1.25 if has_small_vocab else 1.5
    else:
        least = 1.1 if has_small_vocab else 1.25
    return least, GOAL if least < GOAL else None


def decoding(scale: Scale) -> Table:
    """Return the table of decoding."""
    rows = [] if STORIES.is_dir() else [("stories260k", *[ABSENT] * 6)]
    for pair in model_pairs(scale):
        for batch in (1, scale.batch):
            rows.append(decoding_row(pair, scale, batch))
    text = (
        f"Greedy, float32, {scale.new} new tokens on a prompt of {scale.prompt}, prefill included; tokens per second "
        f"of all rows together, by {clock_name()}, best of {scale.rounds} (of three where five take longer than "
        f"{scale.patience:g} s), rounds interleaved. laconic: `laconic.generate` with "
        "`GenerationConfig(max_tokens=…, eos_token_ids=())`. "
        "transformers: `generate` with SDPA, eval, `inference_mode`, `use_cache` and its default dynamic cache "
        "(the static one, made for compiled graphs, had 0.94 and 1.02 times its speed in a single trial on stories260k "
        "and on 8 × 512, V 1,024; it is not raced here), no streamer, no eos, attention mask given, float32. Both read "
        "the same folder of weights; neither is compiled."
    )
    head = ("model", "batch", "laconic tokens/s", "transformers tokens/s", "ratio", "target", "same tokens")
    return Table("Decoding", text, head, rows)


def decoding_row(pair: Pair, scale: Scale, batch: int) -> tuple[str, ...]:
    """Return the row of one model and batch size."""
    ids = random_ids(pair.ours.config, batch, scale.prompt)
    workloads: dict[str, Callable[[], object]] = {"ours": partial(generate_laconic, pair, ids, scale.new)}
    same = ABSENT
    if PEERS:
        workloads["theirs"] = partial(generate_transformers, pair, ids, scale.new)
        laconic_ids, transformers_ids = (
            generate_laconic(pair, ids, scale.new),
            generate_transformers(pair, ids, scale.new),
        )
        num_different = sum(a != b for a, b in zip(laconic_ids, transformers_ids, strict=True))
        same = "yes" if not num_different else f"no: {num_different} of {batch} rows differ"
    times = time_interleaved(workloads, scale.rounds, scale.patience, warm=0 if PEERS else 1)
    speed = {name: batch * scale.new / clock(times[name]) for name in workloads}
    name = f"{pair.name} ({pair.num_parameters / 1e6:.3g} M)"
    if not PEERS:
        return name, str(batch), f"{speed['ours']:,.0f}", *[ABSENT] * 4
    ratio = speed["ours"] / speed["theirs"]
    least, goal = targets(pair, scale, batch)
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
    """Return the table of prefill."""
    rows = [] if STORIES.is_dir() else [("stories260k", *[ABSENT] * 4)]
    for pair in model_pairs(scale):
        rows.append(prefill_row(pair, scale))
    text = (
        f"A prompt of {scale.prefill} tokens, batch 1, with its cache and the logits of the last position, under "
        f"`inference_mode`; milliseconds by {clock_name()}, best of {scale.rounds}, rounds interleaved. "
        "transformers: `model(ids, use_cache=True, logits_to_keep=1)`, SDPA."
    )
    return Table("Prefill", text, ("model", "laconic ms", "transformers ms", "ratio of times", "target"), rows)


def prefill_row(pair: Pair, scale: Scale) -> tuple[str, ...]:
    """Return the row of one model."""
    ids = random_ids(pair.ours.config, 1, scale.prefill)

    def ours() -> None:
        with torch.inference_mode():
            pair.ours.logits(pair.ours(pair.ours.embed(ids)).hidden_states[:, -1])

    def theirs() -> None:
        with torch.inference_mode():
            _ = pair.theirs(ids, use_cache=True, logits_to_keep=1).logits

    workloads = {"ours": ours, "theirs": theirs} if PEERS else {"ours": ours}
    times = time_interleaved(workloads, scale.rounds, scale.patience)
    ms = {name: 1e3 * clock(times[name]) for name in workloads}
    if not PEERS:
        return pair.name, f"{ms['ours']:.1f}", *[ABSENT] * 3
    ratio = ms["ours"] / ms["theirs"]
    return pair.name, f"{ms['ours']:.1f}", f"{ms['theirs']:.1f}", f"{ratio:.2f}", verdict(ratio, most=1.05)
