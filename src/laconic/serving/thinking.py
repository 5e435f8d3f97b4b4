"""Serve questions to runs with a reasoning method: check them, compute thoughts and answers beside other requests."""

from collections.abc import Callable
from dataclasses import replace

import torch

from laconic.batches import ReasoningBatch
from laconic.errors import UsageError
from laconic.experiment.from_recipe.methods import Question, answer_questions, build_questions_batch
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.generation.generate import build_sampler, check_position_table, find_first_new_position
from laconic.generation.prompt import Prompt
from laconic.generation.text_stream import IncrementalDetokenizer
from laconic.interfaces import PromptsAnswers, PromptsAnswersStepwise
from laconic.latent.answering import AnswerDecoding, AnswerPrompt, StepwisePrompt, build_answer_config
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.serving.requests import PromptEvent, TokenEvent, TokenLogprob
from laconic.serving.sequence import RunningSequence


def check_question(model: Reasoner, sequence: RunningSequence) -> None:
    """Check a request to a run that answers questions, and set its question; the errors are UsageErrors."""
    request, config = sequence.request, sequence.request.config
    if request.question is None or request.token_ids or request.state is not None:
        raise UsageError("this run answers questions; give a question without token_ids and state")
    if config.eos_token_ids is not None:
        raise UsageError("eos_token_ids: the recipe's data.format ends an answer; remove eos_token_ids")
    if not isinstance(config.seed, int):
        raise UsageError("seed: a request has one row; give one number")
    if request.with_prompt_logprobs:
        raise UsageError("prompt log probabilities: not available for a question; do not request them")
    if request.num_top_logprobs and not isinstance(model.method, PromptsAnswers):
        name = type(model.method).__name__
        raise UsageError(f"top log probabilities: {name} has no method `prompt_answers`; do not request them")
    sequence.question = build_question(model, request.question)
    sequence.num_prompt_tokens = int(sequence.question.question_mask.sum())
    num_tokens = sequence.num_prompt_tokens
    check_length(model.decoder, f"question of {num_tokens:,} tokens", num_tokens, config.max_tokens)


def check_length(decoder: Decoder, what: str, end: int, max_tokens: int) -> None:
    """Raise UsageError if a prompt up to `end` and new tokens exceed the context that the model was trained on."""
    excess, limit = end + max_tokens - decoder.config.max_position_embeddings, decoder.config.max_position_embeddings
    if excess > 0:
        raise UsageError(f"{what} + max_tokens={max_tokens:,} exceeds the context of {limit:,}; shorten by {excess:,}")


def list_question_ids(model: Reasoner, question: Question) -> list[int]:
    """Return the ids of a question in the recipe's format. Raises InputError if it cannot be encoded."""
    batch = build_question(model, question)
    return batch.question_ids[batch.question_mask].tolist()


def build_question(model: Reasoner, question: Question) -> ReasoningBatch:
    """Return the batch of one question. Raises InputError if it cannot be encoded."""
    batch = build_questions_batch(model.tokenizer, model.recipe.data, [question])
    return batch.to(model.decoder.token_embedding.weight.device)


def start_answer(model: Reasoner, decoder: Decoder, sequence: RunningSequence) -> None:
    """Set the prompt of the answer, and how `decoder` decodes it; answer at once if the method returns no prompts."""
    method, question, decoding = model.method, sequence.question, model.build_decoding(sequence.request.config)
    assert question is not None
    if isinstance(method, PromptsAnswersStepwise):
        stepwise: StepwisePrompt = method.prompt_answer_stepwise(question, decoding)
        start_decoding(decoder, sequence, decoding, None, stepwise.num_positions, stepwise.writes_chain)
        sequence.start_thinking(stepwise.reads)
    elif isinstance(method, PromptsAnswers):
        prompt: AnswerPrompt = method.prompt_answers(question, decoding)
        sequence.prompt, sequence.state = prompt.inputs_embeds[0, prompt.attention_mask[0]], prompt.cache
        sequence.latent_positions = prompt.num_latents[0] if prompt.num_latents else 0
        sequence.latent_passes = prompt.passes[0].latent if prompt.passes else 0
        start_decoding(decoder, sequence, decoding, prompt.cache, len(sequence.prompt), prompt.writes_chain)
    else:
        answer_whole(model, sequence, question, decoding)


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
    sampler = build_sampler(decoder, prompt, config)
    sequence.start_decoding(config, sampler, decoding.eos_token_ids, without_eos(decoding), [])


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
    detokenizer = IncrementalDetokenizer(without_eos(decoding), [], options.stop_list, options.min_tokens)
    sequence.send(PromptEvent())
    for token in ids:
        sequence.num_tokens += 1
        offset = detokenizer.num_characters
        text = detokenizer.append(token)
        is_last = detokenizer.found_stop or sequence.num_tokens == len(ids)
        text += detokenizer.flush() if is_last else ""
        sequence.send(TokenEvent(text, TokenLogprob(token, None), offset))
        if is_last:
            break
    is_eos = bool(ids) and ids[-1] in decoding.eos_token_ids
    sequence.finish("stop" if detokenizer.found_stop else "eos" if is_eos else "length")
