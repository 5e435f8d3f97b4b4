"""A conversation that continues a fast-weight state equals generating from the whole conversation in each turn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from laconic.config.nested import CMSOptions
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import UsageError
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.experiment.text_models.state_chat import StateChatSession
from laconic.generation.config import GenerationConfig
from laconic.nested.hope.model import HopeAttention
from tests.experiment.test_chat_session import PLAIN, REWRITES
from tests.models.fixtures import fresh
from tests.nested.helpers import states_equal

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore:learning does harm")]
LEARNING = CMSOptions(inner_objective="associative", inner_lr=0.5).model_copy(update={"target": "start"})
TEXT = "Chapter one. " + " ".join(f"Sentence {i} stands here." for i in range(4))
ASCII = GenerationConfig(max_tokens=6, temperature=1.0, seed=2, eos_token_ids=(), suppress_token_ids=range(128, 257))


@pytest.fixture
def build() -> Callable[..., NestedTextModel]:
    def build_model(template: str, window: int) -> NestedTextModel:
        donor = fresh("llama", vocab_size=257, max_position_embeddings=window, eos_token_ids=()).double()
        tokenizer = build_byte_tokenizer()
        tokenizer.chat_template = template
        return NestedTextModel(HopeAttention.from_decoder(donor, (8, 16), options=LEARNING).eval(), tokenizer)

    return build_model


@pytest.mark.parametrize("template", [PLAIN, REWRITES])
@pytest.mark.parametrize("window", [400, 130])  # 130: the text leaves no room for the second turn
def test_state_chat_equals_the_whole_conversation(build: Any, template: str, window: int) -> None:
    model = build(template, window)
    state = model.compress([TEXT])
    session = StateChatSession(model, state, system="Be brief.")
    reused: list[int] = []
    for turn in ("Who?", "And where is it?", "When?"):
        ids = session.encode([*session.messages, {"role": "user", "content": turn}])
        expected = model.generate_from_ids([ids], state, ASCII)[0].token_ids
        assert session.reply(turn, ASCII).token_ids == expected
        reused.append(session.num_reused)
    assert reused[0] == 0
    assert states_equal(session.first_state, state)
    if template == PLAIN and window == 400:
        assert 0 < reused[1] < reused[2]
    other = [model.generate_from_ids([ids], None, ASCII)[0].token_ids, expected]
    assert other[0] != other[1], "the state changes nothing"


def test_state_chat_without_a_state_begins_with_what_training_left(build: Any) -> None:
    model = build(PLAIN, 100)
    session = StateChatSession(model)
    first = session.reply("Who?", ASCII)
    assert first.token_ids == model.generate_from_ids([session.encode(session.messages[:1])], None, ASCII)[0].token_ids
    with pytest.raises(UsageError, match=r"has \d+ tokens, the context 100"):
        session.reply("x" * 100, ASCII)
    assert len(session.messages) == 2


def test_state_chat_learns_if_the_options_say_so(build: Any) -> None:
    model = build(PLAIN, 400)
    state = model.compress([TEXT])
    sessions = [StateChatSession(model, state) for _ in range(2)]
    for session, learns in zip(sessions, (None, True), strict=True):
        session.reply("A question of more than one chunk.", replace(ASCII, update_on_prompt=learns))
    updates = [session.state.layers[0].cms.levels[0].num_updates.item() for session in sessions]
    assert updates[0] == state.layers[0].cms.levels[0].num_updates.item() < updates[1]
