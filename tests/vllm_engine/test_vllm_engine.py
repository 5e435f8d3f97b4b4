"""Exported runs and memories in vLLM itself: `make test-vllm` runs these in an environment of their own."""

import base64
import gc
import importlib
import io
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import laconic
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.serving.vllm_export import SERVER_CONFIG_FILE, export_for_vllm
from tests.conftest import call_cli
from tests.reasoning_runs import TEXTS, build_reasoning_run
from tests.runs import train_tiny_run

pytestmark = [pytest.mark.vllm, pytest.mark.loopback]

NUM_QUESTIONS, MAX_TOKENS = 200, 8
TIE = 1e-4  # log probabilities of two tokens that rounding may swap
FLAGS = {"enforce_eager": True, "enable_chunked_prefill": False, "enable_prefix_caching": False}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # families, M = 1, T = 1, T = M, sequential, tied and untied
    "llama": ("kava", {"M": 4, "T": 2}),
    "mistral": ("pccot", {"family": "mistral", "M": 1, "T": 1}),
    "qwen2": ("pccot", {"family": "qwen2", "M": 3, "T": 3, "vocabulary": "bytes", "data": TEXTS}),
    "qwen3": ("codi", {"family": "qwen3", "M": 3, "tied": True}),
    "gpt2": ("kava", {"family": "gpt2", "M": 5, "T": 1, "tied": True}),
    "coconut": ("coconut", {"M": 2}),
}


