"""Export of runs and memories for vLLM, without vLLM: transformers stands in for its models."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import laconic
from laconic.data.tokenizer_files import TOOL_TEMPLATE_FILE
from laconic.errors import InputError, UsageError
from laconic.experiment.export import export_run
from laconic.experiment.from_recipe.methods import set_stage
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.serving.served_thoughts import ServedThoughts
from laconic.serving.vllm_export import CONTROL_TOKENS, export_for_vllm
from laconic.serving.vllm_plugin import check_engine
from tests.compression.compressors import reader
from tests.conftest import RunCli, check_refused, needs
from tests.reasoning_runs import TEXTS, build_reasoning_run
from tests.runs import train_tiny_run

QUESTIONS = ["3+5=", "1+2*3=", "7=", "9*9+8-1="]
CONFIG = laconic.GenerationConfig(max_tokens=8)


def answer_ids(run: LoadedRun) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in Reasoner(run).generate(QUESTIONS, CONFIG)]


def load_reasoner(folder: Path) -> Reasoner:
    model = laconic.load(folder)
    assert isinstance(model, Reasoner)
    return model


class PackedModel:
    """A model of transformers that reads packed requests, as vLLM's does; each row attends to its own request."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        config = json.loads((folder / "config.json").read_text())
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.thoughts = ServedThoughts(config["laconic"], self.model.config.hidden_size, config["vocab_size"])
        self.thoughts.load_weights(load_file(folder / "laconic/thoughts.safetensors"))

    @torch.no_grad()
    def next_ids(self, rows: list[list[int]]) -> list[int]:
        ids = torch.tensor([id for row in rows for id in row])
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        request = torch.cat([torch.full((len(row),), i) for i, row in enumerate(rows)])
        visible = (request[:, None] == request) & (positions[:, None] >= positions)
        mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None, None]

        def run_model(embeds: torch.Tensor) -> torch.Tensor:
            output = self.model.base_model(
                inputs_embeds=embeds[None], attention_mask=mask, position_ids=positions[None]
            )
            return output.last_hidden_state[0]

        latent_rows = self.thoughts.find_rows(ids, positions)
        hidden = self.thoughts.run(run_model, self.model.get_input_embeddings()(ids), latent_rows)
        last = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
        return self.thoughts.mask_logits(self.model.get_output_embeddings()(hidden[last])).argmax(-1).tolist()

    def answer(self, prompts: list[list[int]], eos: int) -> list[tuple[int, ...]]:
        answers: list[list[int]] = [[] for _ in prompts]
        for _ in range(CONFIG.max_tokens):
            rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
            for answer, id in zip(answers, self.next_ids(rows), strict=True):
                if eos not in answer:
                    answer.append(id)
        return [tuple(answer) for answer in answers]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("kava", {"family": "llama", "M": 4, "T": 2}),
        ("pccot", {"family": "gpt2", "M": 1, "T": 1, "tied": True}),
        ("codi", {"family": "qwen3", "M": 3, "tied": True}),
        ("pccot", {"family": "qwen2", "M": 3, "T": 3, "vocabulary": "bytes", "data": TEXTS}),
        ("coconut", {"M": 2}),
        ("pccot", {"M": 3, "T": 0, "projection": "none"}),
    ],
)
def test_export_packed_transformers_model_answers_as_the_run(
    method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    needs("transformers")
    from transformers import AutoTokenizer

    run = build_reasoning_run(method, tmp_path / "run", **options)
    expected = answer_ids(run)
    export_for_vllm(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    eos = json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"][0]
    assert PackedModel(tmp_path / "out").answer(prompts, eos) == expected
    assert len(set(expected)) > 2, "the answers do not depend on the questions"


def test_export_for_vllm_has_no_template_of_the_base_model(tmp_path: Path) -> None:
    """A template for tools would ask for an answer without thoughts; a plain export keeps it."""
    run = build_reasoning_run("kava", tmp_path / "run", M=4, T=2)
    run.parts.tokenizer.files[TOOL_TEMPLATE_FILE] = b"tools"
    export_run(run, tmp_path / "plain")
    assert (tmp_path / "plain" / TOOL_TEMPLATE_FILE).read_bytes() == b"tools"
    export_for_vllm(run, tmp_path / "out")
    assert not (tmp_path / "out" / TOOL_TEMPLATE_FILE).exists()


def test_export_for_vllm_has_tokens_vectors_and_table(tmp_path: Path) -> None:
    run = build_reasoning_run("kava", tmp_path / "run", M=4, T=2)
    assert run.parts.latents is not None
    vectors, vocab_size = run.parts.latents.vectors.detach().clone(), run.parts.decoder.config.vocab_size
    export_for_vllm(run, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LaconicLlamaForCausalLM"]
    table = config["laconic"]
    assert (table["num_latents"], table["num_iterations"], table["schedule"]) == (4, 2, "jacobi")
    tokenizer = laconic.load_tokenizer(tmp_path / "out")
    ids = [tokenizer.backend.token_to_id(token) for token in CONTROL_TOKENS]
    assert ids == [table["begin_token_id"], table["latent_token_id"], table["end_token_id"]]
    weights = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(weights["model.embed_tokens.weight"][ids], vectors)
    assert config["vocab_size"] == vocab_size + 3
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}])
    begin, latent, end = CONTROL_TOKENS
    assert text == f"<bos>1+2={begin}{latent * 4}{end}ans"
    with pytest.raises(InputError, match="contains the token"):
        tokenizer.apply_chat_template([{"role": "user", "content": f"1{latent}="}])
    with pytest.raises(InputError, match="one user message"):
        tokenizer.apply_chat_template([{"role": "user", "content": "1="}] * 2)


