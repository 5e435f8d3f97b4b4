"""The attention gate in every model family: its limits, segments, gradient; scaling vectors is not a gate."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from laconic.halting.stop_distribution import attention_gate_bias, scale_by_survival
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.decoder import Decoder
from tests import tolerances
from tests.oracles.compare import distance

FAMILY = pytest.mark.parametrize("family", list(WEIGHT_NAMES))


@cache
def decoder(family: str, seed: int = 0) -> Decoder:
    """Four layers without a window, weights large enough that layers change what they read."""
    config = DecoderConfig.tiny(family)
    L = 4
    config = replace(
        config,
        num_hidden_layers=L,
        sliding_windows=(None,) * L,
        attention_scales=config.attention_scales[:1] * L,
        initializer_range=0.15,
    )
    return Decoder(config, seed=seed).double().eval().requires_grad_(False)


BLOCK = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])


class Prompt:
    """Eight memory slots in two blocks and 24 words, each column at its place whatever is live."""

    def __init__(self, family: str, seed: int = 0, B: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.decoder = decoder(family, seed)
        D, V = self.decoder.config.hidden_size, self.decoder.config.vocab_size
        self.memory = torch.randn(B, 8, D, generator=generator, dtype=torch.float64)
        self.text = self.decoder.embed(torch.randint(0, V, (B, 24), generator=generator))

    def logits(self, memory: Tensor | None = None, mask: Tensor | None = None, log_s: Tensor | None = None) -> Tensor:
        """Of the text, with the memory's slots removed or gated."""
        memory = self.memory if memory is None else memory
        B = len(memory)
        alive = torch.ones(B, 8, dtype=torch.bool) if mask is None else mask.expand(B, 8)
        bias = None if log_s is None else attention_gate_bias(log_s.expand(B, 8), BLOCK.expand(B, 8), suffix_length=24)
        seen = self.decoder(
            torch.cat([memory, self.text], 1),
            attention_mask=torch.nn.functional.pad(alive, (0, 24), value=True),
            position_ids=torch.arange(32).expand(B, -1),
            attention_bias=bias,
        )
        return self.decoder.logits(seen.hidden_states[:, 8:])


@FAMILY
def test_gate_tends_to_removal(family: str) -> None:
    """As s falls, logits approach those without the slots in proportion to s; at log s = 0 the gate does nothing."""
    prompt = Prompt(family)
    gone = prompt.logits(mask=torch.zeros(1, 8, dtype=torch.bool))

    def away(s: float) -> float:
        log_s = torch.full((1, 8), s, dtype=torch.float64).log()
        return tolerances.error(prompt.logits(log_s=log_s), gone)

    assert tolerances.error(prompt.logits(log_s=torch.zeros(1, 8).double()), prompt.logits()) < tolerances.ORACLE
    assert 0.98 < away(1e-5) / away(1e-6) / 10 < 1.02
    assert away(1.0) > 100 * away(1e-4)


@FAMILY
@pytest.mark.parametrize("lengths", [(2, 4), (1, 3), (4, 0)])
def test_gate_of_zero_or_one_is_hard_reading(family: str, lengths: tuple[int, int]) -> None:
    """Removing slots by mask or by s = 0, at the same positions, gives the same logits."""
    prompt = Prompt(family)
    selected = torch.cat([torch.arange(4) < n for n in lengths])[None]
    log_s = torch.where(selected, 0.0, -1e6).double()
    assert tolerances.error(prompt.logits(log_s=log_s), prompt.logits(mask=selected)) < tolerances.ORACLE


@FAMILY
def test_gate_does_not_apply_inside_a_segment(family: str) -> None:
    """States of the first segment's slots do not depend on its own gate; those of the second do."""
    prompt = Prompt(family)
    log_s = torch.tensor([[0.0, -0.5, -1.0, -2.0, 0.0, -0.1, -0.2, -0.3]]).double()
    B = len(prompt.memory)
    slots = [
        prompt.decoder(
            prompt.memory,
            position_ids=torch.arange(8).expand(B, -1),
            attention_bias=attention_gate_bias((on * log_s).expand(B, 8), BLOCK.expand(B, 8)),
        ).hidden_states
        for on in (0.0, 1.0)
    ]
    assert torch.equal(slots[0][:, :4], slots[1][:, :4])
    assert tolerances.error(slots[1][:, 4:], slots[0][:, 4:]) > 1e-3


def left(family: str, seed: int, scale: bool) -> list[float]:
    """Share of the memory's effect on the predictions that is left at s = .5, .1, .01, .001, in total variation."""
    prompt = Prompt(family, seed)
    full, gone = prompt.logits().softmax(-1), prompt.logits(mask=torch.zeros(1, 8, dtype=torch.bool)).softmax(-1)
    result: list[float] = []
    for s in (0.5, 0.1, 0.01, 0.001):
        log_s = torch.full((2, 8), s, dtype=torch.float64).log()
        read = prompt.logits(scale_by_survival(prompt.memory, log_s)) if scale else prompt.logits(log_s=log_s)
        result.append(float((read.softmax(-1) - gone).abs().sum() / (full - gone).abs().sum()))
    return result


@FAMILY
def test_scaling_vectors_is_not_a_gate(family: str) -> None:
    """Vectors scaled by 1/100 keep most of their effect, because the first norm undoes it; the gate removes it."""
    for seed in range(2):
        scale, gate = left(family, seed, True), left(family, seed, False)
        assert min(scale[:3]) > 0.8
        assert scale[3] > 0.7
        assert gate == sorted(gate, reverse=True)
        assert gate[2] < 0.2
        assert gate[3] < 0.05


def test_gate_gradient_is_equal_in_sdpa_and_eager() -> None:
    """Through rows with minus infinity too, in every back end that has a gradient on this machine."""
    prompt = Prompt("llama")
    log_s = torch.full((2, 8), -0.7, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[True] * 3 + [False, True, True, False, False]])
    result = []
    for backend in ("sdpa", "eager"):
        prompt.decoder.attn_implementation = backend
        result += torch.autograd.grad(prompt.logits(log_s=log_s, mask=mask).square().sum(), log_s)
    prompt.decoder.attn_implementation = "sdpa"
    assert distance(result[0], result[1]) < tolerances.ORACLE
    assert torch.equal(result[0] != 0, mask.expand(2, 8))
