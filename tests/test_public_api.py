"""Every public name has a docstring with a runnable example."""

import doctest
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic.config.methods import CompressionConfig, DistillationConfig
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import UsageError
from laconic.models.cache import KVCache
from tests.models.fixtures import fresh
from tests.runs import train_tiny_run

NAMES = [name for name in laconic.__all__ if not name.startswith("__")]


def documented(name: str) -> tuple[str, dict[str, Any]]:
    """Return the docstring of a public name and the globals of its module."""
    value = getattr(laconic, name)
    return inspect.getdoc(value) or "", vars(importlib.import_module(value.__module__)).copy()


@pytest.mark.parametrize("name", NAMES)
def test_public_name_has_a_complete_docstring(name: str) -> None:
    doc, _ = documented(name)
    assert "Examples:" in doc
    value = getattr(laconic, name)
    if inspect.isfunction(value) and inspect.signature(value).parameters:
        assert "Args:" in doc
        assert "Raises:" in doc


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the examples load."""
    folder = tmp_path_factory.mktemp("examples")
    for method in ("kava", "autocompressor", "hope"):
        train_tiny_run(method, folder)
    return folder


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_public_example_runs(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    doc, module_globals = documented(name)
    example = doctest.DocTestParser().get_doctest(doc, module_globals, name, None, 0)
    assert example.examples
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=output.append)
    assert result.failed == 0, "".join(output)


DECODER, TOKENIZER, IDS = fresh("llama", vocab_size=257), build_byte_tokenizer(), torch.tensor([[1, 2, 3]])
WRONG: dict[str, tuple[Callable[[], Any], str]] = {  # what a user might type, and what the error says
    "Decoder of a name": (lambda: laconic.Decoder("smollm2"), "DecoderConfig, not str; from_pretrained loads"),
    "names as one text": (lambda: laconic.Decoder.from_pretrained("x", allow_missing="y"), r"such as \('y',\)"),
    "generate with a name": (lambda: laconic.generate("smollm2", TOKENIZER, ["a"]), "str is not a decoder; pass"),
    "generate with a number": (lambda: laconic.generate(DECODER, TOKENIZER, 3), "prompts: give a text or a list"),
    "generate with ids": (lambda: laconic.generate(DECODER, TOKENIZER, IDS), "takes one text, not Tensor"),
    "mask as a list": (lambda: laconic.generate(DECODER, input_ids=IDS, attention_mask=[1]), "give a tensor, not"),
    "flag as a text": (lambda: laconic.GenerationConfig(return_state="no"), "give True or False, not str"),
    "tokenizer with ids": (lambda: TOKENIZER([1, 2]), "a list of texts, not int; decode takes ids"),
    "compress_kv without ids": (lambda: laconic.compress_kv(DECODER, None), "token ids of one document, not None"),
    "Kava without latents": (lambda: laconic.Kava(DECODER, None, None, None, None), "LatentThoughts.decoder, …., not"),
    "Coconut without latents": (lambda: laconic.Coconut(DECODER, None, None, steps_per_epoch=1), "latent_thoughts:"),
    "Codi of a name": (lambda: laconic.Codi("smollm2", None, DistillationConfig()), "such as model.decoder, not str"),
    "Cot of a name": (lambda: laconic.Cot("smollm2"), "such as model.decoder, not str"),
    "AutoCompressor": (lambda: laconic.AutoCompressor(DECODER, None, None, total_steps=1), "CompressionConfig"),
    "AutoCompressor of a name": (
        lambda: laconic.AutoCompressor("x", None, CompressionConfig(), total_steps=1), "model.decoder, not str",
    ),
    "CMS of a text": (lambda: laconic.CMS("48", 64, (4,)), "width '48': must be an integer"),
    "CMS with a text": (lambda: laconic.CMS(48, 64, "48"), "at least 1 token"),
    "Titans of a text": (lambda: laconic.Titans("48"), "width: give an integer, not str"),
    "Hope of a decoder": (lambda: laconic.HopeAttention(DECODER), "HopeConfig; from_pretrained loads"),
    "one chunk size": (lambda: laconic.HopeConfig.attention_free(9, 8, 1, chunk_sizes=4), r"such as \(16, 64\)"),
    "Reasoner of a decoder": (lambda: laconic.Reasoner(DECODER), "laconic.load opens a folder, not Decoder"),
    "chat without tokenizer": (lambda: laconic.ChatSession(DECODER, None), "laconic.load_tokenizer"),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_public_call_with_a_wrong_type_says_what_is_expected(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_cache_append_takes_caches_only() -> None:
    cache = DECODER(DECODER.embed(IDS)).cache
    for other in (None, 1, "a", laconic.compress_kv(DECODER, [1, 2, 3])):
        with pytest.raises(ValueError, match="append: give a KVCache without a prefix"):
            cache.append(other)
    assert isinstance(cache.append(cache), KVCache)
