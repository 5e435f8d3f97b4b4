"""C8 and C20 to C22 against their oracles: places, head, next token, default positions."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.positions import (
    default_position_ids,
    last_valid,
    next_token,
    next_token_probabilities,
    position_embedding,
)
from tests.oracles.compare import agree, distance
from tests.oracles.llama_ends import MISREAD, ORACLE


@pytest.mark.equation("llama", "C8")
def test_places() -> None:
    table, p = torch.randn(9, 4, dtype=torch.float64), torch.tensor([[-1, 0, 1, 2], [3, -1, 6, 4]])
    agree(position_embedding, ORACLE["C8"], MISREAD["C8"], table, p, 2, margin=1e-2)
    agree(position_embedding, ORACLE["C8"], {}, table, p, 0)
    assert (position_embedding(table, p, 2)[p == -1] == 0).all()
    assert gradcheck(lambda table: position_embedding(table, p, 2), table.requires_grad_())


@pytest.mark.equation("llama", "C20")
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits(family: str, tied: bool) -> None:
    decoder = Decoder(DecoderConfig.tiny(family, tie_word_embeddings=tied)).double()
    head = decoder.token_embedding if tied else decoder.get_submodule(decoder.weight_names.head)
    hidden = torch.randn(2, 3, decoder.config.hidden_size, dtype=torch.float64, requires_grad=True)
    got = decoder.logits(hidden)
    agree(lambda hidden, _: decoder.logits(hidden), ORACLE["C20"], MISREAD["C20"], hidden, head.weight.detach())
    assert ("lm_head.weight" in decoder.state_dict()) != tied
    (gradient,) = torch.autograd.grad(got.sum(), head.weight)
    assert gradient.abs().sum() > 0
    if not tied:
        assert distance(got, torch.nn.functional.linear(hidden, decoder.token_embedding.weight)) > 1e-2
    assert gradcheck(decoder.logits, hidden, fast_mode=True)


@pytest.mark.equation("llama", "C20")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_head_reads_what_the_final_norm_gives(family: str) -> None:
    decoder = Decoder(DecoderConfig.tiny(family)).double().eval()
    with torch.no_grad():
        norm = decoder.get_submodule(decoder.weight_names.final_norm)
        norm.weight.copy_(torch.rand_like(norm.weight) + 0.5)
        seen = decoder(decoder.embed(torch.tensor([[3, 1, 4]])), want=("resid2", "logits"))
        last = seen.activations[f"resid2.{decoder.config.num_hidden_layers - 1}"]
        assert torch.equal(seen.activations["logits"], decoder.logits(norm(last)))
        assert distance(decoder.logits(last), seen.activations["logits"]) > 1e-1
        assert distance(decoder.logits(norm(norm(last))), seen.activations["logits"]) > 1e-2


def next_of(x: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    last = last_valid(x, live)
    return next_token(last), next_token_probabilities(last)


@pytest.mark.equation("llama", "C21")
def test_next_token() -> None:
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    live = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 0, 1, 0, 0]]).bool()
    x[0, 4, [2, 5]] = 9.0
    x[1, 3, [1, 6]] = x[2, 2, [0, 3]] = 8.0
    agree(next_of, ORACLE["C21"], MISREAD["C21"], x, live)
    assert next_token(last_valid(x, live)).tolist() == [2, 1, 0]
    low = last_valid(x, live).bfloat16()
    assert next_token_probabilities(low).dtype == torch.float32


HELD = torch.tensor([[0, 1, 2], [9, 4, 2], [-1, -1, 0], [7, 8, 9], [-1, -1, -1]])
HELD_LIVE = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]]).bool()
LIVE = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1], [1, 1, 0, 1]]).bool()


@pytest.mark.equation("llama", "C22")
def test_default_positions() -> None:
    want = ORACLE["C22"](LIVE, HELD, HELD_LIVE)
    assert want.tolist() == [[3, 4, 5, 6], [0, 5, 6, 0], [1, 0, 0, 2], [0, 0, 0, 1], [0, 1, 0, 2]]
    assert torch.equal(default_position_ids(LIVE, HELD, HELD_LIVE), want)
    for name, wrong in MISREAD["C22"].items():
        assert not torch.equal(wrong(LIVE, HELD, HELD_LIVE), want), name
    nothing = HELD[:, :0]
    assert torch.equal(
        default_position_ids(LIVE, nothing, nothing.bool()), ORACLE["C22"](LIVE, nothing, nothing.bool())
    )
