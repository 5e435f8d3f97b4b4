"""The positions that a model's context leaves for answers of `laconic generate`, and rows that end there."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from laconic.cli.generate_prompts import PromptRow
from laconic.compression.kv.memory import KVMemory
from laconic.console import log_message
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import Generation, generate
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder


@dataclass
class ContextLimit:
    """A model, with its name for messages, and the context that its prompts and answers share.

    `num_ended` of `num_answers` so far ended because the context was full.
    """

    decoder: Decoder
    name: str
    may_exceed: bool = False
    num_answers: int = 0
    num_ended: int = 0

    @property
    def num_positions(self) -> int:
        return self.decoder.config.max_position_embeddings

    def check_prompts(self, rows: Sequence[PromptRow], ids: Sequence[list[int]], memory: KVMemory | None) -> None:
        """Raise `UsageError` (2) if a prompt leaves no room for an answer.

        A memory takes the positions of the text that it replaces, or of its slots if the text was read in windows.
        """
        before = [0] if memory is None else memory.num_tokens.tolist()
        before = before * len(rows) if len(before) == 1 else before
        for row, row_ids, num_before in zip(rows, ids, before, strict=True):
            excess = num_before + len(row_ids) + 1 - self.num_positions
            if excess > 0 and not self.may_exceed:
                after = f" after a memory of {num_before:,} positions" if num_before else ""
                raise UsageError(
                    f"{row.name} has {len(row_ids):,} tokens{after}, the context of {self.name} "
                    f"{self.num_positions:,}; shorten {'one of them' if after else 'it'} by {excess:,} tokens or more, "
                    "or go on with --allow-long-prompt"
                )

    def generate(
        self, tokenizer: Tokenizer, ids: Sequence[list[int]], state: KVCache | None, config: GenerationConfig
    ) -> list[Generation]:
        """Generate as `laconic.generate` does, and end each row where the context is full, with reason length."""
        ids = list(ids)
        self.num_answers += len(ids)
        before = [0] * len(ids) if state is None else state.next_position.tolist()
        rooms = [self.num_positions - n - len(row_ids) for row_ids, n in zip(ids, before, strict=True)]
        if self.may_exceed or config.max_tokens <= min(rooms):
            return generate(self.decoder, tokenizer, input_ids=ids, state=state, config=config)
        # A learned table has no positions for rows that have ended and are read on as part of the batch.
        most = min(rooms) if self.decoder.config.position_encoding == "table" else max(rooms)
        max_tokens, counts, on_token = min(config.max_tokens, most), [0] * len(ids), config.on_token

        def end_in_context(row: int, token: int, text: str, logprob: float) -> bool:
            counts[row] += 1
            if on_token is not None:
                on_token(row, token, text, logprob)
            return counts[row] == rooms[row]

        min_tokens = min(config.min_tokens, max_tokens)
        options = replace(config, max_tokens=max_tokens, min_tokens=min_tokens, on_token=end_in_context)
        with warnings.catch_warnings():
            if max_tokens > min(rooms):  # only rows that have ended exceed the context
                warnings.filterwarnings("ignore", r"position [\d,]+ exceeds")
            generations = generate(self.decoder, tokenizer, input_ids=ids, state=state, config=options)
        generations = [replace(g, stop_reason="length") if g.stop_reason == "cancelled" else g for g in generations]
        self.num_ended += sum(g.stop_reason == "length" and len(g.token_ids) < config.max_tokens for g in generations)
        return generations

    def log_ended(self) -> None:
        if self.num_ended:
            answers = "the answer" if self.num_answers == 1 else f"{self.num_ended:,} of {self.num_answers:,} answers"
            log_message(
                f"{answers} ended at position {self.num_positions:,}, where the context of {self.name} is full; "
                "--allow-long-prompt goes on, but the text may be poor"
            )
