"""Answers after a question or after thoughts: the same batched or alone, counted in passes and positions."""

import pytest
import torch

from laconic.batches import PassCounts, ReasoningBatch
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.latent.answering import AnswerDecoding, answer_from_cache, answer_from_latents, generate_answers
from laconic.latent.thoughts import LatentThoughts
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.modes import eval_no_grad
from tests.core.readings import FAMILIES, fresh

EOS = 2


def questions(*sizes: int, pads: int = 0) -> ReasoningBatch:
    """Questions alone, padded on the left with the eos; index 5, 6, …"""
    B, width = len(sizes), max(sizes) + pads
    ids, live = torch.full((B, width), EOS), torch.zeros(B, width, dtype=torch.bool)
    for b, n in enumerate(sizes):
        ids[b, width - n :] = torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(b))
        live[b, width - n :] = True
    none = torch.zeros(B, 0, dtype=torch.long)
    row = torch.zeros(B, dtype=torch.long)
    index, off = torch.arange(5, 5 + B), none.bool()
    return ReasoningBatch(ids, live, none, off, none, none, off, row, none, none, row - 1, off, index)


def writing(**changes: object) -> AnswerDecoding:
    settings = {"max_tokens": 6, "eos": (EOS,), "decode": lambda ids: " ".join(map(str, ids))}
    return AnswerDecoding(**(settings | changes))  # type: ignore[arg-type]


def thinking(name: str, rounds: int | None, **changes: object) -> tuple[Decoder, LatentThoughts]:
    decoder, mode = fresh(name), "sequential" if rounds is None else "jacobi"
    return decoder, LatentThoughts(
        decoder, num_latents=3, num_iterations=rounds, schedule=mode, control_init="normal", **changes
    )  # type: ignore[arg-type]


def longhand(decoder: Decoder, thoughts: LatentThoughts, ids: torch.Tensor, told: AnswerDecoding) -> list[int]:
    """The answer of one question, everything before each token read anew: greedy, rounds as loops."""
    M, words = thoughts.num_latents, decoder.embed(ids[None])
    start = torch.cat([words, thoughts.begin[None, None]], 1)
    if thoughts.schedule == "sequential":
        z = start[:, :0]
        for _ in range(M):
            hidden = decoder(torch.cat([start, z], 1)).hidden[:, -1:]
            z = torch.cat([z, thoughts.project(hidden)], 1)
    else:
        z = thoughts.placeholder.expand(1, M, -1)
        for t in range(thoughts.num_iterations):
            hidden = decoder(torch.cat([start, z], 1)).hidden[:, start.shape[1] - 1 : -1]
            z = torch.cat([z[:, : min(t, 1)], thoughts.project(hidden)[:, min(t, 1) :]], 1)
    read = torch.cat(
        [start, z, thoughts.end[None, None], decoder.embed(torch.tensor([told.answer_prompt], dtype=torch.long))], 1
    )
    found: list[int] = []
    while len(found) < told.max_tokens and (not found or found[-1] not in told.eos_token_ids):
        found.append(int(decoder.logits(decoder(read).hidden[0, -1]).argmax()))
        read = torch.cat([read, decoder.embed(torch.tensor([found[-1:]]))], 1)
    return found


