"""`laconic.load` opens runs of every method and every kind of checkpoint, and answers as the command does."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import laconic
from laconic.batches import AnswerBatch, PassCounts
from laconic.config.load import load_recipe
from laconic.config.recipe import DOCUMENT_METHODS, METHOD_TABLES
from laconic.data.synthetic.digits import build_digits_tokenizer
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import InputError, UsageError
from laconic.experiment.load_run import load_config_and_tokenizer, load_run
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.generation.static_cache import is_stock_decoder
from laconic.models.checkpoints import weights
from laconic.models.decoder import Decoder
from laconic.storage.run_dir import RunDirectory
from tests.conftest import REPO, RunCli, check_refused, needs
from tests.house.source import blocks
from tests.models.fixtures import fresh
from tests.runs import train_tiny_run
from tests.tiny_recipes import TINY_RECIPE

pytestmark = pytest.mark.usefixtures("unchecked")
QUESTION_METHODS = sorted(set(METHOD_TABLES) - set(DOCUMENT_METHODS))
LATENT_METHODS = {"coconut", "codi", "pccot", "kava"}
QUESTIONS = ["1+2*3=", "4*5-6="]
METRICS_PAGE = (REPO / "docs/metrics.md").read_text(encoding="utf-8")
SHORT = laconic.GenerationConfig(max_tokens=4)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def undocumented_metrics(run: Path) -> set[str]:
    """Return the keys of a run's metrics.jsonl that docs/metrics.md does not name."""
    names = {name for line in METRICS_PAGE.splitlines() for name in re.findall(r"`([\w.…]+)`", line)}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = {re.sub(r"^level\d+", "levelN", key) for line in lines for key in (*line, *line.get("validation", ()))}
    groups = tuple(name.removeprefix("…") for name in names if name.startswith("…"))
    return {key for key in keys - names if not re.sub("_(low|high)$", "", key).endswith(groups)}


@pytest.mark.medium
@pytest.mark.parametrize("method", QUESTION_METHODS)
def test_load_answers_exactly_as_the_command(method: str, place: Path, run_cli: RunCli) -> None:
    run = train_tiny_run(method, place)
    assert undocumented_metrics(run) == set()
    model = laconic.load(run)
    assert isinstance(model, Reasoner)
    assert model.recipe.method == method
    result = run_cli("generate", run, *QUESTIONS, "--max-tokens", "4", "--format", "json")
    step = run_cli("generate", run / "steps" / "step-000001", *QUESTIONS, "--max-tokens", "4")
    assert step[:2] == run_cli("generate", run, *QUESTIONS, "--max-tokens", "4")[:2]
    rows = json.loads(result.out.splitlines()[-1])["generations"]
    answers = model.generate(QUESTIONS, SHORT)
    assert [(a.text, list(a.token_ids), a.passes.total) for a in answers] == [
        (row["text"], row["ids"], row["passes"]["total"]) for row in rows
    ]
    if method not in LATENT_METHODS:
        with pytest.raises(UsageError, match="no latents; call generate"):
            model.think(QUESTIONS[0])
        return
    with pytest.raises(UsageError, match=r"question: give one question as text, .* not list"):
        model.think(QUESTIONS)  # type: ignore[arg-type]
    thoughts = model.think(QUESTIONS[0])
    alone = model.generate(QUESTIONS[0], SHORT)[0]
    assert thoughts.passes == alone.passes._replace(answer=0)
    assert thoughts.cache.B == 1
    assert len(thoughts.tokens) == len(thoughts.latents) == len(thoughts.hidden_states)
    assert len(repr(thoughts)) < 200
    assert thoughts._repr_html_().count("<tr>") == 1 + len(thoughts.tokens)
    assert len(repr(model)) < 200


