"""The model card of a run: its training data, its results in order, and the commands that repeat them."""

import json
from pathlib import Path

import pytest

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.evaluation.model_card import (
    build_model_card,
    describe_base,
    describe_data_licences,
    describe_options,
    find_datasets,
    list_data_files,
    list_evaluation_commands,
    list_held_out,
    list_hub_names,
    name_task,
)
from laconic.evaluation.reasoning.run import AS_TRAINED, EvalCondition
from laconic.evaluation.results_store import EvalMetadata
from laconic.experiment.from_recipe.build_data import choose_default_protocol
from tests.conftest import RunCli
from tests.runs import train_tiny_run

pytestmark = pytest.mark.usefixtures("unchecked")


def build_recipe(**data: object) -> Recipe:
    tables = {"method": "nocot", "model": {"name": "stories260k"}, "data": data, "train": {"steps": 1}}
    return Recipe.model_validate(tables, strict=False)


def test_find_datasets_looks_up_every_name() -> None:
    names = ["aggregate", "gsm8k-aug:train", "zen-E/GSM8k-Aug-NL", "folder/own.jsonl"]
    datasets = find_datasets(build_recipe(source="catalog", name=names))
    assert list(datasets) == ["aggregate", "gsm8k-aug:train", "zen-E/GSM8k-Aug-NL", "own.jsonl"]
    info_names = [info.name if info else None for info in datasets.values()]
    assert info_names == ["aggregate", "gsm8k-aug", "zen-E/GSM8k-Aug-NL", None]
    hub_names = list_hub_names(datasets)
    assert "whynlp/gsm8k-aug" in hub_names
    assert len(hub_names) == len(set(hub_names)) == 2
    licences = describe_data_licences(datasets)
    assert licences.startswith("aggregate MIT, gsm8k-aug:train ")
    assert licences.endswith("own.jsonl not known to laconic")
    assert describe_data_licences(find_datasets(build_recipe(source="catalog", name="aggregate"))) == "MIT"
    assert "openai/gsm8k" in list_hub_names(find_datasets(build_recipe(source="catalog", name="gsm-union")))
    assert list(find_datasets(build_recipe(source="file", path="/home/me/rows.jsonl"))) == ["rows.jsonl"]


def test_describe_base_says_that_weights_were_rounded(tmp_path: Path) -> None:
    recipe = build_recipe(source="file", path="rows.jsonl")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(tmp_path / "base")})})
    (tmp_path / "base").mkdir()
    assert describe_base(recipe) == "base"
    source = {"file": "small.Q4_1.gguf", "quantization": {"Q4_1": 210, "F32": 61}}
    (tmp_path / "base" / "gguf_source.json").write_text(json.dumps(source))
    assert describe_base(recipe) == "base, converted from small.Q4_1.gguf (weights rounded to Q4_1)"


def test_list_data_files_are_beside_the_recipe() -> None:
    recipe = build_recipe(source="catalog", name=["/home/me/a.jsonl", "gsm8k-aug"], valid="own/b.jsonl", test="gsm8k")
    assert list_data_files(recipe) == ["`laconic/a.jsonl`", "`laconic/own/b.jsonl`"]


@pytest.mark.parametrize(
    ("metadata", "task"),
    [
        (EvalMetadata("compression", "test-128"), "test"),
        (EvalMetadata("compression", "test-excerpt-64"), "excerpt"),
        (EvalMetadata("compression", "valid"), "valid"),
        (EvalMetadata("context_qa", "answers"), "answers.jsonl"),
        (EvalMetadata("streams", "test-bin-2"), "test"),
        (EvalMetadata("reasoning", "own"), "valid"),
        (EvalMetadata("reasoning", "svamp"), "svamp"),
        (EvalMetadata("audit", "others"), "others.jsonl"),
        (EvalMetadata("reasoning", "others", suffix=".parquet"), "others.parquet"),
    ],
)
def test_name_task_of_stored_results(metadata: EvalMetadata, task: str) -> None:
    recipe = build_recipe(source="file", path="rows.jsonl", valid="folder/own.jsonl")
    assert name_task(metadata, recipe) == task


