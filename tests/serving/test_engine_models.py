"""The engine gives runs of every family what their `generate` gives."""

from pathlib import Path
from typing import cast

import pytest

import laconic
from laconic.experiment.reasoner import Reasoner
from laconic.generation.config import GenerationConfig
from laconic.serving.engine import Engine
from laconic.serving.ragged import RaggedDecoder
from tests.runs import train_tiny_run
from tests.serving.receiver import run_to_end, submit

pytestmark = pytest.mark.usefixtures("unchecked")
QUESTIONS = ("1+2*3=", "4*5-6=", "7-3+12=", "9+9+9=", "2*2*2=")
LORA = ("train.trainable=lora", "lora.rank=2", "lora.alpha=4")


@pytest.mark.parametrize(
    ("method", "overrides"), [("kava", ()), ("kava", LORA), ("coconut", ()), ("cot", ()), ("nocot", ())]
)
def test_engine_answers_as_reasoner_generate(
    method: str, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reasoner = cast(Reasoner, laconic.load(train_tiny_run(method, tmp_path, *overrides)))
    engine = Engine(reasoner, max_batch_size=3)
    assert isinstance(engine.served.executor, RaggedDecoder)
    configs = [
        GenerationConfig(max_tokens=6 + i, temperature=0.8 * (i % 2), seed=i, min_tokens=2 * (i == 2))
        for i in range(len(QUESTIONS))
    ]
    receivers = [submit(engine, question=q, config=c) for q, c in zip(QUESTIONS, configs, strict=True)]
    run_to_end(engine)
    for question, config, receiver in zip(QUESTIONS, configs, receivers, strict=True):
        (answer,) = reasoner.generate(question, config)
        assert (receiver.token_ids, receiver.text) == (list(answer.token_ids), answer.text)
        assert receiver.finish.latent_passes == answer.passes.latent
        assert receiver.finish.latent_positions == (2 if method in ("kava", "coconut") else 0)
    assert engine.stats().num_latent_passes == sum(r.finish.latent_passes for r in receivers)
