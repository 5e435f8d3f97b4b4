"""Tokenizers of strangers: panics of the library, texts that grow without end, and values of the wrong type."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from laconic.data.tokenizer import build_byte_tokenizer, load_tokenizer
from laconic.data.tokenizer_limits import measure_growth
from laconic.errors import InputError, UnsafeFileError
from tests.conftest import needs
from tests.data.test_tokenizer import REAL_CONFIGS, byte_level

Spec = dict[str, Any]
TEXTS = ["it's 1234 naïve e\u0301 日本", " a  b\n\n\tc", "<think>x</think>", "HELLO'S don't"]


def replace_rule(pattern: Spec, content: str) -> Spec:
    return {"type": "Replace", "pattern": pattern, "content": content}


def template(pieces: list[Spec], special_tokens: Spec) -> Spec:
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special_tokens}


TEXT: Spec = {"Sequence": {"id": "A", "type_id": 0}}
UNKNOWN: Spec = {"SpecialToken": {"id": "<zzz>", "type_id": 0}}
MANY = {"<zzz>": {"id": "<zzz>", "ids": [1] * 2000, "tokens": ["a"] * 2000}}
TENFOLD = [replace_rule({"String": "a"}, "a" * 10)] * 4
HOSTILE: dict[str, tuple[Spec, str]] = {
    "template with an unknown token": ({"post_processor": template([UNKNOWN, TEXT], {})}, "panics: no entry found"),
    "template with many tokens": ({"post_processor": template([UNKNOWN, TEXT], MANY)}, "adds 2,000 tokens"),
    "template that repeats": ({"post_processor": template([TEXT] * 2000, {})}, "2,000 times longer"),
    "split that backtracks": (
        {"pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "(a|aa)+$b"}, "behavior": "Isolated", "invert": False
        }},
        "panics: .*retry-limit",
    ),
    "damaged table": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}}, "panics: "),
    "unreadable table": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "//8A"}}, "panics: "),
    "normalizer that grows": ({"normalizer": {"type": "Sequence", "normalizers": TENFOLD}}, "normalizer .* 10,000"),
    "decoder that grows": ({"decoder": {"type": "Sequence", "decoders": TENFOLD}}, "decoder .* 10,000 times"),
    "model that is a text": ({"model": "BPE"}, "invalid tokenizer"),
    "version": ({"version": "9"}, "invalid tokenizer"),
}  # fmt: skip


@pytest.fixture
def spec() -> Spec:
    return json.loads(build_byte_tokenizer().backend.to_str())


@pytest.mark.parametrize(("changes", "message"), HOSTILE.values(), ids=HOSTILE)
def test_load_tokenizer_hostile_file(
    changes: Spec, message: str, spec: Spec, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | copy.deepcopy(changes)))
    with pytest.raises(InputError, match=rf"^tokenizer\.json: .*{message}"):
        load_tokenizer(tmp_path)
    assert capfd.readouterr().err == ""


def test_encode_translates_errors_of_the_library(tmp_path: Path, spec: Spec) -> None:
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"model": words, "added_tokens": []}))
    tokenizer = load_tokenizer(tmp_path)
    for encode in (tokenizer.encode, tokenizer):
        with pytest.raises(InputError, match=r"^the tokenizer fails: .*Missing \[UNK\]"):
            encode("b")


@pytest.mark.parametrize("folder", sorted(REAL_CONFIGS.iterdir()), ids=lambda folder: folder.name)
def test_measure_growth_of_published_tokenizers(folder: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        return
    backend = load_tokenizer(folder).backend
    for part in (backend.normalizer, backend.post_processor, backend.decoder):
        assert measure_growth(json.loads(part.__getstate__()) if part is not None else {}) <= 2


@pytest.mark.parametrize(
    ("pattern", "content", "growth"),
    [
        ({"String": " "}, "▁", 1),
        ({"String": "ab"}, "c" * 5, 3),
        ({"Regex": " {2,}"}, " ", 1),
        ({"Regex": "x*"}, "y", 2),
    ],
)
def test_measure_growth_bounds_what_the_library_does(pattern: Spec, content: str, growth: int) -> None:
    from tokenizers import Regex, normalizers

    assert measure_growth(replace_rule(pattern, content)) == growth
    library_pattern = pattern["String"] if "String" in pattern else Regex(pattern["Regex"])
    normalizer = normalizers.Replace(library_pattern, content)
    for text in ("ab" * 30, " " * 30, "axx  x" * 10):
        assert len(normalizer.normalize_str(text)) <= growth * len(text) + 1


IGNORED_TYPES: list[Spec] = [
    {"chat_template": ["a", {"name": ["default"], "template": "b"}]},
    {"chat_template": 5},
    {"tokenizer_class": ["LlamaTokenizer"]},
    {"eos_token": 7},
    {"added_tokens_decoder": {"1": {"content": [1]}}},
]
REFUSED_TYPES: list[Spec] = [
    {"added_tokens_decoder": {"x": {"content": "a"}}},
    {"added_tokens_decoder": {"1": "a"}},
    {"additional_special_tokens": 5},
]


@pytest.mark.parametrize("config", IGNORED_TYPES, ids=map(str, IGNORED_TYPES))
def test_load_tokenizer_ignores_values_of_the_wrong_type(config: Spec, tmp_path: Path) -> None:
    build_byte_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("ab") == [97, 98]


@pytest.mark.parametrize("config", REFUSED_TYPES, ids=map(str, REFUSED_TYPES))
def test_load_tokenizer_refuses_wrong_added_tokens(config: Spec, tmp_path: Path) -> None:
    build_byte_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=r"^tokenizer_config\.json or added_tokens\.json: added tokens of the wrong type"
    ):
        load_tokenizer(tmp_path)


def test_load_tokenizer_refuses_linked_settings_as_unsafe(tmp_path: Path) -> None:
    build_byte_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").symlink_to("/etc/hostname")
    with pytest.raises(UnsafeFileError, match="leads out of its folder"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_load_tokenizer_from_vocab_and_merges_of_qwen(family: str, tmp_path: Path) -> None:
    needs("transformers")
    from transformers import Qwen2Tokenizer

    byte_level(tmp_path, {"tokenizer_class": "Qwen2Tokenizer"} if family == "qwen2" else {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<think>": 330, "</think>": 331}))
    ours, theirs = load_tokenizer(tmp_path), Qwen2Tokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
    assert (ours.vocab_size, ours.eos_token_id, ours.pad_token_id) == (
        len(theirs), theirs.eos_token_id, theirs.pad_token_id
    )  # fmt: skip


def test_load_tokenizer_from_vocab_and_merges_of_another_class(tmp_path: Path) -> None:
    byte_level(tmp_path, {"tokenizer_class": "RobertaTokenizerFast"})
    with pytest.raises(InputError, match=r"^tokenizer_class 'RobertaTokenizer' is not supported with vocab\.json"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_in_a_folder_whose_name_is_not_unicode(tmp_path: Path) -> None:
    """As Python spells any name beyond ASCII where the locale is C."""
    folder = tmp_path / os.fsdecode(b"m\xf6del")
    folder.mkdir()
    build_byte_tokenizer().save(folder)
    assert load_tokenizer(folder).encode("ab") == [97, 98]
    byte_level(tmp_path, {})
    for file in tmp_path.glob("*.*"):
        file.rename(folder / file.name)
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(folder).encode("<|endoftext|>") == [0]


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="needs a list of open files")
def test_load_tokenizer_without_a_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of panics are then shown; no file stays open."""

    def fail() -> None:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    build_byte_tokenizer().save(tmp_path)
    before = len(os.listdir("/dev/fd"))
    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    assert load_tokenizer(tmp_path).vocab_size == 257
    assert len(os.listdir("/dev/fd")) == before
