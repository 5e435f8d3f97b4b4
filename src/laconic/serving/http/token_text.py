"""Texts and bytes of single tokens with their log probabilities, as the API reports them."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from laconic.generation.text_stream import REPLACEMENT_CHARACTER
from laconic.serving.requests import TokenLogprob

TokenBytes = Mapping[int, bytes]  # by id, see `list_token_bytes`
MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API writes this number


def label_token(data: bytes) -> str:
    """Return a token's text, or "bytes:\\x…" for a part of a character, as in OpenAI's completions API."""
    text = data.decode(errors="replace")
    if REPLACEMENT_CHARACTER not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def build_chat_logprobs(token_bytes: TokenBytes, logprobs: Iterable[TokenLogprob], num_top: int) -> dict[str, Any]:
    """Return log probabilities as chat completions report them, with the most likely tokens in each place."""

    def describe(id: int, logprob: float | None) -> dict[str, Any]:
        assert logprob is not None  # chats score no prompts, and ask no method that has none
        data = token_bytes.get(id, b"")
        return {"token": data.decode(errors="replace"), "logprob": clip_logprob(logprob), "bytes": list(data)}

    content = [
        describe(token.token_id, token.logprob)
        | {"top_logprobs": [describe(id, value) for id, value in token.top[:num_top]]}
        for token in logprobs
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobsBuilder:
    """Log probabilities of one continuation in the format of the completions API, with offsets in characters.

    The `num_top` most likely tokens are reported at each position, and the token itself. `echo` is the text of the
    prompt, if the answer repeats it.
    """

    def __init__(self, token_bytes: TokenBytes, num_top: int, echo: str) -> None:
        self.token_bytes = token_bytes
        self.num_top = num_top
        self.echo = echo
        self.offset = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def build(self, tokens: Sequence[TokenLogprob], prompt: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        """Return the log probabilities of the next tokens, after those of the prompt if they are given."""
        offsets = [self.advance(token.token_id, is_prompt=True) for token in prompt]
        self.offset = max(self.offset, len(self.echo))
        offsets += [self.advance(token.token_id) for token in tokens]
        logprobs = (*prompt, *tokens)
        return {
            "tokens": [label_token(self.token_bytes.get(token.token_id, b"")) for token in logprobs],
            "token_logprobs": [None if token.logprob is None else clip_logprob(token.logprob) for token in logprobs],
            "top_logprobs": [self.build_top(token) for token in logprobs],
            "text_offset": offsets,
        }

    def advance(self, token_id: int, is_prompt: bool = False) -> int:
        """Return the offset of the next token, and move to its end.

        Special tokens and SentencePiece's first space belong to a prompt's tokens, but not to its text.
        """
        offset = self.offset
        text = self.decoder.decode(self.token_bytes.get(token_id, b""))
        if is_prompt:
            rest = self.echo[offset:]
            text = next((part for part in (text, text.lstrip()) if rest.startswith(part)), "")
        self.offset += len(text)
        return offset

    def build_top(self, token: TokenLogprob) -> dict[str, float] | None:
        """Return the most likely tokens at a position; of two with the same text, the more likely one."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for id, value in (*token.top[: self.num_top], (token.token_id, token.logprob)):
            top.setdefault(label_token(self.token_bytes.get(id, b"")), clip_logprob(value))
        return top


def clip_logprob(logprob: float) -> float:
    """Return a log probability that is finite, as JSON requires."""
    return max(logprob, MIN_LOGPROB)
