"""Answers after a question or after thoughts: the same batched or alone, counted in passes and positions."""

import pytest
import torch

from laconic.core.answering import Writing, after, latent, quiet, written
from laconic.core.contract import Reasoning
from laconic.core.decoder import Decoder
from laconic.core.families import DecoderConfig
from laconic.core.generate import Passes, generate
from laconic.core.sampling import Sampling
from laconic.core.thoughts import Thoughts
from tests.core.readings import FAMILIES, fresh

EOS = 2


def questions(*sizes: int, pads: int = 0) -> Reasoning:
    """Questions alone, padded on the left with the eos; index 5, 6, …"""
    B, width = len(sizes), max(sizes) + pads
    ids, live = torch.full((B, width), EOS), torch.zeros(B, width, dtype=torch.bool)
    for b, n in enumerate(sizes):
        ids[b, width - n :] = torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(b))
        live[b, width - n :] = True
    none = torch.zeros(B, 0, dtype=torch.long)
    row = torch.zeros(B, dtype=torch.long)
    index, off = torch.arange(5, 5 + B), none.bool()
    return Reasoning(ids, live, none, off, none, none, off, row, none, none, row - 1, off, index)


def writing(**changes: object) -> Writing:
    settings = {"max_tokens": 6, "eos": (EOS,), "decode": lambda ids: " ".join(map(str, ids))}
    return Writing(**(settings | changes))  # type: ignore[arg-type]


def thinking(name: str, rounds: int | None, **changes: object) -> tuple[Decoder, Thoughts]:
    decoder, mode = fresh(name), "sequential" if rounds is None else "jacobi"
    return decoder, Thoughts(decoder, count=3, rounds=rounds, mode=mode, control_init="normal", **changes)  # type: ignore[arg-type]


def longhand(decoder: Decoder, thoughts: Thoughts, ids: torch.Tensor, told: Writing) -> list[int]:
    """The answer of one question, everything before each token read anew: greedy, rounds as loops."""
    M, words = thoughts.count, decoder.embed(ids[None])
    start = torch.cat([words, thoughts.bot[None, None]], 1)
    if thoughts.mode == "sequential":
        z = start[:, :0]
        for _ in range(M):
            hidden = decoder(torch.cat([start, z], 1)).hidden[:, -1:]
            z = torch.cat([z, thoughts.project(hidden)], 1)
    else:
        z = thoughts.slot.expand(1, M, -1)
        for t in range(thoughts.rounds):
            hidden = decoder(torch.cat([start, z], 1)).hidden[:, start.shape[1] - 1 : -1]
            z = torch.cat([z[:, : min(t, 1)], thoughts.project(hidden)[:, min(t, 1) :]], 1)
    read = torch.cat(
        [start, z, thoughts.eot[None, None], decoder.embed(torch.tensor([told.prompt], dtype=torch.long))], 1
    )
    found: list[int] = []
    while len(found) < told.max_tokens and (not found or found[-1] not in told.eos):
        found.append(int(decoder.logits(decoder(read).hidden[0, -1]).argmax()))
        read = torch.cat([read, decoder.embed(torch.tensor([found[-1:]]))], 1)
    return found


