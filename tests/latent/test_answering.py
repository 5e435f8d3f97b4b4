"""Answers after a question or latents: equal in a batch and alone, with passes and cache positions."""

import pytest
import torch

from laconic.batches import AnswerBatch, PassCounts, ReasoningBatch
from laconic.config.methods import DistillationConfig
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.latent.answering import AnswerDecoding, decode_answers, prompt_with_question
from laconic.latent.codi import Codi
from laconic.latent.pccot import Pccot
from laconic.latent.stop_head import count_valid_latents
from laconic.latent.thoughts import LatentThoughts
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.modes import eval_no_grad
from tests.models.fixtures import FAMILIES, fresh

EOS = 2


def questions(*sizes: int, pads: int = 0) -> ReasoningBatch:
    """Questions without chains, padded on the left with the eos; row_index 5, 6, …"""
    B, width = len(sizes), max(sizes) + pads
    ids, mask = torch.full((B, width), EOS), torch.zeros(B, width, dtype=torch.bool)
    for b, n in enumerate(sizes):
        ids[b, width - n :] = torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(b))
        mask[b, width - n :] = True
    none = torch.zeros(B, 0, dtype=torch.long)
    row = torch.zeros(B, dtype=torch.long)
    index, no_mask = torch.arange(5, 5 + B), none.bool()
    return ReasoningBatch(ids, mask, none, no_mask, none, none, no_mask, row, none, none, row - 1, no_mask, index)


def build_decoding(**changes: object) -> AnswerDecoding:
    settings = {"max_tokens": 6, "eos_token_ids": (EOS,), "decode": lambda ids: " ".join(map(str, ids))}
    return AnswerDecoding(**(settings | changes))  # type: ignore[arg-type]


def build_model(
    name: str, num_iterations: int | None, num_latents: int = 3, **changes: object
) -> tuple[Decoder, LatentThoughts]:
    decoder, mode = fresh(name), "sequential" if num_iterations is None else "jacobi"
    options = {"num_latents": num_latents, "num_iterations": num_iterations, "schedule": mode, "control_init": "normal"}
    return decoder, LatentThoughts(decoder, **options, **changes)  # type: ignore[arg-type]


def answer_from_latents(
    decoder: Decoder, thoughts: LatentThoughts, batch: ReasoningBatch, decoding: AnswerDecoding
) -> AnswerBatch:
    method = Codi if thoughts.schedule == "sequential" else Pccot
    return method(decoder, thoughts, DistillationConfig()).answer(batch, decoding)


def answer_question(decoder: Decoder, batch: ReasoningBatch, decoding: AnswerDecoding) -> AnswerBatch:
    return decode_answers(decoder, batch, prompt_with_question(decoder, batch, ()), decoding)


def answer_without_cache(
    decoder: Decoder, thoughts: LatentThoughts, ids: torch.Tensor, decoding: AnswerDecoding
) -> list[int]:
    """The greedy answer to one question; everything is read again for every token."""
    M, vectors = thoughts.num_latents, decoder.embed(ids[None])
    start = torch.cat([vectors, thoughts.begin[None, None]], 1)
    if thoughts.schedule == "sequential":
        z = start[:, :0]
        for _ in range(M):
            hidden = decoder(torch.cat([start, z], 1)).hidden_states[:, -1:]
            z = torch.cat([z, thoughts.project(hidden)], 1)
    else:
        z = thoughts.placeholder.expand(1, M, -1)
        for t in range(thoughts.num_iterations):
            hidden = decoder(torch.cat([start, z], 1)).hidden_states[:, start.shape[1] - 1 : -1]
            z = torch.cat([z[:, : min(t, 1)], thoughts.project(hidden)[:, min(t, 1) :]], 1)
    read = torch.cat(
        [start, z, thoughts.end[None, None], decoder.embed(torch.tensor([decoding.answer_prompt], dtype=torch.long))], 1
    )
    ids_so_far: list[int] = []
    while len(ids_so_far) < decoding.max_tokens and (not ids_so_far or ids_so_far[-1] not in decoding.eos_token_ids):
        ids_so_far.append(int(decoder.logits(decoder(read).hidden_states[0, -1]).argmax()))
        read = torch.cat([read, decoder.embed(torch.tensor([ids_so_far[-1:]]))], 1)
    return ids_so_far


