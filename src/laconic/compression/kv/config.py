"""Options of KV cache compression: the method that ranks keys and values, and how many are kept."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, SupportsIndex

from laconic.errors import UsageError
from laconic.generation.config import check_choices, check_range, check_type

KVMethod = Literal["kvzip", "snapkv", "rkv", "h2o", "expected", "knorm", "window", "random"]
SHARED_METHODS: tuple[KVMethod, ...] = ("kvzip",)  # scores that can be compared between heads and layers
DEFAULT_KEEP = 0.125
MIN_DEFAULT_SLOTS = 64  # an eighth of 512 tokens, the shortest texts on which the default was measured
ROUNDING_SLACK = 1e-6  # of a slot, so that 0.29 of 100 tokens, 28.999999999999996 in floating point, are 29


@dataclass(frozen=True)
class KVCompressionConfig:
    """Options of `compress_kv`. Give at most one of `keep`, `slots` and `max_loss`.

    By default an eighth of the tokens is kept, at least 64.

    Args:
        method: Score that ranks the keys: kvzip, snapkv, rkv, h2o, expected, knorm, window or random.
        keep: Share of the document's keys and values to keep.
        slots: Number of tokens to keep per KV head, on average.
        max_loss: Keep as few as this increase of the loss on the document allows, in nats per token, or as many as
            possible if none is enough.
        num_sinks: First tokens that are always kept (attention sinks).
        equal_heads: Keep the same number in every head. By default KVzip's heads share the slots, which loses much
            less; a document read in several windows always has equal heads.
        seed: Seed of the method random.

    Raises:
        UsageError: If a value is out of range, or several sizes are given.

    Examples:
        >>> import laconic
        >>> laconic.KVCompressionConfig("snapkv", keep=0.25).num_slots(1000)
        250
    """

    method: KVMethod = "kvzip"
    keep: float | None = None
    slots: int | None = None
    max_loss: float | None = None
    num_sinks: int = 4
    equal_heads: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(method=(self.method, KVMethod))
        sizes = {name: getattr(self, name) for name in ("keep", "slots", "max_loss")}
        for name in ("keep", "max_loss"):
            check_type(name, sizes[name], Real | None, "a number")
        check_type("slots", self.slots, SupportsIndex | None, "an integer")
        for name in ("num_sinks", "seed"):
            check_type(name, getattr(self, name), SupportsIndex, "an integer")
        for name in (*sizes, "num_sinks", "seed"):
            if isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}: give a number, not bool")
        check_type("equal_heads", self.equal_heads, bool, "True or False")
        present = [name for name, value in sizes.items() if value is not None]
        if len(present) > 1:
            raise UsageError(f"{' and '.join(present)}: give only one of them, to choose the size of the memory")
        keep, slots, max_loss = (1 if value is None else value for value in sizes.values())
        check_range("keep", keep, 0 < keep <= 1, "a share of the tokens, above 0 and at most 1")
        check_range("slots", slots, slots >= 1, "1 or more")
        check_range("max_loss", max_loss, 0 <= max_loss < math.inf, "nats per token, 0 or more")
        check_range("num_sinks", self.num_sinks, self.num_sinks >= 0, "0 or more")

    def num_slots(self, num_tokens: int) -> int:
        """Return how many of a document's `num_tokens` tokens to keep, for `keep`, `slots` and the default."""
        if self.slots is not None:
            return min(self.slots, num_tokens)
        share, least = (DEFAULT_KEEP, MIN_DEFAULT_SLOTS) if self.keep is None else (self.keep, 1)
        return min(num_tokens, max(least, math.floor(num_tokens * share + ROUNDING_SLACK)))


DEFAULT_CONFIG = KVCompressionConfig()