@torch.no_grad()
@pytest.mark.parametrize("rounds", [0, 2, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_latent_answers_batched_alone_and_by_hand(name: str, rounds: int | None) -> None:
    decoder, thoughts = thinking(name, rounds)
    asked, told = questions(4, 1, 6, pads=2), writing(prompt=(9, 8))
    got = latent(decoder, thoughts, asked, told)
    for b in range(3):
        one = latent(decoder, thoughts, asked.take([b]), told)
        assert (one.ids[0], one.texts[0], one.passes[0], one.held[0]) == (
            got.ids[b], got.texts[b], got.passes[b], got.held[b]
        )  # fmt: skip
        n, size = len(got.ids[b]), int(asked.question_live[b].sum())
        assert list(got.ids[b]) == longhand(decoder, thoughts, asked.question[b, asked.question_live[b]], told)
        assert got.passes[b] == (Passes(1, 0, 3, n) if rounds is None else Passes(0, 1, rounds, n))
        assert got.passes[b].total == 1 + (3 if rounds is None else rounds) + n
        assert got.held[b] == (size + 1 + 3 + 1 + 2, size + 1 + 3 + 1 + 2 + n - 1)
        assert got.texts[b] == " ".join(str(i) for i in got.ids[b] if i != EOS)


def test_as_many_rounds_as_thoughts_answer_like_one_after_the_other() -> None:
    (decoder, jacobi), (_, sequential) = thinking("llama", 3), thinking("llama", None)
    sequential.load_state_dict(jacobi.state_dict())
    asked = questions(4, 1, 6)
    assert latent(decoder, jacobi, asked, writing()).ids == latent(decoder, sequential, asked, writing()).ids


def test_written_answers_are_those_of_generation() -> None:
    decoder, asked = fresh("llama"), questions(4, 1, 6, pads=1)
    rows = [[*asked.question[b, asked.question_live[b]].tolist(), 9] for b in range(3)]
    got = written(decoder, asked, writing(), given=(9,), begins=lambda ids: 2)
    for b, g in enumerate(generate(decoder, ids=rows, max_tokens=6, eos=EOS)):
        n = len(g.ids)
        assert got.ids[b] == tuple(g.ids)
        assert got.passes[b] == Passes(1, 0, 0, n - 1)
        assert got.held[b] == (min(len(rows[b]) + 2, len(rows[b]) + n - 1), len(rows[b]) + n - 1)


def test_a_long_question_is_one_pass() -> None:
    decoder = Decoder(DecoderConfig.small("llama", max_position_embeddings=2048))
    got = written(decoder, questions(700), writing(max_tokens=2))
    assert got.passes[0].read == 1


def test_draws_are_the_rows_own() -> None:
    """They depend on the seed and on the row's place in its set, not on the batch it comes in."""
    decoder, thoughts = thinking("llama", 2)
    asked, hot = questions(4, 4, 4), Sampling(temperature=3.0)
    got = latent(decoder, thoughts, asked, writing(how=hot))
    assert latent(decoder, thoughts, asked.take([2]), writing(how=hot)).ids[0] == got.ids[2]
    assert latent(decoder, thoughts, asked, writing(how=hot, seed=1)).ids != got.ids


@pytest.mark.parametrize("eos", [(EOS,), ()])
def test_padding_is_never_said(eos: tuple[int, ...]) -> None:
    decoder, asked = fresh("llama"), questions(4)
    (first,) = written(decoder, asked, writing(eos=eos, max_tokens=1)).ids
    decoder.config = DecoderConfig.small("llama", pad=first[0])
    (got,) = written(decoder, asked, writing(eos=eos)).ids
    assert first[0] not in got
    kept = written(decoder, asked, writing(eos=(*eos, first[0]))).ids[0]
    assert kept == first


def test_answers_are_without_dropout_and_gradients_and_leave_the_mode() -> None:
    decoder, thoughts = thinking("llama", 2, project="codi", project_dropout=0.9)
    asked = questions(4, 2)
    calm = latent(decoder.eval(), thoughts.eval(), asked, writing())
    thoughts.train()
    decoder.blocks.train()
    got = latent(decoder, thoughts, asked, writing())
    assert got.ids == calm.ids
    assert (decoder.training, decoder.blocks.training, thoughts.training) == (False, True, True)
    with quiet(thoughts):
        assert not torch.is_grad_enabled()
        assert not thoughts.training
    assert torch.is_grad_enabled()


def test_answering_is_bit_equal_after_saving(tmp_path: object) -> None:
    decoder, thoughts = thinking("llama", 2)
    _, other = thinking("llama", 2)
    with torch.no_grad():
        other.vectors.add_(1)
    thoughts.save(f"{tmp_path}/t", {})
    other.load(f"{tmp_path}/t", {})
    asked = questions(3, 5)
    with torch.no_grad():
        one, two = (t.think(decoder, question=decoder.embed(asked.question)) for t in (thoughts, other))
    assert one.state.equal(two.state)
    assert latent(decoder, thoughts, asked, writing()) == latent(decoder, other, asked, writing())


def test_passes_before_and_after_are_added() -> None:
    decoder, thoughts = thinking("llama", 2)
    asked = questions(3)
    with torch.no_grad():
        state = decoder(decoder.embed(asked.question)).state
        rolled = thoughts.think(decoder, state)
    counted = rolled.passes._replace(read=1)
    got = after(decoder, asked, rolled.state, thoughts.eot, counted, writing())
    assert got.passes[0] == Passes(1, 1, 2, len(got.ids[0]))