class Served(NamedTuple):
    """A run, the folder that was exported from it, and vLLM's engine on that folder."""

    run: LoadedRun
    folder: Path
    llm: Any


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Run the engine in this process, so that its errors are ours."""
    with pytest.MonkeyPatch.context() as patch:
        values = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        for name, value in {**values, "VLLM_LOGGING_LEVEL": "WARNING"}.items():
            patch.setenv(name, value)
        yield


def start_engine(folder: Path, **options: Any) -> Any:
    vllm: Any = importlib.import_module("vllm")
    return vllm.LLM(str(folder), dtype="float32", max_model_len=128, max_num_seqs=64, **{**FLAGS, **options})


@contextmanager
def serve_in_process(run: LoadedRun, folder: Path) -> Iterator[Served]:
    """Export a run and start an engine on it, which is shut down before the next one starts."""
    export_for_vllm(run, folder)
    llm = start_engine(folder)
    try:
        yield Served(run, folder, llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@pytest.fixture(scope="module", params=sorted(RUNS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    method, options = RUNS[request.param]
    base = tmp_path_factory.mktemp(request.param)
    with serve_in_process(build_reasoning_run(method, base / "run", **options), base / "out") as engine:
        yield engine


def make_questions() -> list[str]:
    """Return questions of one to twelve operations."""
    draw = random.Random(0)
    return [
        "".join(f"{draw.randrange(10)}{draw.choice('+-*')}" for _ in range(draw.randrange(1, 13))) + f"{i % 10}="
        for i in range(NUM_QUESTIONS)
    ]


def chats(questions: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in questions]


def test_vllm_answers_as_the_run(served: Served) -> None:
    """Greedy ids are equal but where two logits are equal up to rounding."""
    questions = make_questions()
    config = laconic.GenerationConfig(max_tokens=MAX_TOKENS)
    expected = [answer.token_ids for answer in Reasoner(served.run).generate(questions, config)]
    sampling = served.llm.get_default_sampling_params()
    assert sampling.temperature == 0.0
    sampling.max_tokens, sampling.logprobs = MAX_TOKENS, 2
    outputs = served.llm.chat(chats(questions), sampling, use_tqdm=False)
    actual = [tuple(output.outputs[0].token_ids) for output in outputs]
    margins = [min(best - second for best, second in map(top_logprobs, o.outputs[0].logprobs)) for o in outputs]
    unequal = [i for i in range(NUM_QUESTIONS) if actual[i] != expected[i]]
    differing = [i for i in unequal if margins[i] > TIE]
    assert len(unequal) <= NUM_QUESTIONS / 100
    assert not differing, [(questions[i], actual[i], expected[i], margins[i]) for i in differing[:5]]
    assert len(set(actual)) > NUM_QUESTIONS / 4, "the answers do not depend on the questions"
    eos = json.loads((served.folder / "generation_config.json").read_text())["eos_token_id"][0]
    assert all(ids[-1] == eos for ids in actual if len(ids) < MAX_TOKENS)
    sys.stdout.write(f"\n{served.run.recipe.method}: {len(set(actual))} different answers of {NUM_QUESTIONS}, ")
    sys.stdout.write(f"smallest margin of log probabilities {min(margins):.0e}\n")


def top_logprobs(step: dict[int, Any]) -> list[float]:
    """Return the two largest log probabilities of a generated token."""
    return sorted((entry.logprob for entry in step.values()), reverse=True)[:2]


def test_vllm_answers_as_a_run_on_smollm2(smollm2: Path, tmp_path: Path) -> None:
    """Thoughts that are not trained disturb a real model; its answers are the same in vLLM, but for near ties."""
    run = build_reasoning_run("kava", tmp_path / "run", model=f'name = "{smollm2}"', data=TEXTS, M=6, T=2)
    names = ("Tom", "Ada", "A baker", "The old captain of the ship", "Lin")
    questions = [
        f"{names[i % 5]} has {3 + i} apples{' and buys some more' * (i % 4)}. How many apples has {names[i % 5]}?"
        for i in range(20)
    ]
    config = laconic.GenerationConfig(max_tokens=MAX_TOKENS)
    expected = [answer.token_ids for answer in Reasoner(run).generate(questions, config)]
    with serve_in_process(run, tmp_path / "out") as engine:
        sampling = engine.llm.get_default_sampling_params()
        sampling.max_tokens, sampling.logprobs = MAX_TOKENS, 2
        outputs = [output.outputs[0] for output in engine.llm.chat(chats(questions), sampling, use_tqdm=False)]
    for output, ids in zip(outputs, expected, strict=True):
        differing = [i for i, pair in enumerate(zip(output.token_ids, ids, strict=False)) if len(set(pair)) > 1]
        if differing:
            best, second = top_logprobs(output.logprobs[differing[0]])
            assert best - second < 1e-3, (output.token_ids, ids, best - second)
    num_equal = sum(tuple(output.token_ids) == ids for output, ids in zip(outputs, expected, strict=True))
    sys.stdout.write(f"\nsmollm2: {num_equal} of {len(questions)} equal, {len(set(expected))} different answers\n")
    assert num_equal > len(questions) * 0.9
    assert len(set(expected)) > 5


def test_vllm_samples_answers_without_control_tokens(served: Served) -> None:
    vllm: Any = importlib.import_module("vllm")
    table = json.loads((served.folder / "config.json").read_text())["laconic"]
    control = {value for name, value in table.items() if name.endswith("_token_id")}
    sampling = vllm.SamplingParams(temperature=2.0, max_tokens=20, seed=0, repetition_penalty=1.1, prompt_logprobs=1)
    outputs = served.llm.chat(chats(make_questions()[:50]), sampling, use_tqdm=False)
    ids = [id for output in outputs for id in output.outputs[0].token_ids]
    assert len(set(ids)) > 10
    assert not control & set(ids)


def test_vllm_latents_matter(served: Served) -> None:
    """The same folder with one more Jacobi iteration gives other answers."""
    model = served.llm.llm_engine.model_executor.driver_worker.get_model()
    before, questions = model.thoughts.config, make_questions()[:50]
    if before.num_latents == 1:
        pytest.skip("one latent does not change after its first iteration")
    sampling = served.llm.get_default_sampling_params()
    sampling.max_tokens = MAX_TOKENS

    def answers() -> list[Any]:
        return [o.outputs[0].token_ids for o in served.llm.chat(chats(questions), sampling, use_tqdm=False)]

    expected = answers()
    changes = {"schedule": "jacobi", "num_iterations": 0}
    model.thoughts.config = before.model_copy(update=changes)
    other = answers()
    model.thoughts.config = before
    assert other != expected
    assert answers() == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("num_iterations", None, "a number for jacobi"), ("projection_width", 65, "does not fit config")],
)
def test_vllm_refuses_a_wrong_table(key: str, value: object, message: str, tmp_path: Path) -> None:
    export_for_vllm(build_reasoning_run("kava", tmp_path / "run"), tmp_path / "out")
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    config["laconic"][key] = value
    path.write_text(json.dumps(config))
    with pytest.raises(Exception, match=message) as error:
        start_engine(tmp_path / "out")
    assert "\n" not in str(error.value)


def test_vllm_refuses_chunked_prefill(tmp_path: Path) -> None:
    export_for_vllm(build_reasoning_run("kava", tmp_path / "run"), tmp_path / "out")
    with pytest.raises(Exception, match="latent thoughts need --no-enable-chunked-prefill, --no-enable-prefix-caching"):
        start_engine(tmp_path / "out", enable_chunked_prefill=True, enable_prefix_caching=True)


@contextmanager
def serve(folder: Path, *flags: object) -> Iterator[Any]:
    """Run the server of vLLM on a folder and yield an OpenAI client, with the folder's path as the model's name."""
    from openai import OpenAI

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # the command `vllm` asks for a distribution of that name, which vllm-cpu 0.32.0 is not
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", port, *flags]
    log = folder.with_suffix(".log")
    limits = ("--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", 128, "--max-num-seqs", 16)
    with log.open("w") as output:
        process = subprocess.Popen([*map(str, (*command, *limits))], stdout=output, stderr=subprocess.STDOUT)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        while process.poll() is None and "Application startup complete" not in log.read_text():
            time.sleep(1)
        assert process.poll() is None, log.read_text()[-4000:]
        yield client
    finally:
        process.terminate()
        process.wait(60)


def test_vllm_serve_streams_the_answer_of_the_run(tmp_path: Path) -> None:
    import openai

    run = build_reasoning_run("kava", tmp_path / "run")
    export_for_vllm(run, tmp_path / "out")
    config = laconic.GenerationConfig(max_tokens=MAX_TOKENS)
    question = "1+2*3="
    expected = Reasoner(run).generate([question], config)[0].text
    model, messages = str(tmp_path / "out"), chats([question])[0]
    with serve(tmp_path / "out", "--config", tmp_path / "out" / SERVER_CONFIG_FILE) as client:
        chunks = list(
            client.chat.completions.create(model=model, messages=messages, max_tokens=MAX_TOKENS, stream=True)
        )
        deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert "".join(filter(None, deltas)) == expected
        assert len(list(filter(None, deltas))) > 1
        with pytest.raises(openai.BadRequestError, match="contains the token"):
            client.chat.completions.create(model=model, messages=chats(["1<|laconic:latent|>="])[0])
        with pytest.raises(openai.BadRequestError, match="one user message"):
            client.chat.completions.create(model=model, messages=messages * 2)


def test_vllm_serve_continues_a_memory(tmp_path: Path) -> None:
    """The prompt_embeds of docs/vllm.md give the text of `laconic generate --memory`."""
    sizes = ("model.hidden_size=64", "model.num_attention_heads=2")  # heads of vLLM's attention on CPUs
    run, memory, file = train_tiny_run("autocompressor", tmp_path, *sizes), tmp_path / "a.safetensors", tmp_path / "p"
    (tmp_path / "a.txt").write_text("A sentence of a book. " * 3)
    assert call_cli("compress", run, tmp_path / "a.txt", "--out", memory) == 0
    flags = ("--to", "vllm", "--reader", run, "--prompt", "Book")
    assert call_cli("export", memory, *flags, "--out", file) == 0
    assert call_cli("export", run, "--out", tmp_path / "reader") == 0
    compressor = laconic.load(run)
    config = laconic.GenerationConfig(max_tokens=12, eos_token_ids=())
    expected = compressor.generate(["Book"], memory=compressor.load_memory(memory), config=config)[0].token_ids
    assert expected != compressor.generate(["Book"], config=config)[0].token_ids, "the memory does not matter"
    buffer = io.BytesIO()
    torch.save(load_file(file)["prompt_embeds"], buffer)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    with serve(
        tmp_path / "reader", "--enable-prompt-embeds", "--no-enable-prefix-caching", "--enforce-eager"
    ) as client:
        completion = client.completions.create(
            model=str(tmp_path / "reader"),
            prompt=None,
            max_tokens=12,
            temperature=0,
            extra_body={"prompt_embeds": encoded, "ignore_eos": True, "return_token_ids": True},
        )
    assert list(completion.choices[0].token_ids) == list(expected)
