"""The engine on SmolLM2: rows that join one another get what `generate`, and transformers, give each alone."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

import laconic
from laconic.data.messages import Message
from laconic.experiment.text_models.chat_session import ChatSession
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from laconic.serving.engine import Engine
from laconic.serving.requests import PromptEvent
from tests.conftest import needs
from tests.real.texts import SENTENCES
from tests.serving.receiver import Receiver, run_to_end, submit

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("unchecked")]
NUM_TOKENS = 12


def test_engine_rows_equal_generate_and_transformers(smollm2: Path) -> None:
    needs("transformers")
    from transformers import AutoModelForCausalLM

    model = cast(LanguageModel, laconic.load(smollm2))
    engine = Engine(model)
    prompts = [*SENTENCES[:5], " ".join(SENTENCES) * 2]
    configs = [
        GenerationConfig(max_tokens=NUM_TOKENS, temperature=0.9 * (i % 2), top_p=0.95, seed=i, eos_token_ids=())
        for i in range(len(prompts))
    ]
    receivers = list[Receiver]()
    for prompt, config in zip(prompts, configs, strict=True):
        receivers.append(submit(engine, model.tokenizer.encode(prompt), config=config))
        engine.run_once()  # the next request joins one that runs
    run_to_end(engine)
    theirs: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for prompt, config, receiver in zip(prompts, configs, receivers, strict=True):
        alone = model.generate(prompt, config)[0]
        assert (receiver.token_ids, receiver.text) == (alone.token_ids, alone.text)
        if not config.temperature:
            ids = torch.tensor([model.tokenizer.encode(prompt)])
            whole = theirs.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
            assert receiver.token_ids == whole[0, ids.shape[1] :].tolist()


def test_turns_of_a_chat_continue_the_cached_conversation(smollm2: Path) -> None:
    """A client sends the whole chat with every turn; only the new messages are read, with the same replies."""
    model = cast(LanguageModel, laconic.load(smollm2))
    session = ChatSession(model.decoder, model.tokenizer)
    config = GenerationConfig(max_tokens=NUM_TOKENS, eos_token_ids=session.eos_token_ids)
    cached, plain = Engine(model, prefix_cache_bytes=2**28), Engine(model)
    messages = list[Message]()
    previous: list[int] = []
    for sentence in SENTENCES[:3]:
        messages.append({"role": "user", "content": f"{sentence} What happens next?"})
        ids = session.encode(messages)
        receivers = [submit(engine, ids, config=config) for engine in (cached, plain)]
        for engine in (cached, plain):
            run_to_end(engine)
        assert receivers[0].token_ids == receivers[1].token_ids
        num_cached = next(event.num_cached for event in receivers[0].events if isinstance(event, PromptEvent))
        assert num_cached >= len(previous)
        previous = ids
        messages.append({"role": "assistant", "content": receivers[0].text})
