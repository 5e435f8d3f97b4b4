"""Models in the hub's cache, where every file is a link to a blob, open as the folders that were uploaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer

import laconic
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.experiment.export import export_run
from laconic.experiment.load_run import load_run
from tests.conftest import RunCli, check_refused
from tests.hub_cache import add_to_hub_cache
from tests.models.fixtures import fresh
from tests.runs import train_tiny_run

pytestmark = pytest.mark.usefixtures("unchecked")
SHORT = laconic.GenerationConfig(max_tokens=4)


def save_whole_tokenizer(folder: Path) -> None:
    laconic.LanguageModel(fresh("llama", vocab_size=257), build_byte_tokenizer()).save(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def save_vocabulary_and_merges(folder: Path) -> None:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["Once upon a time"] * 4, vocab_size=270, special_tokens=["<|endoftext|>"])
    fresh("gpt2", vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    tokenizer.save_model(str(folder))


def save_nested_model(folder: Path) -> None:
    run = laconic.load(train_tiny_run("hope", folder.parent))
    assert isinstance(run, laconic.NestedTextModel)
    run.model.save_pretrained(folder)
    run.tokenizer.save(folder)


def save_exported_run(folder: Path) -> None:
    run = train_tiny_run("kava", folder.parent)
    export_run(load_run(run, torch.device("cpu")), folder)


@pytest.mark.medium
@pytest.mark.parametrize(
    "save", [save_whole_tokenizer, save_vocabulary_and_merges, save_nested_model, save_exported_run]
)
def test_load_from_the_hub_cache_as_the_folder(
    save: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    save(tmp_path / "uploaded")
    snapshot = add_to_hub_cache(tmp_path / "hub", "org/tiny", tmp_path / "uploaded")
    expected = laconic.load(tmp_path / "uploaded")
    text = expected.generate("Once upon", SHORT)[0].text
    for name in ("org/tiny", snapshot):
        model = laconic.load(name)
        assert type(model) is type(expected)
        assert model.generate("Once upon", SHORT)[0].text == text
    if isinstance(model, laconic.LanguageModel):
        model.save(tmp_path / "saved")
        saved = {path.name: path.is_symlink() for path in (tmp_path / "saved").iterdir()}
        uploaded = {path.name for path in (tmp_path / "uploaded").iterdir()}
        assert set(saved) >= uploaded - {"generation_config.json"}
        assert not any(saved.values())
        ids = AutoTokenizer.from_pretrained(tmp_path / "saved").encode("Once upon")
        assert ids == model.tokenizer.encode("Once upon")


@pytest.mark.medium
def test_generate_takes_a_run_on_the_hub_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    save_exported_run(tmp_path / "uploaded")
    add_to_hub_cache(tmp_path / "hub", "org/tiny", tmp_path / "uploaded")
    flags = ("1+1", "--with-cot", "--max-tokens", 4)
    expected = run_cli("generate", tmp_path / "uploaded", *flags)
    for options in ((), ("--revision", "main")):
        assert run_cli("generate", "org/tiny", *flags, *options).out == expected.out
    check_refused(run_cli("generate", "org/tiny", "1+1", "--chat"), 2, "--chat: not available for a run")
