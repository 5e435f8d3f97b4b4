"""Every latent method equals its reference, the training step written the slow way, in loss and all gradients."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from laconic.config.methods import CoconutConfig, DistillationConfig, IcotConfig
from laconic.latent.coconut import Coconut
from laconic.latent.coconut_reference import coconut_loss
from laconic.latent.codi import Codi
from laconic.latent.icot import Icot
from laconic.latent.icot_reference import icot_loss
from laconic.latent.kava_reference import kava_loss
from laconic.latent.pccot import Pccot
from laconic.latent.pccot_reference import distillation_loss
from laconic.rng import uniform
from tests.latent.batches import build_kava, build_latent_model, gradients, reasoning_batch
from tests.models.fixtures import SOME, assert_all_close, assert_close, fresh

BATCH = reasoning_batch(((5, 6, 4), (3, 3, 3), (4, 0, 5), (6, 5, 2)), pads=1)


def assert_equal_step(method: torch.nn.Module, loss: Tensor, reference: Tensor) -> None:
    assert_close(loss, reference)
    pairs: Iterable[dict[str, Tensor]] = (gradients(method, loss), gradients(method, reference))
    ours, theirs = pairs
    assert_all_close(ours.values(), theirs.values())


@pytest.mark.parametrize(("family", "num_iterations"), [("llama", 0), *((family, 2) for family in SOME)])
def test_kava_equals_its_reference(family: str, num_iterations: int) -> None:
    method = build_kava(family, num_iterations=num_iterations)
    loss = method(BATCH).loss
    method.decoder.attn_implementation = "eager"
    assert_equal_step(method, loss, kava_loss(method.decoder, method.latent_thoughts, BATCH))


def test_kava_without_any_chain_equals_its_reference() -> None:
    method, batch = build_kava(), reasoning_batch(((3, 0, 4), (2, 0, 3)))
    assert_equal_step(method, method(batch).loss, kava_loss(method.decoder, method.latent_thoughts, batch))


def test_kava_reference_refuses_sequential_latents() -> None:
    model = build_latent_model("llama", num_iterations=None)
    with pytest.raises(AssertionError, match="no iterations"):
        kava_loss(*model, BATCH)


@pytest.mark.parametrize("num_iterations", [0, 2, None])
def test_codi_and_pccot_equal_their_reference(num_iterations: int | None) -> None:
    model = build_latent_model("llama", num_iterations=num_iterations)
    method = (Codi if num_iterations is None else Pccot)(*model, DistillationConfig(hidden_weight=3.0))
    assert_equal_step(method, method(BATCH).loss, distillation_loss(*model, BATCH, gamma=3.0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_coconut_equals_its_reference(stage: int) -> None:
    model = build_latent_model("llama", num_iterations=None, projection="none")
    config = CoconutConfig(latents_per_step=2, max_stage=2, first_stage=stage)
    method = Coconut(*model, config, steps_per_epoch=5)
    assert_equal_step(method, method(BATCH).loss, coconut_loss(*model, BATCH, stage, 2, 2))


@pytest.mark.parametrize("step", [0, 20])
def test_icot_equals_its_reference(step: int) -> None:
    config = IcotConfig(tokens_removed_per_epoch=8, removal_smoothing=0.5)
    method = Icot(fresh("llama").double(), config, steps_per_epoch=80)
    u = torch.as_tensor(uniform(0, 0, BATCH.row_index.numpy()))
    batch = replace(BATCH, step=step)
    assert_equal_step(method, method.train()(batch).loss, icot_loss(method.decoder, batch, step // 10, u, 0.5))
    assert_equal_step(method, method.eval()(batch).loss, icot_loss(method.decoder, batch, step // 10))
