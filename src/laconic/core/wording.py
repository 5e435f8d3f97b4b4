"""Ids into text while they come: whole characters only, nothing after a stop string."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what an incomplete character decodes to


class Wording:
    """The text of one continuation, handed out in pieces; their sum is `text`.

    Decoding looks at the last two pieces only: the earlier of them settles whether the later begins with a space.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int], stop: Sequence[str]) -> None:
        self.decode, self.stop = decode, stop
        self.ids, self.start, self.read = list(prompt), 0, len(prompt)
        self.known = decode(self.ids) if self.ids else ""
        self.text = self.waiting = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The piece that this id completes, often nothing; `stopped` says that a stop string was found."""
        self.ids.append(token)
        piece = self.piece()
        if piece.endswith(UNFINISHED):
            return ""
        if piece:
            if not self.known.endswith(UNFINISHED):  # as it may where a prompt ends within a character
                self.start = self.read
            self.read = len(self.ids)
            self.known = self.decode(self.ids[self.start :])
        return self.hand_out(piece)

    def end(self) -> str:
        """What was waiting for more: an unfinished character, the beginning of a stop string."""
        rest = "" if self.stopped else self.waiting + self.piece()
        self.text += rest
        return rest

    def piece(self) -> str:
        """The text since the last piece."""
        return self.decode(self.ids[self.start :])[len(self.known.rstrip(UNFINISHED)) :] if self.ids else ""

    def hand_out(self, piece: str) -> str:
        """As much as cannot belong to a stop string, or what stands before one."""
        text = self.waiting + piece
        found = [at for at in map(text.find, self.stop) if at >= 0]
        if found:
            self.stopped, ready = True, text[: min(found)]
        else:
            ready = text[: len(text) - max((overlap(text, stop) for stop in self.stop), default=0)]
            self.waiting = text[len(ready) :]
        self.text += ready
        return ready


def overlap(text: str, stop: str) -> int:
    """How many last characters of `text` are the first of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
