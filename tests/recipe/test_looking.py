"""A run as inspection takes it: its answers are the method's, selectors go by one pass, chains are cut as they come."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.core.answering import Writing
from laconic.core.block import rotated
from laconic.core.contract import Example
from laconic.data.pieces import Encoder
from laconic.evaluation.protocols import DIGIT
from laconic.recipe import looking, models
from laconic.recipe.methods import asked, method_of
from laconic.recipe.opened import Opened, start
from laconic.recipe.questions import question_set, single
from laconic.recipe.read import read
from tests.verbs.test_train import TINY

CPU = torch.device("cpu")
QUESTIONS = ("3 + 4 * 2 =", "7 * 3 + 1 =")


def opened(folder: Path, *keys: str) -> Opened:
    """A run as it begins, of the digits task with marks in its chains."""
    text = TINY.replace("operations = 2,", 'operations = 2, style = "marks", test_rows = 9,')
    if "thinking.mode=sequential" in keys:
        text = text.replace("rounds = 1\n", "")
    (folder / "tiny.toml").write_text(text)
    recipe = read(folder / "tiny.toml", keys)[0]
    decoder, tokenizer = start(recipe, CPU)
    parts = models.fresh(recipe, decoder, tokenizer, "")
    return Opened(folder, recipe, 0, parts, method_of(parts, recipe, 10).eval())


def writing(run: Opened) -> Writing:
    return Writing(
        3, (run.parts.tokenizer.eos or 0,), run.parts.tokenizer.decode, (run.parts.tokenizer.encode("ans")[1],)
    )


CHANGED = {
    "kava": (),
    "codi": ("method=codi", "thinking.mode=sequential"),
    "coconut": ("method=coconut", "thinking.mode=sequential", "thinking.project=none",
                "staging.max_stage=1", "staging.per_step=2"),
}  # fmt: skip


@pytest.mark.parametrize("method", ["kava", "codi", "coconut"])
def test_what_follows_thoughts_is_the_methods_own_answer(tmp_path: Path, method: str) -> None:
    run = opened(tmp_path, *CHANGED[method])
    told = writing(run)
    found = looking.subject(run, "run", CPU, told)
    batch = asked(run.parts, run.recipe, QUESTIONS)
    rolled = found.think(batch, trace=True)
    answers = run.method.answer(batch, told)  # pyright: ignore
    assert found.follow(batch, rolled.state, rolled.passes).texts == answers.texts
    assert (found.left is None) == (method == "coconut")
    assert found.words(run.parts.tokenizer.encode("7")[1]) == "7"


def test_other_rounds_are_for_one_call(tmp_path: Path) -> None:
    run = opened(tmp_path)
    found = looking.subject(run, "run", CPU, writing(run))
    batch = asked(run.parts, run.recipe, QUESTIONS)
    assert found.think(batch, rounds=0).passes.think == 0
    assert found.think(batch).passes.think == found.rounds == 1


@pytest.mark.parametrize("space", ["pre_rope", "post_rope"])
def test_every_selector_goes_by_the_teachers_one_pass(tmp_path: Path, space: str) -> None:
    run = opened(tmp_path, f"matching.key_space={space}", "keeping.lam=0.3")
    batch: Any = question_set(run, "test", DIGIT, rows=9).source.batch([0, 3], 0, 0)
    left = looking.teaching(run, run.recipe)(batch)
    taught = run.method.teach(batch)  # pyright: ignore
    assert (left.own, left.matched, left.taught) == ("rkv", (0,), True)
    assert tuple(left.chosen) == looking.SELECTORS
    mine, I, R = left.chosen["rkv"], left.I[0], left.R[0]
    assert torch.equal(mine.kept[0].index, taught.kept[0].index)
    assert torch.equal(mine.S[0], taught.S[0])
    assert torch.allclose(mine.S[0], 0.3 * I + 0.7 * R)
    assert torch.equal(left.chosen["attention"].S[0], I)
    assert torch.equal(left.chosen["cosine"].S[0], R)
    assert left.chosen["crop"].kept[0].index.tolist() == [[[0, 1]] * 2] * 2
    assert left.chosen["uniform"].kept[0].index.tolist() == [[[0, 9]] * 2] * 2
    random = left.chosen["random"].kept[0].index
    assert torch.equal(random[:, 0], random[:, 1])  # one draw for all heads
    assert torch.equal(taught.k_t[0], (left.before if space == "pre_rope" else left.keys)[0])


def test_keys_before_rotation_become_those_after_it(tmp_path: Path) -> None:
    run = opened(tmp_path)
    batch: Any = question_set(run, "test", DIGIT, rows=9).source.batch([1], 0, 0)
    left, decoder = looking.teaching(run, run.recipe)(batch), run.parts.decoder
    Nq, Nc = batch.question.shape[1], batch.chain.shape[1]
    positions = torch.arange(Nq + Nc)[None]
    live = torch.ones_like(positions, dtype=torch.bool)
    frame = decoder.frame(positions, live, Nq, None, torch.float32, whole=False, eager=False)
    assert torch.allclose(rotated(left.before[0], frame), left.keys[0], atol=1e-6)


def test_a_run_that_matches_nothing_is_shown_by_the_recipe_of_another(tmp_path: Path) -> None:
    run, other = opened(tmp_path, "method=pccot"), opened(tmp_path, "keeping.select=crop", "matching.kv_layers=[0]")
    batch: Any = question_set(run, "test", DIGIT, rows=9).source.batch([0], 0, 0)
    left = looking.subject(run, "run", CPU, writing(run), other.recipe).left
    assert left is not None
    assert (left(batch).own, left(batch).matched, left(batch).taught) == ("crop", (0,), False)


def test_a_written_chain_is_cut_before_its_prompt(tmp_path: Path) -> None:
    run = opened(tmp_path)
    encoder = Encoder(run.parts.tokenizer, run.recipe.data)
    row = encoder.row(Example("q", QUESTIONS[0], (), "4"))
    ids = run.parts.tokenizer.encode("<<7>> 4 ; 3 ans 4 <eos>")[1:]
    words = [run.parts.tokenizer.decode([i]) for i in ids]
    made = looking.behind(encoder, row, ids, [ids[-1]])
    assert [words[ids.index(i)] for i in made.chain] == ["<<", "7", ">>", "4", ";", "3"]
    assert made.chain_step == (0, 0, 0, 1, 1, 2)
    assert (made.answer, made.number, made.distil) == (tuple(ids[6:]), (1, 2), 0)
    for unfinished in (ids[:-1], ids[:5], [*ids[:7], ids[-1]]):  # no end, no prompt, no number
        found = looking.behind(encoder, row, unfinished, [ids[-1]])
        assert (found.answer, found.number) == (row.answer, row.number)
        assert found.chain == tuple(i for i in unfinished if i != ids[-1])


def test_a_chain_of_ones_own_is_cut_as_in_training(tmp_path: Path) -> None:
    found: list[looking.Chained] = []
    for keys in ((), ("data.chain=drop_last",)):
        run = opened(tmp_path, *keys)
        found.append(looking.given(run, single(run, QUESTIONS[0], ("< < 7 > >", "< < 4 > >"), "4", DIGIT)))
    whole, short = found
    assert (whole.batch.chain.shape[1], short.batch.chain.shape[1]) == (10, 5)
    assert whole.source == "as given"
    assert short.source == "as given, without its last step, which is left out in training"
