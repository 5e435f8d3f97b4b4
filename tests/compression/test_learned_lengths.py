"""Learned lengths in the whole method: each estimator against the exact expectation, and the training phases."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.compression import training_window
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.inference import StopRule
from laconic.compression.summary_tokens import SummaryParameters
from laconic.halting.estimators import penalty_ramp
from tests import tolerances
from tests.compression.documents import compressor, documents, gradients, some
from tests.models.fixtures import assert_close

BATCH = documents(((4, 4), (3, 4)), windows=(2, 0), step=9)


def head_gradients(method: AutoCompressor, loss: Tensor) -> list[Tensor]:
    """Return the gradients of the stop head."""
    result = gradients(method, loss)
    return [result["summaries.u"], result["summaries.b"]]


def test_soft_trains_head_and_summaries() -> None:
    """The gradient flows through log s into the state that the head reads."""
    config = {"estimator": "soft", "hard_window_fraction": 0.0, "cost_on": "read"}
    method = compressor(stop_head=config, length_policy="stop_head")
    course = training_window.WindowRun(
        method.segment_model, BATCH.sequential_parts[0], method.segment_model.empty_memory(2), "joint", 1
    ).run()
    assert head_gradients(method, course.segment_losses[1].sum())[0].any()
    assert course.a[0] is not None
    tokens = method.summaries.tokens
    assert tokens is not None
    result = torch.autograd.grad(course.a[0].exp().sum(), tokens, allow_unused=True)[0]
    assert result is not None
    assert result.any()


def test_cost_kind_ratio_equals_per_vector_for_equal_segments() -> None:
    """With equal segments and alpha 0, lambda of the ratio equals beta per vector times the priced share."""
    batch = documents(((4, 4, 4), (4, 4, 4)), step=9)
    compute = {}
    for penalty in ("per_vector", "ratio"):
        config = {
            "estimator": "soft",
            "hard_window_fraction": 0.0,
            "cost_kind": penalty,
            "length_cost": 0.5,
            "cost_on": "all",
        }
        method = compressor(stop_head=config, length_policy="stop_head")
        free = compressor(stop_head=config | {"length_cost": 0.0}, length_policy="stop_head")
        compute[penalty] = (method(batch).loss - free(batch).loss) * method.loss_denominators(batch)["scored"]
    assert_close(
        compute["ratio"] * 24 / 22, compute["per_vector"], tolerances.FLOAT32
    )  # the first tokens of two rows are not scored


def test_training_phases_decoder_then_head_only() -> None:
    """The first phase does not train the head; the second trains nothing else and resets the optimizer."""
    method = compressor(
        stop_head={"length_cost": 0.1, "head_only_after": 0.8}, length_policy="stop_head", total_steps=10
    )
    heads = {"summaries.u", "summaries.b"}
    for step, restarts in ((0, False), (7, False), (8, True), (9, False)):
        batch = documents(step=step)
        assert method.resets_optimizer_state(batch) == restarts
        assert method.training_phase(step) == ("decoder" if step < 8 else "head_only")
        result = gradients(method, method(batch.sequential_parts[0]).loss)
        learned = {name for name, g in result.items() if g.any()}
        assert learned == heads if step >= 8 else not learned & heads
    soft = compressor(stop_head={"estimator": "soft"}, length_policy="stop_head")
    assert not soft.resets_optimizer_state(documents(step=8))


def test_head_only_loss_of_a_single_segment_is_differentiable() -> None:
    """A last window of one segment trains nothing in the head-only phase, but backward must still work."""
    method = compressor(stop_head={"length_cost": 0.1}, length_policy="stop_head")
    batch = documents(((4, 4, 4),), windows=(2, 0), step=9)
    last = method(batch.sequential_parts[-1])
    last.loss.backward()
    assert last.loss.requires_grad
    assert method.summaries.u is not None
    assert method.summaries.u.grad is not None
    assert not method.summaries.u.grad.any()


@pytest.mark.parametrize("stop_position", ["after", "before"])
def test_classifier_is_trained_on_the_cheapest_length(stop_position: str) -> None:
    """Its labels are found by trial; the decoder gets no gradient. It makes no stops, so their position is ignored."""
    method = compressor(stop_head={"length_cost": 0.4, "stop_position": stop_position}, length_policy="classifier")
    step = method(BATCH)
    result = gradients(method, step.loss)
    assert {name for name, g in result.items() if g.any()} == {"summaries.ratio.weight", "summaries.ratio.bias"}
    course = training_window.WindowRun(
        method.segment_model, BATCH, method.segment_model.empty_memory(2), "head_only", 1
    ).run()
    trials = course.trial_losses[0]
    assert trials is not None
    piece = BATCH.sequential_parts[0]
    first, second = ((piece.input_ids[:, s], piece.attention_mask[:, s]) for s in piece.segment_slices)
    for n in (1, 2, 3):
        memory = method.compress(*first, rule=StopRule("fixed", num_vectors=n))
        targets = course.targets[:, piece.segment_slices[1]]
        assert_close(
            trials[:, n - 1],
            method.segment_model.segment_loss(method.segment_model.read_segment(memory, *second), targets).nll,
        )


def test_classifier_learning_rate_multiplier() -> None:
    """The stored parameters are divided by the multiplier, and their gradient is multiplied by it."""
    one, ten = (
        compressor(stop_head={"length_cost": 0.4, "head_lr_multiplier": rate}, length_policy="classifier")
        for rate in (1.0, 10.0)
    )
    for name in ("weight", "bias"):
        numbers = [
            getattr(SummaryParameters(m.decoder, m.config, m.stop_head_config, eos_token_id=0).ratio, name)
            for m in (one, ten)
        ]
        assert_close(10 * numbers[1], numbers[0])
        getattr(ten.summaries.ratio, name).data = getattr(one.summaries.ratio, name).data / 10
    slow, fast = (gradients(method, method(BATCH).loss) for method in (one, ten))
    for name in ("summaries.ratio.weight", "summaries.ratio.bias"):
        assert slow[name].any()
        assert_close(fast[name], 10 * slow[name])


def test_random_lengths_are_keyed_by_document() -> None:
    """A document gets the same lengths in any batch, and others in another epoch."""
    method, batch = (
        compressor(length_policy="nested_dropout", max_vectors=50),
        documents(((3, 3, 3),) * 4, windows=(3, 1)),
    )

    def lengths(b: DocumentBatch) -> Tensor | None:
        return training_window.WindowRun(
            method.segment_model, b, method.segment_model.empty_memory(b.B), "decoder", 1
        ).predetermined_lengths(0)

    numbers = lengths(batch)
    assert numbers is not None
    turned = lengths(batch.select_rows([2, 0]))
    assert turned is not None
    assert torch.equal(turned, numbers[[2, 0]])
    other = lengths(replace(batch, epoch=1))
    assert other is not None
    assert not torch.equal(other, numbers)


def test_published_variable_length_settings() -> None:
    """States fed back as they are, trigger in place of the last token, vocabulary row as stop, s z as gate."""
    config = {
        "estimator": "soft",
        "head": "vocabulary",
        "control_tokens": "vocabulary",
        "control_tokens_in_softmax": True,
        "soft_gate": "scale_vectors",
        "stop_position": "mixture",
        "cost_kind": "ratio",
        "ratio_memory_weight": 1.0,
        "cost_on": "all",
        "stop_rule": "threshold",
        "stop_threshold": 0.5,
        "hard_window_fraction": 0.0,
        "length_cost": 1.0,
    }
    reading = {
        "summary": "autoregressive",
        "length_policy": "stop_head",
        "memory_policy": "replace",
        "summary_map": "none",
        "step_embedding": False,
        "trigger_placement": "replace",
    }
    method = compressor(stop_head=config, **reading).train()
    batch = documents(((4, 4, 4), (4, 4, 3)), step=9)
    result = gradients(method, method(batch).loss)
    assert result["summaries.control"][1].any()  # the stop
    assert result["summaries.control"][0].any()  # the trigger, which is read
    hidden = method.read_text(batch.input_ids[:, :4])
    assert method.summaries.logits(method.decoder, hidden).shape[-1] == 99
    assert method.eval().summaries.logits(method.decoder, hidden).shape[-1] == 97
    targets = training_window.build_window_targets(method.segment_model, batch)
    assert (targets >= 0).sum(1).tolist() == [6, 5]  # 4 tokens a segment: two that predict, the last two not
    a = [compressor(stop_head=config, **reading).eval() for _ in range(2)]
    memory = a[0].compress(batch.input_ids[:, :4])
    assert memory.num_vectors.max() <= 3
    sampled = StopRule("sample", uniforms=torch.zeros(2, 3).double())
    assert a[1].compress(batch.input_ids[:, :4], rule=sampled).num_vectors.tolist() == [
        0,
        0,
    ]  # split: what stops is not kept


def test_length_cost_ramps_up() -> None:
    """omega is 0 for half of the steps and then rises."""
    assert [penalty_ramp(step, 10, 0.5, 0.25) for step in (0, 5, 8)] == [0.0, 0.0, 1.0]
    config = {"estimator": "soft", "hard_window_fraction": 0.0, "length_cost": 50.0}
    method, free = (compressor(stop_head=config | {"length_cost": p}, length_policy="stop_head") for p in (50.0, 0.0))
    for step, same_loss in ((4, True), (9, False)):
        batch = documents(step=step).sequential_parts[0]
        assert torch.equal(method(batch).loss, free(batch).loss) == same_loss


def test_carried_memory_is_soft_if_lengths_are() -> None:
    batch = documents(((4, 4, 4, 4),), windows=(2, 0), step=9).sequential_parts[0]
    config = {"estimator": "soft", "hard_window_fraction": 0.0}
    soft = compressor(stop_head=config, length_policy="stop_head")(batch).state
    hard = compressor(summary="select")(batch).state
    assert soft is not None
    assert hard is not None
    assert soft.log_s is not None
    assert soft.vectors_per_segment.tolist() == [[3, 3]]
    assert hard.log_s is None


@pytest.mark.parametrize("gate", ["attention_bias", "scale_vectors", "none"])
@pytest.mark.parametrize("memory", ["accumulate", "replace"])
def test_soft_memory_is_read_by_its_gate(gate: str, memory: str) -> None:
    """In training and with the "soft" rule alike: scale_vectors reads s sigma, none reads sigma."""
    config = {
        "estimator": "soft",
        "hard_window_fraction": 0.0,
        "soft_gate": gate,
        "cost_kind": "ratio",
        "ratio_memory_weight": 1.0,
    }
    method = compressor(stop_head=config, length_policy="stop_head", memory_policy=memory)
    piece = documents(((4, 4, 3), (3, 4, 4)), step=9).sequential_parts[0]
    course = training_window.WindowRun(
        method.segment_model, piece, method.segment_model.empty_memory(2), "joint", 1
    ).run()
    first, second, third = ((piece.input_ids[:, s], piece.attention_mask[:, s]) for s in piece.segment_slices)
    memory_mask = method.compress(*first, rule=StopRule("soft"))
    assert memory_mask.log_s is not None
    assert_close(course.memory_sizes[:, 1], memory_mask.log_s.exp().sum(1), tolerances.FLOAT32)
    s = memory_mask.log_s.exp()[..., None]
    hard = {
        "scale": replace(memory_mask, vectors=memory_mask.vectors * s, log_s=None),
        "none": replace(memory_mask, log_s=None),
    }
    result = method.read_text(*second, memory_mask)
    assert_close(result, method.read_text(*second, hard.get(gate, memory_mask)), tolerances.FLOAT32)
    assert torch.allclose(result, method.read_text(*second, hard["none"])) == (gate == "none")
    memory_mask = method.compress(*second, memory_mask, StopRule("soft"))
    targets = training_window.build_window_targets(method.segment_model, piece)[:, piece.segment_slices[2]]
    assert_close(
        course.segment_losses[2],
        method.segment_model.segment_loss(method.read_text(*third, memory_mask), targets).nll,
        tolerances.FLOAT32,
    )
    assert memory_mask.num_vectors.tolist() == ([6, 6] if memory == "accumulate" else [3, 3])


@pytest.mark.parametrize("estimator", some(["soft", "ponder"], 2))
def test_stop_logits_are_computed_in_float32(estimator: str) -> None:
    """Whatever dtype the decoder has, also under autocast and with checkpointed segments."""
    for narrow in (True, False):
        config = {"estimator": estimator, "length_cost": 0.1}
        method = compressor(stop_head=config, length_policy="stop_head", checkpoint_segments=True).float().train()
        if narrow:
            method.decoder.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, not narrow):
            course = training_window.WindowRun(
                method.segment_model,
                BATCH.sequential_parts[0],
                method.segment_model.empty_memory(2),
                "joint",
                1,
            ).run()
            loss = method(BATCH).loss
        assert course.a[0] is not None
        assert course.a[0].dtype == torch.float32
        assert all(g.isfinite().all() for g in gradients(method, loss).values())
