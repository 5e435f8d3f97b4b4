"""Models of vLLM that think in latents: while a prompt is read, each calls vLLM's own model several times.

vLLM imports this module through the plug-in; nothing else does, so that laconic needs no vLLM.
"""
# pyright: reportMissingImports=false

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.gpt2 import GPT2LMHeadModel
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from laconic.serving.served_thoughts import CONFIG_KEY, ServedThoughts
from laconic.serving.vllm_plugin import check_engine

PREFIX = "thoughts."  # of the names of the projection's weights
THOUGHTS_FILE = "laconic/thoughts.safetensors"  # the file that export_run writes them to


class ThinkingModel:
    """Mixin for a model of vLLM that adds the latent rollout and masks logits."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        check_engine(vllm_config)
        config = vllm_config.model_config
        thoughts_config = getattr(config.hf_config, CONFIG_KEY, None)
        thoughts = ServedThoughts(thoughts_config, config.get_hidden_size(), config.get_vocab_size())
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # pyright: ignore[reportCallIssue]
        self.thoughts = thoughts  # after nn.Module's __init__, which a submodule needs
        source = DefaultModelLoader.Source(
            config.model, config.revision, prefix=PREFIX, allow_patterns_overrides=[THOUGHTS_FILE]
        )
        self.secondary_weights = [source]  # vLLM's loader reads this attribute

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Return the hidden states of all rows; decode steps have no latents and call the model once."""
        parent: Any = super()
        latent_rows = self.thoughts.find_rows(input_ids, positions)
        if not len(latent_rows):
            return parent.forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        return self.thoughts.run(
            lambda embeds: parent.forward(input_ids, positions, None, embeds),
            parent.embed_input_ids(input_ids),
            latent_rows,
        )

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits; with tensor parallelism only the first rank has them."""
        parent: Any = super()
        logits = parent.compute_logits(hidden_states)
        return None if logits is None else self.thoughts.mask_logits(logits)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the thoughts, and let vLLM load the rest. Return the names of all loaded parameters."""
        tensors: dict[str, Tensor] = {}

        def take_others() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.startswith(PREFIX):
                    tensors[name.removeprefix(PREFIX)] = tensor
                else:
                    yield name, tensor

        parent: Any = super()
        loaded = parent.load_weights(take_others())
        self.thoughts.load_weights(tensors)
        return loaded | {PREFIX + name for name in self.thoughts.state_dict()}


class LaconicLlamaForCausalLM(ThinkingModel, LlamaForCausalLM):
    """Llama that thinks in latents."""


class LaconicMistralForCausalLM(ThinkingModel, MistralForCausalLM):
    """Mistral that thinks in latents."""


class LaconicQwen2ForCausalLM(ThinkingModel, Qwen2ForCausalLM):
    """Qwen 2 that thinks in latents."""


class LaconicQwen3ForCausalLM(ThinkingModel, Qwen3ForCausalLM):
    """Qwen 3 that thinks in latents."""


class LaconicGPT2LMHeadModel(ThinkingModel, GPT2LMHeadModel):
    """GPT-2 that thinks in latents."""
