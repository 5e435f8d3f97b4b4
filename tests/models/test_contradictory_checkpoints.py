"""Checkpoints whose files contradict one another: logits as in transformers, and a warning that says what counts."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from laconic.errors import InputError
from laconic.models.checkpoints import checkpoint_files
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.models.fixtures import read_logits, transformers_logits
from tests.tolerances import FLOAT32, error

Tensors = dict[str, Tensor]
FLOAT8 = torch.float8_e4m3fn
Q = "model.layers.0.self_attn.q_proj"


def write_checkpoint(
    folder: Path, keys: dict[str, Any], edit: Callable[[Tensors], object] | None = None, **changes: Any
) -> Path:
    """Save a tiny Llama, then change keys of config.json and tensors behind its back."""
    Decoder(DecoderConfig.tiny("llama", **changes), seed=1).save_pretrained(folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    if edit is not None:
        tensors = load_file(weights)
        edit(tensors)
        save_file(tensors, weights, {"format": "pt"})
    return folder


def compare_with_transformers(folder: Path) -> tuple[Decoder, list[str]]:
    """Assert that transformers' logits are equal; return the decoder and the warnings of loading it."""
    ids = torch.arange(2, 42).reshape(2, 20)
    expected = transformers_logits(folder, ids)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decoder = Decoder.from_pretrained(folder, "float32")
    assert error(read_logits(decoder, ids), expected) < FLOAT32
    return decoder, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("parameters", "scaling", "is_same"),
    [
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}, {"type": "linear", "factor": 8.0}, False),
        ({"rope_type": "default", "rope_theta": 50.0}, {"type": "dynamic", "factor": 2.0}, False),
        ({"rope_type": "linear"}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 77.0}, False),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 99.0}, {"type": "linear", "factor": 2.0}, True),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}, {}, True),
    ],
)
def test_rope_scaling_wins_over_rope_parameters(
    parameters: dict[str, Any], scaling: dict[str, Any], is_same: bool, tmp_path: Path
) -> None:
    keys = {"rope_parameters": parameters, "rope_scaling": scaling, "rope_theta": 99.0}
    _, notes = compare_with_transformers(write_checkpoint(tmp_path / "a", keys))
    expected = [f"{tmp_path}/a/config.json: rope_parameters is ignored: rope_scaling beside it differs"]
    assert [note.partition(", and wins")[0] for note in notes] == ([] if is_same else expected)


def add_kv_scales(tensors: Tensors) -> None:
    tensors.update({f"model.layers.{l}.self_attn.{x}_scale": torch.ones(()) for l in (0, 1) for x in "kv"})


def add_rope_tables(tensors: Tensors) -> None:
    tensors.update({"model.rotary_emb.inv_freq": torch.ones(8), f"{Q[:-7]}.rotary_emb.inv_freq": torch.ones(8)})


@pytest.mark.parametrize(
    ("edit", "note"),
    [
        (
            add_kv_scales,
            "4 tensors ignored that a llama decoder does not have (first model.layers.0.self_attn.k_scale)",
        ),
        (lambda t: t.update({"v_head.weight": torch.ones(1, 48)}), "1 tensor ignored .* (first v_head.weight)"),
        (lambda t: t.update({"step": torch.ones(2, dtype=torch.int32)}), "1 tensor ignored .* (first step)"),
        (lambda t: t.update({f"{Q}.bias": torch.zeros(64)}), None),
        (add_rope_tables, None),
    ],
)
def test_tensors_of_no_decoder_are_ignored(edit: Callable[[Tensors], object], note: str | None, tmp_path: Path) -> None:
    _, notes = compare_with_transformers(write_checkpoint(tmp_path / "a", {}, edit))
    assert len(notes) == (note is not None)
    assert note is None or re.search(re.escape(note).replace(r"\.\*", ".*"), notes[0])


@pytest.mark.parametrize(
    ("name", "shape"),
    [(f"{Q}.bias", [64]), ("model.layers.2.mlp.up_proj.weight", [64, 48]), (f"{Q[:-7]}.q_norm", [16])],
)
def test_parameters_that_the_config_rules_out_are_refused(name: str, shape: list[int], tmp_path: Path) -> None:
    """transformers ignores them, and computes something else than the model that was trained."""
    name = name if name.endswith(("bias", "weight")) else f"{name}.weight"
    folder = write_checkpoint(tmp_path / "a", {}, lambda tensors: tensors.update({name: torch.ones(shape)}))
    with pytest.raises(InputError, match=re.escape(f"1 tensor that config.json rules out ({name})")):
        Decoder.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT8])
