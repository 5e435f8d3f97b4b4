"""The model `laconic` of lm-eval scores and writes as lm-eval's own `hf` model, item by item."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPO, RunCli, needs
from tests.runs import train_tiny_run

needs("lm_eval")
import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import laconic  # noqa: E402
from laconic.errors import UsageError  # noqa: E402
from laconic.evaluation import lm_eval_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("unchecked")
TASKS = REPO / "tests/evaluation/lm_eval_tasks"
STORIES = REPO / "src/laconic/checkpoints/stories260k"
NATS = 1e-4  # per item
LaconicLM: Any = lm_eval_model.LaconicLM


@pytest.fixture(scope="module", autouse=True)
def in_repository(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tasks name their rows from the repository's folder; `datasets` caches them in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPO)
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


def evaluate(model: Any, *tasks: str, **options: Any) -> dict[str, list[dict[str, Any]]]:
    """Evaluate a model on tasks and return the samples of each."""
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    results: Any = lm_eval.simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, verbosity="ERROR", **options
    )
    return {task: sorted(rows, key=lambda row: row["doc_id"]) for task, rows in results["samples"].items()}


def hf_model(folder: Path, **options: Any) -> Any:
    """lm-eval's own model of transformers, in float32 on the CPU."""
    from lm_eval.models import huggingface

    hf: Any = huggingface.HFLM
    return hf(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2, **options)


@pytest.mark.medium
@pytest.mark.parametrize("max_length", [None, 24])
def test_laconic_lm_equals_hf(max_length: int | None) -> None:
    tasks = ("stories_choice", "stories_rolling", "stories_generate")[: 3 if max_length is None else 2]
    ours = evaluate(LaconicLM(str(STORIES), batch_size=3, max_length=max_length), *tasks)
    theirs = evaluate(hf_model(STORIES, max_length=max_length), *tasks)
    choices = zip(ours["stories_choice"], theirs["stories_choice"], strict=True)
    for a, b in choices:
        for mine, other in zip(a["filtered_resps"], b["filtered_resps"], strict=True):
            assert mine[0] == pytest.approx(other[0], abs=NATS)
            assert mine[1] == other[1]
    for a, b in zip(ours["stories_rolling"], theirs["stories_rolling"], strict=True):
        assert float(a["filtered_resps"][0]) == pytest.approx(float(b["filtered_resps"][0]), abs=NATS)
    if max_length is None:
        texts = [[row["filtered_resps"] for row in rows["stories_generate"]] for rows in (ours, theirs)]
        assert texts[0] == texts[1]
        assert len({str(text) for text in texts[0]}) > 1


def generated_texts(model: Any, gen_kwargs: dict[str, Any]) -> list[list[str]]:
    """Return the texts that a model writes for each row of the task with generation options."""
    rows = evaluate(model, "stories_generate", gen_kwargs=gen_kwargs)["stories_generate"]
    return [row["resps"][0] for row in rows]


@pytest.mark.medium
def test_laconic_lm_honours_generation_options() -> None:
    """Options that laconic has change the texts as in `hf`; values that change nothing are accepted."""
    model = LaconicLM(str(STORIES), batch_size=3)
    greedy = generated_texts(model, {})
    penalty = {"repetition_penalty": 1.5}
    assert greedy != generated_texts(model, penalty) == generated_texts(hf_model(STORIES), penalty)
    neutral = {
        "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "use_cache": True, "top_p": None,
        "temperature": 0.0, "max_new_tokens": 24,
    }  # fmt: skip
    assert generated_texts(model, neutral) == greedy
    assert generated_texts(model, {"do_sample": True, "temperature": 0.7, "top_k": 1}) == greedy
    sampling = {"do_sample": True, "temperature": 1.5}
    samples = generated_texts(model, sampling)
    assert greedy != samples == generated_texts(LaconicLM(str(STORIES), batch_size=2), sampling)
    assert samples != generated_texts(model, {**sampling, "seed": 5})
    assert samples != generated_texts(model, {**sampling, "min_p": 0.9})


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({"num_beams": 3, "no_repeat_ngram_size": 1}, "num_beams=3, no_repeat_ngram_size=1 not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 not supported"),
        ({"do_sample": True}, "do_sample needs a temperature"),
        ({"do_sample": True, "temperature": 1.0, "seed": [1, 2]}, "give one integer"),
    ],
)
def test_laconic_lm_refuses_generation_options(gen_kwargs: dict[str, Any], message: str) -> None:
    model = LaconicLM(str(STORIES))
    first, second = ((" ", {"until": ["."], **options}) for options in ({"max_gen_toks": 1}, gen_kwargs))
    requests: list[Any] = [type("Request", (), {"args": pair}) for pair in (first, second)]
    model.write_texts = lambda *_: pytest.fail("a text was generated first")
    with pytest.raises(UsageError, match=message):
        model.generate_until(requests)


