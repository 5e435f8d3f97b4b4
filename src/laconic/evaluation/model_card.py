"""The model card of an exported run: what it is, how to use it, its stored results, and commands that repeat them."""

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import tomli_w
import torch
from huggingface_hub import ModelCardData

from laconic import __version__
from laconic.config.data import is_row_file
from laconic.config.load import load_recipe, to_toml
from laconic.config.recipe import Recipe
from laconic.data.reasoning.catalog import DATASETS, DatasetInfo, find_dataset, split_name
from laconic.evaluation.class_incremental.intent_data import FILE_PREFIX, INTENT_DATASETS
from laconic.evaluation.compression.run import EXCERPT
from laconic.evaluation.reasoning.question_sets import RECIPE_SPLITS, set_title
from laconic.evaluation.reasoning.run import COT_CONDITION
from laconic.evaluation.reasoning.suite import group_results
from laconic.evaluation.results_store import EVALUATIONS_FOLDER, EvalKind, EvalMetadata, latest_evaluations
from laconic.evaluation.runs import load_recipes, seed_runs, short_run_names
from laconic.evaluation.suite import EvalRequest, Results, load_results
from laconic.evaluation.suites import SUITES
from laconic.evaluation.tables import Table
from laconic.experiment.export import remove_folders
from laconic.experiment.from_recipe.build_data import choose_default_protocol
from laconic.experiment.load_run import RECIPE_FILE, is_run_dir
from laconic.models.checkpoints.named_models import NAMED_MODELS, find_named_model
from laconic.models.gguf.convert import describe_conversion
from laconic.storage.run_dir import RunDirectory
from laconic.training.signals import StopSignal

USES = {
    "reason": 'answer = model.generate(["QUESTION"])[0]\nprint(answer.text, answer.passes)',
    "read": 'memory = model.compress(["A long text."])\nprint(model.generate(["PROMPT"], memory=memory)[0].text)',
    "learn": 'state = model.compress(["A long text."])\nprint(model.generate(["PROMPT"], memory=state)[0].text)',
    "continue": 'print(model.generate(["PROMPT"])[0].text)',
}
METHOD_USES = {"autocompressor": "read", "hope": "learn", "lm": "continue"}


def build_model_card(run: str | Path, repo: str, licence: str | None = None, step: int | None = None) -> str:
    """Return the README.md of the hub's repository OWNER/NAME for a run that is exported to it.

    `licence` is the hub's identifier for the licence of the weights, such as "apache-2.0"; `step` that of the
    checkpoint, by default that of the results.
    """
    recipe = next(iter(load_recipes([run]).values()))
    datasets = find_datasets(recipe)
    head = ModelCardData(
        library_name="laconic",
        license=licence,
        base_model=find_hub_name(recipe),
        datasets=list_hub_names(datasets) or None,
        tags=["laconic", recipe.method],
    ).to_yaml()
    licences = [
        f"weights: {licence or 'not given'}",
        f"base model: {'none' if recipe.model.family else 'see its page'}",
        f"data: {describe_data_licences(datasets)}",
    ]
    without_laconic = "the folder is the plain decoder, which transformers loads; `laconic` holds what the method adds."
    if recipe.method == "hope":
        without_laconic = "transformers does not know this architecture."
    facts = [
        ("method", recipe.method),
        ("base model", describe_base(recipe)),
        ("trained", "all weights" if recipe.train.trainable == "full" else recipe.train.trainable),
        ("data", ", ".join(datasets)),
        ("seed", str(recipe.seed)),
        ("licences", "; ".join(licences)),
    ]
    lines = [
        f"---\n{head.strip()}\n---",
        f"# {repo.rpartition('/')[2]}",
        f"Trained with laconic {__version__}, method `{recipe.method}`.",
        "\n".join(f"- {name}: {value}" for name, value in facts),
        "## Use",
        "```python\nimport laconic\n\n"
        f'model = laconic.load("{repo}")\n{USES[METHOD_USES.get(recipe.method, "reason")]}\n```',
        f"Without laconic, {without_laconic}",
        "## Results",
        *(describe_results(run, step) or ["This run has not been evaluated."]),
        "## Reproduce",
        *describe_training(run, recipe, step),
    ]
    return "\n\n".join(lines) + "\n"


def find_datasets(recipe: Recipe) -> dict[str, DatasetInfo | None]:
    """Return the training data by name, with what the catalog knows of each; files are named without their folder."""
    data = recipe.data
    names = data.name or [Path(str(data.path or data.source)).name]
    return {Path(name).name if is_row_file(name) else name: find_dataset(name) for name in names}


