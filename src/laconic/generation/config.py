"""Options of text generation: length, sampling, stop conditions, streaming."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsFloat, SupportsIndex, get_args

from laconic.errors import UsageError, check_known

Number = float | int
OnToken = Callable[[int, int, str, float], bool | None]  # (row, token id, text, logprob)
OnPrefill = Callable[[int, int], None]  # (positions read, positions of the prompt)
OnFinish = Callable[[int, Any], None]  # (row, its `Generation`, whose module imports torch)


def check_type(name: str, value: object, kind: Any, expected: str) -> None:
    """Raise UsageError naming an argument, what is expected and the type given; `kind` is that of `isinstance`."""
    if not isinstance(value, kind):
        raise UsageError(f"{name}: give {expected}, not {type(value).__name__}")


def check_choices(**choices: tuple[object, Any]) -> None:
    """Raise UsageError for an argument whose value, the first of a pair, is not one of its Literal, the second."""
    for name, (value, literal) in choices.items():
        check_known(name, value, get_args(literal))


def check_range(name: str, value: Number, is_valid: bool, rule: str) -> None:
    """Raise UsageError naming the option, its value and the allowed range."""
    if not is_valid:
        raise UsageError(f"{name}={value:g} must be {rule}")


def list_integers(name: str, value: SupportsIndex | Sequence[SupportsIndex]) -> list[int]:
    """Return an integer, or several, as a list. Raise UsageError for anything else."""
    try:
        return [index(i) for i in ([value] if isinstance(value, SupportsIndex) else value)]
    except TypeError:
        raise UsageError(f"{name}={value!r} must be an integer or a list of integers") from None


@dataclass(frozen=True)
class GenerationConfig:
    """Options of `laconic.generate`.

    Args:
        max_tokens: Largest number of new tokens per row.
        min_tokens: Number of new tokens before which no end-of-sequence id is generated and no stop string counts.
        temperature: 0 selects the most likely id (greedy); otherwise logits are divided by it and an id is sampled.
        top_k: Sample from the k most likely ids; 0 turns the filter off.
        top_p: Sample from the smallest set of ids whose probabilities add up to at least this; 1 turns it off.
        min_p: Sample from ids at least this many times as likely as the most likely one; 0 turns it off.
        repetition_penalty: Penalty on ids that occur in the prompt or the output (arXiv:1909.05858); 1 turns it off.
        stop_strings: A row ends before the first of these strings in its text; needs a tokenizer.
        eos_token_ids: Ids that end a row. None: those of the model's configuration; ``()``: none.
        eos_count: A row ends at its ``eos_count``-th end-of-sequence id; earlier ones are part of the output.
        suppress_token_ids: Ids that are never generated.
        seed: Seed of every row, or a sequence with one seed per row. A row's samples depend on its own seed alone.
        prefill_chunk_size: Prompt positions per forward pass. The first pass of an unpadded prompt reads eight chunks,
            unless `on_prefill` is set. With dynamic RoPE or LongRoPE, prompts beyond the original context are read in
            one pass.
        return_state: Whether each result holds the state after its row, for continuing.
        update_on_prompt: For models with fast weights: whether reading the prompt updates them. None: only if the
            model has no attention, and so could not condition on the prompt otherwise.
        update_on_output: The same for the generated tokens.
        on_token: Called as ``on_token(row, token_id, text, logprob)`` for every new token. The texts are whole
            characters and concatenate to the row's text. Returning True ends the row after this token.
        on_prefill: Called as ``on_prefill(done, total)`` with the prompt positions read so far, before the first chunk
            and after each one.
        on_finish: Called as ``on_finish(row, generation)`` when a row ends, before the others have.

    Raises:
        UsageError: A value is out of range (exit code 2).

    Examples:
        >>> from laconic import GenerationConfig
        >>> GenerationConfig(max_tokens=32, temperature=0.7, top_p=0.95).top_p
        0.95
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: Number = 0.0
    top_k: int = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    stop_strings: str | Sequence[str] = ()
    eos_token_ids: int | Sequence[int] | None = None
    eos_count: int = 1
    suppress_token_ids: Sequence[int] = ()
    seed: int | Sequence[int] = 0
    prefill_chunk_size: int = 512
    return_state: bool = True
    update_on_prompt: bool | None = None
    update_on_output: bool | None = None
    on_token: OnToken | None = None
    on_prefill: OnPrefill | None = None
    on_finish: OnFinish | None = None

    def __post_init__(self) -> None:
        least = {"max_tokens": 1, "min_tokens": 0, "prefill_chunk_size": 1, "eos_count": 1, "top_k": 0}
        for name, minimum in least.items():
            check_type(name, getattr(self, name), SupportsIndex, "an integer")
            check_range(name, getattr(self, name), getattr(self, name) >= minimum, f"≥ {minimum}")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            check_type(name, getattr(self, name), SupportsFloat, "a number")
        for name in ("on_token", "on_prefill", "on_finish"):
            check_type(name, getattr(self, name), Callable | None, "a function or None")
        for name in ("return_state", "update_on_prompt", "update_on_output"):
            check_type(name, getattr(self, name), bool | None, "True or False")
        check_type("stop_strings", self.stop_strings, Collection, "a string or a list of strings")
        for text in self.stop_list:
            check_type("stop_strings", text, str, "strings")
        is_valid = self.min_tokens <= self.max_tokens
        check_range("min_tokens", self.min_tokens, is_valid, f"in [0, max_tokens={self.max_tokens}]")
        check_range("temperature", self.temperature, 0 <= self.temperature < math.inf, "≥ 0")
        check_range("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        check_range("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        check_range("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "> 0")
        for seed in list_integers("seed", self.seed):
            check_range("seed", seed, -(2**63) <= seed < 2**64, "in [-2^63, 2^64)")
        for name in ("eos_token_ids", "suppress_token_ids"):
            list_integers(name, () if getattr(self, name) is None else getattr(self, name))
        if "" in self.stop_list:
            raise UsageError("stop_strings contains an empty string, which would end every row at once; remove it")

    @property
    def stop_list(self) -> tuple[str, ...]:
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)


def check_config(config: object) -> None:
    """Raise UsageError for options that are not a `GenerationConfig`."""
    check_type("config", config, GenerationConfig, "laconic.GenerationConfig(max_tokens=…)")


GREEDY = GenerationConfig()
