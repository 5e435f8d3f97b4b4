"""A conversation on a KV cache equals generating from the whole conversation in each turn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.data.tokenizer import Tokenizer, build_byte_tokenizer
from laconic.errors import InputError, UsageError
from laconic.experiment.text_models.chat_session import ChatPrefix, ChatSession, ContextFullError
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("unchecked")
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Removes all but the first letter of old replies, as templates of reasoning models remove old thoughts.
REWRITES = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{{ m.content[:1] }}{% else %}{{ m.content }}"
    "{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model_with_template(template: str, family: str = "llama") -> tuple[Decoder, Tokenizer]:
    config = DecoderConfig.tiny(family, vocab_size=257, max_position_embeddings=400, eos_token_ids=())
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = template
    return Decoder(config, seed=3).double().eval(), tokenizer


def whole_reply(session: ChatSession, text: str, config: GenerationConfig, **options: Any) -> list[int]:
    """Generate from the whole conversation, without the session's cache."""
    ids = session.encode([*session.messages, {"role": "user", "content": text}])
    if config.eos_token_ids is None:
        config = replace(config, eos_token_ids=session.eos_token_ids)
    return generate(session.decoder, session.tokenizer, input_ids=[ids], config=config, **options)[0].token_ids


@pytest.mark.medium
@settings(max_examples=10)
@given(
    st.sampled_from([PLAIN, REWRITES]),
    st.sampled_from(["llama", "gpt2", "mistral"]),
    st.lists(st.text(max_size=8), min_size=1, max_size=4),
    st.sampled_from([None, "Be brief."]),
)
def test_chat_session_equals_the_whole_conversation(
    template: str, family: str, turns: list[str], system: str | None
) -> None:
    session = ChatSession(*model_with_template(template, family), system=system)
    config = GenerationConfig(max_tokens=6, temperature=1.0, seed=2)
    for turn in turns:
        expected = whole_reply(session, turn, config)
        assert session.reply(turn, config).token_ids == expected
    assert [m["role"] for m in session.messages] == ["system"] * bool(system) + ["user", "assistant"] * len(turns)


def test_chat_session_reads_only_new_tokens() -> None:
    session, config = ChatSession(*model_with_template(PLAIN)), GenerationConfig(max_tokens=5, eos_token_ids=())
    first = session.reply("Hello", config)
    assert (session.num_reused, first.num_prompt_tokens) == (0, len("<user>Hello.<assistant>"))
    session.messages[-1]["content"] = "abcd"  # other text than was generated
    second = session.reply("You", config)
    assert session.num_reused >= first.num_prompt_tokens
    assert session.num_reused + second.num_prompt_tokens == len(session.encode(session.messages[:-1]))
    expected = whole_reply(session, "Go on", config)
    session.set_system("Be kind.")  # rewrites the conversation from its first token on
    session.set_system(None)
    assert session.reply("Go on", config).token_ids == expected


def test_chat_session_keeps_what_a_cancelled_reply_has() -> None:
    session = ChatSession(*model_with_template(PLAIN))
    config = GenerationConfig(max_tokens=20, temperature=1.0)
    calls: list[str] = []

    def cancel(row: int, token: int, text: str, logprob: float) -> bool:
        calls.append(text)
        return len(calls) == 3

    reply = session.reply("Hello", replace(config, on_token=cancel))
    assert (reply.stop_reason, len(reply.token_ids)) == ("cancelled", 3)
    assert session.messages[-1]["content"] == reply.text == "".join(calls)
    assert session.reply("More", config).token_ids == whole_reply_before(session, "More", config)


def whole_reply_before(session: ChatSession, text: str, config: GenerationConfig) -> list[int]:
    """Return `whole_reply` of the conversation without its last turn."""
    other = ChatSession(session.decoder, session.tokenizer)
    other.messages = session.messages[:-2]
    return whole_reply(other, text, config)


def test_chat_session_on_a_prefix() -> None:
    decoder, tokenizer = model_with_template(PLAIN)
    cache = decoder(decoder.embed(torch.arange(20, 32)[None])).cache
    config = GenerationConfig(max_tokens=5, temperature=1.0)
    for position in (None, 40):
        session = ChatSession(decoder, tokenizer, prefix=ChatPrefix(cache, position))
        first = torch.tensor([12 if position is None else position])
        for turn in ("Hello", "And?"):
            expected = whole_reply(session, turn, config, state=cache, first_positions=first)
            assert session.reply(turn, config).token_ids == expected
        assert session.num_reused > 10
        assert session.context_size == 400 - int(first)


def test_chat_session_stops_at_the_context() -> None:
    session, config = ChatSession(*model_with_template(PLAIN)), GenerationConfig(max_tokens=100, eos_token_ids=())
    session.reply("x" * 300, config)
    before = session.messages
    with pytest.raises(ContextFullError, match=r"tokens, the context 400; begin a new one"):
        session.reply("y" * 100, config)
    assert session.messages == before
    session.reset()
    assert session.messages == []
    clipped = session.reply("x" * 350, config)
    assert clipped.num_prompt_tokens + session.num_reused + len(clipped.token_ids) == 400


def test_chat_session_refuses_bad_messages_and_models_without_template(tmp_path: Path) -> None:
    decoder, tokenizer = model_with_template(PLAIN)
    session = ChatSession(decoder, tokenizer)
    with pytest.raises(InputError, match="message 1 has no role"):
        session.load_messages([{"content": "x"}])
    for messages in ([], "hi", None, {"role": "user", "content": "x"}):
        with pytest.raises(InputError, match="expected a list of messages"):
            session.load_messages(messages)  # pyright: ignore[reportArgumentType]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    session.load_messages([{"role": "user", "content": parts}])
    assert session.messages == [{"role": "user", "content": "ab"}]
    with pytest.raises(InputError, match="no chat template"):
        ChatSession(decoder, build_byte_tokenizer())
    with pytest.raises(UsageError, match=r"reply: give text \(str\), not list"):
        session.reply([{"role": "user", "content": "x"}])  # pyright: ignore[reportArgumentType]
