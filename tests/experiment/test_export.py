"""`laconic export RUN` writes a folder that answers as the run does, without the run."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

import laconic
from laconic.config.load import load_recipe
from laconic.config.recipe import METHOD_TABLES
from laconic.errors import BusyError, CorruptArtifactError, DiskError, UsageError
from laconic.evaluation.model_card import build_model_card
from laconic.experiment.export import export_model, export_run
from laconic.experiment.load_run import load_config_and_tokenizer, load_initial_model, load_run
from laconic.interfaces import ThinksInLatents
from tests.conftest import RunCli, check_refused, needs
from tests.runs import train_tiny_run

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")
SHORT = laconic.GenerationConfig(max_tokens=6)
PROMPTS = {"digits": ["1+2*3=", "4*5-6="], "text": ["Book 1.", "A sentence"]}


def generate_ids(model: Any) -> list[list[int]]:
    """Greedy ids after two prompts of the kind that the model was trained on."""
    prompts = PROMPTS[model.recipe.data.source]
    return [list(answer.token_ids) for answer in model.generate(prompts, config=SHORT)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of KaVa, which no test changes."""
    return train_tiny_run("kava", tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run of KaVa."""
    return Path(shutil.copytree(trained, tmp_path / "runs/kava"))


@pytest.mark.medium
@pytest.mark.parametrize(
    "method",  # the slow ones are stored as nocot and kava are
    [pytest.param(m, marks=[pytest.mark.slow] if m in ("cot", "icot", "pccot") else []) for m in sorted(METHOD_TABLES)],
)
def test_export_answers_as_the_run(method: str, run_cli: RunCli, tmp_path: Path) -> None:
    run = train_tiny_run(method, tmp_path)
    trained, folder = laconic.load(run), tmp_path / "exported"
    expected = generate_ids(trained)
    assert run_cli("export", run, "--out", folder).code == 0
    shutil.move(tmp_path / "runs", tmp_path / "gone")
    model = laconic.load(folder)
    assert type(model) is type(trained)
    assert generate_ids(model) == expected
    assert str(tmp_path) not in (folder / "laconic/recipe.toml").read_text()
    prompts = PROMPTS["text" if method in ("autocompressor", "hope", "lm") else "digits"]
    output = run_cli("generate", folder, *prompts, "--max-tokens", "6", "--format", "json").out
    assert [row["ids"] for row in json.loads(output.splitlines()[-1])["generations"]] == expected
    if isinstance(trained, laconic.Reasoner) and isinstance(trained.method, ThinksInLatents):
        assert isinstance(model, laconic.Reasoner)
        assert torch.equal(model.think("1+2=").latents, trained.think("1+2=").latents)
    if isinstance(trained, laconic.TextCompressor):
        assert isinstance(model, laconic.TextCompressor)
        memories = [m.compress(["A sentence of a book. " * 9]) for m in (trained, model)]
        assert torch.equal(memories[0].vectors, memories[1].vectors)


def test_export_is_a_run_to_start_from(tmp_path: Path) -> None:
    """`laconic train --plan` reads sizes and tokenizer of an exported run, as training reads its weights."""
    run = train_tiny_run("cot", tmp_path)
    export_run(load_run(run, CPU), tmp_path / "exported")
    recipe, _ = load_recipe(run / "recipe.toml", [f"model.init_from_run={tmp_path / 'exported'}"])
    config, tokenizer = load_config_and_tokenizer(recipe)
    decoder, trained_tokenizer, _ = load_initial_model(recipe, CPU)
    assert (config.vocab_size, config.hidden_size) == (decoder.config.vocab_size, decoder.config.hidden_size)
    assert tokenizer.fingerprint == trained_tokenizer.fingerprint


@pytest.mark.medium
@pytest.mark.parametrize("scope", ["both", "write"])
def test_export_adapter_of_a_compressor(scope: str, tmp_path: Path) -> None:
    """A merged adapter changes roundings only; one that is switched off for reading stays an adapter."""
    needs("peft")
    overrides = ("train.trainable=lora", "lora.rank=2", "train.learning_rate=0.1", f"compression.adapter_scope={scope}")
    run = train_tiny_run("autocompressor", tmp_path, *overrides)
    trained = laconic.load(run)
    export_run(load_run(run, CPU), tmp_path / "exported")
    assert (tmp_path / "exported/laconic/adapter_model.safetensors").is_file() == (scope == "write")
    model = laconic.load(tmp_path / "exported")
    assert isinstance(trained, laconic.TextCompressor)
    assert isinstance(model, laconic.TextCompressor)
    memories = [m.compress(["A sentence of a book. " * 9]) for m in (trained, model)]
    torch.testing.assert_close(memories[0].vectors, memories[1].vectors, rtol=1e-4, atol=1e-5)
    assert generate_ids(model) == generate_ids(trained)
    if scope == "write":
        (tmp_path / "exported/laconic/adapter_model.safetensors").unlink()
        with pytest.raises(CorruptArtifactError, match=r"adapter_model\.safetensors is missing"):
            laconic.load(tmp_path / "exported")


def test_export_decoder_loads_in_transformers(run: Path, tmp_path: Path) -> None:
    needs("transformers")
    from transformers import AutoModelForCausalLM

    decoder = export_run(load_run(run, CPU), tmp_path / "exported")
    ids = torch.tensor([[1, 2, 3]])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(input_ids=ids).logits
    torch.testing.assert_close(theirs, decoder.logits(decoder(decoder.embed(ids)).hidden_states))


def test_export_keeps_the_stage_and_dtype(tmp_path: Path) -> None:
    run = train_tiny_run("coconut", tmp_path)
    export_run(load_run(run, CPU), tmp_path / "exported", dtype=torch.bfloat16)
    exported, trained = load_run(tmp_path / "exported", CPU), load_run(run, CPU)
    assert exported.parts.decoder.dtype == torch.bfloat16
    assert exported.epoch == trained.epoch == 0
    assert exported.method.eval_stage == trained.method.eval_stage


def test_export_requires_the_space_of_its_dtype(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load_run(run, CPU).parts.decoder
    num_bytes = sum(p.numel() for p in decoder.parameters()) * 4
    monkeypatch.setattr("laconic.storage.atomic.free_bytes", lambda path: 3 * num_bytes)
    export_model(decoder, tmp_path / "single")
    with pytest.raises(DiskError, match=f"to write {2 * num_bytes:,}"):
        export_model(decoder, tmp_path / "double", dtype=torch.float64)
    export_model(decoder, tmp_path / "half", dtype=torch.bfloat16)


def test_export_refusals(run: Path, tmp_path: Path) -> None:
    for other in (str(run), laconic.load(run)):
        with pytest.raises(UsageError, match=r"run: give the result of .*load_run.*, not (str|Reasoner)"):
            export_run(other, tmp_path / "exported")  # type: ignore[arg-type]
    export_run(load_run(run, CPU), tmp_path / "exported")
    with pytest.raises(BusyError):
        export_run(load_run(run, CPU), tmp_path / "exported")
    with pytest.raises(UsageError, match="exported at step 1"):
        laconic.load(tmp_path / "exported", step=7)
    export_run(load_run(train_tiny_run("pccot", tmp_path), CPU), tmp_path / "other")
    shutil.copyfile(tmp_path / "other/model.safetensors", tmp_path / "exported/model.safetensors")
    with pytest.raises(CorruptArtifactError):
        laconic.load(tmp_path / "exported")


@pytest.fixture
def evaluated(run: Path, run_cli: RunCli) -> Path:
    """A run of KaVa with stored results."""
    assert run_cli("evaluate", run, "--tasks", "valid", "--limit", "4").code == 0
    return run


def test_export_push_dry_run_writes_a_card(evaluated: Path, run_cli: RunCli, tmp_path: Path) -> None:
    result = run_cli(
        "export", evaluated, "--out", tmp_path / "out", "--push", "me/tiny", "--dry-run", "--license", "mit"
    )
    assert result.code == 0, result.err
    assert "laconic/thoughts.safetensors" in result.out
    assert "would upload" in result.err
    card: Any = ModelCard.load(tmp_path / "out/README.md")
    assert (card.data.license, card.data.library_name, card.data.tags) == ("mit", "laconic", ["laconic", "kava"])
    assert 'laconic.load("me/tiny")' in card.text
    assert "95 %" in card.text
    assert "licences: weights: mit; base model: none; data:" in card.text
    assert str(tmp_path.parent) not in card.content


@pytest.mark.medium
def test_exported_run_is_evaluated_and_audited_as_the_run(evaluated: Path, run_cli: RunCli, tmp_path: Path) -> None:
    """Results are stored in the cache, not in the folder."""
    export = tmp_path / "exported"
    assert run_cli("export", evaluated, "--out", export).code == 0
    files = sorted(export.rglob("*"))
    results = [
        run_cli("evaluate", run, "--tasks", "valid", "--limit", "12", "--format", "json") for run in (evaluated, export)
    ]
    assert [result.code for result in results] == [0, 0], results[1].err
    ours, theirs = (json.loads(result.out)["datasets"][0]["runs"][0] for result in results)
    assert (theirs.pop("run"), ours.pop("run")) == ("exported", "kava")
    assert theirs["accuracy"] == ours["accuracy"]
    assert run_cli("evaluate", export, "--tasks", "valid", "--checkpoint", "best").code == 2
    audits = [
        run_cli("audit", run, "--task", "valid", "--limit", "12", "--format", "json") for run in (evaluated, export)
    ]
    assert [audit.code for audit in audits] == [0, 0], audits[1].err
    assert json.loads(audits[0].out)["conditions"] == json.loads(audits[1].out)["conditions"]
    assert run_cli("report", export, "--out", tmp_path / "report.html").code == 0
    assert "Verdict:" in (tmp_path / "report.html").read_text()
    assert sorted(export.rglob("*")) == files


@pytest.mark.medium
def test_folder_of_exported_runs_is_averaged_as_seeds(evaluated: Path, run_cli: RunCli, tmp_path: Path) -> None:
    exports = tmp_path / "exported"
    for seed in (0, 1):
        assert run_cli("export", evaluated, "--out", exports / f"seed-{seed}").code == 0
    result = run_cli("evaluate", exports, evaluated, "--tasks", "valid", "--limit", "12", "--format", "json")
    assert result.code == 0, result.err
    both, one = json.loads(result.out)["datasets"][0]["runs"]
    assert (both["run"], both["seeds"], one["seeds"]) == ("exported", [0, 0], [0])
    assert both["accuracy"]["mean"] == one["accuracy"]["mean"]


@pytest.mark.medium
def test_model_card_lists_results_of_other_questions_and_protocols_apart(run: Path, run_cli: RunCli) -> None:
    """As `laconic report` does: results on other questions share no table, and a run is not a control of itself."""
    for flags in (("--limit", "2"), ("--limit", "3", "--with-cot"), ("--limit", "2", "--protocol", "codi")):
        result = run_cli("evaluate", run, "--tasks", "valid", *flags)
        assert result.code == 0, result.err
    result = run_cli("audit", run, "--task", "valid", "--limit", "12")
    assert result.code == 0, result.err
    card = build_model_card(run, "me/tiny")
    assert "valid: 3 questions" in card
    assert "valid: 2 questions" in card
    assert "protocol codi" in card
    assert "Verdict:" in card
    assert "control" not in card


def test_model_card_of_a_run_that_began_with_another(tmp_path: Path) -> None:
    first = train_tiny_run("cot", tmp_path)
    (tmp_path / "next").mkdir()
    second = train_tiny_run("cot", tmp_path / "next", f"model.init_from_run={first}")
    card = build_model_card(second, "me/tiny")
    assert "base model: the run cot" in card
    assert "not part of this repository" not in card  # its questions are generated
    assert "base model: see its page" in card
    assert str(tmp_path) not in card
    assert (
        "laconic train cot.toml --out runs/cot\nlaconic train laconic/recipe.toml model.init_from_run=runs/cot" in card
    )
    (tmp_path / "cot.toml").write_text(card.partition("```toml\n")[2].partition("```")[0])
    assert load_recipe(tmp_path / "cot.toml")[0] == load_recipe(first / "recipe.toml")[0]
    shutil.rmtree(first)
    assert "laconic train laconic/recipe.toml model.init_from_run=RUN --out" in build_model_card(second, "me/tiny")


@pytest.mark.medium
def test_export_push_uploads_the_folder(
    evaluated: Path, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class FakeApi:
        def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
            calls.append((repo, private, exist_ok))

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
            calls.append((repo_id, sorted(path.name for path in folder_path.iterdir()), commit_message))
            return SimpleNamespace(repo_url=f"https://huggingface.co/{repo_id}")

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    result = run_cli("export", evaluated, "--out", tmp_path / "out", "--push", "me/tiny", "--private")
    assert result.code == 0, result.err
    assert "https://huggingface.co/me/tiny" in result.err
    assert calls[0] == ("me/tiny", True, True)
    assert {"README.md", "laconic", "model.safetensors", "tokenizer.json"} <= set(calls[1][1])
    monkeypatch.setattr(FakeApi, "create_repo", lambda *_, **named: (_ for _ in ()).throw(OSError("401: no token")))
    result = run_cli("export", evaluated, "--out", tmp_path / "again", "--push", "me/tiny")
    assert result.code == 66
    assert "not uploaded: 401: no token" in result.err
    assert result.err.count("\n") <= 3
    assert run_cli("export", evaluated, "--out", tmp_path / "x", "--push", "nonsense").code == 2
    for flags in (("--private",), ("--license", "mit"), ("--dry-run",)):
        result = run_cli("export", evaluated, "--out", tmp_path / "x", *flags)
        check_refused(result, 2, f"{flags[0]}: only with --push")
    shutil.rmtree(evaluated)
    result = run_cli("export", tmp_path / "out", "--out", tmp_path / "x", "--push", "me/tiny", "--dry-run")
    assert result.code == 0, result.err
    assert "This run has not been evaluated." in (tmp_path / "x/README.md").read_text()


@pytest.mark.medium
def test_load_exported_run_from_the_hub(
    run: Path, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that holds the exported folder gives the run; the command says which folder to name."""
    export_run(load_run(run, CPU), tmp_path / "repo")
    snapshot = tmp_path / "snapshot"

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: Any = (), **_: Any) -> str:
        assert name == "me/tiny"
        for path in filter_repo_objects(
            [str(p.relative_to(tmp_path / "repo")) for p in (tmp_path / "repo").rglob("*") if p.is_file()],
            allow_patterns=allow_patterns,
            ignore_patterns=list(ignore_patterns) or None,
        ):
            (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tmp_path / "repo" / path, snapshot / path)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert generate_ids(laconic.load("me/tiny")) == generate_ids(laconic.load(run))
    result = run_cli("evaluate", "me/tiny", "--tasks", "valid", "--limit", "4", "--format", "json")
    (row,) = json.loads(result.out)["datasets"][0]["runs"]
    assert (row["run"], row["passes"]["latent"]) == ("tiny", 1.0)
    refused = run_cli("evaluate", "me/tiny", "--tasks", "valid", "--quantize", "int8")
    check_refused(refused, 2, "only for models, and me/tiny is a run")
    audit = run_cli("audit", "me/tiny", "--task", "valid", "--limit", "12", "--format", "json")
    assert json.loads(audit.out)["run"] == "tiny"
    assert run_cli("report", "me/tiny", "--out", tmp_path / "report.html").code == 0
    result = run_cli("generate", "me/tiny", "1+2=")
    assert (result.code, result.out) == (0, run_cli("generate", run, "1+2=").out)