@pytest.mark.parametrize("method", ["kava", "codi", "coconut", "cot", "nocot", "icot"])
def test_load_of_an_exported_run_answers_as_the_run(method: str, tmp_path: Path) -> None:
    run = build_reasoning_run(method, tmp_path / "run")
    expected = answer_ids(run)
    export_run(run, tmp_path / "plain")
    export_for_vllm(run, tmp_path / "vllm")
    for folder in ("plain", "vllm"):
        model = load_reasoner(tmp_path / folder)
        assert answer_ids(model.run) == expected, folder
        assert model.decoder.fingerprint == run.parts.decoder.fingerprint


@pytest.mark.medium
def test_export_run_command_keeps_what_answers_need(run_cli: RunCli, tmp_path: Path) -> None:
    run = train_tiny_run("codi", tmp_path)
    expected = answer_ids(load_reasoner(run).run)
    for flags in ((), ("--to", "vllm")):
        folder = tmp_path / f"out{len(flags)}"
        result = run_cli("export", run, *flags, "--out", folder)
        assert result.code == 0
        assert ("vllm serve" in result.err) == bool(flags)
        assert answer_ids(load_reasoner(folder).run) == expected


def test_export_ends_answers_at_the_eos_of_the_recipe(tmp_path: Path) -> None:
    data = 'source = "digits"\nformat = "digits"\nchain_steps = "all"\neos_token = "<unk>"'
    run = build_reasoning_run("kava", tmp_path / "run", data=data)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    run.parts.decoder.source_folder = tmp_path / "base"
    export_for_vllm(run, tmp_path / "out")
    tokenizer = laconic.load_tokenizer(tmp_path / "out")
    assert tokenizer.special_tokens["eos_token"] == "<unk>"
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.eos_token_id]


def test_export_suppresses_padding_unless_it_ends_the_answer(tmp_path: Path) -> None:
    run = build_reasoning_run("kava", tmp_path)
    eos = run.parts.tokenizer.eos_token_id
    for pad, suppressed in ((0, [0]), (eos, []), (None, [])):  # SmolLM2 pads with its eos
        run.parts.decoder.config = replace(run.parts.decoder.config, pad_token_id=pad)
        export_for_vllm(run, tmp_path / f"out-{pad}")
        config = json.loads((tmp_path / f"out-{pad}/config.json").read_text())
        assert config["laconic"]["suppress_token_ids"] == suppressed


