"""`laconic inspect` as a user gives it: one question, a set, runs side by side, and what is refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laconic.cli import inspect
from laconic.cli import main as cli
from laconic.errors import DiskError, UsageError
from laconic.evaluation.inspection import dataset as inspection_dataset
from laconic.evaluation.reasoning import question_sets
from laconic.evaluation.reasoning import run as reasoning_run
from tests.conftest import TINY_RECIPE, RunCli
from tests.evaluation.pages import ParsedPage as Page
from tests.evaluation.pages import find_requests as outside

MARKS = 'valid_rows = 20, test_rows = 40, style = "marks"'
RECIPE = TINY_RECIPE.replace("valid_rows = 20", MARKS).replace("[validation]\nmax_rows = 4\nmax_tokens = 6\n", "")
QUESTION = "3 + 4 * 2 ="


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one step: KaVa, one without distillation, one that writes its chain, Coconut with latents and before."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.toml").write_text(RECIPE)
    (folder / "in-turn.toml").write_text(RECIPE.replace("rounds = 1\n", 'mode = "sequential"\nproject = "none"\n'))
    staged = ("method=coconut", "coconut.max_stage=1", "coconut.latents_per_step=2")
    for recipe, name, keys in (
        ("tiny", "kava", ()),
        ("tiny", "nodistil", ("distillation.hidden_weight=0.0", "kv_distillation.weight=0.0")),
        ("tiny", "chain", ("method=cot",)),
        ("in-turn", "coconut", (*staged, "coconut.first_stage=1")),
        ("in-turn", "early", staged),
    ):
        command = ["laconic", "train", str(folder / f"{recipe}.toml"), "--out", str(folder / name)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [*command, "train.steps=1", "train.batch_size=2", *keys])
            with pytest.raises(SystemExit) as end:
                cli.main()
        assert not end.value.code
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, runs: Path, tmp_path: Path) -> RunCli:
    """Run `laconic inspect` in an empty directory; names of runs become paths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inspection_dataset, "MIN_REFERENCE_QUESTIONS", 16)
    # untrained models do not end their answers
    monkeypatch.setattr(reasoning_run, "token_budget", lambda run, questions, with_cot: 12 if with_cot else 2)
    return lambda *args: run_cli("inspect", *(runs / str(arg) if (runs / str(arg)).is_dir() else arg for arg in args))


def sound(html: str) -> Page:
    """A page that asks for nothing, is closed well, follows light and dark and a phone, and says what it draws."""
    page = Page(html)
    assert not outside(html)
    assert not page.problems
    assert not page.open
    assert "prefers-color-scheme: dark" in html
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert drawings
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawings)
    regions = [attributes for _, attributes in page.tags if attributes.get("class") == "scroll"]
    assert all(attributes.get("tabindex") == "0" and attributes.get("aria-label") for attributes in regions)
    return page


def test_one_question_beside_a_run_without_distillation(run: RunCli, tmp_path: Path) -> None:
    code, out, err = run("kava", QUESTION, "--baseline", "nodistil")
    assert (code, err) == (0, "wrote inspect.html\n")
    for text in (QUESTION, "chain, as the run's own teacher writes it", "the teacher writes:", "kava (kava) answers",
                 "nodistil (kava) answers", "placeholders", "round 1", "zero in vectors:", "swap in"):  # fmt: skip
        assert text in out, text
    page = sound((tmp_path / "inspect.html").read_text(encoding="utf-8"))
    text = " ".join(page.text.split())
    for said in ("Inside the thoughts of kava", "as the run's own teacher writes it", "The answer when thoughts are",
                 "one slot alone", "noise Gaussian vectors of equal norm", "What this does not show"):  # fmt: skip
        assert said in text, said


