"""Methods outside laconic: the example of docs/extending.md trains, resumes, answers and loads, if code is allowed."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import laconic
from laconic.batches import ReasoningBatch
from laconic.config.load import load_recipe
from laconic.config.training import TrainingConfig
from laconic.errors import UsageError
from laconic.experiment.from_recipe.build import build_experiment
from laconic.experiment.from_recipe.custom_method import describe_method_source, import_method_class
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.interfaces import StepOutput, ThinksInLatents
from laconic.latent.kava import Kava
from laconic.latent.thoughts import LatentThoughts
from laconic.training.random_state import get_random_state
from laconic.training.ranks import Ranks
from laconic.training.row_order import compute_update_index
from laconic.training.step import Updater
from tests.conftest import REPO, RunCli, check_refused
from tests.house.source import blocks
from tests.house.test_walk import ReasoningData
from tests.tiny_recipes import TINY_RECIPE

pytestmark = pytest.mark.usefixtures("unchecked")
NAME = "pause_tokens:PauseTokens"
SILENT = """
from torch import nn
from laconic.interfaces import StepOutput
class Silent(nn.Module):
    def __init__(self, decoder, tokenizer):
        super().__init__()
        self.decoder = decoder
    def forward(self, batch, state=None):
        return StepOutput(self.decoder.embed(batch.question_ids).mean())
