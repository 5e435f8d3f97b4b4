"""A conversation with a model that has fast weights, after what it has learned."""

from pathlib import Path
from typing import cast

from laconic.experiment.text_models.chat_session import ChatSession
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import Generation
from laconic.nested.state import FastWeightState


class StateChatSession(ChatSession):
    """A conversation that continues a fast-weight state, or the initial one.

    Each turn continues the state after the turn before it, so that only new tokens are read. Where earlier tokens have
    changed, or the attention window has no more room for what was read before the conversation, the whole conversation
    is read again from the first state on. By default, the conversation updates fast weights only in models without
    attention; `update_on_prompt` of a reply's options lets others learn too.

    Args:
        model: The model.
        state: What it has learned, as `model.compress` returns it, of one text, or the file of such a state.
        system: System message.

    Examples:
        >>> import laconic
        >>> model = laconic.NestedTextModel.from_pretrained("smollm2")  # doctest: +SKIP
        >>> session = laconic.StateChatSession(model, model.compress(["A long text."]))  # doctest: +SKIP
        >>> session.reply("What is the text about?").text  # doctest: +SKIP
    """

    def __init__(
        self, model: NestedTextModel, state: FastWeightState | str | Path | None = None, *, system: str | None = None
    ) -> None:
        super().__init__(model.decoder, model.tokenizer, system=system)
        self.model = model
        self.first_state = self.state = model.open_state(state)

    @property
    def context_size(self) -> int:
        """Number of tokens that attention sees at most."""
        return self.model.attention_window

    def generate(self, ids: list[int], config: GenerationConfig) -> Generation:
        """Generate, as `config` says, from the `ids` of the whole conversation, reading those that are new."""
        num_reused = len(self.cached_ids)
        num_new = len(ids) - num_reused + config.max_tokens
        if self.cached_ids != ids[:num_reused] or len(ids) == num_reused or not self.has_room(num_new):
            self.state, num_reused = self.first_state, 0
        generation = self.model.generate_from_ids([ids[num_reused:]], self.state, config)[0]
        self.state = cast(FastWeightState, generation.final_state)
        self.cached_ids = ids + generation.token_ids
        self.num_reused = num_reused
        return generation

    def has_room(self, num_tokens: int) -> bool:
        """Return whether attention sees `num_tokens` more beside all that it sees in the current state."""
        cache = None if self.state is None else self.state.attention_cache
        return cache is None or int(cache.valid.sum()) + num_tokens <= self.model.attention_window