@torch.no_grad()
@pytest.mark.parametrize("rounds", [0, 2, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_latent_answers_batched_alone_and_by_hand(name: str, rounds: int | None) -> None:
    decoder, thoughts = thinking(name, rounds)
    asked, told = questions(4, 1, 6, pads=2), writing(prompt=(9, 8))
    got = answer_from_latents(decoder, thoughts, asked, told)
    for b in range(3):
        one = answer_from_latents(decoder, thoughts, asked.select_rows([b]), told)
        assert (one.token_ids[0], one.texts[0], one.passes[0], one.cache_positions[0]) == (
            got.token_ids[b], got.texts[b], got.passes[b], got.cache_positions[b]
        )  # fmt: skip
        n, size = len(got.token_ids[b]), int(asked.question_mask[b].sum())
        assert list(got.token_ids[b]) == longhand(
            decoder, thoughts, asked.question_ids[b, asked.question_mask[b]], told
        )
        assert got.passes[b] == (PassCounts(1, 0, 3, n) if rounds is None else PassCounts(0, 1, rounds, n))
        assert got.passes[b].total == 1 + (3 if rounds is None else rounds) + n
        assert got.cache_positions[b] == (size + 1 + 3 + 1 + 2, size + 1 + 3 + 1 + 2 + n - 1)
        assert got.texts[b] == " ".join(str(i) for i in got.token_ids[b] if i != EOS)


def test_as_many_rounds_as_thoughts_answer_like_one_after_the_other() -> None:
    (decoder, jacobi), (_, sequential) = thinking("llama", 3), thinking("llama", None)
    sequential.load_state_dict(jacobi.state_dict())
    asked = questions(4, 1, 6)
    assert (
        answer_from_latents(decoder, jacobi, asked, writing()).token_ids
        == answer_from_latents(decoder, sequential, asked, writing()).token_ids
    )


def test_written_answers_are_those_of_generation() -> None:
    decoder, asked = fresh("llama"), questions(4, 1, 6, pads=1)
    rows = [[*asked.question_ids[b, asked.question_mask[b]].tolist(), 9] for b in range(3)]
    got = generate_answers(decoder, asked, writing(), prefix_ids=(9,), answer_offset=lambda ids: 2)
    for b, g in enumerate(generate(decoder, input_ids=rows, config=GenerationConfig(max_tokens=6, eos_token_ids=EOS))):
        n = len(g.token_ids)
        assert got.token_ids[b] == tuple(g.token_ids)
        assert got.passes[b] == PassCounts(1, 0, 0, n - 1)
        assert got.cache_positions[b] == (min(len(rows[b]) + 2, len(rows[b]) + n - 1), len(rows[b]) + n - 1)


def test_a_long_question_is_one_pass() -> None:
    decoder = Decoder(DecoderConfig.tiny("llama", max_position_embeddings=2048))
    got = generate_answers(decoder, questions(700), writing(max_tokens=2))
    assert got.passes[0].prompt == 1


def test_draws_are_the_rows_own() -> None:
    """They depend on the seed and on the row's place in its set, not on the batch it comes in."""
    decoder, thoughts = thinking("llama", 2)
    asked, hot = questions(4, 4, 4), GenerationConfig(temperature=3.0)
    got = answer_from_latents(decoder, thoughts, asked, writing(how=hot))
    assert (
        answer_from_latents(decoder, thoughts, asked.select_rows([2]), writing(how=hot)).token_ids[0]
        == got.token_ids[2]
    )
    assert answer_from_latents(decoder, thoughts, asked, writing(how=hot, seed=1)).token_ids != got.token_ids


@pytest.mark.parametrize("eos", [(EOS,), ()])
def test_padding_is_never_said(eos: tuple[int, ...]) -> None:
    decoder, asked = fresh("llama"), questions(4)
    (first,) = generate_answers(decoder, asked, writing(eos=eos, max_tokens=1)).token_ids
    decoder.config = DecoderConfig.tiny("llama", pad=first[0])
    (got,) = generate_answers(decoder, asked, writing(eos=eos)).token_ids
    assert first[0] not in got
    kept = generate_answers(decoder, asked, writing(eos=(*eos, first[0]))).token_ids[0]
    assert kept == first


def test_answers_are_without_dropout_and_gradients_and_leave_the_mode() -> None:
    decoder, thoughts = thinking("llama", 2, project="codi", projection_dropout=0.9)
    asked = questions(4, 2)
    calm = answer_from_latents(decoder.eval(), thoughts.eval(), asked, writing())
    thoughts.train()
    decoder.layers.train()
    got = answer_from_latents(decoder, thoughts, asked, writing())
    assert got.token_ids == calm.token_ids
    assert (decoder.training, decoder.layers.training, thoughts.training) == (False, True, True)
    with eval_no_grad(thoughts):
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
        one, two = (t.think(decoder, question=decoder.embed(asked.question_ids)) for t in (thoughts, other))
    assert one.cache.equal(two.cache)
    assert answer_from_latents(decoder, thoughts, asked, writing()) == answer_from_latents(
        decoder, other, asked, writing()
    )


def test_passes_before_and_after_are_added() -> None:
    decoder, thoughts = thinking("llama", 2)
    asked = questions(3)
    with torch.no_grad():
        state = decoder(decoder.embed(asked.question_ids)).state
        rolled = thoughts.think(decoder, state)
    counted = rolled.passes._replace(prompt=1)
    got = answer_from_cache(decoder, asked, rolled.cache, thoughts.end, counted, writing())
    assert got.passes[0] == PassCounts(1, 1, 2, len(got.token_ids[0]))
