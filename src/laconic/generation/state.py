"""State that generation continues from: a KV cache and the ids that have not been read into it yet."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.models.cache import KVCache, RowIndex, build_row_index


@dataclass(frozen=True, eq=False)
class DecodeState:
    """State of a sequence after all its ids, for `generate(..., state=…)`.

    The last id of a sequence is chosen, not read: reading it would cost a forward pass that is wasted unless someone
    continues. So it is stored here, and `generate` reads it together with the next prompt.

    Args:
        cache: KV cache of all ids but the unread ones.
        unread_ids: Ids that follow those of the cache.

    Examples:
        >>> import laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> config = laconic.GenerationConfig(max_tokens=3, eos_token_ids=())
        >>> first = laconic.generate(decoder, input_ids=[[1, 17]], config=config)[0]
        >>> first.state.cache.S, first.state.S  # the second number counts the unread id
        (4, 5)
        >>> ids = [1, 17, *first.token_ids, 42]
        >>> whole = laconic.generate(decoder, input_ids=[ids], config=config)[0]
        >>> second = laconic.generate(decoder, input_ids=[[42]], state=first.state, config=config)[0]
        >>> second.token_ids == whole.token_ids
        True
    """

    cache: KVCache
    unread_ids: Int[Tensor, "B U"]

    def __repr__(self) -> str:
        return f"DecodeState(B={self.B}, S={self.S}, {self.unread_ids.shape[1]} unread)"

    @property
    def B(self) -> int:
        """Number of rows."""
        return self.cache.B

    @property
    def S(self) -> int:
        """Number of slots of the cache and of unread ids."""
        return self.cache.S + self.unread_ids.shape[1]

    def select_rows(self, rows: RowIndex) -> "DecodeState":
        """Select rows by their indices or a boolean mask; repeats fork the sequence.

        Raises:
            ValueError: A row is out of range, or a mask has another length.
        """
        index = build_row_index(rows, self.B).to(self.unread_ids.device)
        return DecodeState(self.cache.select_rows(index), self.unread_ids.index_select(0, index))

    @staticmethod
    def concat_rows(*states: "DecodeState") -> "DecodeState":
        """Concatenate the rows of several states, for example of all results of one `generate` call.

        Raises:
            ValueError: No state is given, or they belong to different models or have different numbers of unread ids.
        """
        if len({state.unread_ids.shape[1] for state in states}) > 1:
            raise ValueError("concat_rows: the states have different numbers of unread ids; pass those of `generate`")
        cache = KVCache.concat_rows(*(state.cache for state in states))
        return DecodeState(cache, torch.cat([state.unread_ids for state in states]))