"""


@pytest.mark.medium
def test_loop_of_ones_own_answers_new_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    exec([*blocks(REPO / "docs/extending.md", "python")][2][1], {})
    assert re.fullmatch(r"\['.*', '.*'\]\n", capsys.readouterr().out)
    assert (tmp_path / "method.pt").is_file()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with the example of the page as a module, and a tiny recipe for it."""
    (_, code), (_, policy), _, (_, loading) = blocks(REPO / "docs/extending.md", "python")
    assert "allow_code=True" in loading
    (tmp_path / "pause_tokens.py").write_text(code)
    (tmp_path / "value_norms.py").write_text(policy)
    tables = re.sub(r"\[latents\]\n.*?\n\[data\]", "[method_options]\nnum_pauses = 2\n[data]", TINY_RECIPE, flags=re.S)
    (tmp_path / "pause.toml").write_text(tables.replace('"kava"', f'"{NAME}"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("pause_tokens", "value_norms"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delenv("LACONIC_ALLOW_CODE", raising=False)
    return tmp_path


@pytest.mark.medium
def test_custom_method_trains_resumes_answers_and_loads(
    place: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run_cli("train", "pause.toml", "--out", "whole")
    assert code == 0
    assert f"method {NAME} is code outside laconic: {place / 'pause_tokens.py'}" in err
    assert "accuracy" in err
    shutil.copytree("whole", "parts")
    assert run_cli("train", "pause.toml", "--out", "parts", "--resume", "step-2").code == 0
    whole, parts = (load_file(place / run / "steps/step-000004/method.safetensors") for run in ("whole", "parts"))
    assert whole["pauses"].shape == (2, 16)
    assert torch.equal(whole["pauses"], parts["pauses"])
    first = load_file(place / "parts/steps/step-000002/method.safetensors")
    assert not torch.equal(whole["pauses"], first["pauses"])

    code, out, err = run_cli("generate", "whole", "1+2*3=")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"whole was trained with {NAME}, code outside laconic; if you trust it, set LACONIC_ALLOW_CODE=1" in err
    sys.modules.pop("pause_tokens")
    with pytest.raises(UsageError, match="allow_code=True"):
        laconic.load("whole")
    assert "pause_tokens" not in sys.modules
    model = laconic.load("whole", allow_code=True)
    assert isinstance(model, Reasoner)
    assert torch.equal(model.method.get_parameter("pauses"), whole["pauses"])
    answer = model.generate("1+2*3=", laconic.GenerationConfig(max_tokens=4))[0]
    monkeypatch.setenv("LACONIC_ALLOW_CODE", "1")
    out = run_cli("generate", "whole", "1+2*3=", "--max-tokens", 4, "--format", "json").out
    assert json.loads(out)["generations"][0]["ids"] == list(answer.token_ids)
    assert run_cli("evaluate", "whole", "--tasks", "valid", "--limit", "4").code == 0
    with_cot = run_cli("evaluate", "whole", "--tasks", "valid", "--limit", "4", "--with-cot")
    assert with_cot.code == 0, with_cot.err
    assert "with CoT" in with_cot.out
    assert not isinstance(model.method, ThinksInLatents)
    assert run_cli("inspect", "whole", "1+2*3=").code == 2


@pytest.mark.medium
def test_custom_method_plan_and_frozen_decoder(place: Path, run_cli: RunCli) -> None:
    code, out, _ = run_cli("train", "pause.toml", "--plan", "--format", "json")
    assert code == 0
    assert json.loads(out)["method"] == NAME
    frozen = ("train.trainable=latents", "method_options.num_pauses=3", "train.steps=1")
    assert run_cli("train", "pause.toml", "--out", "frozen", *frozen).code == 0
    step = place / "frozen/steps/step-000001"
    assert load_file(step / "method.safetensors")["pauses"].shape == (3, 16)
    assert not (step / "model.safetensors").exists()
    assert isinstance(laconic.load("frozen", allow_code=True), Reasoner)


@pytest.mark.medium
def test_plan_of_a_custom_method_whose_shapes_depend_on_numbers(place: Path, run_cli: RunCli) -> None:
    loss = "self.decoder.embed(batch.question_ids).flatten()"
    code = f"loss = {loss}\n        return StepOutput(loss[: (loss > 0).long().bincount().shape[0]].mean())"
    (place / "counting.py").write_text(re.sub(r"return StepOutput.*", code, SILENT))
    recipe = (place / "pause.toml").read_text().replace(NAME, "counting:Silent")
    (place / "counting.toml").write_text(re.sub(r"\[(method_options|validation)\]\n[^[]*", "", recipe))
    code, out, err = run_cli("train", "counting.toml", "--plan")
    assert code == 0, err
    assert "memory and time need the numbers of counting:Silent" in out
    assert "--plan=step measures them" in out
    assert "rows         " in out
    assert "time         " not in out
    code, out, err = run_cli("train", "counting.toml", "--plan=step", "--format", "json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["memory"], plan["seconds"], plan["measured"]["seconds"] > 0) == (None, None, True)


@pytest.mark.medium
def test_custom_method_that_does_not_answer_loads_as_its_decoder(
    place: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "silent_method.py").write_text(SILENT)
    recipe = (place / "pause.toml").read_text().replace(NAME, "silent_method:Silent")
    recipe = re.sub(r"\[method_options\]\n.*?\n\[", "[", recipe, flags=re.S)
    (place / "validated.toml").write_text(recipe)
    code, _, err = run_cli("train", "validated.toml", "--out", "validated")
    assert code == 2
    assert "validation: Silent does not answer questions; give it a method `answer`, or remove [validation]" in err
    assert not list((place / "validated").glob("steps/*")), "refused before the first update"
    (place / "silent.toml").write_text(re.sub(r"\[validation\]\n.*?\n\[", "[", recipe, flags=re.S))
    assert run_cli("train", "silent.toml", "--out", "silent", "train.steps=1").code == 0
    assert not (place / "silent/steps/step-000001/method.safetensors").exists()
    assert isinstance(laconic.load("silent", allow_code=True), laconic.LanguageModel)
    monkeypatch.setenv("LACONIC_ALLOW_CODE", "1")
    code, out, err = run_cli("generate", "silent", "1+2*3=")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "silent: method silent_method:Silent has no `answer`, so it answers no questions; give the class one" in err
    (place / "bare_method.py").write_text(SILENT.replace("StepOutput(self", "(self"))
    for flags in ((), ("--plan",)):
        check_refused(
            run_cli("train", "silent.toml", "--out", "bare", "method=bare_method:Silent", *flags),
            2,
            "Silent.forward returned a tensor of shape []; return laconic.interfaces.StepOutput(loss",
        )


@pytest.mark.parametrize(
    ("old", "new", "options", "message"),
    [
        ("question_ids", "questions", (), "bad_method.py:9: AttributeError: 'ReasoningBatch' object has no attribute"),
        (", state=None", "", (), "Silent has forward(self, batch), expected forward(self, batch, state=None); change"),
        ("decoder, tokenizer", "decoder", (), "__init__(self, decoder), expected __init__(self, decoder, tokenizer, *"),
        ("__init__(", "build(", (), "bad_method:Silent has no __init__; expected __init__(self, decoder, tokenizer, *"),
        (
            "tokenizer)",
            "tokenizer, n=3)",
            ("method_options.n=4",),
            "keyword-only parameters of bad_method:Silent are none",
        ),
        ("mean())", "mean().detach())", (), "Silent.forward returned a detached tensor of shape [] as loss; return a"),
        ("mean())", "mean().expand(2))", (), "Silent.forward returned a tensor of shape [2] as loss; return a scalar"),
        ("mean())", "mean().item())", (), "Silent.forward returned a float as loss; return a scalar that depends on"),
        ("mean())", "mean(), {'loss': 7.0})", (), "a metric named loss, which the training loop writes itself; rename"),
        ("mean())", "mean(), {'step': 7.0})", (), "a metric named step, which the training loop writes itself; rename"),
        (
            "mean())",
            "mean(), {'a': batch.B * [1.0]})",
            (),
            "Silent.forward returned a list as metric a; return a number",
        ),
        ("mean())", "mean(), {'a': batch.question_ids})", (), "] as metric a; return a number or a scalar tensor"),
    ],
)
def test_custom_method_with_an_error_is_said_to_be_the_users(
    place: Path, run_cli: RunCli, old: str, new: str, options: tuple[str, ...], message: str
) -> None:
    (place / "bad_method.py").write_text(SILENT.replace(old, new))
    recipe = (place / "pause.toml").read_text().replace(NAME, "bad_method:Silent")
    (place / "bad.toml").write_text(re.sub(r"\[(method_options|validation)\]\n[^[]*", "", recipe))
    sys.modules.pop("bad_method", None)
    importlib.invalidate_caches()
    code, _, err = run_cli("train", "bad.toml", "--out", "bad", *options)
    expected = 70 if "AttributeError" in message else 2
    assert (code, message in err, "please report" in err) == (expected, True, False), err
    assert not list((place / "bad").glob("steps/*")), "refused before the first update"


def test_custom_method_may_report_numbers(place: Path, run_cli: RunCli) -> None:
    (place / "number_method.py").write_text(SILENT.replace("mean())", "mean(), {'one': 1.0, 'odd': float('nan')})"))
    recipe = (place / "pause.toml").read_text().replace(NAME, "number_method:Silent")
    (place / "number.toml").write_text(re.sub(r"\[(method_options|validation)\]\n[^[]*", "", recipe))
    code, out, err = run_cli("train", "number.toml", "--out", "number", "train.steps=1", "--format", "json")
    assert code == 0, err
    (run,) = json.loads(out)["runs"]
    metrics = run["metrics"]
    assert metrics["one"] == pytest.approx(1)
    assert "odd" not in metrics
    line = json.loads((place / "number/metrics.jsonl").read_text().splitlines()[0])
    assert line["one"] == pytest.approx(1)
    assert line["odd"] is None


def test_custom_method_selects_kv(place: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    methods: list[Any] = []
    for seed in (1, 2):
        recipe, _ = load_recipe(
            place / "pause.toml",
            ["method=value_norms:ValueNorms", f"seed={seed}", "method_options={num_latents=1, iterations=1}"],
        )
        experiment = build_experiment(recipe, torch.device("cpu"))
        methods.append(experiment.method)
    one, two = methods
    assert (one.seed, one.latent_thoughts.seed, two.seed) == (1, 1, 2)
    assert not torch.equal(one.latent_thoughts.projection.inner.weight, two.latent_thoughts.projection.inner.weight)
    decoder = one.decoder
    assert LatentThoughts(decoder, num_latents=2, num_iterations=1).seed == 0
    plain = Kava(decoder, one.latent_thoughts, one.config, one.selection_config, one.kv_config)
    batch = experiment.training_data.batch(range(8), 0, 0)
    assert one(batch).metrics["kv"] != plain(batch).metrics["kv"]
    flags = ("method=value_norms:ValueNorms", "method_options={num_latents=2}", "train.steps=1")
    assert run_cli("train", "pause.toml", "--out", "norms", *flags).code == 0
    monkeypatch.setenv("LACONIC_ALLOW_CODE", "1")
    code, _, err = run_cli("export", "norms", "--to", "vllm", "--out", "served")
    monkeypatch.delenv("LACONIC_ALLOW_CODE")
    assert code == 2
    assert "--to vllm: not available for method" in err
    model = laconic.load("norms", allow_code=True)
    assert isinstance(model, Reasoner)
    assert isinstance(model.method, ThinksInLatents)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("method_options.num_pauses=two",), 'method_options.num_pauses: "two": Input should be a valid integer'),
        (("method_options.depth=2",), f"no such key; the keyword-only parameters of {NAME} are num_pauses, std"),
        (("method=pause_tokens:Pauses",), "pause_tokens has no class Pauses that is a torch.nn.Module"),
        (("method=no_such_module:Method",), "no module no_such_module in "),
        (("method=kavaa",), '"kavaa" is not a method; did you mean kava?'),
        (("method=nocot",), "method_options: method nocot has tables of its own"),
    ],
)
def test_custom_method_errors_name_the_key(place: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        describe_method_source(load_recipe(place / "pause.toml", overrides)[0], place)
    assert "\n" not in str(error.value)


def test_custom_method_is_imported_from_the_folder_of_the_recipe(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(place / "pause.toml")[0]
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    with pytest.raises(UsageError, match="add its folder to PYTHONPATH"):
        import_method_class(NAME)
    assert describe_method_source(recipe, Path("..")).endswith(str(place / "pause_tokens.py"))


def test_import_method_class_reports_an_error_in_the_module(place: Path) -> None:
    (place / "broken_method.py").write_text("import no_such_package\n")
    with pytest.raises(UsageError, match="ModuleNotFoundError: No module named 'no_such_package'"):
        import_method_class("broken_method:Method")


class RowMean(nn.Module):
    """A loss that is a mean over rows, without denominators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: ReasoningBatch, state: None = None) -> StepOutput:
        loss = (self.weight * batch.question_ids.double().mean(1)).mean()
        return StepOutput(loss, {"ids": loss.detach()})


def test_updater_averages_a_method_without_denominators_over_rows() -> None:
    data, results = ReasoningData(), []
    for size in (4, 3, 1):
        config = TrainingConfig(steps=1, batch_size=4, micro_batch_size=size)
        updater = Updater(RowMean(), config, 1, Ranks(), torch.device("cpu"))
        index = compute_update_index(config, 0, 0, len(data))
        results.append(updater.update(data, index, get_random_state()).metrics)
    for metrics in results:
        assert metrics["ids"] == metrics["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-6)
