"""lm-eval scores the server's model as a forward pass does, and generates what `laconic.generate` does."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import laconic
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from tests.conftest import needs
from tests.runs import train_tiny_run
from tests.serving.lm_eval_run import CHOICES, TEXT_TASK, run_lm_eval, run_tasks
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


@pytest.mark.slow
@pytest.mark.loopback
def test_lm_eval_asks_a_run_that_thinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tokenizer, lm-eval sends questions as texts; its `until` ends the answers."""
    for package in ("lm_eval", "tenacity", "datasets"):
        needs(package)
    monkeypatch.chdir(tmp_path)
    folder = train_tiny_run("kava", tmp_path)
    reasoner, questions = laconic.load(folder), ["1+2*3=", "4*5-6=", "2*2+1=", "9-8+7=", "3*3*3="]
    assert isinstance(reasoner, laconic.Reasoner)
    answers = [answer.text for answer in reasoner.generate(questions, GenerationConfig(max_tokens=12))]
    until = next(text[1:3] for text in answers if len(text) > 2)
    with run_server(folder) as server:
        model_args = f"model={folder.name},tokenizer_backend=None"
        samples = run_tasks(tmp_path, questions, (TEXT_TASK,), server.port, model_args, (until,))
    generated = [row["resps"][0][0] for row in samples["local_text"]]
    assert generated == [answer.partition(until)[0] for answer in answers] != answers
