"""A run as inspection takes it: its answers are the method's, selectors go by one pass, chains are cut as they come."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic import load_tokenizer
from laconic.batches import ReasoningExample
from laconic.config.load import load_recipe
from laconic.data.reasoning.answer_matching import DIGIT
from laconic.data.reasoning.encode import ReasoningEncoder
from laconic.evaluation.inspection import question as inspection_run
from laconic.evaluation.inspection.inspected_run import INSPECTED_POLICIES, InspectedRun
from laconic.evaluation.reasoning.question_sets import load_question_set, single_question
from laconic.experiment.from_recipe import build_model
from laconic.experiment.from_recipe.methods import build_method, build_questions_batch
from laconic.experiment.load_run import LoadedRun, load_initial_model
from laconic.latent.answering import AnswerDecoding
from laconic.models.block import build_context
from tests.latent.batches import select_in_all_layers
from tests.tiny_recipes import TINY_RECIPE

CPU = torch.device("cpu")
QUESTIONS = ("3 + 4 * 2 =", "7 * 3 + 1 =")


def new_run(folder: Path, *keys: str) -> LoadedRun:
    """A run as it begins, of the digits task with marks in its chains."""
    text = TINY_RECIPE.replace(
        "num_operations = 2,", 'num_operations = 2, chain_style = "bracket_tokens", test_rows = 9,'
    )
    if "latents.schedule=sequential" in keys:
        text = text.replace("jacobi_iterations = 1\n", "")
    (folder / "tiny.toml").write_text(text)
    recipe = load_recipe(folder / "tiny.toml", keys)[0]
    decoder, tokenizer, _ = load_initial_model(recipe, CPU)
    parts = build_model.build_parts(recipe, decoder, tokenizer, "")
    return LoadedRun(folder, recipe, 0, parts, build_method(parts, recipe, 10).eval())


def writing(run: LoadedRun) -> AnswerDecoding:
    return AnswerDecoding(
        3, (run.parts.tokenizer.eos_token_id or 0,), run.parts.tokenizer.decode, (run.parts.tokenizer.encode("ans")[1],)
    )


CHANGED = {
    "kava": (),
    "codi": ("method=codi", "latents.schedule=sequential"),
    "coconut": ("method=coconut", "latents.schedule=sequential", "latents.projection=none",
                "coconut.max_stage=1", "coconut.latents_per_step=2"),
}  # fmt: skip


@pytest.mark.parametrize("method", ["kava", "codi", "coconut"])
def test_answer_after_latents_is_the_methods_answer(tmp_path: Path, method: str) -> None:
    run = new_run(tmp_path, *CHANGED[method])
    results = writing(run)
    result = InspectedRun(run, "run", results)
    batch = build_questions_batch(run.parts.tokenizer, run.recipe.data, QUESTIONS)
    rolled = result.think(batch, record_passes=True)
    answers = run.method.answer(batch, results)  # pyright: ignore
    assert result.answer(batch, rolled).texts == answers.texts
    assert result.has_teacher == (method != "coconut")
    assert result.decode_token(run.parts.tokenizer.encode("7")[1]) == "7"


def test_decode_token_keeps_the_space_before_a_word_of_sentencepiece() -> None:
    tokenizer = load_tokenizer("stories260k")
    run: Any = SimpleNamespace(run=SimpleNamespace(parts=SimpleNamespace(tokenizer=tokenizer)))
    ids = tokenizer.encode("He likes a red ball!", add_special_tokens=False)
    assert "".join(InspectedRun.decode_token(run, i) for i in ids) == " He likes a red ball!"
    assert InspectedRun.decode_token(run, tokenizer.bos_token_id) == "<s>"


def test_think_with_other_iterations_is_for_one_call(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    result = InspectedRun(run, "run", writing(run))
    batch = build_questions_batch(run.parts.tokenizer, run.recipe.data, QUESTIONS)
    assert result.think(batch, iterations=0).passes[0].latent == 0
    assert result.think(batch).passes[0].latent == result.num_iterations == 1


@pytest.mark.parametrize("space", ["pre_rope", "post_rope"])
def test_teacher_chain_scores_every_policy_from_one_pass(tmp_path: Path, space: str) -> None:
    run = new_run(tmp_path, f"kv_distillation.key_space={space}", "kv_selection.importance_weight=0.3")
    batch: Any = load_question_set(run, "test", DIGIT, limit=9).source.batch([0, 3], 0, 0)
    left = InspectedRun(run, "run", writing(run)).teacher_chain(batch)
    expected = select_in_all_layers(run.method.eval(), batch)[0]  # pyright: ignore
    assert (left.policy, left.matched_layers, left.is_distilled) == ("rkv", (0,), True)
    assert tuple(left.choices) == INSPECTED_POLICIES
    assert torch.equal(left.choices["rkv"][0].index, expected.columns.index)
    for policy, scores in (("attention", expected.I), ("cosine", expected.R)):
        best = scores.topk(2, -1).indices.sort(-1).values
        assert torch.equal(left.choices[policy][0].index, best)
    assert left.choices["crop"][0].index.tolist() == [[[0, 1]] * 2] * 2
    assert left.choices["uniform"][0].index.tolist() == [[[0, 9]] * 2] * 2
    random = left.choices["random"][0].index
    assert torch.equal(random[:, 0], random[:, 1])  # one draw for all heads
    assert torch.equal(expected.k_t, left.keys_values[space == "pre_rope"][0])


def test_teacher_chain_keys_before_rope_rotate_to_its_keys(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    batch: Any = load_question_set(run, "test", DIGIT, limit=9).source.batch([1], 0, 0)
    left, decoder = InspectedRun(run, "run", writing(run)).teacher_chain(batch).keys_values, run.parts.decoder
    Nq, Nc = batch.question_ids.shape[1], batch.chain_ids.shape[1]
    positions = torch.arange(Nq + Nc)[None]
    live = torch.ones_like(positions, dtype=torch.bool)
    frame = build_context(
        decoder.config, positions, live, Nq, None, torch.float32, backend="sdpa", all_valid=False, needs_visible=False
    )
    block: Any = decoder.layers[0]
    assert torch.allclose(block.apply_rope(left.keys_before_rope[0], frame), left.keys[0], atol=1e-6)


def test_teacher_chain_takes_the_selection_of_another_recipe(tmp_path: Path) -> None:
    run, other = (
        new_run(tmp_path, "method=pccot"),
        new_run(tmp_path, "kv_selection.policy=crop", "kv_distillation.layers=[0]"),
    )
    batch: Any = load_question_set(run, "test", DIGIT, limit=9).source.batch([0], 0, 0)
    left = InspectedRun(run, "run", writing(run), other.recipe).teacher_chain(batch)
    assert (left.policy, left.matched_layers, left.is_distilled) == ("crop", (0,), False)


def test_append_generated_chain_cuts_before_the_answer_prompt(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    encoder = ReasoningEncoder(run.parts.tokenizer, run.recipe.data)
    row = encoder.encode_example(ReasoningExample("q", QUESTIONS[0], (), "4"))
    ids = run.parts.tokenizer.encode("<<7>> 4 ; 3 ans 4 <eos>")[1:]
    words = [run.parts.tokenizer.decode([i]) for i in ids]
    built = inspection_run.append_generated_chain(encoder, row, ids, [ids[-1]])
    assert [words[ids.index(i)] for i in built.chain_ids] == ["<<", "7", ">>", "4", ";", "3"]
    assert built.chain_step_index == (0, 0, 0, 1, 1, 2)
    assert (built.answer_ids, built.number_span, built.distill_column) == (tuple(ids[6:]), (1, 2), 0)
    for unfinished in (ids[:-1], ids[:5], [*ids[:7], ids[-1]]):  # no end, no prompt, no number
        result = inspection_run.append_generated_chain(encoder, row, unfinished, [ids[-1]])
        assert (result.answer_ids, result.number_span) == (row.answer_ids, row.number_span)
        assert result.chain_ids == tuple(i for i in unfinished if i != ids[-1])


def test_with_given_chain_drops_the_last_step_as_in_training(tmp_path: Path) -> None:
    steps = ("< < 7 > >", "< < 4 > >")
    for keys, num_tokens, source in (
        ((), 10, "as given"),
        (("data.chain_steps=drop_last",), 5, "as given, without its last step, which training leaves out"),
    ):
        run = new_run(tmp_path, *keys)
        batch: Any = single_question(run, QUESTIONS[0], steps, "4", DIGIT).source.batch([0], 0, 0)
        assert batch.chain_ids.shape[1] == num_tokens
        assert inspection_run.describe_given_chain(run, steps) == source
