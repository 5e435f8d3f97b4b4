"""Incremental detokenization: emit whole characters only, and end before a stop string."""

from collections.abc import Callable, Sequence

REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


class IncrementalDetokenizer:
    """Text of one continuation, emitted in pieces that concatenate to `text`.

    Each step decodes only the ids of the last two pieces. The earlier piece is needed because some tokenizers remove
    the space at the beginning of a decoded text. The prompt may end within a character. The text ends before the first
    stop string that is not in the text of the first `min_tokens` tokens.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_ids: Sequence[int],
        stop_strings: Sequence[str],
        min_tokens: int = 0,
    ) -> None:
        self.decode, self.stop_strings = decode, stop_strings
        self.token_ids = list(prompt_ids)
        self.first_stop = len(prompt_ids) + min_tokens
        # token_ids[start:num_decoded] are the ids of the last piece, and decoded_prefix is their text
        self.start = 0
        self.num_decoded = len(prompt_ids)
        self.decoded_prefix = decode(self.token_ids) if self.token_ids else ""
        self.text = ""
        self.pending = ""  # decoded, but possibly the beginning of a stop string
        self.found_stop = False

    @property
    def num_characters(self) -> int:
        """Number of characters decoded so far, including those of a possible stop string."""
        return len(self.text) + len(self.pending)

    def append(self, token: int) -> str:
        """Add an id and return the text that is now certain, often ""; set `found_stop` at a stop string."""
        self.token_ids.append(token)
        piece = self.decode_new_text()
        if piece.endswith(REPLACEMENT_CHARACTER):
            return ""
        if piece:
            if not self.decoded_prefix.endswith(REPLACEMENT_CHARACTER):  # the prompt may end within a character
                self.start = self.num_decoded
            self.num_decoded = len(self.token_ids)
            self.decoded_prefix = self.decode(self.token_ids[self.start :])
        return self.emit(piece)

    def flush(self) -> str:
        """Return the pending text: an incomplete character, or the beginning of a stop string."""
        if self.found_stop:
            return ""
        ready = self.emit(self.decode_new_text())
        if self.found_stop:
            return ready
        rest = self.pending
        self.pending = ""
        self.text += rest
        return ready + rest

    def decode_new_text(self) -> str:
        """Decode the text since the last piece."""
        if not self.token_ids:
            return ""
        text = self.decode(self.token_ids[self.start :])
        prefix = self.decoded_prefix
        if not text.startswith(prefix):  # the new ids complete the character that the prefix ends in
            prefix = prefix.rstrip(REPLACEMENT_CHARACTER)
        return text[len(prefix) :]

    def emit(self, piece: str) -> str:
        """Return the text that cannot belong to a stop string, or the text before one."""
        text = self.pending + piece
        if len(self.token_ids) <= self.first_stop:
            self.text += text
            return text
        matches = [index for index in map(text.find, self.stop_strings) if index >= 0]
        if matches:
            self.found_stop = True
            ready = text[: min(matches)]
        else:
            overlap = max((stop_prefix_length(text, stop) for stop in self.stop_strings), default=0)
            ready = text[: len(text) - overlap]
            self.pending = text[len(ready) :]
        self.text += ready
        return ready


def stop_prefix_length(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