def test_laconic_lm_repeats_of_a_question_differ() -> None:
    pair = ("Once upon a time", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12})
    requests: list[Any] = [type("Request", (), {"args": pair}) for _ in range(6)]
    assert len(set(LaconicLM(str(STORIES), batch_size=4).generate_until(requests))) > 3


def test_laconic_lm_model_arguments() -> None:
    model = LaconicLM.create_from_arg_obj(
        {"pretrained": str(STORIES), "trust_remote_code": True, "dtype": "auto", "add_bos_token": False},
        {"batch_size": "auto:4", "max_batch_size": 64, "device": "cpu"},
    )
    bos = model.tokenizer.bos_token_id
    assert [LaconicLM(str(STORIES)).tok_encode("Once")[0], model.tok_encode("Once", True)[0]] == [bos, bos]
    assert bos not in model.tok_encode("Once")
    with pytest.raises(UsageError, match="no argument parallelize, peft"):
        LaconicLM.create_from_arg_string(f"pretrained={STORIES},parallelize=True,peft=x")
    with pytest.raises(UsageError, match="pretrained is missing"):
        LaconicLM.create_from_arg_string("")
    with pytest.raises(UsageError, match="revision"):
        LaconicLM(str(STORIES), revision="main")
    for options, message in (
        ({"batch_size": "foo"}, "batch_size=foo: give a number"),
        ({"batch_size": 0}, "batch_size=0: give a number"),
        ({"max_length": 0}, "max_length=0: give 1 to 512"),
    ):
        with pytest.raises(UsageError, match=message):
            LaconicLM(str(STORIES), **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the continuation b has 20 tokens; the model laconic scores 1 to 8"):
        LaconicLM(str(STORIES), max_length=8)._loglikelihood_tokens([(("a", "b"), [5], [6] * 20)])


def test_laconic_lm_takes_lm_evals_default_device() -> None:
    """lm-eval passes cuda:0 if no device is given, on machines without a GPU too."""
    assert LaconicLM(str(STORIES), device="cuda:0").device.type in ("cpu", "cuda")


def test_laconic_lm_leaves_the_prefix_of_an_answer_open() -> None:
    """As `hf`, which passes `continue_final_message` for tasks with `gen_prefix`."""
    model = LaconicLM(str(STORIES))
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    model.tokenizer.chat_template = template
    chat = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "The best answer is "}]
    text = "<user>Which?</s><assistant>The best answer is "
    assert model.apply_chat_template(chat, add_generation_prompt=False) == text
    for content in ("s", "end", ""):  # which also occur in the template, or are nothing
        chat[1]["content"] = content
        assert model.apply_chat_template(chat, add_generation_prompt=False) == f"<user>Which?</s><assistant>{content}"
    assert model.apply_chat_template(chat[:1]) == "<user>Which?</s><assistant>"
    assert (
        model.apply_chat_template([{"role": "system", "content": "Be brief."}, chat[0]])
        == "<user>Which?</s><assistant>"
    )


@pytest.mark.slow
def test_laconic_lm_by_name_on_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The arguments are those of lm_eval; only the model's name is new."""
    from laconic.evaluation.lm_eval_model import run_lm_eval

    arguments = ["run", "--model", "laconic", "--model_args", f"pretrained={STORIES}", "--tasks", "stories_choice"]
    arguments += ["--include_path", str(TASKS), "--batch_size", "4", "--trust_remote_code"]
    monkeypatch.setattr("sys.argv", ["laconic-lm-eval", *arguments])
    run_lm_eval()
    assert "stories_choice" in capsys.readouterr().out


