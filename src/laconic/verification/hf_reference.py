"""transformers as a reference, unmodified: its stages taken by hooks and by an attention function registered with it.

Shapes: B rows, T new slots, P slots held and new, H query heads, G key heads, E per head, D width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.verification.hf_hooks import MODULE_PATHS, HookRecorder, hooked_attention
from laconic.verification.traces import LayerActivations, ParityCase, threaded_generator

ATTENTION_NAME = "laconic_parity"


class TransformersReference:
    """A checkpoint read by transformers; `stream` gives the stages of a case, a layer at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()  # it would write into our own
        transformers.AttentionInterface.register(ATTENTION_NAME, hooked_attention)
        transformers.AttentionMaskInterface.register(ATTENTION_NAME, transformers.masking_utils.eager_mask)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model: Any = load(
            str(folder), dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
        ).eval()
        self.cache_class: Any = transformers.DynamicCache
        self.name = f"transformers {transformers.__version__}"
        self.paths = MODULE_PATHS[self.model.config.model_type]
        self.layers: list[Any] = list(self.model.get_submodule(self.paths.layers))
        self.dtype = dtype

    def iterate_stages(self, case: ParityCase) -> Iterator[LayerActivations]:
        """What transformers makes of the case; always told where each slot stands."""
        return threaded_generator(lambda give: self.run_case(case, give))

    def run_case(self, case: ParityCase, emit: Callable[[LayerActivations], None]) -> None:
        """Reads the pieces one after another on one cache of plain layers, which keeps every slot."""
        self.reset_rope()
        cache, live = self.cache_class(), case.valid_mask
        record = HookRecorder(self.model, case, emit)
        with self.sharpened_queries(case.query_scale), record:
            for piece, (S, T) in enumerate(case.pieces()):
                record.start_piece(piece, S, T)
                what = {"inputs_embeds": None if case.vectors is None else case.vectors[:, S : S + T].to(self.dtype)}
                if case.ids is not None:
                    what = {"input_ids": case.ids[:, S : S + T]}
                made = self.model(
                    **what,
                    attention_mask=live[:, : S + T].long(),
                    position_ids=case.position_ids[:, S : S + T],
                    past_key_values=cache,
                    use_cache=True,
                )
                emit(record.finish_piece(made.logits, live[:, S : S + T]))

    def reset_rope(self) -> None:
        """One slot at position 0: dynamic and long RoPE keep the table of the longest pass until a short one."""
        zero = torch.zeros(1, 1, dtype=torch.long)
        self.model(input_ids=zero, position_ids=zero, use_cache=False)

    @contextmanager
    def sharpened_queries(self, factor: float) -> Iterator[None]:
        """Queries times a power of two, by their weights, which come back to the same bits."""
        parts: list[Tensor] = []
        for layer in self.layers if factor != 1.0 else []:
            module = layer.get_submodule(self.paths.attention)
            if self.paths.fused:
                D = module.embed_dim
                parts += [module.c_attn.weight[:, :D], module.c_attn.bias[:D]]
            else:
                parts += list((module.q_norm if hasattr(module, "q_norm") else module.q_proj).parameters())
        with torch.no_grad():
            for p in parts:
                p.mul_(factor)
            try:
                yield
            finally:
                for p in parts:
                    p.mul_(1 / factor)
