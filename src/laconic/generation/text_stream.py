"""Ids into text while they come: whole characters only, nothing after a stop string."""

from collections.abc import Callable, Sequence

REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete character decodes to


class IncrementalDetokenizer:
    """The text of one continuation, handed out in pieces; their sum is `text`.

    Decoding looks at the last two pieces only: the earlier of them settles whether the later begins with a space.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int], stop_strings: Sequence[str]
    ) -> None:
        self.decode, self.stop_strings = decode, stop_strings
        self.token_ids, self.start, self.num_decoded = list(prompt_ids), 0, len(prompt_ids)
        self.decoded_prefix = decode(self.token_ids) if self.token_ids else ""
        self.text = self.pending = ""
        self.found_stop = False

    def append(self, token: int) -> str:
        """The piece that this id completes, often nothing; `stopped` says that a stop string was found."""
        self.token_ids.append(token)
        piece = self.new_text()
        if piece.endswith(REPLACEMENT_CHARACTER):
            return ""
        if piece:
            if not self.decoded_prefix.endswith(
                REPLACEMENT_CHARACTER
            ):  # as it may where a prompt ends within a character
                self.start = self.num_decoded
            self.num_decoded = len(self.token_ids)
            self.decoded_prefix = self.decode(self.token_ids[self.start :])
        return self.emit(piece)

    def flush(self) -> str:
        """What was waiting for more: an unfinished character, the beginning of a stop string."""
        rest = "" if self.found_stop else self.pending + self.new_text()
        self.text += rest
        return rest

    def new_text(self) -> str:
        """The text since the last piece."""
        return (
            self.decode(self.token_ids[self.start :])[len(self.decoded_prefix.rstrip(REPLACEMENT_CHARACTER)) :]
            if self.token_ids
            else ""
        )

    def emit(self, piece: str) -> str:
        """As much as cannot belong to a stop string, or what stands before one."""
        text = self.pending + piece
        found = [at for at in map(text.find, self.stop_strings) if at >= 0]
        if found:
            self.found_stop, ready = True, text[: min(found)]
        else:
            ready = text[: len(text) - max((stop_prefix_length(text, stop) for stop in self.stop_strings), default=0)]
            self.pending = text[len(ready) :]
        self.text += ready
        return ready


def stop_prefix_length(text: str, stop: str) -> int:
    """How many last characters of `text` are the first of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
