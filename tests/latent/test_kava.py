"""Laws of a KaVa step: what its terms leave alone, accumulation, the question shared or not, rounds, short chains."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.errors import UsageError
from laconic.interfaces import Method
from laconic.latent import codi
from laconic.latent.answering import AnswerDecoding
from laconic.latent.codi import Codi
from laconic.latent.cot import Cot
from laconic.latent.kava import Kava, TeacherTargets
from laconic.latent.pccot import Pccot
from tests import tolerances
from tests.core.readings import all_same, same
from tests.methods.batches import gradients, kava, reasoning, trained

ROWS = ((5, 6, 4), (3, 3, 3), (4, 0, 5), (6, 5, 2))
TERMS = ("student", "teacher", "codi", "kv")


def same_step(a: Any, b: Any, first: ReasoningBatch, second: ReasoningBatch | None = None) -> None:
    """Equal loss and gradients of two methods of the same weights."""
    x, y = a(first).loss, b(first if second is None else second).loss
    same(x, y)
    all_same(gradients(a, x).values(), gradients(b, y).values())


def test_they_are_methods() -> None:
    sequential, jacobi = trained("llama", rounds=None), trained("llama")
    for method in (Codi(*sequential, DistillationConfig()), Pccot(*jacobi, DistillationConfig()), kava()):
        assert isinstance(method, Method)
        assert not method.resets_optimizer_state(reasoning())


def test_modes_and_layers_that_cannot_be_meant() -> None:
    with pytest.raises(UsageError, match="codi: thoughts of mode jacobi; choose sequential, or the method pccot"):
        Codi(*trained("llama"), DistillationConfig())
    with pytest.raises(UsageError, match="pccot: thoughts of mode sequential; choose jacobi, or the method codi"):
        Pccot(*trained("llama", rounds=None), DistillationConfig())
    for layers in ((), (0, 2)):
        with pytest.raises(UsageError, match="the decoder has layers 0 to 1; name some of them"):
            kava(layers=layers)


def test_parts_and_what_is_not_computed() -> None:
    batch = reasoning(ROWS)
    assert set(kava()(batch).parts) == {*TERMS, "student_right", "teacher_right", "kept"}
    bare = kava(distillation={"alpha1": 0.0, "teacher": 0.0}, alpha2=0.0)(batch)
    assert set(bare.parts) == {"student", "student_right"}
    assert not any(part.requires_grad for part in bare.parts.values())
    assert float(kava(M=4)(batch).parts["kept"]) == (4 + 3 + 0 + 4) / 16


def test_a_teacher_that_no_term_looks_at_reads_nothing() -> None:
    for rest, reads in (({"student": 1.0}, False), ({"alpha1": 1.0}, True), ({"teacher": 1.0}, True)):
        bare = DistillationConfig(**({"student": 0.0, "teacher": 0.0, "alpha1": 0.0} | rest))
        decoder, thoughts = trained("llama")
        both = codi.run_teacher_and_student(decoder, thoughts, reasoning(ROWS), bare)
        assert (both.teacher is not None) == reads
    bare = {"student": 0.0, "teacher": 0.0, "alpha1": 0.0}
    crop = kava(distillation=bare, keeping={"select": "crop"})(reasoning(ROWS))  # wants no stage, only the cache
    assert set(crop.parts) == {"kv", "kept"}
    with pytest.raises(
        UsageError, match="every weight of the loss is 0, so nothing would be learned; give student one"
    ):
        kava(distillation=bare, alpha2=0.0)(reasoning(ROWS))


@pytest.mark.parametrize("rounds", [0, 2])
def test_without_weights_only_the_cross_entropies_are_left_bit_for_bit(rounds: int) -> None:
    batch = reasoning(ROWS)
    bare = {"alpha1": 0.0}
    ours, pccot = (
        kava(rounds=rounds, distillation=bare, alpha2=0.0),
        Pccot(*trained("llama", rounds=rounds), DistillationConfig()),
    )
    x, found = ours(batch).loss, pccot(batch)
    y = Pccot(pccot.decoder, pccot.latent_thoughts, DistillationConfig(**bare))(batch)
    assert torch.equal(x, y.loss)
    assert torch.equal(x, found.parts["student"] + found.parts["teacher"])
    for a, b in zip(gradients(ours, x).values(), gradients(pccot, y.loss).values(), strict=True):
        assert torch.equal(a, b)
    if rounds == 0:
        assert all(p.grad is None for p in pccot.latent_thoughts.projection.parameters())


def test_the_teachers_cross_entropy_is_that_of_the_written_chain() -> None:
    method, batch = kava(), reasoning(ROWS, pads=1)
    written = Cot(method.decoder)(batch)
    for name in ("teacher", "teacher_right"):
        same(method(batch).parts[name], written.parts[name])


@pytest.mark.parametrize("term", ["kv", "codi", "teacher"])
def test_no_term_reaches_the_teacher(term: str) -> None:
    """Only the teacher reads the chain: nothing of the two terms flows into its words, and CE_t does."""
    weights = {"student": 0.0, "teacher": float(term == "teacher"), "alpha1": float(term == "codi")}
    method, batch = kava(distillation=weights, alpha2=float(term == "kv")), reasoning(((3, 6, 4),), V=90)
    batch = replace(batch, chain_ids=torch.tensor([[91, 92, 93, 94, 95, 96]]))
    found = gradients(method, method(batch).loss)
    words = found["decoder.model.embed_tokens.weight"]
    assert bool(words[batch.chain_ids].any()) == (term == "teacher")
    assert words[batch.question_ids].any()
    assert bool(found["thoughts.vectors"].any()) == (term != "teacher")


@pytest.mark.parametrize("name", ["loss", "norm", "reduction"])
def test_a_batch_without_any_chain_is_finite(name: str) -> None:
    forms = {
        "loss": {},
        "norm": {"kv_norm": "layer"},
        "reduction": {"kv_reduction": "row_mean", "kv_norm": "each_side"},
    }
    method, batch = kava(**forms[name]), reasoning(((3, 0, 4), (2, 0, 3)))
    found = method(batch)
    assert float(found.parts["kv"]) == float(found.parts["kept"]) == 0
    assert all(g.isfinite().all() for g in gradients(method, found.loss).values())
    assert all(g.isfinite().all() for g in gradients(method, method(reasoning(((2, 3, 2),))).loss).values())


FORMS: list[dict[str, Any]] = [
    {},
    {"kv_reduction": "row_mean"},
    {"kv_reduction": "paper_sum"},
    {"short_chain": "zero"},
    {"short_chain": "repeat"},
    {"kv_rounds": "all"},
]


@pytest.mark.parametrize(("form", "reduction"), [({}, "row"), *((form, "token") for form in FORMS)], ids=str)
def test_micro_batches_with_the_totals_of_the_step_are_one_batch(form: dict[str, Any], reduction: str) -> None:
    how = {"codi_norm": "none", "ce_reduction": reduction}
    method, batch = kava(distillation=how, **form), reasoning(ROWS)
    micro = [batch.select_rows([0, 3]), batch.select_rows([1]), batch.select_rows([2])]
    totals = [method.loss_denominators(part) for part in micro]
    summed = {name: sum(t[name] for t in totals) for name in totals[0]}
    assert summed == method.loss_denominators(batch)
    steps = [method(replace(part, loss_denominators=summed)) for part in micro]
    whole = method(batch)
    same(torch.stack([step.loss for step in steps]).sum(), whole.loss)
    for name in whole.parts:
        same(torch.stack([step.parts[name] for step in steps]).sum(), whole.parts[name])
    added = [sum(g) for g in zip(*(gradients(method, step.loss).values() for step in steps), strict=True)]
    all_same(added, gradients(method, whole.loss).values())


def test_a_total_of_0_is_no_division() -> None:
    method, batch = kava(), reasoning(ROWS)
    found = method(replace(batch, loss_denominators=dict.fromkeys(method.loss_denominators(batch), 0.0)))
    assert all(part.isfinite() for part in found.parts.values())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_question_shared_or_read_twice(family: str) -> None:
    same_step(kava(family), kava(family, distillation={"share_question": False}), reasoning(ROWS, pads=1))


@pytest.mark.parametrize("share", [True, False])
def test_a_second_pass_of_the_teacher_is_the_same_without_dropout(share: bool) -> None:
    how = {"codi_target": "second_pass", "share_question": share}
    same_step(kava(), kava(distillation=how), reasoning(ROWS))


def test_a_second_pass_draws_its_own_dropout() -> None:
    batch = reasoning(ROWS)
    for target, equal in (("same_pass", True), ("second_pass", False)):
        decoder, thoughts = trained("gpt2")
        dropout = replace(decoder.config.dropout, residual=0.5)
        decoder.config = replace(decoder.config, dropout=dropout)
        for block in decoder.layers:
            block.config = decoder.config
        both = codi.run_teacher_and_student(decoder.train(), thoughts, batch, DistillationConfig(teacher_pass=target))  # type: ignore[arg-type]
        found = [both.distill_target.activations["hidden.2"], both.teacher.hidden_states]
        assert torch.equal(*found) == equal
        assert both.distill_target.hidden_states.requires_grad == equal


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_recomputed_blocks_change_no_gradient(family: str) -> None:
    batch, found = reasoning(ROWS), list[dict[str, Tensor]]()
    for recompute in (0, 1):
        method = kava(family, key_space="pre_rope").train()
        method.decoder.activation_checkpointing = recompute
        found.append(gradients(method, method(batch).loss))
    for x, y in zip(found[1].values(), found[0].values(), strict=True):
        assert tolerances.error(x, y) <= tolerances.RECOMPUTE


@pytest.mark.parametrize(("family", "space"), [("gpt2", "post_rope"), ("mistral", "post_rope"), ("qwen3", "pre_rope")])
def test_as_many_rounds_as_thoughts_are_one_after_the_other(family: str, space: str) -> None:
    more: dict[str, Any] = {"key_space": space, "M": 3}
    one, all = kava(family, rounds=None, **more), kava(family, rounds=3, **more)
    same_step(one, all, reasoning(ROWS))
    short = kava(family, rounds=2, **more)(reasoning(ROWS)).loss
    assert tolerances.largest(short, one(reasoning(ROWS)).loss) > tolerances.ORACLE


def test_every_round_is_matched_where_asked() -> None:
    """The mean over rounds of what each would give as the last; with one round or none there is no difference."""
    batch, keep = reasoning(ROWS), {"select": "crop"}
    kv = [kava(rounds=t, keeping=keep)(batch).parts["kv"] for t in (1, 2, 3)]
    same(kava(rounds=3, keeping=keep, iterations="all")(batch).parts["kv"], torch.stack(kv).mean())
    for rounds in (0, 1, None):
        assert torch.equal(kava(rounds=rounds)(batch).loss, kava(rounds=rounds, iterations="all")(batch).loss)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_keys_before_rotation_are_the_same_where_there_is_none(family: str) -> None:
    batch = reasoning(ROWS)
    post, pre = (kava(family, key_space=space)(batch).loss for space in ("post_rope", "pre_rope"))
    assert torch.equal(post, pre) == (family == "gpt2")


def test_slots_beyond_a_short_chain() -> None:
    """With every chain at least M long the three ways are one; else each is another."""
    long, short = reasoning(((3, 6, 4), (3, 5, 3))), reasoning(ROWS)
    ways = [kava(short_chain_targets=how) for how in ("mask", "zero", "repeat")]
    assert len({float(way(long).loss.detach()) for way in ways}) == 1
    assert len({float(way(short).loss.detach()) for way in ways}) == 3
    assert [way.loss_denominators(short)["kv"] for way in ways] == [4 + 3 + 0 + 4, 16, 12]


@pytest.mark.parametrize("layers", [(0,), (1,), (1, 0)])
def test_some_layers_alone(layers: tuple[int, ...]) -> None:
    batch = reasoning(ROWS)
    each = [kava(layers=(l,))(batch).parts["kv"] for l in layers]
    same(kava(layers=layers)(batch).parts["kv"], torch.stack(each).mean())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_padding_changes_nothing(family: str) -> None:
    same_step(kava(family), kava(family), reasoning(ROWS), reasoning(ROWS, pads=3))


def test_a_step_after_something_read_is_a_step_on_both() -> None:
    """`state` stands before the questions, as if it were their beginning."""
    method, batch = kava(), reasoning(((5, 6, 4), (5, 3, 3)))
    first = method.decoder(method.decoder.embed(batch.question_ids[:, :2])).state
    rest = replace(batch, question_ids=batch.question_ids[:, 2:], question_mask=batch.question_mask[:, 2:])
    same(method(rest, first).loss, method(batch).loss)


def test_autocast_leaves_losses_float32() -> None:
    decoder, thoughts = trained("llama")
    method = Kava(decoder.float(), thoughts.float(), DistillationConfig(), KVSelectionConfig(), KVDistillationConfig())
    with torch.autocast("cpu", torch.bfloat16):
        found = method(reasoning(ROWS))
    assert found.loss.dtype == torch.float32
    assert all(part.dtype == torch.float32 and part.isfinite() for part in found.parts.values())
    wide = method(reasoning(ROWS))
    assert float((found.loss - wide.loss).abs().detach()) < 0.05 * float(wide.loss.detach())


@pytest.mark.parametrize("space", ["post_rope", "pre_rope"])
def test_teach_tells_what_the_step_keeps(space: str) -> None:
    method, batch = kava(key_space=space, keeping={"select": "cosine"}, rounds=0), reasoning(ROWS)
    found = method.train().compute_teacher_targets(batch)
    assert method.decoder.training
    assert isinstance(found, TeacherTargets)
    assert all(len(part) == 2 for part in found)
    I, R, S, kept = found.I[1], found.R[1], found.S[1], found.columns[1]
    assert torch.equal(R, S)
    same(I.sum(-1), batch.chain_mask.any(1)[:, None].expand(-1, 2).double())
    assert kept.index.shape == (4, 2, 4)
    assert not any(x.requires_grad for x in (*found.k_t, *found.v_t, I))


def test_thoughts_and_answers() -> None:
    """`think` is the rollout; `answer` follows it, or by the same weights the chain."""
    method, batch = kava(), reasoning(ROWS)
    rolled = method.think(batch, record_passes=True)
    assert rolled.latents.shape == (4, 4, 48)
    assert len(rolled.records) == 3
    assert not rolled.latents.requires_grad
    writing = AnswerDecoding(5, (2,), lambda ids: " ".join(map(str, ids)), (11, 12))
    found = method.answer(batch, writing)
    assert [p[:3] for p in found.passes] == [(0, 1, 2)] * 4
    assert method.answer(batch, writing, with_cot=True) == Cot(method.decoder).answer(batch, writing)
    for other in (
        Codi(*trained("llama", rounds=None), DistillationConfig()),
        Pccot(*trained("llama"), DistillationConfig()),
    ):
        assert len(other.answer(batch, writing).texts) == 4
        assert other.think(batch).latents.shape == (4, 4, 48)


def test_codi_and_pccot_are_kava_without_its_term() -> None:
    batch = reasoning(ROWS, pads=1)
    for rounds, kind in ((None, Codi), (2, Pccot)):
        bare = kind(*trained("llama", rounds=rounds), DistillationConfig())
        same_step(kava(rounds=rounds, alpha2=0.0), bare, batch)
        assert bare.loss_denominators(batch).items() <= kava(rounds=rounds).loss_denominators(batch).items()


@pytest.mark.parametrize("layers", ["all", "blocks", "last"])
def test_which_hidden_states(layers: str) -> None:
    """With rotary positions l = 0 is the same token's vector, so that `all` is `blocks` times L / (L + 1)."""
    batch = reasoning(ROWS)
    found = {k: kava(distillation={"codi_layers": k})(batch).parts["codi"] for k in ("all", "blocks", "last")}
    same(found["all"], found["blocks"] * 2 / 3)
    assert found["last"] != found["blocks"]
    assert bool(found[layers].isfinite())