@torch.no_grad()
@pytest.mark.parametrize("num_iterations", [0, 1, 2, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_from_latents_equal_single_rows_without_cache(name: str, num_iterations: int | None) -> None:
    decoder, thoughts = build_model(name, num_iterations)
    batch, decoding = questions(4, 1, 6, pads=2), build_decoding(answer_prompt=(9, 8))
    got = answer_from_latents(decoder, thoughts, batch, decoding)
    for b in range(3):
        one = answer_from_latents(decoder, thoughts, batch.select_rows([b]), decoding)
        assert (one.token_ids[0], one.texts[0], one.passes[0], one.cache_positions[0]) == (
            got.token_ids[b], got.texts[b], got.passes[b], got.cache_positions[b]
        )  # fmt: skip
        n, size = len(got.token_ids[b]), int(batch.question_mask[b].sum())
        assert list(got.token_ids[b]) == answer_without_cache(
            decoder, thoughts, batch.question_ids[b, batch.question_mask[b]], decoding
        )
        assert got.passes[b] == (
            PassCounts(1, 0, 3, n - 1) if num_iterations is None else PassCounts(0, 1, num_iterations, n - 1)
        )
        assert got.passes[b].total == (3 if num_iterations is None else num_iterations) + n
        assert got.cache_positions[b] == (size + 1 + 3 + 1 + 2, size + 1 + 3 + 1 + 2 + n - 1)
        assert got.texts[b] == " ".join(str(i) for i in got.token_ids[b] if i != EOS)


def test_answers_as_many_iterations_as_latents_equal_sequential() -> None:
    (decoder, jacobi), (_, sequential) = build_model("llama", 3), build_model("llama", None)
    sequential.load_state_dict(jacobi.state_dict())
    batch = questions(4, 1, 6)
    assert (
        answer_from_latents(decoder, jacobi, batch, build_decoding()).token_ids
        == answer_from_latents(decoder, sequential, batch, build_decoding()).token_ids
    )


def test_decode_answers_equals_generate() -> None:
    decoder, batch = fresh("llama"), questions(4, 1, 6, pads=1)
    rows = [[*batch.question_ids[b, batch.question_mask[b]].tolist(), 9] for b in range(3)]
    got = decode_answers(decoder, batch, prompt_with_question(decoder, batch, (9,)), build_decoding())
    for b, g in enumerate(generate(decoder, input_ids=rows, config=GenerationConfig(max_tokens=6, eos_token_ids=EOS))):
        n = len(g.token_ids)
        assert got.token_ids[b] == tuple(g.token_ids)
        assert got.passes[b] == PassCounts(1, 0, 0, n - 1)
        assert got.cache_positions[b] == (len(rows[b]), len(rows[b]) + n - 1)


def test_decode_answers_reads_a_long_question_in_one_pass() -> None:
    decoder = Decoder(DecoderConfig.tiny("llama", max_position_embeddings=2048))
    got = answer_question(decoder, questions(700), build_decoding(max_tokens=2))
    assert got.passes[0].prompt == 1


def test_answers_sampling_depends_on_the_row_only() -> None:
    """Samples depend on the seed and the row index, not on the batch."""
    decoder, thoughts = build_model("llama", 2)
    batch, hot = questions(4, 4, 4), GenerationConfig(temperature=3.0)
    got = answer_from_latents(decoder, thoughts, batch, build_decoding(sampling=hot))
    assert (
        answer_from_latents(decoder, thoughts, batch.select_rows([2]), build_decoding(sampling=hot)).token_ids[0]
        == got.token_ids[2]
    )
    assert (
        answer_from_latents(decoder, thoughts, batch, build_decoding(sampling=hot, seed=1)).token_ids != got.token_ids
    )


@pytest.mark.parametrize("eos", [(EOS,), ()])
def test_answers_suppress_the_padding_token(eos: tuple[int, ...]) -> None:
    decoder, batch = fresh("llama"), questions(4)
    (first,) = answer_question(decoder, batch, build_decoding(eos_token_ids=eos, max_tokens=1)).token_ids
    decoder.config = DecoderConfig.tiny("llama", pad_token_id=first[0])
    (got,) = answer_question(decoder, batch, build_decoding(eos_token_ids=eos)).token_ids
    assert first[0] not in got
    with_pad = answer_question(decoder, batch, build_decoding(eos_token_ids=(*eos, first[0]))).token_ids[0]
    assert with_pad == first


def test_answers_have_no_dropout_or_gradients() -> None:
    decoder, thoughts = build_model("llama", 2, projection="codi", projection_dropout=0.9)
    batch = questions(4, 2)
    expected = answer_from_latents(decoder.eval(), thoughts.eval(), batch, build_decoding())
    thoughts.train()
    decoder.layers.train()
    got = answer_from_latents(decoder, thoughts, batch, build_decoding())
    assert got.token_ids == expected.token_ids
    assert (decoder.training, decoder.layers.training, thoughts.training) == (False, True, True)
    with eval_no_grad(thoughts):
        assert not torch.is_grad_enabled()
        assert not thoughts.training
    assert torch.is_grad_enabled()


def test_answers_are_equal_after_save_and_load(tmp_path: object) -> None:
    decoder, thoughts = build_model("llama", 2)
    _, other = build_model("llama", 2)
    with torch.no_grad():
        other.vectors.add_(1)
    thoughts.save(f"{tmp_path}/t", {})
    other.load(f"{tmp_path}/t", {})
    batch = questions(3, 5)
    with torch.no_grad():
        one, two = (t.think(decoder, question=decoder.embed(batch.question_ids)) for t in (thoughts, other))
    assert one.cache.is_equal(two.cache)
    assert answer_from_latents(decoder, thoughts, batch, build_decoding()) == answer_from_latents(
        decoder, other, batch, build_decoding()
    )


@torch.no_grad()
def test_answers_with_a_jacobi_tolerance_equal_single_rows() -> None:
    decoder, thoughts = build_model("llama", 5)
    batch, decoding = questions(4, 1, 6, pads=2), build_decoding(answer_prompt=(9, 8), jacobi_tolerance=1.2)
    got = answer_from_latents(decoder, thoughts, batch, decoding)
    fixed = answer_from_latents(decoder, thoughts, batch, build_decoding(answer_prompt=(9, 8)))
    assert sum(p.total for p in got.passes) < sum(p.total for p in fixed.passes)
    for b in range(3):
        one = answer_from_latents(decoder, thoughts, batch.select_rows([b]), decoding)
        assert (one.token_ids[0], one.passes[0], one.cache_positions[0]) == (
            got.token_ids[b], got.passes[b], got.cache_positions[b]
        )  # fmt: skip


def test_prompt_after_latents_adds_passes() -> None:
    decoder, thoughts = build_model("llama", 2)
    batch = questions(3)
    with torch.no_grad():
        state = decoder(decoder.embed(batch.question_ids)).cache
        rolled = thoughts.think(decoder, state)
    counted = tuple(p._replace(prompt=1) for p in rolled.passes)
    method = Pccot(decoder, thoughts, DistillationConfig())
    num_latents = count_valid_latents(rolled.cache, thoughts.num_latents)
    prompt = method.prompt_after_latents(rolled.cache, counted, num_latents, build_decoding())
    got = decode_answers(decoder, batch, prompt, build_decoding())
    assert got.passes[0] == PassCounts(1, 1, 2, len(got.token_ids[0]))
    assert got.token_ids == method.answer(batch, build_decoding()).token_ids
