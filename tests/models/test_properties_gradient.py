"""Gradients: through chunks, caches, bias and fed-back hidden states, and with activation checkpointing."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from laconic.models.cache import KVCache
from laconic.models.checkpoints.hf_config import DropoutRates
from laconic.models.decoder import Decoder, DecoderOutput
from tests.models.fixtures import (
    FAMILIES,
    EmbedBatch,
    assert_all_close,
    assert_close,
    assert_same_cache,
    embed_batches,
    fresh,
    noise,
    read_in_chunks,
    read_whole,
    small,
)
from tests.tolerances import RECOMPUTE, error

pytestmark = pytest.mark.usefixtures("unchecked")
USUAL = pytest.mark.parametrize("name", [*FAMILIES, "llama, windows"])


def weighted_sum(hidden: Tensor, state: KVCache, mask: Tensor) -> Tensor:
    """Return a weighted sum of every valid output, output with its own weight."""
    heads = [x.transpose(1, 2)[state.valid] for x in (*state.keys, *state.values)]
    return sum(((x * noise(i, *x.shape, dtype=x.dtype)).sum() for i, x in enumerate([hidden[mask], *heads])), 0)


def gradients(
    decoder: Decoder, batch: EmbedBatch, run: Callable[[Decoder, EmbedBatch], list[DecoderOutput]]
) -> list[Tensor]:
    """Return gradients of the weighted sum for the embeddings and all parameters that it depends on."""
    embeds = batch.inputs_embeds.clone().requires_grad_()
    passes = run(decoder, EmbedBatch(embeds, batch.attention_mask, batch.cuts))
    number = weighted_sum(
        torch.cat([output.hidden_states for output in passes], 1), passes[-1].cache, batch.attention_mask
    )
    results = torch.autograd.grad(number, [embeds, *decoder.parameters()], allow_unused=True)
    return [x for x in results if x is not None]


@USUAL
@given(batch=embed_batches(B=2, T=9))
@settings(max_examples=3)
def test_gradients_in_chunks_equal_one_pass(name: str, batch: EmbedBatch) -> None:
    decoder = fresh(name).double()
    once = gradients(decoder, batch, lambda d, r: [read_whole(d, r)])
    chunks = gradients(decoder, batch, read_in_chunks)
    assert len(once) > 10
    assert_all_close(chunks, once)


@USUAL
@given(batch=embed_batches(B=2, T=9), data=st.data())
@settings(max_examples=2)
def test_no_gradient_flows_to_padding_or_the_future(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    decoder = fresh(name).double()
    t = data.draw(st.integers(1, batch.inputs_embeds.shape[1]))
    embeds = batch.inputs_embeds.clone().requires_grad_()
    output = read_whole(decoder, EmbedBatch(embeds, batch.attention_mask, ()))
    early = batch.attention_mask[:, :t]
    if early.any():
        weighted_sum(output.hidden_states[:, :t], output.cache.crop(t), early).backward()
        assert not embeds.grad[:, t:].any()
        assert not embeds.grad[~batch.attention_mask].any()
        assert embeds.grad[:, :t][early].any()


SLOW = ("mistral", "qwen2", "opt")  # their own code has separate gradient tests


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES]
)
def test_gradcheck_through_two_passes_on_a_cache(name: str) -> None:
    decoder = small(name, **({"activation": "gelu"} if name == "opt" else {}))  # ReLU has no derivative at its corner
    mask = torch.tensor([[True, True, False], [False, True, True]])

    start, directions = [noise(i, 2, T, 8) for i, T in enumerate((3, 1, 2))], noise(5, 2, 8)

    def read(*moves: Tensor) -> tuple[Tensor, ...]:
        """Run three passes with embeddings moved along a few directions; return weighted sums of the outputs."""
        first, second, third = (x + move @ directions for x, move in zip(start, moves[:3], strict=True))
        one = decoder(first, attention_mask=mask)
        two = decoder(second, one.cache)
        three = decoder(third, two.cache, attention_bias=moves[3])
        outs = (three.hidden_states, three.cache.keys[1], three.cache.values[0], two.hidden_states)
        return tuple(torch.stack([(x * noise(seed, *x.shape)).sum() for seed in (6, 7)]) for x in outs)

    moves = [torch.zeros(2, T, 2).double().requires_grad_() for T in (3, 1, 2)]
    assert gradcheck(read, (*moves, noise(4, 1, 2, 6).requires_grad_()), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradcheck_of_the_attention_bias(name: str, backend: str) -> None:
    decoder = small(name)
    decoder.attn_implementation = backend
    embeds, mask = noise(1, 2, 4, 8), torch.tensor([[True] * 4, [False, True, True, True]])

    def read(bias: Tensor) -> Tensor:
        return torch.einsum(
            "nd,dk->nk", decoder(embeds, attention_mask=mask, attention_bias=bias).hidden_states[mask], noise(3, 8, 2)
        )

    for shape in ((2, 4, 4), (1, 1, 4)):
        assert gradcheck(read, noise(2, *shape).requires_grad_(), atol=1e-7)


@USUAL
@given(batch=embed_batches(B=2, T=8), rounds=st.integers(1, 4))
@settings(max_examples=2)
def test_feedback_loop_on_a_cache_equals_recomputation(name: str, batch: EmbedBatch, rounds: int) -> None:
    """Hidden states become inputs; the loop on a cache equals reading question and all latents again."""
    mask = batch.attention_mask.clone()
    mask[:, -1] = True
    decoder = fresh(name).double()
    with torch.no_grad():  # so that rounding errors do not grow over the rounds
        for p in decoder.layers.parameters():
            p.mul_(0.4 if p.ndim == 2 else 1.0)

    def looped(question: Tensor) -> tuple[Tensor, Tensor, KVCache]:
        output = decoder(question, attention_mask=mask)
        thoughts: list[Tensor] = []
        for _ in range(rounds):
            thoughts.append(output.hidden_states[:, -1:])
            output = decoder(thoughts[-1], output.cache)
        return output.hidden_states, torch.cat(thoughts, 1), output.cache

    def recomputed(question: Tensor) -> tuple[Tensor, Tensor, KVCache]:
        thoughts = question[:, :0]
        for m in range(rounds + 1):
            alive = torch.cat([mask, torch.ones(len(mask), m, dtype=torch.bool)], 1)
            output = decoder(torch.cat([question, thoughts], 1), attention_mask=alive)
            if m < rounds:
                thoughts = torch.cat([thoughts, output.hidden_states[:, -1:]], 1)
        return output.hidden_states[:, -1:], thoughts, output.cache

    results = []
    for run in (looped, recomputed):
        question = batch.inputs_embeds.clone().requires_grad_()
        last, thoughts, state = run(question)
        weights = (last * noise(1, *last.shape)).sum()
        grads = torch.autograd.grad(weights, [question, *decoder.layers.parameters()])
        results.append((last, thoughts, state, grads))
    (last, thoughts, state, grads), (last_anew, thoughts_anew, state_anew, grads_anew) = results
    assert_close(last, last_anew)
    assert_close(thoughts, thoughts_anew)
    assert_same_cache(state, state_anew)
    assert_all_close(grads, grads_anew)


@pytest.mark.parametrize(("name", "every"), [*((name, 1) for name in FAMILIES), ("llama", 2)])
@given(batch=embed_batches(B=2, T=8))
@settings(max_examples=2)
def test_activation_checkpointing_does_not_change_results(name: str, every: int, batch: EmbedBatch) -> None:
    """Hidden states, keys, values and stages, and the gradients through output of them."""
    decoder = fresh(name).double().train()
    first = decoder(noise(9, len(batch.attention_mask), 3, 48)).cache.detach()
    past_tensors = [x.clone().requires_grad_() for x in (*first.keys, *first.values)]
    L, results = len(first.keys), []
    for every_k in (0, every):
        decoder.activation_checkpointing = every_k
        embeds = batch.inputs_embeds.clone().requires_grad_()
        state = KVCache(tuple(past_tensors[:L]), tuple(past_tensors[L:]), first.positions, first.valid)
        output = decoder(embeds, state, attention_mask=batch.attention_mask, capture=("q_rot", "mid.1", "hidden"))
        number = weighted_sum(output.hidden_states, output.cache, batch.attention_mask)
        number = number + sum(output.activations[key].square().mean() for key in sorted(output.activations))
        leaves = [embeds, *past_tensors, *decoder.parameters()]
        grads = [x for x in torch.autograd.grad(number, leaves, allow_unused=True) if x is not None]
        results.append(
            [output.hidden_states, *output.cache.keys, *output.cache.values, *output.activations.values(), *grads]
        )
    assert_all_close(results[1], results[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_activation_checkpointing_repeats_dropout(name: str) -> None:
    decoder = fresh(name, dropout=DropoutRates(0.1, 0.1, 0.1)).train()
    results = []
    for every_k in (0, 1):
        decoder.activation_checkpointing = every_k
        torch.manual_seed(7)
        embeds = noise(1, 2, 7, 48, dtype=torch.float32).requires_grad_()
        output = decoder(embeds)
        weighted_sum(output.hidden_states, output.cache, output.cache.valid).backward()
        results.append((output.hidden_states, embeds.grad))
    for actual, expected in zip(results[1], results[0], strict=True):
        assert error(actual, expected) <= RECOMPUTE


def test_activation_checkpointing_saves_fewer_tensors() -> None:
    """Fewer tensors are saved for the backward pass."""
    decoder, embeds = fresh("llama").train(), noise(1, 2, 7, 48, dtype=torch.float32)
    saved = []
    for every_k in (0, 1):
        decoder.activation_checkpointing, count = every_k, []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, count=count: count.append(x.numel()) or x, lambda x: x):
            decoder(embeds)
        saved.append(sum(count))
    assert saved[1] < 0.6 * saved[0]


def test_activation_checkpointing_is_off_in_eval_mode() -> None:
    decoder, embeds = fresh("llama").eval(), noise(1, 1, 3, 48, dtype=torch.float32)
    decoder.activation_checkpointing = 1
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        decoder(embeds)
    assert len(packed) > 40
