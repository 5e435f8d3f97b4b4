"""The engine on SmolLM2: rows that join one another get what `generate`, and transformers, give each alone."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

import laconic
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from laconic.serving.engine import Engine
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