def test_reasoner_generate_follows_suppressed_ids_and_streams_text(place: Path) -> None:
    model = laconic.load(train_tiny_run("nocot", place))
    assert isinstance(model, Reasoner)
    texts: list[str] = []
    config = replace(SHORT, on_token=lambda row, token, text, logprob: texts.append(text))
    (answer,) = model.generate(QUESTIONS[0], config)
    assert "".join(texts) == model.tokenizer.decode(list(answer.token_ids))
    (other,) = model.generate(QUESTIONS[0], replace(SHORT, suppress_token_ids=answer.token_ids))
    assert not {*answer.token_ids} & {*other.token_ids}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("method", "overrides", "is_merged"),
    [
        ("kava", (), True),
        ("lm", (), True),
        ("autocompressor", ("compression.adapter_scope=both",), True),
        ("autocompressor", ("compression.adapter_scope=write",), False),
    ],
)
def test_load_merges_an_adapter_that_is_always_on(
    method: str, overrides: tuple[str, ...], is_merged: bool, tmp_path: Path
) -> None:
    needs("peft")
    tokenizer = build_digits_tokenizer() if method == "kava" else build_byte_tokenizer()
    base = fresh("llama", vocab_size=tokenizer.vocab_size)
    laconic.LanguageModel(base, tokenizer).save(tmp_path / "base")
    adapter = (f"model.name={tmp_path / 'base'}", "train.trainable=lora", "lora.rank=2", "train.learning_rate=0.1")
    run = train_tiny_run(method, tmp_path, *adapter, *overrides)
    before, model = load_run(run, torch.device("cpu")), laconic.load(run)
    assert model.decoder.fingerprint == before.parts.decoder.fingerprint, "memories fit both"
    assert [is_stock_decoder(cast(Decoder, x)) for x in (model.decoder, before.parts.decoder)] == [is_merged, False]
    ids = torch.arange(10)[None]
    with torch.no_grad():
        logits = [x.logits(x(x.embed(ids)).hidden_states) for x in (model.decoder, before.parts.decoder, base)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert not is_merged or (logits[0] - logits[2]).abs().max() > 1e-3, "the adapter has learned nothing"
    if method == "kava":
        answers = [reasoner.generate(QUESTIONS, SHORT) for reasoner in (cast(Reasoner, model), Reasoner(before))]
        assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("autocompressor", laconic.TextCompressor),
        ("hope", laconic.NestedTextModel),
        ("lm", laconic.LanguageModel),
    ],
)
def test_load_document_run(method: str, kind: type, place: Path, run_cli: RunCli) -> None:
    run = train_tiny_run(method, place)
    assert undocumented_metrics(run) == set()
    model = laconic.load(run)
    assert isinstance(model, kind)
    assert model.recipe is not None
    assert len(repr(model)) < 200
    prompts = ["Book 1."]
    generation = model.generate(prompts, config=SHORT)[0]
    again = laconic.load(run / "steps" / "step-000001").generate(prompts, config=SHORT)[0]
    assert again.token_ids == generation.token_ids == model.generate(prompts[0], config=SHORT)[0].token_ids
    for folder in (run, run / "steps" / "step-000001"):
        out = run_cli("generate", folder, *prompts, "--max-tokens", "4", "--format", "json").out
        assert json.loads(out.splitlines()[-1])["generations"][0]["ids"] == generation.token_ids
    direct = laconic.generate(model.decoder, model.tokenizer, prompts, config=replace(SHORT, return_state=False))[0]
    assert direct.token_ids[:1] == generation.token_ids[:1]


def test_load_checkpoint_continues_text_and_saves(tmp_path: Path) -> None:
    decoder, tokenizer = fresh("llama", vocab_size=257), build_byte_tokenizer()
    laconic.LanguageModel(decoder, tokenizer).save(tmp_path / "plain")
    model = laconic.load(str(tmp_path / "plain"))
    assert isinstance(model, laconic.LanguageModel)
    expected = laconic.generate(decoder, tokenizer, ["Once"], config=SHORT)[0]
    assert model.generate("Once", SHORT)[0].token_ids == expected.token_ids
    half = laconic.load(tmp_path / "plain", dtype="bfloat16").decoder
    assert half.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="dtype 'int8'"):
        laconic.load(tmp_path / "plain", dtype="int8")
    with pytest.raises(UsageError, match="has no steps"):
        laconic.load(tmp_path / "plain", step=3)


def test_commands_point_to_what_can_be_loaded(place: Path, tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "text.txt").write_text("A text.")
    for arguments in (
        ("generate", tmp_path / "adapter", "a"),
        ("compress", tmp_path / "adapter", tmp_path / "text.txt", "--out", tmp_path / "memory.safetensors"),
        ("export", tmp_path / "adapter", "--out", tmp_path / "out"),
    ):
        code, _, err = run_cli(*arguments)
        assert (code, "names no base model; laconic export MODEL --adapter" in err) == (66, True), arguments
    run = train_tiny_run("nocot", place)
    overrides = [f"model.name={run}", "model.tokenizer=bytes"]
    with pytest.raises(InputError, match=r"model\.name: .* is a run of laconic train; .* set model\.init_from_run"):
        load_config_and_tokenizer(load_recipe("demo-cot", overrides)[0])


def test_load_suggests_a_run_of_nearly_that_name(tmp_path: Path) -> None:
    (tmp_path / "runs" / "codi").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(InputError, match=r"did you mean runs/codi\?"):
            laconic.load("runs/cod")


