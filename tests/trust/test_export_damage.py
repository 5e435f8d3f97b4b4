"""Damage to an exported folder is found when it is loaded; what users add or edit is not taken for damage."""

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import laconic
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import CorruptArtifactError
from laconic.experiment.export import export_model, export_run
from laconic.experiment.load_run import load_run
from laconic.models.checkpoints.checkpoint_files import INDEX_FILE
from laconic.storage import export_record
from tests.conftest import RunCli, needs
from tests.runs import train_tiny_run

pytestmark = pytest.mark.usefixtures("unchecked")
RECORD = "laconic/export.json"
RUN_FILES = ("config.json", "model.safetensors", "laconic/recipe.toml", "laconic/thoughts.safetensors", RECORD)
MODEL_FILES = ("config.json", INDEX_FILE, "model-00001-*.safetensors", "model-00005-*.safetensors")


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an exported run of KaVa, and a model in more files than are hashed at a time."""
    folder = tmp_path_factory.mktemp("exports")
    export_run(load_run(train_tiny_run("kava", folder), torch.device("cpu")), folder / "run")
    tokenizer = build_byte_tokenizer()
    decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama", vocab_size=tokenizer.vocab_size))
    with patch.object(decoder, "save_pretrained", partial(decoder.save_pretrained, max_shard_bytes=50_000)):
        export_model(decoder, folder / "model", tokenizer)
    assert len(list((folder / "model").glob("*.safetensors"))) > export_record.NUM_THREADS
    return folder


@pytest.fixture
def run(exports: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exports / "run", tmp_path / "run")


@pytest.fixture
def model(exports: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exports / "model", tmp_path / "model")


def flip_bit(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def answer(folder: Path) -> object:
    loaded: Any = laconic.load(folder)
    return [row.token_ids for row in loaded.generate(["1+2*3="], config=laconic.GenerationConfig(max_tokens=4))]


@pytest.mark.parametrize("place", ["start", "middle", "end"])
@pytest.mark.parametrize("name", RUN_FILES)
def test_export_of_a_run_with_a_flipped_bit(name: str, place: str, run: Path) -> None:
    path = run / name
    flip_bit(path, {"start": 0, "middle": path.stat().st_size // 2, "end": path.stat().st_size - 4}[place])
    with pytest.raises(CorruptArtifactError) as error:
        laconic.load(run)
    assert Path(name).name in str(error.value)
    assert "intact copy" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["start", "end"])
@pytest.mark.parametrize("name", MODEL_FILES)
def test_export_of_a_model_with_a_flipped_bit(name: str, place: str, model: Path) -> None:
    """Also a header that cannot be parsed, which the reader of tensors sees first, is reported as damage."""
    (path,) = model.glob(name)
    flip_bit(path, 0 if place == "start" else path.stat().st_size - 4)
    with pytest.raises(CorruptArtifactError, match=path.name):
        laconic.load(model)
    with pytest.raises(CorruptArtifactError, match=path.name):
        laconic.Decoder.from_pretrained(model)


@pytest.mark.parametrize("name", ["laconic/thoughts.safetensors", "laconic/recipe.toml", "model.safetensors"])
def test_export_of_a_run_with_a_missing_file(name: str, run: Path) -> None:
    (run / name).unlink()
    with pytest.raises(CorruptArtifactError, match=f"{name} is missing"):
        laconic.load(run)


def test_export_with_a_recipe_of_another_run(run: Path) -> None:
    recipe = run / "laconic/recipe.toml"
    changed = recipe.read_text().replace("jacobi_iterations = 1", "jacobi_iterations = 2")
    assert changed != recipe.read_text()
    recipe.write_text(changed)
    with pytest.raises(CorruptArtifactError, match=r"recipe\.toml has changed"):
        laconic.load(run)


@pytest.mark.parametrize("kind", ["run", "model"])
def test_export_commands_refuse_damage_in_one_line(kind: str, exports: Path, tmp_path: Path, run_cli: RunCli) -> None:
    folder = shutil.copytree(exports / kind, tmp_path / kind)
    weights = max(folder.glob("*.safetensors"))
    flip_bit(weights, weights.stat().st_size - 4)
    refused = [
        run_cli("generate", folder, "1+2="),
        run_cli("generate", folder, "1+2=", "--format", "json"),
        run_cli("export", folder, "--out", tmp_path / "again"),
    ]
    assert [(result.code, result.err.count("\n"), result.out) for result in refused] == [(76, 1, "")] * 3
    assert all(weights.name in result.err for result in refused)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("kind", ["run", "model"])
def test_export_loads_with_files_of_the_user(kind: str, exports: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exports / kind, tmp_path / kind)
    expected = answer(folder)
    (folder / "README.md").write_text("My model.\n")
    (folder / "samples").mkdir()
    (folder / "samples/notes.json").write_text("{}")
    (folder / "laconic/notes.md").write_text("Notes.\n")
    (folder / "generation_config.json").write_text('{"temperature": 0.2}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    assert answer(folder) == expected


def test_export_loads_with_line_ends_of_windows(run: Path) -> None:
    """Git changes them in text files on Windows; weights are not text."""
    expected = answer(run)
    for name in ("config.json", RECORD, "laconic/recipe.toml"):
        (run / name).write_bytes((run / name).read_bytes().replace(b"\n", b"\r\n"))
    assert answer(run) == expected


def test_export_loads_an_edited_config_once_it_is_removed_from_the_record(run: Path) -> None:
    edit_json(run / "config.json", rms_norm_eps=0.125)
    with pytest.raises(
        CorruptArtifactError, match=r'if you changed it, .* delete config\.json from "files" in .*json$'
    ):
        laconic.load(run)
    record = json.loads((run / RECORD).read_text())
    del record["files"]["config.json"]
    (run / RECORD).write_text(json.dumps(record))
    loaded: Any = laconic.load(run)
    assert loaded.decoder.config.norm_eps == 0.125


def test_export_loads_what_transformers_saves_into_it_once_the_record_is_deleted(model: Path) -> None:
    needs("transformers")
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        theirs.lm_head.weight.mul_(2)
    theirs.save_pretrained(model)
    with pytest.raises(CorruptArtifactError) as error:
        laconic.load(model)
    assert "config.json has changed since the export" in str(error.value)
    assert str(error.value).endswith(f"if you changed it, or save_pretrained did, delete {model / RECORD}")
    (model / RECORD).unlink()
    loaded: Any = laconic.load(model)
    assert torch.equal(loaded.decoder.lm_head.weight, theirs.lm_head.weight)


def test_export_warns_of_a_changed_vocabulary(model: Path) -> None:
    """transformers writes tokenizer.json again, with its padding, when a chat template is saved."""
    needs("transformers")
    from transformers import AutoTokenizer

    expected, tokenizer = answer(model), AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer(["a", "bc"], padding=True)
    tokenizer.save_pretrained(model)
    with pytest.warns(UserWarning, match=r"tokenizer\.json has changed since the export"):
        assert answer(model) == expected
    (model / RECORD).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer(model) == expected


def test_export_of_a_model_loads_in_transformers(exports: Path, tmp_path: Path) -> None:
    """What transformers saves elsewhere has no record."""
    needs("transformers")
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(exports / "model")
    decoder, ids = laconic.Decoder.from_pretrained(exports / "model"), torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(theirs(input_ids=ids).logits, decoder.logits(decoder(decoder.embed(ids)).hidden_states))
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.equal(
        laconic.Decoder.from_pretrained(tmp_path / "theirs").token_embedding.weight, decoder.token_embedding.weight
    )