def test_main_lm_eval_without_lm_eval(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from laconic.cli.main import main_lm_eval

    for name in ("lm_eval", "laconic.evaluation.lm_eval_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as end:
        main_lm_eval()
    assert end.value.code == 2
    assert (
        capsys.readouterr().err == "laconic: lm_eval is not installed; in a clone of laconic: pip install '.[eval]'\n"
    )


def test_laconic_lm_with_a_memory(run_cli: RunCli, tmp_path: Path) -> None:
    """Behind a memory of the whole text, a continuation is as likely as behind the text."""
    story = "Once upon a time, there was a little girl named Lily. She had a red ball."
    (tmp_path / "story.txt").write_text(story)
    memory = tmp_path / "story.safetensors"
    flags = ("--method", "window", "--keep", "1", "--out", memory)
    assert run_cli("compress", STORIES, tmp_path / "story.txt", *flags).code == 0
    plain, reader = LaconicLM(str(STORIES)), LaconicLM(str(STORIES), memory=str(memory))
    question, answer = " Then Lily", " played with the red ball."
    with_text = plain._loglikelihood_tokens(
        [(("", ""), plain.tok_encode(story) + reader.tok_encode(question), reader.tok_encode(answer))]
    )
    with_memory = reader._loglikelihood_tokens([(("", ""), reader.tok_encode(question), reader.tok_encode(answer))])
    assert with_memory[0][0] == pytest.approx(with_text[0][0], abs=1e-3)
    without = plain._loglikelihood_tokens([(("", ""), plain.tok_encode(question), reader.tok_encode(answer))])
    assert with_memory[0][0] > without[0][0] + 0.1
    assert reader.max_length < plain.max_length


def test_laconic_lm_with_a_memory_of_selected_slots(run_cli: RunCli, tmp_path: Path) -> None:
    """Heads with slots of their own, as `laconic compress` keeps them by default."""
    (tmp_path / "story.txt").write_text("Once upon a time, there was a little girl named Lily. She had a red ball.")
    memory = tmp_path / "story.safetensors"
    assert run_cli("compress", STORIES, tmp_path / "story.txt", "--keep", "0.5", "--out", memory).code == 0
    plain, reader = LaconicLM(str(STORIES)), LaconicLM(str(STORIES), memory=str(memory))
    assert 0 < plain.max_length - reader.max_length < 40
    question, answer = reader.tok_encode(" Then Lily"), reader.tok_encode(" played with the red ball.")
    decoder, ids = reader.model.decoder, torch.tensor([question + answer])
    hidden = decoder(decoder.embed(ids[:, :-1]), reader.read_memory(str(memory))[0]).hidden_states
    log_probs = decoder.logits(hidden).log_softmax(-1).gather(2, ids[:, 1:, None])[0, -len(answer) :]
    likelihood = reader._loglikelihood_tokens([(("", ""), question, answer)])[0][0]
    assert likelihood == pytest.approx(log_probs.sum().item(), abs=1e-3)


@pytest.mark.medium
@pytest.mark.parametrize("overrides", [(), ("mixer.kind=attention",)])
def test_laconic_lm_scores_a_model_that_learns(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """In padded batches as one id after the other, from the run's fast weights or from those of a text."""
    run = train_tiny_run("hope", tmp_path, *overrides)
    model = laconic.load(run)
    assert isinstance(model, laconic.NestedTextModel)
    model.save(model.compress(["A sentence of a book. " * 3]), tmp_path / "state.safetensors")
    pairs = [(("", ""), model.tokenizer.encode(a), model.tokenizer.encode(b)) for a, b in (("A", "x y"), ("Book", "!"))]
    totals = list[float]()
    for memory in (None, str(tmp_path / "state.safetensors")):
        scores = LaconicLM(str(run), memory=memory)._loglikelihood_tokens(pairs)
        for (_, context, continuation), (score, is_greedy) in zip(pairs, scores, strict=True):
            state, expected, greedy = None if memory is None else model.load_memory(memory), 0.0, True
            for i, id in enumerate((context + continuation)[:-1], 1):
                output = model.model.read_tokens(torch.tensor([[id]]), state, update_weights=not model.has_attention)
                state, logprobs = output.cache, model.model.logits(output.hidden_states)[0, 0].log_softmax(-1)
                if i >= len(context):
                    target = (context + continuation)[i]
                    expected, greedy = expected + float(logprobs[target]), greedy and int(logprobs.argmax()) == target
            assert (score, is_greedy) == (pytest.approx(expected, abs=1e-4), greedy)
            totals.append(score)
    assert totals[:2] != totals[2:]


def test_laconic_lm_answers_with_thoughts(tmp_path: Path) -> None:
    run = train_tiny_run("kava", tmp_path)
    model = LaconicLM(str(run), max_gen_toks=5)
    requests: list[Any] = [
        type("Request", (), {"args": (question, {"until": ["<"]})})() for question in ("1+2=", "3*4=", "9-1=")
    ]
    reasoner = laconic.load(run)
    assert isinstance(reasoner, laconic.Reasoner)
    answers = reasoner.generate(["1+2=", "3*4=", "9-1="], laconic.GenerationConfig(max_tokens=5))
    assert model.generate_until(requests) == [answer.text.split("<")[0] for answer in answers]
    with pytest.raises(UsageError, match="continues texts"):
        model._loglikelihood_tokens([(("a", "b"), [1], [2])])
    with pytest.raises(UsageError, match="reads no memories"):
        LaconicLM(str(run), memory="x.safetensors")