def test_load_expands_the_home_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_tiny_run("nocot", place)
    monkeypatch.setenv("HOME", str(run.parent.resolve()))
    for path in (f"~/{run.name}", Path("~") / run.name / "steps" / "step-000001"):
        assert isinstance(laconic.load(path), laconic.Reasoner)
    with pytest.raises(InputError, match="is not a run, but holds runs; load one of them, such as "):
        laconic.load("~")


def test_load_points_to_what_can_be_loaded(place: Path, tmp_path: Path) -> None:
    run = train_tiny_run("nocot", place)
    with pytest.raises(UsageError, match=r"revision abc: .* is a run, which has its own; remove rev"):
        laconic.load(run, revision="abc")
    with pytest.raises(UsageError, match=r"dtype bfloat16: .* is a run"):
        laconic.load(run, dtype="bfloat16")
    with pytest.raises(UsageError, match=r"step 2: .* is the checkpoint of step 1"):
        laconic.load(run / "steps" / "step-000001", step=2)
    with pytest.raises(InputError, match="laconic train demo-kava"):
        laconic.load("demo-kava")
    (run / "steps" / "step-000001").rename(tmp_path / "step-000001")
    with pytest.raises(InputError, match="no checkpoint yet"):
        laconic.load(run)
    (tmp_path / "step-000001" / "config.json").unlink()  # as in a step of a LoRA run
    with pytest.raises(InputError, match=r"has checkpoints, but no recipe\.toml"):
        laconic.load(tmp_path / "step-000001")
    for name, match in (("adapter_config.json", "a peft adapter"), ("memory.safetensors", "load of the model")):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_text("{}")
        with pytest.raises(InputError, match=match):
            laconic.load(tmp_path / "other" / (name if "safetensors" in name else ""))
    (tmp_path / "seeds").mkdir()
    run.rename(tmp_path / "seeds" / "seed-0")
    with pytest.raises(InputError, match=r"is not a run, but holds runs; load one of them, such as .*seed-0"):
        laconic.load(tmp_path / "seeds")
    with pytest.raises(UsageError, match=r"path_or_name: give a folder or a name, .*, not NoneType"):
        laconic.load(None)  # type: ignore[arg-type]


def test_load_and_commands_say_that_a_run_has_no_checkpoint_yet(tmp_path: Path, run_cli: RunCli) -> None:
    """A run has no recipe while laconic train reads the rows."""
    run = tmp_path / "runs" / "seed-0"
    with RunDirectory(run).lock(), pytest.raises(InputError, match=r"seed-0 has no checkpoint yet; laconic train"):
        laconic.load(run)
    best = ("generate", run, "1+1", "--checkpoint", "best")
    for command in (best, ("evaluate", run.parent, "--tasks", "test"), ("chat", run)):
        result = run_cli(*command)
        check_refused(result, 66, "has no checkpoint yet")


@pytest.mark.medium
def test_train_in_python_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kava.toml").write_text(TINY_RECIPE)
    program = next(text for _, text in blocks(REPO / "docs/huggingface.md", "python") if "init_run" in text)
    names: dict[str, Any] = {}
    exec(program, names)
    assert isinstance(names["model"], Reasoner)
    assert names["run"].step_numbers()[-1] == 20
    (tmp_path / "runs/kava/recipe.toml").unlink()
    with pytest.raises(InputError, match=r"runs/kava has checkpoints, but no recipe\.toml; .*init_run\(run"):
        laconic.load("runs/kava")
    names["init_run"](names["run"], names["recipe"])
    assert isinstance(laconic.load("runs/kava"), Reasoner)
    with pytest.raises(UsageError, match=r"recipe: give the recipe alone: recipe, notes = load_recipe.*, not tuple"):
        names["build_experiment"](names["load_recipe"]("kava.toml"), names["device"])


