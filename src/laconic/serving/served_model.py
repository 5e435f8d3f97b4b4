"""Models as the engine runs them: prepare a loaded model of each kind, and start sequences of texts or questions."""

import copy
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from laconic.batches import ReasoningBatch
from laconic.experiment.from_recipe.methods import answer_questions
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.experiment.text_models.read_into_state import clear_attention_if_full
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.generation.generate import (
    SequenceState,
    build_sampler,
    check_position_table,
    find_first_new_position,
    resolve_eos,
    resolve_update_flags,
)
from laconic.generation.prompt import Prompt, build_prompt
from laconic.generation.static_cache import is_stock_decoder
from laconic.interfaces import PromptsAnswers, PromptsAnswersStepwise, RecurrentState, StatefulLM
from laconic.latent.answering import AnswerDecoding, AnswerPrompt, StepwisePrompt, build_answer_config
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.ops.rope_scaling import has_fixed_frequencies
from laconic.nested.state import FastWeightState
from laconic.serving.prefix_cache import PrefixCache
from laconic.serving.ragged import MIN_FREE_SLOTS, CacheRow, RaggedDecoder
from laconic.serving.requests import PromptEvent
from laconic.serving.row_by_row import RowByRowModel, StateRow
from laconic.serving.sequence import RunningSequence

ServableModel = LanguageModel | Reasoner | TextCompressor | NestedTextModel


class ServedModel:
    """A loaded model as the engine runs it."""

    def __init__(self, model: ServableModel, prefix_cache_bytes: int = 0) -> None:
        self.model = model
        self.tokenizer = model.tokenizer
        self.decoder = build_reading_decoder(model)
        is_ragged = not isinstance(self.decoder, StatefulLM) and is_stock_decoder(self.decoder)
        with torch.inference_mode():
            self.executor = RaggedDecoder(self.decoder) if is_ragged else RowByRowModel(self.decoder)
        self.prefix_cache = PrefixCache(prefix_cache_bytes if is_ragged else 0)

    def start(self, sequence: RunningSequence) -> None:
        """Set the prompt of a sequence, the state that it continues, and how its ids are chosen and become text."""
        if isinstance(self.model, Reasoner):
            state = start_answer(self.model, self.decoder, sequence)
            update_flags = (False, False)
        else:
            state, update_flags = self.start_text(sequence)
        if sequence.prompt is None:
            return  # answered at once
        first_position = sequence.request.first_position
        if not isinstance(self.executor, RaggedDecoder):
            sequence.row = StateRow(state, first_position, *update_flags)
        else:
            assert state is None or isinstance(state, KVCache)
            length = len(sequence.prompt)
            # with room for new tokens, since the copy of a long prompt's keys delays the rows that decode
            num_tokens = length + min(sequence.output.config.max_tokens, max(length, MIN_FREE_SLOTS))
            sequence.row = CacheRow(self.decoder, state, first_position, num_tokens)
            buffer, sequence.num_cached = self.prefix_cache.find(sequence.shared_ids)
            if buffer is not None:
                sequence.row.copy_slots(buffer, sequence.num_cached)
                sequence.num_read = sequence.num_cached
        if sequence.hidden_states is not None:  # the prompt has been read
            sequence.end_prompt()
            sequence.choose_next(self.executor.logits(sequence.hidden_states))

    def keep_prefix(self, sequence: RunningSequence) -> None:
        """Keep what a sequence has read for later ones that begin with it."""
        row, rope = sequence.row, self.decoder.config.rope
        if not isinstance(row, CacheRow) or not sequence.is_shareable:
            return
        if has_fixed_frequencies(rope, row.next_position):
            with suppress(RuntimeError):  # no memory for a copy
                self.prefix_cache.add((*sequence.request.token_ids, *sequence.output.token_ids), row)

    def start_text(self, sequence: RunningSequence) -> tuple[KVCache | RecurrentState | None, tuple[bool, bool]]:
        """Set what is read and decoded; return the state before it, and whether prompt and output update weights."""
        request, decoder, model = sequence.request, self.decoder, self.model
        config, state = request.config, request.state
        if isinstance(model, NestedTextModel) and not model.update_weights:
            config = replace(config, update_on_prompt=False, update_on_output=False)
        prompt = build_prompt(decoder, input_ids=[list(request.token_ids)], state=state)
        if request.first_position is not None:
            prompt = prompt._replace(first_positions=torch.tensor([request.first_position], device=decoder.device))
        if isinstance(model, NestedTextModel) and isinstance(state, FastWeightState):
            length = len(request.token_ids) + config.max_tokens
            state = clear_attention_if_full(model.model, state, length, model.attention_window)
        update_flags = resolve_update_flags(decoder, state, prompt.first_positions, config)
        end = find_first_new_position(decoder, prompt, state)
        sequence.prompt = torch.tensor(request.token_ids, device=decoder.device)
        sequence.is_read_at_once = not has_fixed_frequencies(decoder.config.rope, end)
        sequence.sampler = build_sampler(decoder, prompt, config)
        eos = resolve_eos(decoder, config)
        sequence.output = SequenceState(0, self.tokenizer.decode, request.token_ids, eos, config)
        return state, update_flags


def build_reading_decoder(model: ServableModel) -> Decoder:
    """Return the decoder that answers, without adapter layers where they can be merged.

    Memories may be written at the same time on another thread, which switches adapters on and off. So this decoder has
    modules of its own; weights that no adapter changes are shared.
    """
    decoder = model.decoder
    if isinstance(decoder, StatefulLM) or is_stock_decoder(decoder):
        return decoder
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return decoder
    adapted = {name for name, module in decoder.named_modules() if isinstance(module, BaseTunerLayer)}
    shared = {
        id(p): p for name, p in decoder.named_parameters() if not any(name.startswith(f"{layer}.") for layer in adapted)
    }
    with model.reading_mode() if isinstance(model, TextCompressor) else nullcontext():
        decoder = copy.deepcopy(decoder, dict[int, Any](shared))
    for name in sorted(adapted):
        layer: Any = decoder.get_submodule(name)
        if not layer.disable_adapters:
            layer.merge()
        decoder.set_submodule(name, layer.get_base_layer())
    return decoder.requires_grad_(False)


def start_answer(model: Reasoner, decoder: Decoder, sequence: RunningSequence) -> KVCache | None:
    """Set the prompt of the answer, and how `decoder` decodes it; return the KV cache that the prompt continues.

    If the method returns no prompts, answer at once.
    """
    method, question = model.method, sequence.request.question
    decoding = model.build_decoding(sequence.request.config)
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
    sequence.hidden_states = prompt.last_hidden
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
    sequence.output = SequenceState(0, decoding.decode_answer, [], decoding.eos_token_ids, config)


def answer_whole(
    model: Reasoner, sequence: RunningSequence, question: ReasoningBatch, decoding: AnswerDecoding
) -> None:
    """Answer with a method that does not return prompts; the events come when it has finished."""
    options = decoding.sampling
    answers = answer_questions(model.method, question, replace(decoding, sampling=replace(options, stop_strings=())))
    sequence.latent_passes = answers.passes[0].latent
    ids = answers.token_ids[0]
    config = replace(options, max_tokens=max(1, len(ids)), min_tokens=min(options.min_tokens, max(1, len(ids))))
    sequence.output = SequenceState(0, decoding.decode_answer, [], (), config)
    sequence.send(PromptEvent())
    for token in ids:
        if sequence.add_token(token, None) == "stop":
            return sequence.finish("stop")
    sequence.finish("eos" if ids and ids[-1] in decoding.eos_token_ids else "length")