def test_a_chain_of_the_users_own_as_json(run: RunCli, tmp_path: Path) -> None:
    steps = ["< < 7 > >", "< < 4 > >"]
    asked = (
        "kava",
        QUESTION,
        "--answer",
        "4",
        "--format",
        "json",
        "--interventions",
        "zero,swap",
        "--latents",
        "2",
        "--chain",
    )
    code, out, err = run(*asked, *steps)
    assert (code, err) == (0, "")
    assert not (tmp_path / "inspect.html").exists()
    found = json.loads(out)
    assert (found["gold"], found["chain_source"], found["teacher"]) == ("4", "as given", None)
    assert found["chain"] == list("<<7>><<4>>")
    (made,) = found["runs"]
    assert [(each["edit"], each["where"], each["slots"]) for each in made["edits"]] == [
        ("zero", "vectors", [2]), ("zero", "cache", [2]), ("swap", "vectors", [2]), ("swap", "cache", [2])
    ]  # fmt: skip
    assert list(made["kept"]) == ["rkv", "cosine", "attention", "crop", "uniform", "random"]
    assert all(sum(head) == 2 for layers in made["kept"].values() for layer in layers for head in layer)
    assert len(made["maps"]) == 6
    assert [len(row) for row in made["scores"]["I"]] == [10, 10]
    assert made["token_classes"] == ["bracket", "bracket", "result", "bracket", "bracket"] * 2
    assert all(abs(sum(row) - 1) < 1e-5 for name in "IR" for row in made["scores"][name])


def test_a_set_beside_another_run(run: RunCli, tmp_path: Path) -> None:
    asked = (
        "kava",
        "--task",
        "test",
        "--limit",
        6,
        "--batch-size",
        4,
        "--jacobi-iterations",
        "0,1",
        "--interventions",
        "zero,mean,swap",
    )
    code, out, _ = run(*asked, "--baseline", "nodistil", "--out", "set.html", "--format", "json")
    assert code == 0
    found = json.loads(out)
    assert (found["set"], found["questions"], found["protocol"]) == ("test", 6, "last digit")
    first, second = found["runs"]
    assert len(first["edits"]) == 6
    assert first["edits"][0]["less_first"] is None
    for mine, theirs in zip(first["edits"], second["edits"], strict=True):
        apart = theirs["change"]["mean"] - mine["change"]["mean"]
        assert theirs["less_first"]["mean"] == pytest.approx(apart)
        assert mine["change"]["mean"] == pytest.approx(mine["accuracy"]["mean"] - first["accuracy"]["mean"])
    assert first["rounds"]["1"] == first["accuracy"]  # as trained
    assert first["words"]["all"]["questions"] == 6
    page = sound((tmp_path / "set.html").read_text(encoding="utf-8"))
    text = " ".join(page.text.split())
    for said in ("6 questions of test", "Rounds at test time", "as trained", "Words in the thoughts", "chance"):
        assert said in text, said
    out = run(*asked, "--intervene-on", "cache")[1]
    assert out.startswith("6 questions of test, judged by last digit; majority floor")
    for said in ("kava (kava): ", "zero in cache", "right by rounds: 0: ", "of slots name a word of the chain"):
        assert said in out, said


def test_without_other_questions_mean_and_swap_are_left_out(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection_dataset, "MIN_REFERENCE_QUESTIONS", 256)
    code, out, _ = run("kava", QUESTION)
    assert code == 0
    assert "mean is left out: the recipe has 20 validation rows, it asks for 256." in out
    assert "mean in vectors" not in out
    monkeypatch.setattr(question_sets, "RECIPE_SPLITS", ())  # as where the recipe's rows are gone
    code, out, _ = run("kava", QUESTION, "--out", "a.html")
    assert code == 0
    assert "mean and swap are left out, they need other questions of the recipe" in out


