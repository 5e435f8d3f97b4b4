"""Data sets by name in a recipe: paths, training and validation rows, held-out checks, and a whole run."""

import json
from pathlib import Path

import pytest
import torch

from laconic.cli.commands.train import TrainCommand
from laconic.config.data import DataConfig
from laconic.config.load import load_recipe
from laconic.data.reasoning.answer_matching import TEXT
from laconic.data.reasoning.load import load_training_examples
from laconic.errors import InputError
from laconic.experiment.from_recipe.build_data import choose_default_protocol, load_held_out_rows, load_training_rows
from laconic.experiment.from_recipe.build_model import load_model_tokenizer
from laconic.experiment.load_run import recipe_fingerprint

SMALL = """method = "kava"
[model]
name = "MODEL"
[latents]
num_latents = 4
jacobi_iterations = 2
[data]
source = "catalog"
name = ["aggregate", "rows.jsonl"]
valid = "gsm8k-aug:valid"
data_dir = "data"
size_check = "off"
on_too_long = "drop"
max_train_rows = 24
[validation]
max_rows = 2
max_tokens = 4
[train]
steps = 2
batch_size = 4
learning_rate = 1e-3
"""


@pytest.fixture
def small(tmp_path: Path, shared: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL.replace("MODEL", str(shared / "models/stories260k")))
    (tmp_path / "data").symlink_to(shared / "data")
    row = {"question": "Two and two and two?", "steps": ["<<2+2=4>>", "<<4+2=6>>"], "answer": "6"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return path


def test_recipe_paths_and_data_set_names(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    data = load_recipe(small)[0].data
    assert data.name == ("aggregate", str(tmp_path / "rows.jsonl"))  # files are relative to the recipe
    assert (data.valid, data.data_dir) == ("gsm8k-aug:valid", str(tmp_path / "data"))
    data = load_recipe(small, ["data.name=whynlp/gsm8k-aug", "data.valid=held.jsonl", "data.data_dir=there"])[0].data
    assert data.name == ("whynlp/gsm8k-aug",)
    assert (data.valid, data.data_dir) == (str(tmp_path / "here/held.jsonl"), str(tmp_path / "here/there"))
    data = load_recipe(small, ['data.name=["gsm8k", "a/b.parquet"]'])[0].data
    assert data.name == ("gsm8k", str(tmp_path / "here/a/b.parquet"))


def test_recipe_fingerprint_ignores_data_dir(small: Path) -> None:
    recipes = [load_recipe(small, [f"data.data_dir={root}"])[0] for root in ("a", "b")]
    assert recipe_fingerprint(recipes[0]) == recipe_fingerprint(recipes[1])
    assert recipe_fingerprint(load_recipe(small, ["data.name=gsm8k"])[0]) != recipe_fingerprint(recipes[0])
    files = [load_recipe(small, [f"data.name={name}"])[0] for name in ("a.jsonl", "b/a.jsonl")]
    assert recipe_fingerprint(files[0]) == recipe_fingerprint(files[1]), "the rows have a hash, and files may move"


@pytest.mark.medium
def test_load_rows_of_data_sets(small: Path) -> None:
    recipe = load_recipe(small, ['data.name=["gsm8k-aug", "gsm8k"]', "data.max_train_rows=300"])[0]
    tokenizer = load_model_tokenizer(recipe.model)
    rows = load_training_rows(recipe, tokenizer, 512)
    assert len(rows.examples) == 300
    assert rows.examples[0].id == "gsm8k-aug-train-00000"
    assert rows.notes[0] == "gsm8k-aug:train: 10,432 of 385,620 published rows"
    assert [e.id for e in load_held_out_rows(recipe, tokenizer, 512, "valid", 3).examples][
        -1
    ] == "gsm8k-aug-valid-00002"
    with pytest.raises(InputError, match=r"^data\.test is not set"):
        load_held_out_rows(recipe, tokenizer, 512, "test")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"path": "gsm8k/train.jsonl"}, r"gsm8k/train\.jsonl: 500 rows are validation questions of GSM8K-Aug"),
        ({"path": "svamp/test.jsonl"}, r"^data\.path .* is svamp:test: cannot train on test rows"),
        ({"valid": "gsm8k/test.jsonl"}, r"^data\.valid .* is gsm8k:test: test rows must not select"),
        ({"test": "signs.jsonl"}, r"^1 training questions are also held out \(rows\.jsonl:1 = signs\.jsonl:1\)"),
        ({"valid": "new.jsonl", "test": "old.jsonl"}, r"^1 questions of data\.valid are also in data\.test"),
    ],
)  # fmt: skip
def test_load_training_examples_of_a_file_held_out_checks(small: Path, more: dict[str, str], message: str) -> None:
    folder, row = small.parent, '{"question": "QUESTION", "answer": "6"}\n'
    for name, question in (("signs", "two and TWO, and two"), ("new", "One?"), ("old", "one...")):
        (folder / f"{name}.jsonl").write_text(row.replace("QUESTION", question))
    paths = {key: folder / ("data" if "/" in name else ".") / name for key, name in more.items()}
    with pytest.raises(InputError, match=message):
        load_training_examples(
            DataConfig.model_validate(
                {"path": f"{folder}/rows.jsonl"} | {key: str(path) for key, path in paths.items()}
            )
        )


def test_choose_default_protocol_of_multiplication(small: Path) -> None:
    assert choose_default_protocol(load_recipe(small)[0].data).name == "pccot"
    assert choose_default_protocol(load_recipe(small, ["data.name=mult-4:valid"])[0].data) is TEXT


@pytest.mark.medium
def test_train_on_gsm8k_questions(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    assert TrainCommand(recipe=str(small), out=tmp_path / "run", format="json", device="cpu").run() == 0
    out, err = capsys.readouterr()
    end = json.loads(out)["runs"][0]
    assert end["steps"] == 2
    assert set(end["validation"]) == {"accuracy", "teacher_accuracy"}
    assert "24 of 24 rows are used" in err
    saved = load_recipe(tmp_path / "run/recipe.toml")[0]
    assert saved == load_recipe(small)[0]
