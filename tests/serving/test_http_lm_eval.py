"""lm-eval scores the server's model as a forward pass does, and generates what `laconic.generate` does."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import laconic
from laconic.experiment.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from tests.conftest import needs
from tests.serving.lm_eval_run import CHOICES, run_lm_eval
from tests.serving.test_http_process import run_server

STORIES = Path(laconic.__file__).parent / "checkpoints/stories260k"
TEXTS = ["Once upon a time there was", "Lily and her mom saw", "One day, Tom said that", "The sun was", "Ben had a"]


def score(model: LanguageModel, context: str, choice: str) -> tuple[float, bool]:
    """Return log likelihood and greediness of a choice, from one pass over both."""
    encode = model.tokenizer.encode
    ids = encode(context + choice, add_special_tokens=False)
    num_context = len(encode(context, add_special_tokens=False))
    with torch.no_grad():
        hidden = model.decoder(model.decoder.embed(torch.tensor([ids]))).hidden_states
        logprobs = F.log_softmax(model.decoder.logits(hidden)[0].float(), -1)[num_context - 1 : -1]
    targets = torch.tensor(ids[num_context:])
    return float(logprobs.gather(1, targets[:, None]).sum()), bool((logprobs.argmax(-1) == targets).all())


def check_against_model(model: LanguageModel, folder: Path, source: Path, texts: list[str], tolerance: float) -> None:
    """Run lm-eval on a server of the model, and compare with the model itself."""
    for package in ("lm_eval", "tenacity", "transformers", "datasets"):
        needs(package)
    with run_server(source) as server:
        scores, generated = run_lm_eval(folder, texts, server.port, source.name, source)
    for text, row in zip(texts, scores, strict=True):
        for choice, (value, is_greedy) in zip(CHOICES, row, strict=True):
            expected, expected_greedy = score(model, text, choice)
            assert value == pytest.approx(expected, abs=tolerance), (text, choice)
            assert is_greedy == expected_greedy
    config = GenerationConfig(max_tokens=12, stop_strings=".")
    ids = [model.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    expected_texts = laconic.generate(model.decoder, model.tokenizer, input_ids=ids, config=config)
    assert generated == [generation.text for generation in expected_texts]


@pytest.mark.slow
@pytest.mark.loopback
def test_lm_eval_scores_and_generates_as_the_model(tmp_path: Path) -> None:
    model = laconic.load(STORIES)
    assert isinstance(model, LanguageModel)
    check_against_model(model, tmp_path, STORIES, TEXTS, 1e-4)
