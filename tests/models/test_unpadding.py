"""Training without padding gives the outputs, caches and gradients of the padded batch."""

import pytest
import torch
from torch import Tensor, nn

from laconic.models.decoder import Decoder, DecoderOutput
from tests.models.fixtures import assert_all_close, assert_close, assert_same_cache, fresh, noise

MASK = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0, 0]]).bool()
CAPTURE = ("hidden", "q_rot", "k_cache.1")
pytestmark = pytest.mark.usefixtures("unchecked")


def count_rows(decoder: Decoder) -> list[int]:
    """Return a list to which each pass adds the number of vectors that the last MLP reads."""
    counts: list[int] = []
    layer = decoder.layers[-1].submodule("down")  # pyright: ignore[reportCallIssue]
    assert isinstance(layer, nn.Linear)
    layer.register_forward_pre_hook(lambda module, args: counts.append(args[0].shape[:-1].numel()))
    return counts


def read_twice(decoder: Decoder, capture: tuple[str, ...] = CAPTURE) -> tuple[DecoderOutput, list[Tensor]]:
    """Run a pass on the cache of another; return its output, and the gradients of embeddings and parameters."""
    first, second = (noise(seed, 3, 8, 48).requires_grad_() for seed in (1, 2))
    cache = decoder(first, attention_mask=MASK).cache
    output = decoder(second, cache, attention_mask=MASK.flip(0), capture=capture)
    terms = [output.hidden_states[MASK.flip(0)], *(x.transpose(1, 2)[output.cache.valid] for x in output.cache.keys)]
    total = sum((x * noise(i, *x.shape)).sum() for i, x in enumerate(terms))
    assert isinstance(total, Tensor)
    return output, list(torch.autograd.grad(total, [first, second, *decoder.parameters()], materialize_grads=True))


@pytest.mark.parametrize("activation_checkpointing", [0, 2])
@pytest.mark.parametrize("name", ["llama, windows", "qwen3", "gpt2", "opt"])
def test_unpadding_changes_no_result(name: str, activation_checkpointing: int) -> None:
    decoder = fresh(name).double()
    decoder.activation_checkpointing = activation_checkpointing
    counts = count_rows(decoder)
    unpadded, gradients = read_twice(decoder.train())
    assert set(counts) == {int(MASK.sum())}
    counts.clear()
    padded, expected = read_twice(decoder.eval())
    assert set(counts) == {MASK.numel()}
    assert_all_close(gradients, expected)
    assert_close(unpadded.hidden_states[MASK.flip(0)], padded.hidden_states[MASK.flip(0)])
    assert_same_cache(unpadded.cache, padded.cache)
    for l in range(3):
        assert_close(unpadded.activations[f"hidden.{l}"][MASK.flip(0)], padded.activations[f"hidden.{l}"][MASK.flip(0)])
    queries, expected_queries = (output.activations["q_rot.1"].transpose(1, 2) for output in (unpadded, padded))
    assert_close(queries[MASK.flip(0)], expected_queries[MASK.flip(0)])


def test_unpadding_is_only_for_training_on_padded_rows() -> None:
    decoder = fresh("llama").double().train()
    counts = count_rows(decoder)
    read_twice(decoder, ("mid",))  # of every position
    assert counts == [int(MASK.sum()), MASK.numel()]
    with torch.no_grad():
        decoder(noise(1, 3, 8, 48), attention_mask=MASK)
    decoder(noise(1, 3, 8, 48), attention_mask=torch.ones_like(MASK))
    decoder(noise(1, 3, 8, 48), attention_mask=torch.zeros_like(MASK))
    assert set(counts[2:]) == {MASK.numel()}