def test_a_method_without_a_teacher(run: RunCli, tmp_path: Path) -> None:
    code, out, _ = run("coconut", QUESTION, "--chain", "< < 7 > >")
    assert code == 0
    for said in ("chain, as given: <<7>>", "in turn", "% of the slots name a word of the chain", "swap in cache:",
                 "Method coconut has no teacher, so there are no maps and no selection."):  # fmt: skip
        assert said in out, said
    assert not outside((tmp_path / "inspect.html").read_text(encoding="utf-8"))
    code, out, _ = run("coconut", "--task", "valid", "--limit", 3, "--interventions", "zero,shuffle")
    assert code == 0
    assert "shuffle in vectors" in out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("chain", QUESTION), "method cot has no thoughts to look into; give a run of codi, pccot, kava"),
        (("early", QUESTION), "at step 1 its stage has no latents yet; look into a later step"),
        (("kava",), "give either a question or --task SET; laconic inspect RUN QUESTION"),
        (("kava", QUESTION, "--task", "test"), "give either a question or --task SET; laconic inspect RUN QUESTION"),
        (
            ("kava", "--task", "test", "--answer", "4"),
            "--chain and --answer belong to a question; a set brings its own",
        ),
        (
            ("kava", "--task", "test", "--limit", "1"),
            "--limit 1 --batch-size 64: give two questions or more, one at once or",
        ),
        (("kava", "--task", "gsm8k"), "and has words for no other; ask test"),
        (
            ("kava", QUESTION, "--interventions", "zero,turn"),
            "--interventions turn: no such kind; there are zero, mean, shuffle, swap",
        ),
        (("kava", QUESTION, "--intervene-on", "head"), "--intervene-on head: no such kind; there are vectors, cache"),
        (("kava", QUESTION, "--latents", "a"), "--latents a: expected comma-separated integers, for example 1,2"),
        (
            ("kava", QUESTION, "--jacobi-iterations", "2"),
            "--jacobi-iterations 2: rounds are tried over a set; give --task SET in place of a",
        ),
        (
            ("kava", QUESTION, "--out", "gone/a.html"),
            "--out gone/a.html: a file in a folder that is there is asked",
        ),
        (("kava", QUESTION, "--latents", "0"), "slots [0]: there are 2 thoughts, from 1; name some of them"),
    ],
)
def test_what_cannot_be_meant_is_one_line(run: RunCli, args: tuple[str, ...], told: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_a_page_that_cannot_be_written_is_known_before_and_costs_no_finding(
    run: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskError("no room for the page")

    monkeypatch.setattr(inspect, "write", full)
    code, out, err = run("kava", QUESTION, "--interventions", "zero")
    assert (code, err) == (74, "laconic: no room for the page\n")
    assert "zero in vectors:" in out
    monkeypatch.setattr("laconic.experiment.load_run.load_run", None)  # whoever loads a run fails
    assert run("kava", QUESTION, "--out", ".")[0] == 2


def test_other_questions_come_from_the_root_that_is_given(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, roots = question_sets.load_question_set, list[Any]()

    def read(run: Any, name: str, *rest: Any, **more: Any) -> Any:
        roots.append((name, more["root"]))
        return whole(run, name, *rest, **more)

    monkeypatch.setattr(question_sets, "load_question_set", read)
    assert run("kava", QUESTION, "--interventions", "swap", "--data-dir", "elsewhere")[0] == 0
    assert roots == [("valid", "elsewhere")]


def test_runs_that_cannot_be_compared() -> None:
    def made(**changed: str) -> Any:
        data = {"kind": "maths", "format": "pccot", "chain": "all"} | changed
        tokenizer = SimpleNamespace(fingerprint=changed.get("tokenizer", "same"))
        return SimpleNamespace(
            folder="b", parts=SimpleNamespace(tokenizer=tokenizer), recipe=SimpleNamespace(data=SimpleNamespace(**data))
        )

    with pytest.raises(UsageError, match="--baseline b: its tokenizer is another one; compare runs of the same words"):
        inspect.check_comparable([made(), made(tokenizer="other")])
    with pytest.raises(UsageError, match=r"data.chain_steps is drop_last, of b all; compare runs of the same rows"):
        inspect.check_comparable([made(), made(chain="drop_last")])
    inspect.check_comparable([made(), made()])


def test_runs_that_leave_out_different_rows(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = question_sets.load_question_set

    def fewer(run: Any, *rest: Any, **more: Any) -> Any:
        rows = whole(run, *rest, **more)
        return replace(rows, examples=rows.examples[int("nodistil" in str(run.folder)) :])

    monkeypatch.setattr(question_sets, "load_question_set", fewer)
    code, _, err = run("kava", "--task", "test", "--baseline", "nodistil")
    assert code == 2
    assert "--baseline: the runs leave out different rows of the set (data.on_too_long); compare others" in err


def test_a_chain_that_the_model_has_no_positions_for(run: RunCli) -> None:
    code, _, err = run("kava", QUESTION, "--chain", *["7"] * 2048)
    assert code == 66
    assert "more than the model's" in err