@pytest.mark.medium
@pytest.mark.parametrize("is_relative", [False, True])
def test_load_of_an_adapter_finds_its_base_as_transformers_does(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    needs("peft")
    import peft
    import transformers

    monkeypatch.chdir(tmp_path)
    laconic.LanguageModel(fresh("llama", vocab_size=257), build_byte_tokenizer()).save("base")
    name = "base" if is_relative else str(tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(theirs, config).save_pretrained("adapter")
    reference = transformers.AutoModelForCausalLM.from_pretrained("adapter").eval()
    model = laconic.load("adapter")
    assert isinstance(model, laconic.LanguageModel)
    assert all(p.requires_grad for p in model.decoder.parameters()), "as those of any checkpoint"
    ids = torch.arange(20)[None]
    with torch.no_grad():
        want = reference(ids).logits
        torch.testing.assert_close(
            model.decoder.logits(model.decoder(model.decoder.embed(ids)).hidden_states), want, rtol=1e-4, atol=1e-5
        )
    text = model.generate("Once", SHORT)[0].text
    assert run_cli("generate", "adapter", "Once", "--max-tokens", 4, "--no-echo").out.rstrip("\n") == text.rstrip("\n")
    assert run_cli("export", "adapter", "--out", "merged").code == 0
    assert laconic.load("merged").decoder.fingerprint == model.decoder.fingerprint


def test_load_looks_a_name_on_the_hub_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laconic.LanguageModel(fresh("llama", vocab_size=257), build_byte_tokenizer()).save(tmp_path / "plain")
    names: list[str] = []

    def download(name: str, revision: str | None, with_weights: bool) -> Path:
        names.append(name)
        return tmp_path / "plain"

    monkeypatch.setattr(weights, "download_checkpoint", download)
    assert laconic.load("org/model").decoder.name_or_path == "org/model"
    assert names == ["org/model"]


def test_answers_end_at_stop_strings_and_stream_their_text(place: Path, run_cli: RunCli) -> None:
    run = train_tiny_run("kava", place)
    model = laconic.load(run)
    assert isinstance(model, Reasoner)
    config = replace(SHORT, temperature=2.0, seed=5, max_tokens=8)
    whole = model.generate("1+2*3=", config)[0]
    assert whole.logprobs is not None
    assert (len(whole.logprobs), whole.num_prompt_tokens) == (len(whole.token_ids), 7)
    stop, pieces = whole.text[2:4], list[str]()
    config = replace(config, stop_strings=stop)
    ended = model.generate("1+2*3=", replace(config, on_token=lambda row, token, text, _: pieces.append(text)))[0]
    assert (ended.text, ended.stop_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert ended.token_ids == whole.token_ids[: len(ended.token_ids)]
    assert "".join(pieces) == ended.text
    flags = ("--max-tokens", 8, "--temperature", 2, "--seed", 5, "--stop-string", stop)
    assert run_cli("generate", run, "1+2*3=", *flags).out == f"{ended.text}\n"
    printed = json.loads(run_cli("generate", run, "1+2*3=", *flags, "--format", "json", "--logprobs").out)
    assert ended.logprobs is not None
    assert printed["generations"][0]["logprobs"] == [round(x, 6) for x in ended.logprobs]
    assert printed["generations"][0]["stop_reason"] == "stop"


def test_short_answers_of_a_method_without_stop_reasons_end_with_eos(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a method may leave the eos token out."""
    model = laconic.load(train_tiny_run("kava", place))
    assert isinstance(model, Reasoner)
    answers = AnswerBatch(("AB",), ((65, 66),), (PassCounts(1, 0, 0, 1),), ((0, 0),))
    monkeypatch.setattr(model.method, "answer", lambda *_, **__: answers)
    for max_tokens, reason in ((8, "eos"), (2, "length")):
        assert model.generate("1+2*3=", laconic.GenerationConfig(max_tokens=max_tokens))[0].stop_reason == reason


def test_stream_answers_equals_generate_and_checks_its_arguments(place: Path) -> None:
    model = laconic.load(train_tiny_run("kava", place))
    assert isinstance(model, Reasoner)
    questions = ["1+2*3=", "4*5-6=", "7-1=", "2+2="]
    config = replace(SHORT, temperature=2.0, seed=5)
    answers = [answer.text for answer in model.generate(questions, config)]
    assert [answer.text for answer in model.stream_answers(questions, config, batch_size=3)] == answers
    assert [answer.text for answer in model.stream_answers(questions, config, start=3)] == answers[3:]
    assert list(model.stream_answers(questions, start=4)) == []
    cases: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ("1+2=", {}, "questions"),
        ([1], {}, "questions"),
        (questions, {"start": -1}, "start: question -1 of 4"),
        (questions, {"start": 5}, "start: question 5 of 4"),
        (questions, {"batch_size": 0}, "batch_size"),
        (questions, {"batch_size": 2.5}, "batch_size"),
        (questions, {"config": replace(SHORT, eos_token_ids=(1,))}, "eos_token_ids: the recipe's data.format"),
    )
    for invalid, options, message in cases:
        with pytest.raises(UsageError, match=message):
            model.stream_answers(invalid, **options)
    with pytest.raises(InputError, match="question 2: "):
        model.stream_answers(["1+2=", ""])
