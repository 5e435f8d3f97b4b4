"""Serve questions to runs with a reasoning method: compute thoughts and answers beside other requests."""

from collections.abc import Callable
from dataclasses import replace

import torch

from laconic.batches import ReasoningBatch
from laconic.experiment.from_recipe.methods import answer_questions
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.generation.generate import SequenceState, build_sampler, check_position_table, find_first_new_position
from laconic.generation.prompt import Prompt
from laconic.interfaces import PromptsAnswers, PromptsAnswersStepwise
from laconic.latent.answering import AnswerDecoding, AnswerPrompt, StepwisePrompt, build_answer_config
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.serving.requests import PromptEvent
from laconic.serving.sequence import RunningSequence


def start_answer(model: Reasoner, decoder: Decoder, sequence: RunningSequence) -> KVCache | None:
    """Set the prompt of the answer, and how `decoder` decodes it; return the KV cache that the prompt continues.

    If the method returns no prompts, answer at once.
    """
    method, question, decoding = model.method, sequence.request.question, model.build_decoding(sequence.request.config)
    assert question is not None
    if isinstance(method, PromptsAnswersStepwise):
        stepwise: StepwisePrompt = method.prompt_answer_stepwise(question, decoding)
        start_decoding(decoder, sequence, decoding, None, stepwise.num_positions, stepwise.writes_chain)
        sequence.thinking = stepwise.reads
        sequence.start_read(next(stepwise.reads))
        return None
    if not isinstance(method, PromptsAnswers):
        answer_whole(model, sequence, question, decoding)
        return None
    prompt: AnswerPrompt = method.prompt_answers(question, decoding)
    sequence.prompt = prompt.inputs_embeds[0, prompt.attention_mask[0]]
    sequence.latent_positions = prompt.num_latents[0] if prompt.num_latents else 0
    sequence.latent_passes = prompt.passes[0].latent if prompt.passes else 0
    start_decoding(decoder, sequence, decoding, prompt.cache, len(sequence.prompt), prompt.writes_chain)
    return prompt.cache


def start_decoding(
    decoder: Decoder,
    sequence: RunningSequence,
    decoding: AnswerDecoding,
    cache: KVCache | None,
    num_positions: int,
    writes_chain: bool,
) -> None:
    """Set how to decode an answer after a cache and `num_positions` further positions."""
    alone = torch.zeros(1, dtype=torch.long)  # a row's samples depend on its index, which is 0 for a request
    config = build_answer_config(decoder, alone, decoding, num_positions, writes_chain)
    prompt = Prompt(None, None, torch.ones(1, num_positions, dtype=torch.bool), [[]])
    first = find_first_new_position(decoder, prompt, cache)
    check_position_table(decoder.config, first, config.max_tokens)
    sequence.sampler = build_sampler(decoder, prompt, config)
    sequence.output = SequenceState(0, without_eos(decoding), [], decoding.eos_token_ids, config)


def without_eos(decoding: AnswerDecoding) -> Callable[[list[int]], str]:
    """Return the map from ids to an answer's text, in which the eos tokens that a chain contains do not occur."""
    return lambda ids: decoding.decode([i for i in ids if i not in decoding.eos_token_ids])


def answer_whole(
    model: Reasoner, sequence: RunningSequence, question: ReasoningBatch, decoding: AnswerDecoding
) -> None:
    """Answer with a method that does not return prompts; the events come when it has finished."""
    options = decoding.sampling
    answers = answer_questions(model.method, question, replace(decoding, sampling=replace(options, stop_strings=())))
    sequence.latent_passes, ids = answers.passes[0].latent, answers.token_ids[0]
    config = replace(options, max_tokens=max(1, len(ids)), min_tokens=min(options.min_tokens, max(1, len(ids))))
    sequence.output = SequenceState(0, without_eos(decoding), [], (), config)
    sequence.send(PromptEvent())
    for token in ids:
        if sequence.add_token(token, None) == "stop":
            return sequence.finish("stop")
    sequence.finish("eos" if ids and ids[-1] in decoding.eos_token_ids else "length")
