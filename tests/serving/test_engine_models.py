"""The engine gives runs of every family what their `generate` gives."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

import laconic
from laconic.cli.commands.serve import set_tolerance
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import UsageError
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.generation.config import GenerationConfig
from laconic.serving import served_model
from laconic.serving.engine import Engine, StepInput
from laconic.serving.http.prompts import encode_question
from laconic.serving.ragged import RaggedDecoder
from tests.models.fixtures import ROPES, fresh
from tests.runs import train_tiny_run
from tests.serving.answers_only import AnswersOnly, PromptsOnly
from tests.serving.receiver import Receiver, run_to_end, submit
from tests.tolerances import FLOAT32, error


@cache
def tiny_reasoner() -> Reasoner:
    with tempfile.TemporaryDirectory() as folder:
        return cast(Reasoner, laconic.load(train_tiny_run("nocot", Path(folder))))


pytestmark = pytest.mark.usefixtures("unchecked")
STORIES = Path(laconic.__file__).parent / "checkpoints/stories260k"
QUESTIONS = ("1+2*3=", "4*5-6=", "7-3+12=", "9+9+9=", "2*2*2=")
STOP_HEAD = ('latents.length_policy="stop_head"',)
LORA = ("train.trainable=lora", "lora.rank=2", "lora.alpha=4", "train.learning_rate=0.1")


SLOW_COT = pytest.param("cot", (), marks=pytest.mark.slow)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("method", "overrides"),
    [("kava", ()), ("kava", STOP_HEAD), ("kava", LORA), ("codi", ()), ("coconut", ()), ("nocot", ()), SLOW_COT],
)
def test_engine_answers_as_reasoner_generate(
    method: str, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reasoner = cast(Reasoner, laconic.load(train_tiny_run(method, tmp_path, *overrides)))
    engine = Engine(reasoner, max_batch_size=3)
    assert isinstance(engine.served.executor, RaggedDecoder)
    configs = [
        GenerationConfig(max_tokens=6 + i, temperature=0.8 * (i % 2), seed=i, min_tokens=2 * (i == 2))
        for i in range(len(QUESTIONS))
    ]
    receivers = [submit(engine, question=q, config=c) for q, c in zip(QUESTIONS, configs, strict=True)]
    run_to_end(engine)
    for question, config, receiver in zip(QUESTIONS, configs, receivers, strict=True):
        (answer,) = reasoner.generate(question, config)
        assert (receiver.token_ids, receiver.text) == (list(answer.token_ids), answer.text)
        assert receiver.finish.latent_passes == answer.passes.latent
        assert receiver.finish.latent_positions == (2 if method in ("kava", "codi", "coconut") else 0)
    if overrides == LORA:
        merged, adapted = (d(d.embed(torch.tensor([[5, 6, 7]]))) for d in (engine.served.decoder, reasoner.decoder))
        assert error(merged.hidden_states, adapted.hidden_states) <= FLOAT32


@pytest.mark.medium
def test_engine_ends_jacobi_iterations_as_reasoner_generate_does(tmp_path: Path) -> None:
    loaded = cast(Reasoner, laconic.load(train_tiny_run("kava", tmp_path, "latents.jacobi_iterations=4")))
    reasoner = replace(loaded, jacobi_tolerance=1e-6)  # two latents are exact after two iterations
    engine, config = Engine(reasoner, max_batch_size=3), GenerationConfig(max_tokens=6)
    receivers = [submit(engine, question=q, config=config) for q in QUESTIONS]
    run_to_end(engine)
    for question, receiver in zip(QUESTIONS, receivers, strict=True):
        (answer,), (fixed,) = reasoner.generate(question, config), loaded.generate(question, config)
        assert (receiver.text, receiver.finish.latent_passes) == (answer.text, answer.passes.latent)
        assert (answer.token_ids, answer.passes) == (fixed.token_ids, fixed.passes)
        assert answer.passes.latent == 2
        steps = engine.num_steps
        submit(engine, question=question, config=config)
        run_to_end(engine)
        assert engine.num_steps - steps == answer.passes.total, "no pass for eot and the answer prompt alone"
    with pytest.raises(UsageError, match="no Jacobi iterations"):
        replace(tiny_reasoner(), jacobi_tolerance=0.1)
    assert set_tolerance(loaded, 1e-6) == reasoner
    with pytest.raises(UsageError, match=r"--jacobi-tolerance 0\.1: this model has no Jacobi iterations"):
        set_tolerance(cast(LanguageModel, laconic.load(STORIES)), 0.1)


@pytest.mark.medium
@pytest.mark.parametrize("is_stock", [True, False])
def test_engine_thinks_about_questions_together_and_between_tokens(
    is_stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass per iteration for all that wait, or as much of it as an answer that runs can wait for."""
    keys = ("latents.num_latents=4", "latents.jacobi_iterations=3")
    reasoner = cast(Reasoner, laconic.load(train_tiny_run("kava", tmp_path, *keys)))
    monkeypatch.setattr(served_model, "is_stock_decoder", lambda decoder: is_stock)
    engine, passes, limit = Engine(reasoner), list[list[tuple[bool, int]]](), [10**6]
    forward = engine.forward

    def forward_and_log(segments: Sequence[StepInput]) -> Sequence[Tensor | Exception]:
        passes.append([(s.next_id is not None, len(inputs)) for s, inputs in segments])
        return forward(segments)

    monkeypatch.setattr(engine, "forward", forward_and_log)
    monkeypatch.setattr(engine.chunk_sizer, "choose", lambda num_decoding: limit[0])
    config = GenerationConfig(max_tokens=4)
    expected = [list(answer.token_ids) for answer in reasoner.generate(QUESTIONS, config)]
    together = [submit(engine, question=q, config=config) for q in QUESTIONS]
    while not all(r.tokens for r in together):
        engine.run_once()
    assert [len(p) for p in passes] == [len(QUESTIONS)] * 4, "question, two iterations, the third with the suffix"
    assert [[n for _, n in p] for p in passes[1:3]] == [[3] * len(QUESTIONS), [2] * len(QUESTIONS)]
    run_to_end(engine)
    assert [r.token_ids for r in together] == expected

    running = submit(engine, question=QUESTIONS[0], config=GenerationConfig(max_tokens=60, min_tokens=60))
    while not running.tokens:
        engine.run_once()
    passes.clear()
    limit[0] = 5
    beside = [submit(engine, question=q, config=config) for q in QUESTIONS]
    run_to_end(engine)
    assert [r.token_ids for r in beside] == expected
    assert len(running.tokens) == 60
    assert all(segments[0] == (True, 1) for segments in passes), "a token of the running answer in every pass"
    assert max(sum(n for is_decoding, n in segments if not is_decoding) for segments in passes) == 5


