"""transformers as an unmodified reference; its activations are recorded by `hf_hooks`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.models.config import WEIGHT_NAMES
from laconic.verification.hf_hooks import HookRecorder, find_attention, hooked_attention
from laconic.verification.traces import LayerActivations, ParityCase, replay_stages, scaled

ATTENTION_NAME = "laconic_parity"


@contextmanager
def silence_warnings() -> Iterator[None]:
    import transformers

    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)


class TransformersReference:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()  # it would interfere with our own
        transformers.AttentionInterface.register(ATTENTION_NAME, hooked_attention)
        transformers.AttentionMaskInterface.register(ATTENTION_NAME, transformers.masking_utils.eager_mask)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model: Any = load(str(folder), dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True)
        self.model = self.model.to(device).eval()
        self.cache_class: Any = transformers.DynamicCache
        self.name = f"transformers {transformers.__version__}"
        self.names = WEIGHT_NAMES[self.model.config.model_type]
        self.layers: list[Any] = list(self.model.get_submodule(self.names.layers))
        self.dtype = dtype

    def iterate_stages(self, case: ParityCase) -> Iterator[LayerActivations]:
        yield from replay_stages(self.run_case(case), case, len(self.layers))  # runs when the first is asked for

    @torch.no_grad()
    def run_case(self, case: ParityCase) -> dict[str, Tensor]:
        """Run the pieces of a case on one cache without sliding-window eviction; return the activations by key."""
        self.reset_rope()
        cache = self.cache_class()
        valid = case.valid_mask
        recorder = HookRecorder(self.model, case)
        with self.sharpened_queries(case.query_scale), recorder:
            for piece, (S, T) in enumerate(case.pieces()):
                recorder.start_piece(piece, S, T)
                if case.ids is not None:
                    inputs = {"input_ids": case.ids[:, S : S + T]}
                else:
                    assert case.vectors is not None
                    inputs = {"inputs_embeds": case.vectors[:, S : S + T].to(self.dtype)}
                output = self.model(
                    **inputs,
                    attention_mask=valid[:, : S + T].long(),
                    position_ids=case.position_ids[:, S : S + T],
                    past_key_values=cache,
                    use_cache=True,
                )
                recorder.finish_piece(output.logits, valid[:, S : S + T])
        return recorder.stages

    def reset_rope(self) -> None:
        """Run one token at position 0: dynamic and longrope keep the table of the longest pass until a short one."""
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        self.model(input_ids=zero, position_ids=zero, use_cache=False)

    @contextmanager
    def sharpened_queries(self, factor: float) -> Iterator[None]:
        parameters: list[Tensor] = []
        for layer in self.layers:
            attention: Any = find_attention(layer, self.names)
            if self.names.qkv:
                D = attention.embed_dim
                parameters += [attention.c_attn.weight[:, :D], attention.c_attn.bias[:D]]
            else:
                module = attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj
                parameters += list(module.parameters())
        with scaled(parameters, factor):
            yield
