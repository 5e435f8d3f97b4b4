"""Sampling options that a checkpoint publishes in generation_config.json."""

from pathlib import Path
from typing import Any, NamedTuple

from laconic.errors import InputError, UsageError
from laconic.generation.config import GenerationConfig
from laconic.storage.file_names import resolve_inside
from laconic.storage.strict_json import read_foreign_json

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}

# Options of transformers that change texts and that laconic does not have, with the values that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "no_repeat_ngram_size": (0,), "typical_p": (1,), "penalty_alpha": (0,), "bad_words_ids": ([],),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "sequence_bias": ({},), "guidance_scale": (1,),
    "min_length": (0,), "min_new_tokens": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,), "exponential_decay_length_penalty": ([],), "forced_eos_token_id": ([],),
}  # fmt: skip

GREEDY_TOP_P = 1e-9  # instead of 0, which some files have for greedy decoding: only the most likely token is left


class PublishedSampling(NamedTuple):
    """Options by their name in `GenerationConfig`, the names of those that the file has, and its `do_sample`.

    `unsupported` names options of the file that would change the text, and that laconic does not have.
    """

    options: dict[str, float | int]
    published: tuple[str, ...]
    do_sample: bool = True
    unsupported: tuple[str, ...] = ()

    def request_defaults(self, asks_for_sampling: bool) -> dict[str, float | int]:
        """Return the options that a request does not give itself.

        They are as published if the request asks for sampling, or if the file has `temperature`, `top_p`, `top_k` or
        `min_p` and no `"do_sample": false`. Otherwise decoding is greedy, with the published penalty.
        """
        if asks_for_sampling or (self.do_sample and set(self.published) - {"repetition_penalty"}):
            return self.options
        return {name: self.options[name] for name in self.published if name == "repetition_penalty"}

    def describe(self) -> str:
        """Return a line with the options in use."""
        values = {name: f"{name} {value:g}" for name, value in self.options.items() if value != DEFAULTS[name]}
        if self.options["top_p"] == GREEDY_TOP_P:
            values["top_p"] = "top_p 0, so the most likely token"
        changed = list(values.values())
        source = f"published: {', '.join(self.published)}" if self.published else "the model publishes none"
        if self.unsupported:
            source = f"{source}; ignored: {', '.join(self.unsupported)}"
        return f"sampling with {', '.join(changed) or 'temperature 1'} ({source})"


def read_published_sampling(folder: Path | None) -> PublishedSampling:
    """Read temperature, top_p, top_k, min_p, repetition_penalty and do_sample of a checkpoint, and no others.

    A `top_p` of 0 leaves only the most likely token, at any temperature, as in transformers. Without a folder, without
    generation_config.json, or without an option in it, the model's own distribution is sampled.

    Raises:
        InputError: The file is not JSON, or an option is not a number or out of range.
    """
    path = None if folder is None else resolve_inside(folder, "generation_config.json")
    content = read_foreign_json(path) if path is not None and path.is_file() else {}
    published = {name: content[name] for name in DEFAULTS if content.get(name) is not None}
    for name, value in published.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{path}: {name} = {value!r} is not a number; correct the file")
    top_k = published.get("top_k", 0)
    if top_k == -1 or (isinstance(top_k, float) and top_k.is_integer()):  # vLLM writes -1 for none, others 50.0
        published["top_k"] = max(0, int(top_k))
    if published.get("top_p") == 0:
        published["top_p"] = GREEDY_TOP_P
    try:
        GenerationConfig(**published)
    except UsageError as error:
        raise InputError(f"{path}: {error}; correct the file") from None
    unsupported = tuple(k for k, neutral in UNSUPPORTED.items() if content.get(k) not in (None, *neutral))
    return PublishedSampling(DEFAULTS | published, tuple(published), content.get("do_sample") is not False, unsupported)