def test_engine_continues_prompts_that_have_been_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a method without stepwise prompts, such as one that reads documents first."""
    loaded = cast(Reasoner, laconic.load(train_tiny_run("kava", tmp_path)))
    reasoner = Reasoner(replace(loaded.run, method=PromptsOnly(loaded.method)))
    for is_stock in (True, False):
        monkeypatch.setattr(served_model, "is_stock_decoder", lambda decoder, is_stock=is_stock: is_stock)
        engine = Engine(reasoner)
        for max_tokens in (1, 6):
            config = GenerationConfig(max_tokens=max_tokens)
            receivers = [submit(engine, question=q, config=config) for q in QUESTIONS]
            run_to_end(engine)
            for question, receiver in zip(QUESTIONS, receivers, strict=True):
                (answer,) = loaded.generate(question, config)
                assert (receiver.token_ids, receiver.text) == (list(answer.token_ids), answer.text)
                assert receiver.finish.latent_passes == answer.passes.latent


def test_engine_question_that_exceeds_a_position_table_fails_alone(tmp_path: Path) -> None:
    """The latents do not count as tokens of the question, but need positions of the table too."""
    reasoner = cast(
        Reasoner,
        laconic.load(train_tiny_run("kava", tmp_path, "model.family=gpt2", "model.max_position_embeddings=40")),
    )
    engine = Engine(reasoner)
    max_tokens = 40 - int(encode_question(reasoner, QUESTIONS[0]).question_mask.sum())
    bad = submit(engine, question=QUESTIONS[0], config=GenerationConfig(max_tokens=max_tokens))
    good = submit(engine, question=QUESTIONS[1], config=GenerationConfig(max_tokens=4))
    run_to_end(engine)
    assert isinstance(bad.events[-1], UsageError)
    assert "exceeds the 40 positions" in str(bad.events[-1])
    assert good.text == reasoner.generate(QUESTIONS[1], GenerationConfig(max_tokens=4))[0].text


def test_engine_continues_the_cache_of_a_memory() -> None:
    """Slots that are left out, and positions that text before the memory has."""
    model = cast(LanguageModel, laconic.load(STORIES))
    decoder, tokenizer = model.decoder, model.tokenizer
    ids = torch.tensor([tokenizer.encode("Lily had a red ball. She liked to play with it in the park.")])
    cache = decoder(decoder.embed(ids)).cache
    memory = cache.with_valid(torch.arange(cache.S)[None] % 3 != 1)
    config = GenerationConfig(max_tokens=12)
    question = tokenizer.encode("Tom", add_special_tokens=False)
    engine = Engine(model, prefill_chunk_size=2)
    cases = [(memory, None), (memory, 60), (memory, 4)]
    receivers = [submit(engine, question, state=s, first_position=p, config=config) for s, p in cases]
    plain = submit(engine, tokenizer.encode("Tom"), config=config)
    run_to_end(engine)
    for (state, position), receiver in zip(cases, receivers, strict=True):
        first = None if position is None else torch.tensor([position])
        (alone,) = laconic.generate(
            decoder, tokenizer, input_ids=[question], state=state, first_positions=first, config=config
        )
        assert (receiver.token_ids, receiver.text) == (alone.token_ids, alone.text)
    assert plain.token_ids == model.generate("Tom", config)[0].token_ids


def test_engine_reads_prompts_beyond_the_original_context_of_longrope_as_generate_does() -> None:
    """Keys are rotated for the length at the end of their step, so chunks would change the answer."""
    decoder = fresh("llama", vocab_size=257, max_position_embeddings=256, rope=ROPES["longrope"])
    model = LanguageModel(decoder, build_byte_tokenizer())
    prompts = [[1 + i * 7 % 90 for i in range(87)], [5, 6, 7]]
    config = GenerationConfig(max_tokens=12, eos_token_ids=())
    engine = Engine(model, prefill_chunk_size=16)
    receivers = [submit(engine, prompt, config=config) for prompt in prompts]
    run_to_end(engine)
    expected = [laconic.generate(decoder, input_ids=[prompt], config=config)[0].token_ids for prompt in prompts]
    assert [receiver.token_ids for receiver in receivers] == expected


@pytest.mark.parametrize("overrides", [(), (*LORA, "compression.adapter_scope=write")])
def test_engine_reads_summary_vectors(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter that only writes, the base model reads, also while another thread writes a memory."""
    monkeypatch.chdir(tmp_path)
    compressor = cast(TextCompressor, laconic.load(train_tiny_run("autocompressor", tmp_path, *overrides)))
    memory = compressor.compress(["A text of two segments, which is not very long."])
    prompts = ["Who arrived?", "What is", "Th"]
    encoded = compressor.prepare_prompts(prompts, memory)
    with torch.no_grad():
        cache = compressor.method.segment_model.prefill_memory(memory)  # as the server reads a memory
    assert cache is not None
    assert encoded.cache is not None
    assert cache.is_equal(encoded.cache.select_rows([0]))
    engine = Engine(compressor)
    config = GenerationConfig(max_tokens=6, eos_token_ids=compressor.stop_token_ids)
    receivers = list[Receiver]()
    for i, ids in enumerate(encoded.prompt_ids):
        cache = None if encoded.cache is None else encoded.cache.select_rows([i])
        first = None if encoded.positions is None else int(encoded.positions[i])
        receivers.append(submit(engine, ids, state=cache, first_position=first, config=config))
    run_to_end(engine)
    assert isinstance(engine.served.executor, RaggedDecoder)
    hidden = [decoder(decoder.embed(torch.tensor([[5, 6]]))) for decoder in (compressor.decoder, engine.served.decoder)]
    assert torch.equal(hidden[0].hidden_states, hidden[1].hidden_states) == (not overrides)
    alone = compressor.generate(prompts, memory=memory, config=config)
    assert [r.token_ids for r in receivers] == [g.token_ids for g in alone]
    assert [r.text for r in receivers] == [g.text for g in alone]


