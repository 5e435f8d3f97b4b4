"""Result of text generation for one row."""

from dataclasses import dataclass

from torch import Tensor

from laconic.batches import PassCounts, StopReason
from laconic.console import to_html_table
from laconic.errors import UsageError
from laconic.generation.state import DecodeState
from laconic.interfaces import RecurrentState


@dataclass(frozen=True, eq=False)
class Generation:
    """The continuation of one row, without its prompt.

    Args:
        text: Decoded text, without the end-of-sequence id or stop string that ended it. Empty without a tokenizer.
        token_ids: Generated ids, including the end-of-sequence id or stop string that ended the row.
        logprobs: Log probability of each id in nats, before temperature and filters.
        passes: Decoder calls of this row.
        stop_reason: "eos", "stop" (a stop string), "length" or "cancelled" (`on_token` returned True).
        final_state: State to continue from, as `state` returns it; None if the options had `return_state=False`.
        last_hidden: Hidden state [D] that the last id was chosen from.
        num_prompt_tokens: Prompt tokens that were read, including the unread id of a `state`.

    Examples:
        >>> import laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> config = laconic.GenerationConfig(max_tokens=3, eos_token_ids=())
        >>> generation = laconic.generate(decoder, input_ids=[[1, 17]], config=config)[0]
        >>> generation.stop_reason, generation.passes.total
        ('length', 3)
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    passes: PassCounts
    stop_reason: StopReason
    final_state: DecodeState | RecurrentState | None
    last_hidden: Tensor
    num_prompt_tokens: int = 0

    @property
    def state(self) -> DecodeState | RecurrentState:
        """State after the prompt and all of `token_ids`; pass it to `generate` to continue.

        Raises:
            UsageError: The row was generated with `return_state=False`.
        """
        if self.final_state is None:
            raise UsageError("state: generated with return_state=False; set it to True to continue from the result")
        return self.final_state

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:28]}…{self.text[-28:]}"
        S = f", S={self.final_state.S}" if isinstance(self.final_state, DecodeState) else ""
        return f"Generation({text!r}, {len(self.token_ids)} tokens, {self.stop_reason}{S})"

    def _repr_html_(self) -> str:
        numbers = (len(self.token_ids), self.num_prompt_tokens, self.passes.total)
        mean = sum(self.logprobs) / max(1, len(self.logprobs))
        row = (self.text, *(f"{n:,}" for n in numbers), self.stop_reason, f"{mean:.3f}")
        return to_html_table(("text", "tokens", "prompt tokens", "passes", "ended by", "mean logprob"), [row])
