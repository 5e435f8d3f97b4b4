"""Laws of a KaVa step: gradients of its terms, accumulation, iterations, short chains, layers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.errors import UsageError
from laconic.interfaces import Method, ResetsOptimizer
from laconic.latent.answering import AnswerDecoding
from laconic.latent.codi import Codi
from laconic.latent.cot import Cot
from laconic.latent.kava import Kava
from laconic.latent.pccot import Pccot
from tests import tolerances
from tests.latent.batches import build_kava, build_latent_model, gradients, reasoning_batch, select_in_all_layers
from tests.models.fixtures import assert_all_close, assert_close

ROWS = ((5, 6, 4), (3, 3, 3), (4, 0, 5), (6, 5, 2))
TERMS = ("student", "teacher", "codi", "kv")
NO_WEIGHTS = {"student_ce_weight": 0.0, "teacher_ce_weight": 0.0, "hidden_weight": 0.0}


def same_step(a: Any, b: Any, first: ReasoningBatch, second: ReasoningBatch | None = None) -> None:
    """Equal loss and gradients of two methods of the same weights."""
    x, y = a(first).loss, b(first if second is None else second).loss
    assert_close(x, y)
    assert_all_close(gradients(a, x).values(), gradients(b, y).values())


def test_latent_methods_implement_the_protocol() -> None:
    sequential, jacobi = build_latent_model("llama", num_iterations=None), build_latent_model("llama")
    for method in (Codi(*sequential, DistillationConfig()), Pccot(*jacobi, DistillationConfig()), build_kava()):
        assert isinstance(method, Method)
        assert isinstance(method, ResetsOptimizer)
        assert not method.resets_optimizer_state(reasoning_batch())


def test_latent_methods_refuse_schedules_and_layers() -> None:
    with pytest.raises(UsageError, match="Codi needs sequential"):
        Codi(*build_latent_model("llama"), DistillationConfig())
    with pytest.raises(UsageError, match="Pccot needs jacobi"):
        Pccot(*build_latent_model("llama", num_iterations=None), DistillationConfig())
    with pytest.raises(UsageError, match="layers 0 to 1"):
        build_kava(layers=(0, 2))
    with pytest.raises(ValidationError, match="at least 1 item"):
        build_kava(layers=())


def test_kava_terms_of_weight_0_are_not_computed() -> None:
    batch = reasoning_batch(ROWS)
    assert set(build_kava()(batch).metrics) == {
        *TERMS,
        "student_token_accuracy",
        "teacher_token_accuracy",
        "kv_target_fraction",
    }
    bare = build_kava(distillation={"hidden_weight": 0.0, "teacher_ce_weight": 0.0}, weight=0.0)(batch)
    assert set(bare.metrics) == {"student", "student_token_accuracy"}
    assert not any(term.requires_grad for term in bare.metrics.values())
    assert float(build_kava(num_latents=4)(batch).metrics["kv_target_fraction"]) == (4 + 3 + 0 + 4) / 16


def test_codi_skips_the_teacher_pass_if_no_term_needs_it() -> None:
    for rest, needs_teacher in (
        ({"student_ce_weight": 1.0}, False),
        ({"hidden_weight": 1.0}, True),
        ({"teacher_ce_weight": 1.0}, True),
    ):
        bare = DistillationConfig(**(NO_WEIGHTS | rest))
        decoder, thoughts = build_latent_model("llama")
        outputs = Pccot(decoder, thoughts, bare).run_teacher_and_student(reasoning_batch(ROWS))
        assert (outputs.teacher is not None) == needs_teacher
    crop = build_kava(distillation=NO_WEIGHTS, selection={"policy": "crop"})(
        reasoning_batch(ROWS)
    )  # needs the teacher's cache only
    assert set(crop.metrics) == {"kv", "kv_target_fraction"}
    with pytest.raises(UsageError, match="every loss weight is 0"):
        build_kava(distillation=NO_WEIGHTS, weight=0.0)(reasoning_batch(ROWS))


@pytest.mark.parametrize("num_iterations", [0, 2])
def test_kava_without_weights_is_the_cross_entropies(num_iterations: int) -> None:
    batch = reasoning_batch(ROWS)
    bare = {"hidden_weight": 0.0}
    ours, pccot = (
        build_kava(num_iterations=num_iterations, distillation=bare, weight=0.0),
        Pccot(*build_latent_model("llama", num_iterations=num_iterations), DistillationConfig()),
    )
    x, output = ours(batch).loss, pccot(batch)
    y = Pccot(pccot.decoder, pccot.latent_thoughts, DistillationConfig(**bare))(batch)
    assert torch.equal(x, y.loss)
    assert torch.equal(x, output.metrics["student"] + output.metrics["teacher"])
    for a, b in zip(gradients(ours, x).values(), gradients(pccot, y.loss).values(), strict=True):
        assert torch.equal(a, b)
    if num_iterations == 0:
        assert all(p.grad is None for p in pccot.latent_thoughts.projection.parameters())


def test_kava_teacher_loss_equals_cot() -> None:
    method, batch = build_kava(), reasoning_batch(ROWS, pads=1)
    written = Cot(method.decoder)(batch)
    for name in ("teacher", "teacher_token_accuracy"):
        assert_close(method(batch).metrics[name], written.metrics[name])


@pytest.mark.parametrize("term", ["kv", "codi", "teacher"])
def test_kava_terms_stop_gradients_at_the_teacher(term: str) -> None:
    """Only the teacher reads the chain: the embeddings of its tokens have gradients of CE_t alone."""
    weights = {
        "student_ce_weight": 0.0, "teacher_ce_weight": float(term == "teacher"), "hidden_weight": float(term == "codi"),
    }  # fmt: skip
    method, batch = build_kava(distillation=weights, weight=float(term == "kv")), reasoning_batch(((3, 6, 4),), V=90)
    batch = replace(batch, chain_ids=torch.tensor([[91, 92, 93, 94, 95, 96]]))
    grads = gradients(method, method(batch).loss)
    embedding = grads["decoder.model.embed_tokens.weight"]
    assert bool(embedding[batch.chain_ids].any()) == (term == "teacher")
    assert embedding[batch.question_ids].any()
    assert bool(grads["latent_thoughts.vectors"].any()) == (term != "teacher")


@pytest.mark.parametrize("scale", ["none", "layer"])
def test_kava_batch_without_chains_is_finite(scale: str) -> None:
    method, batch = build_kava(scale=scale), reasoning_batch(((3, 0, 4), (2, 0, 3)))
    output = method(batch)
    assert float(output.metrics["kv"]) == float(output.metrics["kv_target_fraction"]) == 0
    assert all(g.isfinite().all() for g in gradients(method, output.loss).values())
    assert all(g.isfinite().all() for g in gradients(method, method(reasoning_batch(((2, 3, 2),))).loss).values())


@pytest.mark.parametrize("targets", ["mask", "zero"])
def test_kava_micro_batches_equal_one_batch(targets: str) -> None:
    distillation = {"hidden_scale": "none"}
    method, batch = build_kava(distillation=distillation, short_chain_targets=targets), reasoning_batch(ROWS)
    micro = [batch.select_rows([0, 3]), batch.select_rows([1]), batch.select_rows([2])]
    totals = [method.loss_denominators(part) for part in micro]
    summed = {name: sum(t[name] for t in totals) for name in totals[0]}
    assert summed == method.loss_denominators(batch)
    steps = [method(replace(part, loss_denominators=summed)) for part in micro]
    whole = method(batch)
    assert_close(torch.stack([step.loss for step in steps]).sum(), whole.loss)
    for name in whole.metrics:
        assert_close(torch.stack([step.metrics[name] for step in steps]).sum(), whole.metrics[name])
    added = [sum(g) for g in zip(*(gradients(method, step.loss).values() for step in steps), strict=True)]
    assert_all_close(added, gradients(method, whole.loss).values())


def test_kava_denominators_of_0_are_finite() -> None:
    method, batch = build_kava(), reasoning_batch(ROWS)
    output = method(replace(batch, loss_denominators=dict.fromkeys(method.loss_denominators(batch), 0.0)))
    assert all(part.isfinite() for part in output.metrics.values())


def test_codi_second_pass_equals_the_first_without_dropout() -> None:
    same_step(build_kava(), build_kava(distillation={"teacher_pass": "second_pass"}), reasoning_batch(ROWS))


def test_codi_second_pass_draws_dropout_again() -> None:
    batch = reasoning_batch(ROWS)
    for target, equal in (("same_pass", True), ("second_pass", False)):
        decoder, thoughts = build_latent_model("gpt2")
        dropout = replace(decoder.config.dropout, residual=0.5)
        decoder.config = replace(decoder.config, dropout=dropout)
        for block in decoder.layers:
            block.config = decoder.config
        method = Pccot(decoder, thoughts, DistillationConfig(teacher_pass=target)).train()  # type: ignore[arg-type]
        outputs = method.run_teacher_and_student(batch)
        output = [outputs.distill_target.activations["hidden.2"], outputs.teacher.hidden_states]
        assert torch.equal(*output) == equal
        assert outputs.distill_target.hidden_states.requires_grad == equal


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_kava_activation_checkpointing_changes_no_gradient(family: str) -> None:
    batch, output = reasoning_batch(ROWS), list[dict[str, Tensor]]()
    for recompute in (0, 1):
        method = build_kava(family, key_space="pre_rope").train()
        method.decoder.activation_checkpointing = recompute
        output.append(gradients(method, method(batch).loss))
    for x, y in zip(output[1].values(), output[0].values(), strict=True):
        assert tolerances.error(x, y) <= tolerances.RECOMPUTE


@pytest.mark.parametrize(("family", "space"), [("gpt2", "post_rope"), ("mistral", "post_rope"), ("qwen3", "pre_rope")])
def test_kava_as_many_iterations_as_latents_equal_the_sequential_schedule(family: str, space: str) -> None:
    more: dict[str, Any] = {"key_space": space, "num_latents": 3}
    one, all = build_kava(family, num_iterations=None, **more), build_kava(family, num_iterations=3, **more)
    same_step(one, all, reasoning_batch(ROWS))
    short = build_kava(family, num_iterations=2, **more)(reasoning_batch(ROWS)).loss
    assert tolerances.largest(short, one(reasoning_batch(ROWS)).loss) > tolerances.ORACLE


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_kava_key_space_without_rotation(family: str) -> None:
    batch = reasoning_batch(ROWS)
    post, pre = (build_kava(family, key_space=space)(batch).loss for space in ("post_rope", "pre_rope"))
    assert torch.equal(post, pre) == (family == "gpt2")


def test_kava_short_chains() -> None:
    """The two kinds of targets differ only for chains shorter than M."""
    long, short = reasoning_batch(((3, 6, 4), (3, 5, 3))), reasoning_batch(ROWS)
    methods = [build_kava(short_chain_targets=kind) for kind in ("mask", "zero")]
    assert len({float(method(long).loss.detach()) for method in methods}) == 1
    assert len({float(method(short).loss.detach()) for method in methods}) == 2
    assert [method.loss_denominators(short)["kv"] for method in methods] == [4 + 3 + 0 + 4, 16]


def test_kava_policy_results_counts_results_as_targets() -> None:
    batch = reasoning_batch(ROWS)
    every_other = torch.arange(batch.chain_ids.shape[1]) % 2 == 0
    batch = replace(batch, chain_result_mask=batch.chain_mask & every_other)  # 3, 2, 0 and 3 results
    method = build_kava(selection={"policy": "results"})
    assert method.loss_denominators(batch)["kv"] == 3 + 2 + 0 + 3
    assert float(method(batch).metrics["kv_target_fraction"]) == (3 + 2 + 0 + 3) / 16
    assert float(method(batch).metrics["kv"].detach()) != float(build_kava()(batch).metrics["kv"].detach())


@pytest.mark.parametrize("layers", [(0,), (1,), (1, 0)])
def test_kava_some_layers(layers: tuple[int, ...]) -> None:
    batch = reasoning_batch(ROWS)
    per_layer = [build_kava(layers=(l,))(batch).metrics["kv"] for l in layers]
    assert_close(build_kava(layers=layers)(batch).metrics["kv"], torch.stack(per_layer).mean())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_kava_padding_changes_nothing(family: str) -> None:
    same_step(build_kava(family), build_kava(family), reasoning_batch(ROWS), reasoning_batch(ROWS, pads=3))


def test_kava_state_precedes_the_questions() -> None:
    """A cache of the beginning of the questions changes nothing."""
    method, batch = build_kava(), reasoning_batch(((5, 6, 4), (5, 3, 3)))
    first = method.decoder(method.decoder.embed(batch.question_ids[:, :2])).cache
    rest = replace(batch, question_ids=batch.question_ids[:, 2:], question_mask=batch.question_mask[:, 2:])
    assert_close(method(rest, first).loss, method(batch).loss)


def test_kava_losses_are_float32_under_autocast() -> None:
    decoder, thoughts = build_latent_model("llama")
    method = Kava(decoder.float(), thoughts.float(), DistillationConfig(), KVSelectionConfig(), KVDistillationConfig())
    with torch.autocast("cpu", torch.bfloat16):
        output = method(reasoning_batch(ROWS))
    assert output.loss.dtype == torch.float32
    assert all(part.dtype == torch.float32 and part.isfinite() for part in output.metrics.values())
    wide = method(reasoning_batch(ROWS))
    assert float((output.loss - wide.loss).abs().detach()) < 0.05 * float(wide.loss.detach())


@pytest.mark.parametrize("space", ["post_rope", "pre_rope"])
def test_kava_selection_in_every_layer(space: str) -> None:
    method, batch = build_kava(key_space=space, selection={"policy": "cosine"}, num_iterations=0), reasoning_batch(ROWS)
    _, layer = select_in_all_layers(method, batch)
    assert torch.equal(layer.R, layer.S)
    assert_close(layer.I.sum(-1), batch.chain_mask.any(1)[:, None].expand(-1, 2).double())
    assert layer.columns.index.shape == (4, 2, 4)
    assert not any(x.requires_grad for x in (layer.k_t, layer.v_t, layer.I))


def test_latent_methods_think_and_answer() -> None:
    """`think` returns the rollout; `answer` follows it, or writes a chain with the same weights."""
    method, batch = build_kava(), reasoning_batch(ROWS)
    rolled = method.think(batch, record_passes=True)
    assert rolled.latents.shape == (4, 4, 48)
    assert len(rolled.records) == 3
    assert not rolled.latents.requires_grad
    writing = AnswerDecoding(5, (2,), lambda ids: " ".join(map(str, ids)), (11, 12))
    output = method.answer(batch, writing)
    assert [p[:3] for p in output.passes] == [(0, 1, 2)] * 4
    assert method.answer(batch, writing, with_cot=True) == Cot(method.decoder).answer(batch, writing)
    for other in (
        Codi(*build_latent_model("llama", num_iterations=None), DistillationConfig()),
        Pccot(*build_latent_model("llama"), DistillationConfig()),
    ):
        assert len(other.answer(batch, writing).texts) == 4
        assert other.think(batch).latents.shape == (4, 4, 48)


def test_kava_without_its_term_equals_codi_and_pccot() -> None:
    batch = reasoning_batch(ROWS, pads=1)
    for num_iterations, kind in ((None, Codi), (2, Pccot)):
        bare = kind(*build_latent_model("llama", num_iterations=num_iterations), DistillationConfig())
        same_step(build_kava(num_iterations=num_iterations, weight=0.0), bare, batch)
        assert (
            bare.loss_denominators(batch).items()
            <= build_kava(num_iterations=num_iterations).loss_denominators(batch).items()
        )


@pytest.mark.parametrize("layers", ["all", "blocks", "last"])
def test_codi_hidden_layers(layers: str) -> None:
    """With rotary positions l = 0 is the same token's embedding, so `all` is `blocks` times L / (L + 1)."""
    batch = reasoning_batch(ROWS)
    output = {
        k: build_kava(distillation={"hidden_layers": k})(batch).metrics["codi"] for k in ("all", "blocks", "last")
    }
    assert_close(output["all"], output["blocks"] * 2 / 3)
    assert output["last"] != output["blocks"]
    assert bool(output[layers].isfinite())
