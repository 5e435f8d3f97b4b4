"""Loading recipes: errors with their key, overrides, paths, defaults, and what a resumed run may change."""

import contextlib
import json
import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from laconic.config.data import DataConfig
from laconic.config.load import SHIPPED_RECIPES, closest_key, load_recipe, to_toml
from laconic.config.recipe import BUILT_IN_TOKENIZERS, ModelConfig, Recipe
from laconic.config.recipe_keys import explicit_values, find_field, iter_fields, known_keys, leaf_keys
from laconic.errors import InputError, UsageError
from laconic.experiment.from_recipe.build_model import load_model_tokenizer

KAVA = """method = "kava"
seed = 3
[model]
family = "llama"
tokenizer = "digits"
[latents]
num_latents = 4
jacobi_iterations = 3
[data]
source = "digits"
format = "digits"
[train]
steps = 10
learning_rate = 1e-3
"""


@pytest.fixture
def kava(tmp_path: Path) -> Path:
    path = tmp_path / "kava.toml"
    path.write_text(KAVA)
    return path


def load_errors(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).splitlines()


def edit(path: Path, *edits: tuple[str, str]) -> Path:
    text = KAVA
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def test_to_toml_loads_to_an_equal_recipe(kava: Path, tmp_path: Path) -> None:
    overrides = [
        "train.betas=[0.9, 0.95]",
        'data.eos_token="𝄞 \\" é"',
        "train.early_stop.at_least=0.5",
        "validation={}",
    ]
    recipe, notes = load_recipe(kava, overrides)
    assert notes == []
    (tmp_path / "again.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "again.toml")[0] == recipe
    assert tomllib.loads(to_toml(recipe))["distillation"]["hidden_weight"] == 1.0  # defaults are written out


@pytest.mark.parametrize("path", sorted(SHIPPED_RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_load_recipe_by_name(path: Path, tmp_path: Path) -> None:
    recipe, notes = load_recipe(path.stem)
    assert (notes, recipe.unused_tables) == ([], [])
    (tmp_path / "again.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "again.toml")[0] == recipe


@pytest.mark.parametrize(
    ("edits", "start", "words"),
    [
        ([("learning_rate =", "learning_rat =")], "train.learning_rat: no such key", "train.learning_rate?"),
        ([("[latents]", "[latent]")], "latent: no such key", "latents?"),
        ([("seed = 3", "jacobi_iteration = 3")], "jacobi_iteration: no such key", "latents.jacobi_iterations?"),
        ([("seed = 3", "gizmos = 3")], "gizmos: no such key", "--schema lists all keys"),
        ([("learning_rate =", "qqqqqq =")], "train.qqqqqq: no such key", "--schema lists all keys"),
        ([("learning_rate =", "lr =")], "train.lr: no such key", "did you mean train.learning_rate?"),
        ([("num_latents = 4", 'num_latents = "4"')], 'latents.num_latents: "4":', "valid integer"),
        ([("num_latents = 4", "num_latents = 4.0")], "latents.num_latents: 4.0:", "latent thoughts"),
        ([("= 1e-3", "= true")], "train.learning_rate: true:", "valid number"),
        ([("= 1e-3", "= nan")], "train.learning_rate: NaN:", "finite"),
        ([("= 1e-3", "= 2026-01-01")], 'train.learning_rate: "2026-01-01"', "valid number"),
        ([('"kava"', '"kawa"')], 'method: "kawa"', "did you mean kava?"),
        ([("jacobi_iterations = 3", "")], "latents.jacobi_iterations: missing", "jacobi"),
        ([("num_latents = 4", 'schedule = "sequential"')], "latents.jacobi_iterations: 3:", "sequential"),
        ([("steps = 10", "")], "train: ", "set exactly one"),
        ([('family = "llama"', "")], "model.name: missing", "model.name=stories260k or"),
        ([('tokenizer = "digits"', "")], "model.tokenizer: missing", "new decoder"),
        ([('family = "llama"', 'init_from_run = "a"')], 'model.tokenizer: "digits"', "its own"),
        ([("jacobi_iterations = 3", "jacobi_iterations = 0")], 'latents.projection: "pccot"', "unused"),
        ([('"kava"', '"cot"'), ("steps", 'trainable = "latents"\nsteps')], "train.trainable", "no latents"),
        ([("steps", "early_stop = { at_least = 1.0 }\nsteps")], "train.early_stop", "[validation]"),
    ],
)  # fmt: skip
def test_load_recipe_names_key_and_remedy(kava: Path, edits: list[tuple[str, str]], start: str, words: str) -> None:
    errors = load_errors(edit(kava, *edits))
    assert any(error.startswith(f"kava.toml: {start}") and words in error for error in errors), errors


@pytest.mark.parametrize(
    ("text", "words"), [(KAVA + "steps = 2\n", "overwrite"), (KAVA + "x =\n", "line 15"), (b"\xff\xfe", "not UTF-8")]
)
def test_load_recipe_refuses_text_that_is_not_toml(kava: Path, text: str | bytes, words: str) -> None:
    kava.write_bytes(text if isinstance(text, bytes) else text.encode())
    (error,) = load_errors(kava)
    assert error.startswith("kava.toml: not ")
    assert words in error


def test_load_recipe_reports_all_errors_and_no_missing_key_for_a_typo(kava: Path) -> None:
    edit(kava, ("= 1e-3", '= "x"\nmax_grad_norm = -1'), ("num_latents", "num_latens"), ("method", "metod"))
    errors = load_errors(kava, "train.batch_sizes=3", "seed=abc")
    assert {line.partition(": ")[0] for line in errors} == {"train.batch_sizes=3", "seed=abc", "kava.toml"}
    assert {line.split(": ")[1] for line in errors if line.startswith("kava")} == {
        "latents.num_latens", "metod", "train.learning_rate", "train.max_grad_norm"
    }  # fmt: skip


def test_find_recipe_file_suggests_names() -> None:
    with pytest.raises(InputError, match=r"^no recipe demo-kawa; did you mean demo-kava\?$"):
        load_recipe("demo-kawa")
    with pytest.raises(InputError, match=r"^no recipe a/b\.toml; give a path, or a name"):
        load_recipe("a/b.toml")


def test_find_recipe_file_suggests_the_recipe_of_a_run_and_the_file(kava: Path) -> None:
    run = kava.parent / "run"
    run.mkdir()
    (run / "recipe.toml").write_text("")
    for path, meant in ((run, run / "recipe.toml"), (kava.with_suffix(""), kava)):
        with pytest.raises(InputError, match=f"did you mean {re.escape(str(meant))}"):
            load_recipe(path)


def test_overrides_replace_values_and_the_last_one_is_used(kava: Path) -> None:
    overrides = ["--train.learning_rate=2", "train.learning-rate=5e-4", "latents.projection=none", "seed=9"]
    recipe, notes = load_recipe(kava, overrides)
    assert (recipe.train.learning_rate, recipe.seed) == (5e-4, 9)
    assert recipe.latents is not None
    assert recipe.latents.projection == "none"
    assert notes == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.learning_rat=1", "no such key; did you mean train.learning_rate?"),
        ("qqqqqqqq=1", "no such key; laconic train --schema"),
        ("grad_accum=1", "no such key; did you mean train.micro_batch_size?"),
        ("train.learning_rate=fast", '"fast": should be a valid number'),
        ("train.stateful=True", '"True": should be true or false'),
        ("train.learning_rate=-1", "-1: should be greater than 0"),
        ("train.learning_rate=1e39", "1e+39: should be less than or equal to 1e+38"),
        ("seed.x=1", "no such key"),
        ("train.learning_rate", "no value; write train.learning_rate=VALUE"),
        ("data.name=[gsm8k,aggregate]", 'not a TOML list; write lists as ["a", "b"] (in a shell, quote the'),
        ("train.betas=[0.9, 2.0]", "train.betas.1: 2.0: should be less than"),
        ("data.columns={questionx='x'}", "data.columns.questionx: \"questionx\": should be 'id', 'question'"),
        ("data.columns.questionx=x", "should be 'id', 'question'"),
    ],
)
def test_override_errors_begin_with_the_override(kava: Path, override: str, words: str) -> None:
    (error,) = load_errors(kava, override)
    assert error.startswith(override)
    assert words in error


def test_overrides_of_names_that_users_choose(kava: Path) -> None:
    """They keep their dashes, need no quotes if they hold text, and are added to those of the file."""
    edit(kava, ('source = "digits"\nformat = "digits"', 'path = "a.jsonl"\ncolumns = { answer = "target" }'))
    recipe, _ = load_recipe(kava, ["data.columns.question=prompt", "deviations.train.steps=fewer, for a test"])
    assert recipe.data.columns == {"answer": "target", "question": "prompt"}
    assert recipe.deviations == {"train.steps": "fewer, for a test"}
    overrides = ["method=pkg.mod:Mine", "method-options.a-b=1", "method_options.c.d=[1]", "method_options.e=x"]
    overrides.append("method_options.reduction=mean")  # which built-in methods once had, and had as their default
    options = {"a-b": 1, "c": {"d": [1]}, "e": "x", "reduction": "mean"}
    assert load_recipe(kava, overrides)[0].method_options == options


@pytest.mark.parametrize("overrides", [{"train.steps": 1}, "train.steps=1"])
def test_overrides_are_a_list(kava: Path, overrides: Any) -> None:
    with pytest.raises(UsageError, match=r'expected a list such as \["train\.steps=1"\], given (dict|str)'):
        load_recipe(kava, overrides)


def test_override_into_a_key_that_is_no_table(kava: Path) -> None:
    kava.write_text(KAVA.replace("seed = 3", "lora = 3"))
    assert "lora.rank=4: lora is not a table in kava.toml" in load_errors(kava, "lora.rank=4")


def test_override_of_a_text_key_needs_no_quotes(kava: Path) -> None:
    text = ["model.family=qwen2", "model.tokenizer=1234", "latents.control-init=copy:<<"]
    recipe, _ = load_recipe(kava, text)
    assert (recipe.model.family, recipe.model.tokenizer) == ("qwen2", "1234")
    assert recipe.latents is not None
    assert recipe.latents.control_init == "copy:<<"


@pytest.mark.parametrize("key", ["model.name=org/model", "model.init_from_run=runs/a"])
def test_override_of_the_model_replaces_that_of_the_file(kava: Path, key: str) -> None:
    recipe, notes = load_recipe(kava, [key])
    assert (recipe.model.family, recipe.model.tokenizer) == (None, None)
    assert notes == [f"{key.partition('=')[0]} replaces model.family"]
    other, _ = load_recipe(kava, ["model.name=org/model", "model.tokenizer=digits"])
    assert other.model.tokenizer == "digits"
    assert "exactly one of name" in load_errors(kava, key, "model.family=llama")[0]


def test_an_override_without_a_value_removes_the_key(kava: Path) -> None:
    """Nothing else can say that a key of the file is not wanted, such as one that another schedule does not have."""
    assert load_recipe(kava)[0].train.steps is not None
    recipe, notes = load_recipe(kava, ["train.steps=", "train.epochs=2", "train.learning_rate="])
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2.0)
    assert "train.steps is removed from the recipe" in notes
    assert load_recipe(kava, ["train.epochs=2"])[0].train == recipe.train, "steps and epochs replace one another"
    assert load_errors(kava, "train.steps=") == ["kava.toml: train: set exactly one of steps and epochs, not neither"]


def test_paths_are_relative_to_the_file_and_those_of_overrides_to_the_working_directory(
    kava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    kava.write_text(KAVA.replace('family = "llama"', 'init_from_run = "runs/a"').replace('tokenizer = "digits"', ""))
    assert load_recipe(kava)[0].model.init_from_run == str(tmp_path / "runs/a")
    assert load_recipe(kava, ["model.init_from_run=b"])[0].model.init_from_run == str(tmp_path / "here/b")
    assert load_recipe("demo-kava")[0].model.init_from_run == str(tmp_path / "here/runs/demo-teacher")
    kava.write_text(KAVA.replace('family = "llama"', 'name = "here"').replace('tokenizer = "digits"', ""))
    assert load_recipe(kava)[0].model.name == str(tmp_path / "here")
    assert load_recipe(kava, ["model.name=org/model"])[0].model.name == "org/model"


def test_paths_may_begin_with_the_home_directory(kava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "model").mkdir()
    edit(kava, ('source = "digits"\nformat = "digits"', 'path = "~/a.jsonl"'))
    recipe, _ = load_recipe(kava, ["data.valid=~/b.jsonl", "model.name=~/model"])
    assert (recipe.data.path, recipe.data.valid) == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert recipe.model.name == str(tmp_path / "model")
    assert load_recipe(kava, ["model.init_from_run=~/r"])[0].model.init_from_run == str(tmp_path / "r")


@pytest.mark.parametrize("name", BUILT_IN_TOKENIZERS)
def test_built_in_tokenizer_names_are_not_folders(
    name: str, kava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    kava.write_text(KAVA.replace('tokenizer = "digits"', f'tokenizer = "{name}"'))
    assert load_recipe(kava)[0].model.tokenizer == name
    assert load_recipe(kava, [f"model.tokenizer={name}"])[0].model.tokenizer == name
    assert load_model_tokenizer(load_recipe(kava)[0].model).vocab_size > 0
    assert load_recipe(kava, [f"model.tokenizer=./{name}"])[0].model.tokenizer == str(tmp_path / name)


def test_unused_tables_are_kept_when_only_the_method_changes(kava: Path) -> None:
    kava.write_text(KAVA + "[kv_distillation]\nweight = 2.0\n")
    recipe, _ = load_recipe(kava, ["method=pccot"])
    assert recipe.unused_tables == ["kv_distillation"]
    assert recipe.kv_selection is None


def test_chain_steps_default_to_all_for_methods_that_write_the_chain(kava: Path) -> None:
    for method, steps in (("kava", "drop_last"), ("cot", "all"), ("icot", "all")):
        recipe, notes = load_recipe(kava, [f"method={method}"])
        assert (recipe.data.chain_steps, notes) == (steps, [])
    _, notes = load_recipe(kava, ["method=cot", "data.chain_steps=drop_last"])
    assert "never learns the last step" in notes[0]


def test_loss_weights_must_not_all_be_zero(kava: Path) -> None:
    zeros = [f"distillation.{key}=0" for key in ("student_ce_weight", "hidden_weight")]
    for overrides in (["method=pccot"], ["kv_distillation.weight=0"]):
        (error,) = load_errors(kava, *overrides, *zeros)
        assert error.startswith("distillation.student_ce_weight=0: every loss")
    assert load_recipe(kava, zeros)[0].kv_distillation
    assert load_recipe(kava, ["method=cot", *zeros])[0].unused_tables == ["distillation", "latents"]


def test_iterations_are_only_needed_by_methods_with_jacobi_latents(kava: Path) -> None:
    edit(kava, ("jacobi_iterations = 3\n", ""))
    assert "latents.jacobi_iterations: missing; the jacobi schedule needs a number" in load_errors(kava)[0]
    for method in ("codi", "coconut"):
        latents = load_recipe(kava, [f"method={method}"])[0].latents
        assert latents
        assert latents.schedule == "sequential"
    assert load_recipe(kava, ["method=nocot"])[0].unused_tables == ["latents"]


def test_a_validation_that_cannot_happen_is_said(kava: Path) -> None:
    assert load_errors(kava, "train.validate_every=5") == [
        "train.validate_every=5: nothing is validated; add a [validation] table"
    ]
    edit(
        kava,
        ('source = "digits"\nformat = "digits"', 'path = "a.jsonl"\nvalid = "b.jsonl"'),
        ('tokenizer = "digits"', f'tokenizer = "{kava.parent}"'),
    )
    assert load_recipe(kava)[1] == [
        "data.valid: only checked for questions that are also in data.path; a table [validation] measures accuracy"
    ]
    assert load_recipe(kava, ["validation.max_rows=5"])[1] == []


def test_autocompressor_needs_two_segments_in_a_row_and_hope_does_not() -> None:
    keys = ["data.text.row_tokens=64", "data.text.segment_tokens=64", "data.text.segment_lengths=fixed"]
    assert load_recipe("hope-tiny-books", keys)[0].data.text.row_tokens == 64
    with pytest.raises(UsageError, match="never reads its summary"):
        load_recipe("ac-llama-2-7b-6k", ["data.text.row_tokens=1536"])


def test_explicit_values_leave_out_what_cannot_change_the_result(kava: Path) -> None:
    recipe, _ = load_recipe(kava)
    free = ["train.steps=20", "train.keep_best=3", "train.log_every=7", "paper_table=ours"]
    assert explicit_values(load_recipe(kava, free)[0]) == explicit_values(recipe)
    assert explicit_values(load_recipe(kava, ["train.learning_rate=2e-3"])[0]) != explicit_values(recipe)


def test_every_key_has_a_description() -> None:
    assert [key for key in known_keys() if not (info := find_field(key)) or not info.description] == []
    json.dumps(Recipe.model_json_schema())


def test_optional_keys_default_to_none() -> None:
    """TOML cannot write None, so another default would come back when a resolved recipe is loaded."""
    optional = {key: info for key, info in iter_fields() if type(None) in get_args(info.annotation)}
    assert "icot.remove_all_after" in optional
    assert {key: info.default for key, info in optional.items() if info.default is not None} == {}


def make_typo(key: str, draws: random.Random) -> str:
    """Return the key with one edit in its last part."""
    table, dot, part = key.rpartition(".")
    i = draws.randrange(len(part))
    letter = draws.choice("abcdefghijklmnopqrstuvwxyz_")
    edits = [
        part[:i] + letter + part[i:],
        part[:i] + part[i + 1 :],
        part[:i] + letter + part[i + 1 :],
        part[:i] + part[i + 1 : i + 2] + part[i : i + 1] + part[i + 2 :],
    ]
    return f"{table}{dot}{draws.choice(edits)}"


def test_typos_are_refused_and_the_intended_key_is_suggested(kava: Path) -> None:
    draws, known, suggested, tried = random.Random(12), leaf_keys(), 0, 0
    while tried < 200:
        key = draws.choice(known)
        typo = make_typo(key, draws)
        if typo in known_keys() or len(key.rpartition(".")[2]) < 4:
            continue
        tried += 1
        error = load_errors(kava, f"{typo}=1")[0]
        assert "no such key" in error
        suggested += f"did you mean {key}?" in error
    assert suggested >= 180, suggested


@pytest.mark.parametrize(
    ("key", "close"),
    [
        ("batch_size", "train.batch_size"),
        ("lora.rnk", "lora.rank"),
        ("lora.link", None),
        ("train.max_steps", "train.steps"),
        ("model.hidden", "model.hidden_size"),
        ("latent.num_latents", "latents.num_latents"),
        ("data.dataset", None),
    ],
)
def test_closest_key_stays_within_the_table_or_the_name(key: str, close: str | None) -> None:
    assert closest_key(key, known_keys()) == close


def test_load_recipe_imports_no_torch(kava: Path) -> None:
    kava.write_text(KAVA.replace("learning_rate =", "learning_rat ="))
    program = (
        "import sys\n"
        "from laconic.errors import UsageError\nfrom laconic.config.load import load_recipe\n"
        f"try: load_recipe({str(kava)!r})\nexcept UsageError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, last = done.stdout.splitlines()
    assert first.endswith("did you mean train.learning_rate?")
    assert last == "False"


def test_load_recipe_of_any_text_raises_nothing_but_usage_error(kava: Path) -> None:
    draws = random.Random(5)
    pieces = [*KAVA.splitlines(keepends=True), "[", "]]", "=", '"""', "a.b.c = {", "\x00", "é = 1\n", "[[x]]\n", "'"]
    for _ in range(500):
        kava.write_text("".join(draws.choice(pieces) for _ in range(draws.randrange(20))), encoding="utf-8")
        with contextlib.suppress(UsageError):
            load_recipe(kava)


def test_to_toml_leaves_out_sizes_of_a_pretrained_model(kava: Path) -> None:
    recipe, _ = load_recipe(kava, ["model.name=some/model", "model.tokenizer=some/model"])
    text = to_toml(recipe)
    assert "hidden_size" not in text
    assert "\ninit =" not in text
    kava.write_text(text)
    assert load_recipe(kava)[0] == recipe
    sized, _ = load_recipe(kava, ["model.hidden_size=128"])  # as a recipe that sets it in vain
    kava.write_text(to_toml(sized))
    assert load_recipe(kava)[0] == sized


def test_recipe_takes_paths_in_python(tmp_path: Path) -> None:
    data = DataConfig(path=tmp_path / "train.jsonl", valid=tmp_path / "valid.jsonl")  # type: ignore[arg-type]
    assert data.path == str(tmp_path / "train.jsonl")
    assert ModelConfig(name=tmp_path).name == str(tmp_path)  # type: ignore[arg-type]


def test_load_recipe_keeps_a_name_that_is_too_long_for_a_path(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(KAVA.replace('tokenizer = "digits"', f'tokenizer = "{"x" * 5000}"'))
    recipe, _ = load_recipe(tmp_path / "a.toml")
    assert recipe.model.tokenizer == "x" * 5000


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["data.valid=b.jsonl", "data.max_train_rows=5"], "data.valid, data.max_train_rows: not used with data.source "
         '"digits", which generates its rows'),
        (["model.name=a/b", "model.hidden_size=64", "model.init=normal"],
         "model.hidden_size, model.init: not used with model.name; a trained model has its own sizes and weights"),
        (["model.init_from_run=a", "model.hidden_size=64"], "model.hidden_size: not used with model.init_from_run"),
    ],
)  # fmt: skip
def test_load_notes_keys_that_do_nothing(kava: Path, overrides: list[str], note: str) -> None:
    notes = load_recipe(kava, overrides)[1]
    assert [line for line in notes if line.startswith(note)], notes
    assert [line for line in notes if "replaces" not in line and not line.startswith(note)] == []


@pytest.mark.parametrize("answer_type", ["number", "text"])
def test_load_notes_chat_replies_at_which_nothing_is_distilled(kava: Path, answer_type: str) -> None:
    edit(kava, ('source = "digits"\nformat = "digits"', 'path = "a.jsonl"\nformat = "chat"'))
    notes = load_recipe(kava, [f"data.answer_type={answer_type}"])[1]
    assert any("distillation.hidden_weight: not used" in note for note in notes) == (answer_type == "text")


def test_a_text_may_begin_with_a_bracket_where_no_list_is_expected() -> None:
    assert load_recipe("demo-kava", ["data.answer_prompt=[Answer]"])[0].data.answer_prompt == "[Answer]"
