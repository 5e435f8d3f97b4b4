"""Questions to runs that answer: thought about together, then decoded beside other requests."""

from collections.abc import Callable, Sequence

import torch

from laconic.batches import ReasoningBatch
from laconic.errors import UsageError
from laconic.experiment.methods import Question, answer_questions, build_questions_batch
from laconic.experiment.reasoner import Reasoner
from laconic.generation.generate import build_sampler, check_max_length
from laconic.generation.prompt import Prompt
from laconic.generation.text_stream import IncrementalDetokenizer
from laconic.interfaces import PromptsAnswers
from laconic.latent.answering import AnswerDecoding, AnswerPrompt, build_answer_config
from laconic.models.decoder import Decoder
from laconic.serving.requests import PromptEvent, TokenEvent, TokenLogprob
from laconic.serving.sequence import RunningSequence


def check_question(model: Reasoner, sequence: RunningSequence) -> None:
    """Check a request to a run that answers questions, and count the question's tokens.

    Raises:
        UsageError: The request does not fit the run: no question, too long a one, or options without effect.
    """
    request, config = sequence.request, sequence.request.config
    if request.question is None or request.token_ids or request.state is not None:
        raise UsageError("this run answers questions; give a question without token_ids and state")
    if config.stop_list or config.eos_token_ids is not None:
        raise UsageError("stop_strings and eos_token_ids: the recipe's data.format ends an answer; leave them out")
    if not isinstance(config.seed, int):
        raise UsageError("seed: a request has one row; give one number")
    if request.with_prompt_logprobs:
        raise UsageError("prompt log probabilities: a question has none; leave them out")
    if request.num_top_logprobs and not isinstance(model.method, PromptsAnswers):
        name = type(model.method).__name__
        raise UsageError(f"top log probabilities: {name} has no method `prompt_answers`; leave them out")
    sequence.num_prompt_tokens = count_question_tokens(model, request.question)
    limit, required = model.decoder.config.max_position_embeddings, sequence.num_prompt_tokens + config.max_tokens
    if required > limit:
        raise UsageError(
            f"question of {sequence.num_prompt_tokens:,} tokens + max_tokens={config.max_tokens:,} exceeds the context "
            f"of {limit:,}; shorten by {required - limit:,}"
        )


def count_question_tokens(model: Reasoner, question: Question) -> int:
    """Return the number of tokens of a question in the recipe's format. Raises InputError if it cannot be encoded."""
    return int(build_questions_batch(model.run.parts, model.recipe, [question]).question_mask.sum())


def think(model: Reasoner, decoder: Decoder, sequences: Sequence[RunningSequence]) -> None:
    """Think about the questions of several requests in one batch; set what their answers follow.

    Args:
        model: The run.
        decoder: The decoder that reads the answers.
        sequences: The requests. If the batch fails, each is thought about alone, so that one cannot fail the others.
    """
    method = model.method
    try:
        assert isinstance(method, PromptsAnswers)
        decodings, questions = [build_decoding(model, s) for s in sequences], build_questions(model, sequences)
        prompt: AnswerPrompt = method.prompt_answers(questions, decodings[0])
        for row, (sequence, decoding) in enumerate(zip(sequences, decodings, strict=True)):
            with sequence.fail_on_error():
                set_answer_prompt(decoder, sequence, prompt, row, decoding)
    except Exception as error:
        if len(sequences) == 1:
            return sequences[0].fail(error)
        for sequence in sequences:
            think(model, decoder, [sequence])


def build_questions(model: Reasoner, sequences: Sequence[RunningSequence]) -> ReasoningBatch:
    """Return the batch of the requests' questions."""
    questions = [s.request.question or "" for s in sequences]
    batch = build_questions_batch(model.run.parts, model.recipe, questions)
    return batch.to(model.decoder.token_embedding.weight.device)


def build_decoding(model: Reasoner, sequence: RunningSequence) -> AnswerDecoding:
    """Return how the answer to a request is decoded, as `Reasoner.generate` has it."""
    return model.build_decoding(sequence.request.config)


def set_answer_prompt(
    decoder: Decoder, sequence: RunningSequence, prompt: AnswerPrompt, row: int, decoding: AnswerDecoding
) -> None:
    """Set what one of the answers follows, and how it is decoded.

    Raises:
        UsageError: Question, latents and answer exceed a learned position table.
    """
    mask = prompt.attention_mask[row]
    embeds, cache = prompt.inputs_embeds[row, mask], None if prompt.cache is None else prompt.cache.select_rows([row])
    alone = torch.zeros(1, dtype=torch.long)  # a row's samples depend on its index, which is 0 for a request
    config = build_answer_config(decoder, alone, decoding, len(embeds), prompt.eos_count)
    answer = Prompt(None, embeds[None], mask[mask][None], [[]])
    check_max_length(decoder, answer, cache, config.max_tokens)
    sequence.prompt, sequence.state = embeds, cache
    sequence.latent_positions = prompt.num_latents[row] if prompt.num_latents else 0
    sequence.latent_passes = prompt.passes[row].latent if prompt.passes else 0
    eos = decoding.eos_token_ids
    sequence.start_decoding(config, build_sampler(decoder, answer, config), eos, without_eos(decoding), [])


def without_eos(decoding: AnswerDecoding) -> Callable[[list[int]], str]:
    """Return the map from ids to an answer's text, in which the eos tokens that a chain contains do not occur."""
    return lambda ids: decoding.decode([i for i in ids if i not in decoding.eos_token_ids])


def answer_whole(model: Reasoner, sequence: RunningSequence) -> None:
    """Answer with a method that does not say what its answers follow; the events come when it has finished."""
    decoding = build_decoding(model, sequence)
    answers = answer_questions(model.method, build_questions(model, [sequence]), decoding)
    sequence.latent_passes = answers.passes[0].latent
    detokenizer, ids = IncrementalDetokenizer(without_eos(decoding), [], ()), answers.token_ids[0]
    sequence.send(PromptEvent())
    for n, token in enumerate(ids, 1):
        text = detokenizer.append(token) + (detokenizer.flush() if n == len(ids) else "")
        sequence.send(TokenEvent(text, TokenLogprob(token, None)))
    sequence.num_tokens = len(ids)
    sequence.finish("eos" if ids and ids[-1] in decoding.eos_token_ids else "length")
