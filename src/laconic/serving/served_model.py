"""What the engine runs for each kind of loaded model, and how a request becomes a sequence for it."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from laconic.errors import UsageError
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.experiment.text_models.read_into_state import clear_attention_if_full
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import (
    build_sampler,
    find_first_new_position,
    resolve_eos,
    resolve_update_flags,
)
from laconic.generation.prompt import build_prompt
from laconic.generation.state import DecodeState
from laconic.generation.static_cache import is_stock_decoder
from laconic.interfaces import StatefulLM
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.ops.rope_scaling import has_fixed_frequencies
from laconic.nested.state import FastWeightState
from laconic.serving.ragged import MIN_FREE_SLOTS, CacheRow, RaggedDecoder
from laconic.serving.requests import EngineRequest
from laconic.serving.row_by_row import RowByRowModel, StateRow
from laconic.serving.sequence import RunningSequence
from laconic.serving.thinking import check_length, check_question, start_answer

ServableModel = LanguageModel | Reasoner | TextCompressor | NestedTextModel


class ServedModel:
    """A loaded model as the engine runs it."""

    def __init__(self, model: ServableModel) -> None:
        self.model, self.tokenizer = model, model.tokenizer
        self.decoder = build_reading_decoder(model)
        is_ragged = not isinstance(self.decoder, StatefulLM) and is_stock_decoder(self.decoder)
        with torch.inference_mode():
            self.executor = RaggedDecoder(self.decoder) if is_ragged else RowByRowModel(self.decoder)

    @property
    def device(self) -> torch.device:
        return self.decoder.token_embedding.weight.device

    @torch.inference_mode()
    def prepare(self, sequence: RunningSequence) -> None:
        """Check a request and set its prompt and sampler; the errors are those of `Engine.submit`."""
        request = sequence.request
        if isinstance(self.model, Reasoner):
            return check_question(self.model, sequence)
        config, state = self.resolve_config(request), request.state
        if request.question is not None:
            raise UsageError("question: this model continues texts; send a prompt")
        if not isinstance(config.seed, int):
            raise UsageError("seed: a request has one row; give one number")
        try:
            prompt = build_prompt(self.decoder, None, None, [list(request.token_ids)], None, None, state)
            if request.first_position is not None:
                prompt = prompt._replace(first_positions=prompt.attention_mask.sum(1) * 0 + request.first_position)
            cache = state.cache if isinstance(state, DecodeState) else state
            if isinstance(self.model, NestedTextModel) and isinstance(cache, FastWeightState):
                length, window = len(request.token_ids) + config.max_tokens, self.model.attention_window
                cache = clear_attention_if_full(self.model.model, cache, length, window)
            prompt = prompt._replace(
                update_flags=resolve_update_flags(self.decoder, cache, prompt.first_positions, config)
            )
            end = find_first_new_position(self.decoder, prompt, cache)
            check_length(self.decoder, f"prompt of {end:,} positions", end, config.max_tokens)
            sampler = build_sampler(self.decoder, prompt, config)
        except ValueError as error:
            raise UsageError(str(error)) from error
        assert prompt.input_ids is not None
        sequence.prompt, sequence.state = prompt.input_ids[0], cache
        sequence.is_read_at_once = not has_fixed_frequencies(self.decoder.config.rope, end)
        sequence.num_state_ids = state.unread_ids.shape[1] if isinstance(state, DecodeState) else 0
        sequence.num_prompt_tokens = len(request.token_ids)
        sequence.update_flags = prompt.update_flags
        eos = resolve_eos(self.decoder, config)
        sequence.start_decoding(config, sampler, eos, self.tokenizer.decode, prompt.token_ids[0])

    def resolve_config(self, request: EngineRequest) -> GenerationConfig:
        """Return a request's options with the defaults of the model, as its `generate` has them."""
        config, model = request.config, self.model
        if isinstance(model, TextCompressor | NestedTextModel) and config.eos_token_ids is None:
            config = replace(config, eos_token_ids=model.stop_token_ids)
        if isinstance(model, NestedTextModel) and not model.update_weights:
            config = replace(config, update_on_prompt=False, update_on_output=False)
        return config

    def start(self, sequences: Sequence[RunningSequence]) -> None:
        for sequence in sequences:
            with sequence.fail_on_error():
                if isinstance(self.model, Reasoner):
                    start_answer(self.model, self.decoder, sequence)
                if not sequence.has_ended:
                    sequence.row = self.create_row(sequence)

    def create_row(self, sequence: RunningSequence) -> CacheRow | StateRow:
        """Return the state that a sequence starts from."""
        assert sequence.prompt is not None
        request, config, state = sequence.request, sequence.config, sequence.state
        if isinstance(self.executor, RaggedDecoder):
            assert state is None or isinstance(state, KVCache)
            length = len(sequence.prompt)
            # with room for new tokens, since the copy of a long prompt's keys delays the rows that decode
            num_tokens = length + min(config.max_tokens, max(length, MIN_FREE_SLOTS))
            return CacheRow(self.decoder, state, request.first_position, num_tokens)
        return StateRow(state, request.first_position, *sequence.update_flags)


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