@pytest.mark.medium
@pytest.mark.parametrize("overrides", [(), ("mixer.kind=attention",)])
def test_engine_reads_fast_weights(overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = cast(NestedTextModel, laconic.load(train_tiny_run("hope", tmp_path, *overrides)))
    states = [None, model.compress(["A text that changes the fast weights."]), model.compress(["Another."])]
    configs = [
        GenerationConfig(max_tokens=5, seed=1, temperature=0.5),
        GenerationConfig(max_tokens=7, update_on_prompt=True),
        GenerationConfig(max_tokens=6, update_on_prompt=False, update_on_output=True),
    ]
    engine = Engine(model, prefill_chunk_size=3)
    prompts = ["Who arrived?", "What", "A sentence"]
    receivers = [
        submit(engine, model.tokenizer.encode(p), state=s, config=replace(c, eos_token_ids=model.stop_token_ids))
        for p, s, c in zip(prompts, states, configs, strict=True)
    ]
    run_to_end(engine)
    for prompt, state, config, receiver in zip(prompts, states, configs, receivers, strict=True):
        alone = model.generate([prompt], config, memory=state)[0]
        assert (receiver.token_ids, receiver.text) == (alone.token_ids, alone.text)


def test_engine_answers_with_a_method_that_only_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = cast(Reasoner, laconic.load(train_tiny_run("cot", tmp_path))).run
    reasoner = Reasoner(replace(run, method=AnswersOnly(run.method)))
    engine = Engine(reasoner)
    configs = [GenerationConfig(max_tokens=6), GenerationConfig(max_tokens=4, temperature=1.0, seed=3)]
    receivers = [submit(engine, question=q, config=c) for q, c in zip(QUESTIONS, configs, strict=False)]
    run_to_end(engine)
    for question, config, receiver in zip(QUESTIONS, configs, receivers, strict=False):
        (answer,) = reasoner.generate(question, config)
        assert (receiver.token_ids, receiver.text) == (list(answer.token_ids), answer.text)
        stop = answer.text[1:3]
        stopped = submit(engine, question=question, config=replace(config, stop_strings=stop))
        run_to_end(engine)
        assert (stopped.text, stopped.finish.reason) == (answer.text[: answer.text.index(stop)], "stop")
        assert len(stopped.token_ids) < len(answer.token_ids)