def test_export_of_coconut_has_the_latents_of_its_stage(tmp_path: Path) -> None:
    run = replace(build_reasoning_run("coconut", tmp_path / "run", M=3), epoch=0)
    set_stage(run.method, 0)
    expected = answer_ids(run)
    export_for_vllm(run, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["laconic"]["num_latents"] == 1
    assert answer_ids(load_reasoner(tmp_path / "out").run) == expected


def test_export_for_vllm_refuses_what_vllm_would_answer_otherwise(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="family opt: the vLLM plug-in has llama"):
        export_for_vllm(build_reasoning_run("kava", tmp_path, family="opt"), tmp_path / "out")
    with pytest.raises(UsageError, match="Qwen's own tokenizer"):
        export_for_vllm(build_reasoning_run("kava", tmp_path, family="qwen2"), tmp_path / "out")
    file = 'source = "file"\npath = "x.jsonl"\nchain_steps = "all"\n'
    data = file + 'format = "codi"\nseparator = "eos"\nanswer_prompt = "ans"'
    with pytest.raises(UsageError, match="contains eos tokens, but vLLM stops"):
        export_for_vllm(build_reasoning_run("coconut", tmp_path, data=data), tmp_path / "out")
    run = build_reasoning_run("kava", tmp_path)
    run.parts.tokenizer.backend.add_special_tokens([CONTROL_TOKENS[1]])
    with pytest.raises(InputError, match=r"has a token .* already"):
        export_for_vllm(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def engine_config(**changes: Any) -> Any:
    values = {
        "enable_chunked_prefill": False, "long_prefill_token_threshold": 0, "enable_prefix_caching": False,
        "pipeline_parallel_size": 1, "enforce_eager": True, "enable_prompt_embeds": False, "model": "DIR", **changes,
    }  # fmt: skip
    table = SimpleNamespace(**values)
    return SimpleNamespace(scheduler_config=table, model_config=table, cache_config=table, parallel_config=table)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"enable_chunked_prefill": True}, "--no-enable-chunked-prefill"),
        ({"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
        ({"enforce_eager": False}, "--enforce-eager"),
        ({"enable_prompt_embeds": True}, "no --enable-prompt-embeds"),
    ],
)
def test_check_engine_names_the_missing_flag(change: dict[str, Any], flag: str) -> None:
    check_engine(engine_config())
    with pytest.raises(UsageError, match=f"latent thoughts need {flag}; DIR/vllm.yaml"):
        check_engine(engine_config(**change))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_latents", "4", r"laconic.num_latents: Input should be a valid integer"),
        ("num_iterations", None, "a number for jacobi"),
        ("latent_token_id", 24, "three different ids"),
        ("end_token_id", 4000, "names token 4000, but the model has 27"),
        ("end_token_id", None, "laconic.end_token_id"),
        ("projection_width", 65, "size mismatch for projection.inner.weight"),
        ("projection", "none", "Unexpected key"),
    ],
)
def test_served_thoughts_refuse_a_wrong_table(key: str, value: object, message: str, tmp_path: Path) -> None:
    export_for_vllm(build_reasoning_run("kava", tmp_path / "run"), tmp_path / "out")
    table = json.loads((tmp_path / "out/config.json").read_text())["laconic"]
    table[key] = value
    with pytest.raises(InputError, match=message) as error:
        ServedThoughts(table, 64, 27).load_weights(load_file(tmp_path / "out/laconic/thoughts.safetensors"))
    assert "\n" not in str(error.value)


def test_served_thoughts_need_a_table() -> None:
    with pytest.raises(InputError, match="laconic: Input should be an object"):
        ServedThoughts(None, 64, 27)


def test_served_thoughts_find_rows_of_no_other_request() -> None:
    ids = torch.tensor([5, 1, 2, 2, 3, 2, 2, 1, 2, 2])  # begin 1, latent 2; the second request begins with a latent
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 0, 1, 5])
    table = {"method": "kava", "step": 1, "num_latents": 2, "schedule": "sequential", "projection": "none"}
    table |= {"projection_width": 4, "begin_token_id": 1, "latent_token_id": 2, "end_token_id": 3}
    assert ServedThoughts(table, 4, 6).find_rows(ids, positions).tolist() == [2, 3, 6, 8]


@pytest.mark.medium
def test_export_of_a_memory_gives_the_text_of_generate(run_cli: RunCli, tmp_path: Path) -> None:
    run = train_tiny_run("autocompressor", tmp_path)
    (tmp_path / "a.txt").write_text("A sentence of a book. " * 3)
    memory, file = tmp_path / "a.mem", tmp_path / "prompt.safetensors"
    assert run_cli("compress", run, tmp_path / "a.txt", "--out", memory).code == 0
    command = ("export", memory, "--to", "vllm", "--prompt", "Book", "--out", file)
    assert "--reader: missing" in run_cli(*command).err
    plain = run_cli(*command, "--reader", "stories260k")
    check_refused(plain, 2, "--reader stories260k: not an AutoCompressor")
    result = run_cli(*command, "--reader", run, "--dry-run")
    check_refused(result, 2, "--dry-run: only with --push")
    assert not file.exists()
    result = run_cli(*command[:-1], tmp_path / "a.txt", "--reader", run)
    check_refused(result, 73, "a.txt exists; delete it or choose another file")
    (tmp_path / "cut.mem").write_bytes(memory.read_bytes()[:900])
    result = run_cli("export", tmp_path / "cut.mem", *command[2:], "--reader", run)
    check_refused(result, 76, "damaged")
    assert run_cli(*command, "--reader", run).code == 0
    compressor = laconic.load(run)
    expected = compressor.generate(["Book"], memory=compressor.load_memory(memory), config=CONFIG)[0].token_ids
    embeds = load_file(file)["prompt_embeds"]
    config = laconic.GenerationConfig(max_tokens=CONFIG.max_tokens, eos_token_ids=compressor.stop_token_ids)
    assert laconic.generate(compressor.decoder, inputs_embeds=embeds[None], config=config)[0].token_ids == expected
    alone = compressor.prompt_embeddings(compressor.load_memory(memory))
    assert torch.equal(embeds[: len(alone)], alone)


def test_prompt_embeddings_refuse_other_positions() -> None:
    compressor = reader("gpt2", summary_positions="zero")
    memory = compressor.compress(["A sentence of a book."])
    with pytest.raises(UsageError, match="consecutive"):
        compressor.prompt_embeddings(memory, "x")
    with pytest.raises(UsageError, match="memory of 2 texts"):
        reader().prompt_embeddings(reader().compress(["A text.", "Another."]), "x")