def test_describe_options_of_other_protocols_and_limits() -> None:
    recipe = build_recipe(source="file", path="rows.jsonl")

    def describe(protocol: str, limit: int | None = None, condition: EvalCondition = AS_TRAINED) -> str:
        variant = {"protocol": protocol, "condition": condition.name}
        return describe_options(EvalMetadata("reasoning", "svamp", limit=limit, variant=variant), recipe)

    default = choose_default_protocol(recipe.data).name
    assert describe(default) == ""
    assert describe("decimal, tolerance 0.01", 8) == " --protocol decimal --tolerance 0.01 --limit 8"
    assert describe(default, condition=EvalCondition(with_cot=True)) == " --with-cot"
    assert describe(default, condition=EvalCondition(iterations=2)) == " --jacobi-iterations 2"
    assert describe(default, condition=EvalCondition(tolerance=0.1)) == " --jacobi-tolerance 0.1"
    memories = EvalMetadata("memories", "memories", variant={"data": "books", "tokens": "300", "keep": "0.1"})
    assert describe_options(memories, recipe) == " --keep 0.1 --tokens 300  # with --documents or --questions: books"


def test_list_held_out_names_what_the_recipe_has() -> None:
    assert list_held_out(build_recipe(source="file", path="rows.jsonl")) == []
    assert list_held_out(build_recipe(source="file", path="rows.jsonl", valid="own.jsonl")) == [" --tasks valid"]
    assert list_held_out(build_recipe(source="file", path="rows.jsonl", test="own.jsonl")) == [""]
    assert list_held_out(build_recipe(source="digits", format="digits")) == [""]


@pytest.mark.medium
def test_model_card_commands_repeat_the_stored_results(tmp_path: Path, run_cli: RunCli) -> None:
    run = train_tiny_run("kava", tmp_path)
    for flags in (("--limit", 3, "--with-cot", "--jacobi-iterations", "0,2"), ("--limit", 3, "--protocol", "codi")):
        result = run_cli("evaluate", run, "--tasks", "valid", *flags)
        assert result.code == 0, result.err
    assert run_cli("audit", run, "--task", "valid", "--limit", 12).code == 0
    card = build_model_card(run, "me/tiny")
    commands = [line for line in card.splitlines() if line.startswith(("laconic evaluate", "laconic audit"))]
    flags = ("", " --protocol codi", " --jacobi-iterations 0", " --jacobi-iterations 2", " --with-cot")
    evaluations = {f"laconic evaluate runs/reproduced --tasks valid{x} --limit 3" for x in flags}
    assert set(commands) == evaluations | {"laconic audit runs/reproduced --task valid --limit 12"}
    assert "has not been evaluated" in build_model_card(run, "me/tiny", step=9)
    recipe = load_recipe(run / "recipe.toml")[0]
    assert list_evaluation_commands(run, recipe, "x", 9) == ["laconic evaluate x --checkpoint 9"]
    for command in list_evaluation_commands(run, recipe, str(run)):
        assert run_cli(*command.split()[1:]).code == 0, command


@pytest.mark.medium
def test_model_card_of_an_autocompressor_is_in_order_and_has_its_limit(tmp_path: Path, run_cli: RunCli) -> None:
    run = train_tiny_run("autocompressor", tmp_path)
    result = run_cli("evaluate", run, "--limit", 2, "--format", "json")
    assert result.code == 0, result.err
    evaluated = list(dict.fromkeys(result["dataset"] for result in json.loads(result.out)["results"]))
    card = build_model_card(run, "me/tiny")
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in card.splitlines() if line.startswith("| test")]
    assert list(dict.fromkeys(row[0] for row in rows)) == evaluated
    lengths = [int(name.rpartition("-")[2]) for name in evaluated]
    assert lengths == sorted(lengths)
    assert rows[0][2] == "none"
    assert {row[3] for row in rows} == {"2"}
    assert "laconic evaluate runs/reproduced --tasks test --limit 2" in card