def list_hub_names(datasets: Mapping[str, DatasetInfo | None]) -> list[str]:
    """Return the hub repositories of data sets, and of those that they are the union of."""
    names: list[str] = []
    for name, info in datasets.items():
        members = [] if info is None else [info, *(DATASETS[member] for member in info.members)]
        names += [member.hub_repo for member in members if member.hub_repo]
        names += [split_name(name)[0]] if info is None and "/" in name else []
    return list(dict.fromkeys(names))


def describe_data_licences(datasets: Mapping[str, DatasetInfo | None]) -> str:
    licences = {name: "not known to laconic" if info is None else info.licence for name, info in datasets.items()}
    if len(set(licences.values())) == 1:
        return next(iter(licences.values()))
    return ", ".join(f"{name} {licence}" for name, licence in licences.items())


def describe_training(run: str | Path, recipe: Recipe, step: int | None) -> list[str]:
    """Return the commands that repeat a training and its evaluation, and the recipes of the runs that it began with."""
    recipes: list[str] = []
    commands: list[str] = []
    override = ""
    bases = list_base_runs(recipe)
    first = bases[0][1] if bases else recipe
    if first.model.init_from_run:
        recipes.append(f"RUN is {describe_base(first)}, with which the training began.")
        override = " model.init_from_run=RUN"
    if files := list_data_files(recipe):
        recipes.append(f"The data are not part of this repository; the recipe finds them as {', '.join(files)}.")
    for path, base in bases:
        name = short_run_names([path])[0].replace("/", "-")
        tables = tomllib.loads(to_toml(base))
        remove_folders(tables)
        block = f"```toml\n{tomli_w.dumps(tables)}```"
        recipes.append(f"<details><summary>The recipe {name}.toml</summary>\n\n{block}\n\n</details>")
        commands.append(f"laconic train {name}.toml{override} --out runs/{name}")
        override = f" model.init_from_run=runs/{name}"
    commands += [
        f"laconic train laconic/recipe.toml{override} --out runs/reproduced",
        *list_evaluation_commands(run, recipe, "runs/reproduced", step),
    ]
    return [*recipes, "```sh\n" + "\n".join(commands) + "\n```"]


def list_data_files(recipe: Recipe) -> list[str]:
    """Return the files of data that `laconic/recipe.toml` names, beside which it looks for them."""
    data = recipe.data
    names = [data.path, *(data.name or ()), data.valid, data.test]
    files = [Path(name) for name in names if name and (name == data.path or is_row_file(name))]
    return [f"`laconic/{file.name if file.is_absolute() else file}`" for file in dict.fromkeys(files)]


