"""Runs whose weights are written by hand, so that their answers need the thoughts, or do not.

The question holds one digit, which is the answer, among operators. Attention is uniform. Its values carry a digit from
block A of the hidden dimensions to block B, and from B to C. Token embeddings are in A; a thought, which is the hidden
state at the token before it, has the question's digit in B. So where the answer begins, B has the question's digit, and
C has the thoughts'. An output head on C needs the thoughts, one on B does not.

Thoughts of runs that do not need them say how many + and - the question has, which is independent of its digit, and
this disturbs the answer. Another question's thoughts change many of these answers, but not the accuracy expected.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from laconic.batches import ReasoningExample
from laconic.data.reasoning.answer_matching import DIGIT
from laconic.data.synthetic.digits import TOKEN_IDS
from laconic.evaluation.inspection.conditions import (
    answer_under_conditions,
    count_latents,
    list_conditions,
    reference_means_of,
)
from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.verdict import ThoughtAudit
from laconic.evaluation.reasoning.question_sets import QuestionSet, encode_questions
from laconic.evaluation.reasoning.run import decoding_for
from laconic.evaluation.reasoning.table import ReasoningRow
from laconic.experiment.load_run import LoadedRun
from tests.reasoning_runs import build_reasoning_run

D, CONSTANT, BALANCE = 32, 30, 31  # hidden size; dimensions of a constant, and of + minus -
NUM_OPERATORS = 5
A, B, C = (range(start, start + 10) for start in (0, 10, 20))
MODEL = f"""family = "llama"
tokenizer = "digits"
hidden_size = {D}
num_hidden_layers = 1
num_attention_heads = 1
intermediate_size = {D}
tie_word_embeddings = false
"""


def plant_run(folder: Path, seed: int, *, needs_thoughts: bool) -> LoadedRun:
    """Return a run; seeds vary the schedule, M, T, and the noise on all weights or how much thoughts disturb."""
    M, T, noise, disturbance = 2 + seed % 3, 1 + seed % 2, 0.008 * (seed % 4), 0.3 * (seed % 4)
    noise, head = (noise, C) if needs_thoughts else (0.0, B)
    run = build_reasoning_run(
        ("kava", "codi")[seed % 5 == 4], folder, M=M, T=T, model=MODEL, projection="none", seed=seed
    )
    generator = torch.Generator().manual_seed(seed)
    decoder, latents = run.parts.decoder, run.parts.latents
    assert latents is not None
    attention = cast(Any, decoder.layers[0]).self_attn
    with torch.no_grad():
        for p in decoder.parameters():
            if p.ndim == 2:
                p.zero_().add_(torch.randn(p.shape, generator=generator) * noise)
        embedding, out = decoder.token_embedding.weight, cast(Any, decoder).lm_head.weight
        embedding[:, CONSTANT] += 1
        for digit in range(10):
            token = TOKEN_IDS[str(digit)]
            embedding[token, CONSTANT] -= 1
            embedding[token, A[digit]] += 1
            attention.v_proj.weight[B[digit], A[digit]] += 1
            if needs_thoughts:
                attention.v_proj.weight[C[digit], B[digit]] += 1
            out[token, head[digit]] += 1
        if not needs_thoughts:
            embedding[TOKEN_IDS["+"], BALANCE] = 1
            embedding[TOKEN_IDS["-"], BALANCE] = -1
            attention.v_proj.weight[C[0], BALANCE] = 1
            attention.v_proj.weight[list(B), C[0]] = disturbance * torch.randn(10, generator=generator)
        attention.o_proj.weight += torch.eye(D)
        latents.vectors.zero_()[:, CONSTANT] = 1
        latents.projection = None
    return run


def plant_questions(run: LoadedRun, n: int) -> QuestionSet:
    """Return questions with a digit among operators."""
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    examples: list[ReasoningExample] = []
    for i in range(n):
        words, digit = ["+-*"[draw(3)] for _ in range(NUM_OPERATORS)], str(draw(10))
        words.insert(draw(NUM_OPERATORS + 1), digit)
        examples.append(ReasoningExample(f"q{i}", " ".join([*words, "="]), (), digit))
    return encode_questions(run, "digits", examples, DIGIT, run.recipe.data, False)


def audit_in_memory(run: LoadedRun, n: int = 100) -> ThoughtAudit:
    """Audit a run that has no committed step."""
    questions = plant_questions(run, n)
    latents = run.parts.latents
    assert latents is not None
    decoding = replace(decoding_for(run, questions), max_tokens=1)
    inspected = InspectedRun(run, "planted", decoding)
    conditions = list_conditions(count_latents(inspected, questions.source), latents.num_iterations)
    means = reference_means_of(inspected, questions.source, 64)
    items = answer_under_conditions(inspected, questions, conditions, range(n), means)
    return ThoughtAudit(ReasoningRow("digits", "planted", "", (0,), [items], "last digit"))
