"""Equations C8 and C20 to C22 against their oracles: positions, head, next token, default positions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from laconic.models.cache_slots import default_position_ids
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder, position_embedding
from laconic.models.next_token import last_valid, next_token, next_token_probabilities
from tests.oracles.compare import agree, distance
from tests.oracles.llama_ends import MISREAD, ORACLE


@pytest.mark.equation("llama", "C8")
def test_position_embedding() -> None:
    table, p = torch.randn(9, 4, dtype=torch.float64), torch.tensor([[-1, 0, 1, 2], [3, -1, 6, 4]])

    def ours(table: Tensor, p: Tensor, offset: int) -> Tensor:
        return position_embedding(lambda rows: F.embedding(rows, table), p, offset)

    agree(ours, ORACLE["C8"], MISREAD["C8"], table, p, 2, margin=1e-2)
    agree(ours, ORACLE["C8"], {}, table, p, 0)
    assert (ours(table, p, 2)[p == -1] == 0).all()
    assert gradcheck(lambda table: ours(table, p, 2), table.requires_grad_())


@pytest.mark.equation("llama", "C20")
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits(family: str, tied: bool) -> None:
    decoder = Decoder(DecoderConfig.tiny(family, tie_word_embeddings=tied)).double()
    head = decoder.token_embedding if tied else decoder.get_submodule(decoder.weight_names.head)
    hidden = torch.randn(2, 3, decoder.config.hidden_size, dtype=torch.float64, requires_grad=True)
    logits = decoder.logits(hidden)
    agree(lambda hidden, _: decoder.logits(hidden), ORACLE["C20"], MISREAD["C20"], hidden, head.weight.detach())
    assert ("lm_head.weight" in decoder.state_dict()) != tied
    (gradient,) = torch.autograd.grad(logits.sum(), head.weight)
    assert gradient.abs().sum() > 0
    if not tied:
        assert distance(logits, torch.nn.functional.linear(hidden, decoder.token_embedding.weight)) > 1e-2
    assert gradcheck(decoder.logits, hidden, fast_mode=True)


@pytest.mark.equation("llama", "C20")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_are_computed_after_the_final_norm(family: str) -> None:
    decoder = Decoder(DecoderConfig.tiny(family)).double().eval()
    with torch.no_grad():
        norm = decoder.get_submodule(decoder.weight_names.final_norm)
        norm.weight.copy_(torch.rand_like(norm.weight) + 0.5)
        output = decoder(decoder.embed(torch.tensor([[3, 1, 4]])), capture=("resid2", "logits"))
        last = output.activations[f"resid2.{decoder.config.num_hidden_layers - 1}"]
        assert torch.equal(output.activations["logits"], decoder.logits(norm(last)))
        assert distance(decoder.logits(last), output.activations["logits"]) > 1e-1
        assert distance(decoder.logits(norm(norm(last))), output.activations["logits"]) > 1e-2


def last_token(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    last = last_valid(x, mask)
    return next_token(last), next_token_probabilities(last)


@pytest.mark.equation("llama", "C21")
def test_next_token() -> None:
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 0, 1, 0, 0]]).bool()
    x[0, 4, [2, 5]] = 9.0
    x[1, 3, [1, 6]] = x[2, 2, [0, 3]] = 8.0
    agree(last_token, ORACLE["C21"], MISREAD["C21"], x, mask)
    assert next_token(last_valid(x, mask)).tolist() == [2, 1, 0]
    low = last_valid(x, mask).bfloat16()
    assert next_token_probabilities(low).dtype == torch.float32


PAST = torch.tensor([[0, 1, 2], [9, 4, 2], [-1, -1, 0], [7, 8, 9], [-1, -1, -1]])
PAST_VALID = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]]).bool()
MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1], [1, 1, 0, 1]]).bool()


@pytest.mark.equation("llama", "C22")
def test_default_position_ids() -> None:
    expected = ORACLE["C22"](MASK, PAST, PAST_VALID)
    assert expected.tolist() == [[3, 4, 5, 6], [0, 5, 6, 0], [1, 0, 0, 2], [0, 0, 0, 1], [0, 1, 0, 2]]
    assert torch.equal(default_position_ids(MASK, PAST, PAST_VALID), expected)
    for name, wrong in MISREAD["C22"].items():
        assert not torch.equal(wrong(MASK, PAST, PAST_VALID), expected), name
    empty = PAST[:, :0]
    assert torch.equal(default_position_ids(MASK, empty, empty.bool()), ORACLE["C22"](MASK, empty, empty.bool()))
