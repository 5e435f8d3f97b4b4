"""`laconic serve` with SmolLM2: replies, memories and lm-eval's scores are those of the model without a server."""

from pathlib import Path
from typing import Any

import pytest

import laconic
from laconic.compression.kv_compress import KVCompressionConfig
from laconic.experiment.chat_session import ChatPrefix, ChatSession
from laconic.experiment.kv_compressor import MARK, compress_text, split_template
from laconic.experiment.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from tests.serving.test_http_lm_eval import check_against_model
from tests.serving.test_http_process import open_client, run_server

pytestmark = [pytest.mark.real, pytest.mark.loopback]
LETTER = (
    "Dear Anna, the meeting has been moved to Thursday at noon in the red room on the third floor. Please bring the "
    "blue folder with the contracts and ask Tom for the key. Yours, Maria"
)
QUESTIONS = ("What is the capital of France?", "What colour is the folder?")
TEXTS = ["The dog saw", "Berlin is the capital of", "Once upon a time, there was"]


@pytest.fixture(scope="module")
def model(smollm2: Path) -> LanguageModel:
    loaded = laconic.load(smollm2)
    assert isinstance(loaded, LanguageModel)
    return loaded


def test_serve_smollm2_replies_as_chat_does(model: LanguageModel, smollm2: Path) -> None:
    config = GenerationConfig(max_tokens=24)
    result = compress_text(model.decoder, model.tokenizer, LETTER, KVCompressionConfig("snapkv", keep=0.5), chat=True)
    opening = split_template(model.tokenizer, MARK)[0]
    prefix = ChatPrefix(result.memory.to_cache(), int(result.memory.num_tokens[0]), opening)
    expected = [
        ChatSession(model.decoder, model.tokenizer).reply(QUESTIONS[0], config).text,
        ChatSession(model.decoder, model.tokenizer, prefix=prefix).reply(QUESTIONS[1], config).text,
    ]
    assert "Paris" in expected[0]
    with run_server(smollm2) as server:
        client = open_client(server)
        body: dict[str, Any] = {"text": LETTER, "method": "snapkv", "keep": 0.5, "chat": True}
        memory = client.post("/memories", body=body, cast_to=dict)
        for question, text, extra in zip(QUESTIONS, expected, ({}, {"memory": [memory["id"]]}), strict=True):
            options: dict[str, Any] = {"model": smollm2.name, "temperature": 0, "max_tokens": 24, "extra_body": extra}
            options["messages"] = [{"role": "user", "content": question}]
            assert client.chat.completions.create(**options).choices[0].message.content == text
            chunks = client.chat.completions.create(**options, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_lm_eval_scores_smollm2_as_the_model(model: LanguageModel, smollm2: Path, tmp_path: Path) -> None:
    check_against_model(model, tmp_path, smollm2, TEXTS, 1e-3)