def test_head_that_differs_from_the_tied_embedding_is_used(dtype: torch.dtype, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"]).to(dtype)

    folder = write_checkpoint(tmp_path / "a", {}, edit, tie_word_embeddings=True)
    decoder, notes = compare_with_transformers(folder)
    message = f"{folder}: tie_word_embeddings is ignored: lm_head.weight differs from model.embed_tokens.weight"
    assert (notes, decoder.config.tie_word_embeddings) == ([message], False)
    decoder.save_pretrained(tmp_path / "b")
    assert compare_with_transformers(tmp_path / "b")[1] == []


def test_tied_checkpoint_is_indexed_and_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal head beside a tied embedding is read for one comparison."""

    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = write_checkpoint(tmp_path / "a", {}, edit, tie_word_embeddings=True)
    calls: list[str] = []
    index_tensors, load = checkpoint_files.index_tensors, checkpoint_files.StoredTensor.load

    def index_and_record(folder: Path) -> dict[str, checkpoint_files.StoredTensor]:
        calls.append("index")
        return index_tensors(folder)

    def load_and_record(stored: checkpoint_files.StoredTensor) -> torch.Tensor:
        calls.append(stored.name)
        return load(stored)

    monkeypatch.setattr(checkpoint_files, "index_tensors", index_and_record)
    monkeypatch.setattr(checkpoint_files.StoredTensor, "load", load_and_record)
    assert Decoder.from_pretrained(folder).config.tie_word_embeddings
    assert sorted(calls) == ["index", "lm_head.weight", "model.embed_tokens.weight"]


def test_tied_embedding_under_the_name_of_the_head(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    folder = write_checkpoint(tmp_path / "a", {}, rename, tie_word_embeddings=True)
    decoder, notes = compare_with_transformers(folder)
    assert (notes, decoder.config.tie_word_embeddings) == ([], True)


def test_classifier_with_tied_embeddings_is_a_language_model(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["score.weight"] = torch.ones(2, 48)

    keys = {"architectures": ["LlamaForSequenceClassification"]}
    _, notes = compare_with_transformers(write_checkpoint(tmp_path / "a", keys, edit, tie_word_embeddings=True))
    assert "LlamaForSequenceClassification" in notes[0]
    assert "(first score.weight)" in notes[1]


def test_classifier_without_a_language_model_head_is_refused(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["score.weight"] = torch.ones(2, 48)
        del tensors["lm_head.weight"]

    keys = {"architectures": ["LlamaForSequenceClassification"]}
    folder = write_checkpoint(tmp_path / "a", keys, edit, tie_word_embeddings=False)
    message = r"^1 tensor missing \(lm_head.weight\); a checkpoint without a language-model head continues no text; "
    with pytest.warns(UserWarning, match="architectures"), pytest.raises(InputError, match=message):
        Decoder.from_pretrained(folder)
    with pytest.warns(UserWarning, match="lm_head.weight: not in the checkpoint, randomly initialised"):
        Decoder.from_pretrained(folder, allow_missing=("lm_head.weight",))


def round_to_float8(tensors: Tensors) -> None:
    tensors.update({name: tensor.to(FLOAT8) for name, tensor in tensors.items() if "proj" in name})


@pytest.mark.parametrize("edit", [None, round_to_float8])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", {"": "float32", "text_config": "bfloat16"}])
def test_dtype_of_the_config_does_not_matter(dtype: Any, edit: Callable[[Tensors], object], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", {"dtype": dtype}, edit)
    decoder, notes = compare_with_transformers(folder)
    assert (notes, decoder.config.dtype) == ([], torch.float32)
    auto = Decoder.from_pretrained(folder, "auto")
    assert auto.config.dtype == (torch.float32 if edit is None else torch.bfloat16)
    assert bool(torch.isfinite(read_logits(auto, torch.tensor([[1, 2]]))).all())


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_scaled_float8_weights_are_refused(suffix: str, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors.update({f"{Q}.weight": tensors[f"{Q}.weight"].to(FLOAT8), f"{Q}.weight{suffix}": torch.ones(1)})

    folder = write_checkpoint(tmp_path / "a", {}, edit)
    with pytest.raises(
        InputError, match=rf"^1 tensor of a dtype that needs other kernels .{Q}.weight torch.float8_e4m3fn.$"
    ):
        Decoder.from_pretrained(folder)


@pytest.mark.parametrize("eos", ["2", ["2", 3], 2.0, [3.0]])
def test_generation_ids_that_are_no_integers(eos: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", {})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    decoder, notes = compare_with_transformers(folder)
    assert decoder.config.eos_token_ids == tuple(int(i) for i in (eos if isinstance(eos, list) else [eos]))
    assert notes == []