def list_base_runs(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """Return the runs that a training began with, the first one first, as far as they still exist."""
    runs = list[tuple[str, Recipe]]()
    while (run := recipe.model.init_from_run) and is_run_dir(run):
        recipe = load_recipe(Path(run) / RECIPE_FILE)[0]
        runs.insert(0, (run, recipe))
    return runs


def describe_base(recipe: Recipe) -> str:
    """Return the name of a recipe's base model, without the folders of this machine."""
    if recipe.model.init_from_run:
        return f"the run {short_run_names([recipe.model.init_from_run])[0]}"
    name = recipe.model.name
    folder = find_named_model(recipe.model.name or "", with_weights=False)
    if name is None:
        return "none, trained from random weights"
    conversion = describe_conversion(folder or Path(name))
    base = find_hub_name(recipe) or (Path(name).name if Path(name).is_absolute() else name)
    return f"{base}, {conversion}" if conversion else base


def find_hub_name(recipe: Recipe) -> str | None:
    name = recipe.model.name
    if name in NAMED_MODELS:
        return NAMED_MODELS[name].hub_name or None
    return name if name and "/" in name and not Path(name).is_absolute() else None


def describe_results(run: str | Path, step: int | None) -> list[str]:
    """Return the stored results of a run as tables and lines of Markdown, as `laconic evaluate` prints them."""
    blocks: list[str] = []
    request = EvalRequest([str(run)], (), torch.device("cpu"), StopSignal())
    for suite in SUITES:
        for results in split_results(load_results(suite, [str(run)], step)):
            for block in suite.report(request, results).blocks:
                if isinstance(block, Table):
                    blocks.append(to_markdown(block))
                else:
                    blocks.append("\n".join(f"- {line.strip()}" for line in block.splitlines() if line.strip()))
    return blocks


def split_results(results: Results) -> list[Results]:
    """Return stored results in parts that one report can hold; audits are without controls, which are other runs."""
    if "audit" in results:
        return [{"audit": [audit], "reasoning": []} for audit in results["audit"]]
    if "reasoning" in results:
        return [{"reasoning": group} for group in group_results(results["reasoning"])]
    return [results] if any(results.values()) else []


def to_markdown(table: Table) -> str:
    width = max(len(table.header), *(len(row) for row in table.rows))
    aligned = ["---" if i < table.num_text_columns else "--:" for i in range(width)]
    rows = [list(table.header), aligned, *(list(row) for row in table.rows)]
    padded = [[str(cell).strip().replace("|", "\\|") for cell in [*row, *[""] * (width - len(row))]] for row in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in padded]
    return "\n".join(([f"*{table.caption}*", ""] if table.caption else []) + lines)


def list_evaluation_commands(run: str | Path, recipe: Recipe, target: str, step: int | None = None) -> list[str]:
    """Return the commands that repeat a run's stored evaluations on `target`, by default of any step.

    Files of rows and documents are not in a run; only their names are given. For a run without results, the command
    evaluates it on what its recipe holds out.
    """
    folder = seed_runs(run)[0]
    commands: list[str] = []
    checkpoint = "" if step in (None, *RunDirectory(folder).step_numbers()[-1:]) else f" --checkpoint {step}"
    stored = (latest_evaluations(folder / EVALUATIONS_FOLDER, kind, step).values() for kind in get_args(EvalKind))
    for metadata in (evaluation.metadata for evaluations in stored for evaluation in evaluations):
        command = f"audit {target} --task" if metadata.kind == "audit" else f"evaluate {target} --tasks"
        task = shlex.quote(name_task(metadata, recipe))
        commands.append(f"laconic {command} {task}{checkpoint}{describe_options(metadata, recipe)}")
    held_out = [f"laconic evaluate {target}{task}{checkpoint}" for task in list_held_out(recipe)]
    return list(dict.fromkeys(commands)) or held_out


def list_held_out(recipe: Recipe) -> list[str]:
    """Return the flag that evaluates a run on what its recipe holds out; nothing if it holds out no rows."""
    data = recipe.data
    if data.source not in ("file", "catalog") or data.test is not None:
        return [""]
    return [] if data.valid is None else [" --tasks valid"]


def name_task(metadata: EvalMetadata, recipe: Recipe) -> str:
    """Return the name that `--tasks` takes for a stored evaluation."""
    task = metadata.task
    suffix = metadata.suffix or ".jsonl"
    match metadata.kind:
        case "compression":
            return EXCERPT if EXCERPT in task else task.partition("-")[0]
        case "context_qa":
            return f"{task}{suffix}"
        case "class_incremental" if task not in INTENT_DATASETS:
            return f"{FILE_PREFIX}{task}{suffix}"
        case "streams":
            return task.partition("-bin-")[0]
        case "reasoning" | "audit":
            return name_question_set(task, recipe, suffix)
        case _:
            return task


def name_question_set(title: str, recipe: Recipe, suffix: str) -> str:
    """Return the recipe's split, the data set or the file whose title is that of a stored evaluation."""
    if recipe.data.source == "digits":
        return title
    for split in RECIPE_SPLITS:
        path = getattr(recipe.data, split)
        if path is not None and set_title(path) == title:
            return split
    return title if find_dataset(title) is not None else f"{title}{suffix}"


def describe_options(metadata: EvalMetadata, recipe: Recipe) -> str:
    """Return the flags of condition and protocol, and of how much was evaluated; for documents of a file also which."""
    variant = metadata.variant
    flags: list[tuple[str, Any]] = []
    condition = variant.get("condition", "")
    if condition.endswith(" iterations"):
        flags.append(("jacobi-iterations", condition.partition(" ")[0]))
    elif condition and condition != COT_CONDITION:
        flags.append(("jacobi-tolerance", condition.rpartition(" ")[2]))
    if metadata.kind in ("reasoning", "audit"):
        name, _, tolerance = variant["protocol"].partition(", tolerance ")
        flags.append(("protocol", None if name == choose_default_protocol(recipe.data).name else name))
        flags.append(("tolerance", tolerance or None))
    flags += [(name, variant.get(name)) for name in ("keep", "tokens")]
    flags += [("limit", metadata.limit), ("shots", metadata.shots)]
    text = " --with-cot" if condition == COT_CONDITION else ""
    text += "".join(f" --{name} {value}" for name, value in flags if value is not None)
    return f"{text}  # with --documents or --questions: {variant['data']}" if "tokens" in variant else text
