"""Recipes: what is refused, with which words, and what a recipe becomes."""

import contextlib
import json
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from laconic.config.load import SHIPPED_RECIPES, load_recipe, to_toml
from laconic.config.recipe import BUILT_IN_TOKENIZERS, Recipe, explicit_values, find_field, iter_fields, known_keys
from laconic.errors import InputError, UsageError
from laconic.experiment.build_model import load_model_tokenizer

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


def faults(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load_recipe(path, overrides, ["resume", "out"])
    return str(caught.value).splitlines()


def edited(path: Path, *edits: tuple[str, str]) -> Path:
    text = KAVA
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def test_a_recipe_written_and_read_again_is_equal(kava: Path, tmp_path: Path) -> None:
    recipe, notes = load_recipe(
        kava, ["train.betas=[0.9, 0.95]", 'data.eos_token="𝄞 \\" é"', "train.early_stop.at_least=0.5", "validation={}"]
    )
    assert notes == []
    (tmp_path / "again.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "again.toml")[0] == recipe
    assert tomllib.loads(to_toml(recipe))["distilling"]["alpha1"] == 1.0  # defaults are written out


@pytest.mark.parametrize("path", sorted(SHIPPED_RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_what_comes_with_laconic_is_read_by_its_name(path: Path, tmp_path: Path) -> None:
    recipe, notes = load_recipe(path.stem)
    assert (notes, recipe.unused_tables) == ([], [])
    (tmp_path / "again.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "again.toml")[0] == recipe


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([("lr =", "lrr =")], "kava.toml:14: train.lrr: no such key; did you mean train.lr?"),
        ([("seed = 3", "sed = 3")], "kava.toml:2: sed: no such key; did you mean seed?"),
        ([("[latents]", "[thinkimg]")], "kava.toml:6: thinkimg: no such key; did you mean thinking?"),
        ([("seed = 3", "rounds = 3")], "kava.toml:2: rounds: no such key; did you mean thinking.rounds?"),
        ([("seed = 3", "gizmos = 3")], "kava.toml:2: gizmos: no such key; a recipe has data, differs, distilling,"),
        ([("lr =", "qqqqqq =")], "kava.toml:14: train.qqqqqq: no such key; [train] has batch, best,"),
        ([("lr = 1e-3", 'lr = "1e-3"')], 'kava.toml:14: train.learning_rate: "1e-3" is text; drop the quotes'),
        ([("count = 4", 'count = "4"')], 'kava.toml:7: latents.num_latents: "4" is text; drop the quotes'),
        ([("count = 4", "count = 4.0")], "kava.toml:7: latents.num_latents: 4.0: should be a valid integer; it is M,"),
        ([("lr = 1e-3", "lr = true")], "kava.toml:14: train.learning_rate: true: should be a valid number"),
        ([("lr = 1e-3", "lr = nan")], "kava.toml:14: train.learning_rate: NaN: should be a finite number"),
        ([("lr = 1e-3", "lr = -1")], "kava.toml:14: train.learning_rate: -1: should be greater than 0"),
        ([("lr = 1e-3", "lr = 2026-01-01")], "kava.toml:14: train.learning_rate: a date; no key takes one"),
        ([('"kava"', '"kawa"')], "kava.toml:1: method: \"kawa\": should be 'cot', 'nocot',"),
        ([("lr = 1e-3", "lr = 1\nlr = 2")], "kava.toml:15: train.learning_rate: stands there twice, first in line 14"),
        ([("[data]", "[train]")], "kava.toml:12: train: stands there twice, first in line 9"),
        ([("lr = 1e-3", "lr = ")], "kava.toml:14: not TOML: Invalid value"),
        ([("rounds = 3", "")], "kava.toml:6: latents.jacobi_iterations: absent; mode jacobi needs a number of rounds"),
        ([("count = 4", 'mode = "sequential"')], "latents.jacobi_iterations: 3: sequential thoughts have no rounds; leave"),
        ([("steps = 10", "")], "kava.toml:12: train.steps: None, epochs None: give one of them"),
        ([('family = "llama"', "")], "kava.toml:3: model: given: none of them; one of name, start, family"),
        ([('tokenizer = "digits"', "")], "kava.toml:3: model.tokenizer: absent; a new decoder needs one"),
        ([('family = "llama"', 'start = "a"')], 'kava.toml:5: model.tokenizer: "digits": a run has its own; leave'),
        ([("rounds = 3", "rounds = 0")], 'kava.toml:6: latents.projection: "pccot": with rounds 0 nothing goes'),
        ([('"kava"', '"cot"'), ("lr =", 'what = "thoughts"\nlr =')], "has none, so nothing would be trained"),
        ([("lr =", "stop_when = { at_least = 1.0 }\nlr =")], "train.early_stop: its number comes from [validation]"),
    ],
)  # fmt: skip
def test_a_fault_has_its_line_and_what_to_do(kava: Path, edits: list[tuple[str, str]], said: str) -> None:
    assert any(said in fault for fault in faults(edited(kava, *edits))), faults(kava)


def test_all_faults_come_in_one_pass_and_a_mistyped_key_is_not_missing_too(kava: Path) -> None:
    edited(kava, ("lr = 1e-3", 'lr = "x"\nclip = -1'), ("count", "cuont"), ("method", "mehtodq"))
    found = faults(kava, "train.batchs=3", "seed=abc")
    assert [line.split(": ")[0] for line in found] == [
        "train.batchs=3", "seed=abc", "kava.toml:7", "kava.toml:1", "kava.toml:14", "kava.toml:15"
    ]  # fmt: skip


def test_no_text_at_all_and_no_such_file(kava: Path) -> None:
    kava.write_bytes(b"\xff\xfe")
    assert faults(kava) == ["kava.toml: not UTF-8 at byte 0; save it as UTF-8"]
    with pytest.raises(InputError, match=r"^no recipe demo-kawa; did you mean demo-kava\?$"):
        load_recipe("demo-kawa")
    with pytest.raises(
        InputError,
        match=r"^no recipe a/b\.toml; a path, or one of ac-…, cms-…, coconut-…, codi-…, cot-…, demo-…, hope-…,",
    ):
        load_recipe("a/b.toml")


def test_overrides_win_the_last_of_them_and_say_so(kava: Path) -> None:
    recipe, notes = load_recipe(kava, ["--train.lr=2", "train.learning_rate=5e-4", "latents.projection=none", "seed=9"])
    assert (recipe.train.learning_rate, recipe.seed) == (5e-4, 9)
    assert recipe.latents is not None
    assert recipe.latents.projection == "none"
    assert notes == ["train.learning_rate is given twice; the last holds: 5e-4"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lrr=1", "train.lrr=1: no such key; did you mean train.lr?"),
        ("resme=auto", "resme=auto: no such key; did you mean resume?"),
        ("qqqqqqqq=1", "qqqqqqqq=1: no such key; laconic train --schema lists all"),
        (
            "train.learning_rate=fast",
            "train.learning_rate=fast: no value of TOML; a list is [1, 2], a switch true or false",
        ),
        ("train.learning_rate=-1", "train.learning_rate=-1: -1: should be greater than 0"),
        ("seed.x=1", "seed.x=1: no such key"),
        ("train.learning_rate", "train.learning_rate: no value; write train.learning_rate=VALUE"),
    ],
)
def test_an_override_that_cannot_be_meant(kava: Path, override: str, said: str) -> None:
    assert said in faults(kava, override)[0]


def test_an_override_into_a_table_that_is_none(kava: Path) -> None:
    kava.write_text(KAVA.replace("seed = 3", "lora = 3"))
    assert "lora.rank=4: lora is no table in kava.toml" in faults(kava, "lora.rank=4")


def test_a_text_may_be_a_word_or_digits_only(kava: Path) -> None:
    text = ["model.family=qwen2", "model.tokenizer=1234", "thinking.control-init=copy:<<"]
    recipe, _ = load_recipe(kava, text)
    assert (recipe.model.family, recipe.model.tokenizer) == ("qwen2", "1234")
    assert recipe.latents is not None
    assert recipe.latents.control_init == "copy:<<"


def test_the_first_word_of_a_name_lists_what_goes_on_with_it() -> None:
    with pytest.raises(InputError, match=r"^no recipe kava; a path, or one of kava-llama1b-aug, kava-llama1b-aug-nl, "):
        load_recipe("kava")


@pytest.mark.parametrize("key", ["model.name=org/model", "model.init_from_run=runs/a"])
def test_an_override_says_in_the_file_s_place_where_the_decoder_comes_from(kava: Path, key: str) -> None:
    recipe, notes = load_recipe(kava, [key])
    assert (recipe.model.family, recipe.model.tokenizer) == (None, None)
    assert notes == [f"{key.partition('=')[0]} takes the place of model.family"]
    other, _ = load_recipe(kava, ["model.name=org/model", "model.tokenizer=digits"])
    assert other.model.tokenizer == "digits"
    assert "one of name, start, family" in faults(kava, key, "model.family=llama")[0]


def test_paths_are_relative_to_the_file_or_to_the_working_folder(
    kava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    kava.write_text(KAVA.replace('family = "llama"', 'start = "runs/a"').replace('tokenizer = "digits"', ""))
    assert load_recipe(kava)[0].model.init_from_run == str(tmp_path / "runs/a")
    assert load_recipe(kava, ["model.init_from_run=b"])[0].model.init_from_run == str(tmp_path / "here/b")
    assert load_recipe("demo-kava")[0].model.init_from_run == str(tmp_path / "here/runs/demo-cot")
    kava.write_text(KAVA.replace('family = "llama"', 'name = "here"').replace('tokenizer = "digits"', ""))
    assert load_recipe(kava)[0].model.name == str(tmp_path / "here")
    assert load_recipe(kava, ["model.name=org/model"])[0].model.name == "org/model"


@pytest.mark.parametrize("name", BUILT_IN_TOKENIZERS)
def test_a_tokenizer_that_comes_with_laconic_is_no_folder(
    name: str, kava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    kava.write_text(KAVA.replace('tokenizer = "digits"', f'tokenizer = "{name}"'))
    assert load_recipe(kava)[0].model.tokenizer == name
    assert load_recipe(kava, [f"model.tokenizer={name}"])[0].model.tokenizer == name
    assert load_model_tokenizer(load_recipe(kava)[0].model).vocab_size > 0
    assert load_recipe(kava, [f"model.tokenizer=./{name}"])[0].model.tokenizer == str(tmp_path / name)


def test_one_word_changes_the_method_and_what_it_does_not_read_is_told(kava: Path) -> None:
    kava.write_text(KAVA + "[kv_distillation]\nweight = 2.0\n")
    recipe, _ = load_recipe(kava, ["method=pccot"])
    assert recipe.unused_tables == ["matching"]
    assert recipe.kv_selection is None


def test_a_chain_that_is_to_be_written_keeps_its_last_step(kava: Path) -> None:
    for method, chain in (("kava", "drop_last"), ("cot", "all"), ("icot", "all")):
        recipe, notes = load_recipe(kava, [f"method={method}"])
        assert (recipe.data.chain_steps, notes) == (chain, [])
    _, notes = load_recipe(kava, ["method=cot", "data.chain_steps=drop_last"])
    assert notes == ['data.chain_steps "drop_last": method cot is not taught the last step; "all" is usual']


def test_weights_that_are_all_0(kava: Path) -> None:
    zeros = [f"distilling.{key}=0" for key in ("student", "alpha1")]
    said = "distillation.student_ce_weight=0: 0, as every other weight that the thoughts learn by; give one of them"
    assert faults(kava, "method=pccot", *zeros) == faults(kava, "kv_distillation.weight=0", *zeros) == [said]
    assert load_recipe(kava, zeros)[0].kv_distillation
    assert load_recipe(kava, ["method=cot", *zeros])[0].unused_tables == ["distilling", "thinking"]


def test_tables_that_a_method_reads_are_there() -> None:
    recipe, _ = load_recipe("demo-kava")
    with pytest.raises(ValueError, match="keeping: absent; method kava reads this table"):
        Recipe(**{**dict(recipe), "kv_selection": None})


def test_what_cannot_change_the_result_is_not_said(kava: Path) -> None:
    recipe, _ = load_recipe(kava)
    free = ["train.steps=20", "train.keep_best=3", "train.log_every=7", "source=ours"]
    assert explicit_values(load_recipe(kava, free)[0]) == explicit_values(recipe)
    assert explicit_values(load_recipe(kava, ["train.learning_rate=2e-3"])[0]) != explicit_values(recipe)


def test_every_field_is_described() -> None:
    assert [key for key in known_keys() if not (info := find_field(key)) or not info.description] == []
    json.dumps(Recipe.model_json_schema())


def test_what_may_be_absent_is_so_by_default() -> None:
    """TOML has no word for it: another default would come back when a resolved recipe is read."""
    empty = {key: info for key, info in iter_fields() if type(None) in get_args(info.annotation)}
    assert "icot.remove_all_after" in empty
    assert {key: info.default for key, info in empty.items() if info.default is not None} == {}


def typos(key: str, draws: random.Random) -> str:
    """The key with one or two edits in its last part."""
    table, dot, part = key.rpartition(".")
    for _ in range(draws.choice([1, 1, 2])):
        i = draws.randrange(len(part))
        letter = draws.choice("abcdefghijklmnopqrstuvwxyz_")
        part = draws.choice(
            [
                part[:i] + letter + part[i:],
                part[:i] + part[i + 1 :],
                part[:i] + letter + part[i + 1 :],
                part[:i] + part[i + 1 : i + 2] + part[i : i + 1] + part[i + 2 :],
            ]
        )
    return f"{table}{dot}{part}"


def test_two_hundred_typos_are_refused_and_the_key_meant_is_named(kava: Path) -> None:
    draws, known, right, asked = random.Random(12), known_keys(), 0, 0
    while asked < 200:
        key = draws.choice(known)
        wrong = typos(key, draws)
        if wrong in known or not wrong.rpartition(".")[2] or wrong.endswith("."):
            continue
        asked += 1
        (found, *_) = faults(kava, f"{wrong}=1")
        assert "no such key" in found
        right += f"did you mean {key}?" in found
    assert right >= 190, right


def test_a_recipe_is_refused_in_half_a_second_without_torch(kava: Path) -> None:
    kava.write_text(KAVA.replace("lr =", "lrr ="))
    program = (
        "import sys, time; start = time.process_time()\n"
        "from laconic.errors import Usage\nfrom laconic.config.load import read\n"
        f"try: read({str(kava)!r})\nexcept Usage as error: print(error)\n"
        "print(time.process_time() - start, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, last = done.stdout.splitlines()
    assert first.endswith("did you mean train.lr?")
    assert float(last.split()[0]) <= 0.5
    assert last.split()[1] == "False"


def test_any_text_is_a_recipe_or_a_typed_error(kava: Path) -> None:
    draws = random.Random(5)
    pieces = [
        *KAVA.splitlines(keepends=True),
        "[",
        "]]",
        "=",
        '"""',
        "a.b.c = {",
        "\x00",
        "é = 1\n",
        "[[x]]\n",
        "'",
        "\\u",
    ]
    for _ in range(500):
        kava.write_text("".join(draws.choice(pieces) for _ in range(draws.randrange(20))), encoding="utf-8")
        with contextlib.suppress(UsageError):
            load_recipe(kava)
