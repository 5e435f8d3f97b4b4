"""The part of a served model that thinks: projection, token ids and the mask on logits. It needs no vLLM."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laconic.errors import InputError
from laconic.latent.packed_rollout import ModelFn, find_latent_rows, run_packed_rollout
from laconic.latent.thoughts import Projection
from laconic.serving.thoughts_config import ThoughtsConfig, parse_thoughts_config

CONTROL_VECTORS = "vectors"  # in thoughts.safetensors; not loaded, since the embedding table has them too


class ServedThoughts(nn.Module):
    """Latent thoughts of an exported run, for a model that holds the control vectors as embeddings.

    Args:
        config: Value of `laconic` in config.json.
        hidden_size: Width of the model, D.
        vocab_size: Number of its embeddings, V.

    Raises:
        InputError: If the value is missing, invalid, or does not fit the model.
    """

    def __init__(self, config: Any, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.config: ThoughtsConfig = parse_thoughts_config(config)
        suppressed = sorted({*self.config.control_ids, *self.config.suppress_token_ids})
        if suppressed[-1] >= vocab_size:
            raise InputError(
                f"config.json: laconic names token {suppressed[-1]}, but the model has {vocab_size}; write the folder "
                "with laconic export --to vllm"
            )
        self.register_buffer("suppressed", torch.tensor(suppressed), persistent=False)
        self.projection: Projection | None = None
        if self.config.projection != "none":
            width = self.config.projection_width
            self.projection = Projection(hidden_size, width, 0.0, torch.Generator()).float()
        self.eval().requires_grad_(False)

    @property
    def num_updates(self) -> int:
        """Jacobi iterations, T."""
        return self.config.num_updates

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of thoughts.safetensors.

        Raises:
            InputError: If one is missing, unexpected or of another shape.
        """
        state = {name: tensor for name, tensor in tensors.items() if name != CONTROL_VECTORS}
        shapes = {name: list(tensor.shape) for name, tensor in state.items()}
        expected = {name: list(tensor.shape) for name, tensor in self.state_dict().items()}
        names = sorted(shapes.keys() | expected.keys())
        odd = next((name for name in names if shapes.get(name) != expected.get(name)), None)
        if odd is not None:
            raise InputError(
                f"thoughts.safetensors: {odd} is {shapes.get(odd, 'missing')}, config.json: laconic asks for "
                f"{expected.get(odd, 'nothing')}; write the folder with laconic export --to vllm"
            )
        self.load_state_dict(state)

    def project(self, hidden_states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Return the vectors to read after these hidden states, in their dtype; computed in float32 as in training."""
        if self.projection is None:
            return hidden_states
        return self.projection(hidden_states.float()).to(hidden_states.dtype)

    def find_rows(self, input_ids: Int[Tensor, " N"], position_ids: Int[Tensor, " N"]) -> Int[Tensor, " rows"]:
        return find_latent_rows(input_ids, position_ids, self.config.begin_token_id, self.config.latent_token_id)

    def run(
        self, run_model: ModelFn, inputs_embeds: Float[Tensor, "N D"], latent_rows: Int[Tensor, " rows"]
    ) -> Float[Tensor, "N D"]:
        """Return the hidden states of a packed batch after its latents have been computed."""
        return run_packed_rollout(run_model, inputs_embeds, latent_rows, self.project, self.num_updates)

    def mask_logits(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Give the suppressed tokens a probability of 0."""
        return logits.index_fill(-1, self.get_buffer("suppressed"), -torch.inf)
