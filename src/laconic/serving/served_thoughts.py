"""The part of a served model that thinks: latent rollout, projection, and the mask on logits. It needs no vLLM.

Engines such as vLLM read the rows of all requests one after the other in one flat batch, and keep the KV cache
themselves: a call writes the keys and values of its rows into fixed slots. Calling the model again on the same rows
overwrites them, so T calls with updated latents are T Jacobi iterations (PCCoT arXiv:2506.18582, Eqs. 1 and 2), and
M of them give the sequential rollout of M latents (CODI arXiv:2502.21074).

Symbols: N rows of all requests, D width, V vocabulary.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, NonNegativeInt, ValidationError, model_validator
from torch import Tensor, nn

from laconic.config.config_model import ConfigModel, PositiveInt
from laconic.errors import InputError
from laconic.latent.thought_vectors import Projection

CONFIG_KEY = "laconic"  # the object in config.json
ADVICE = "write the folder with laconic export --to vllm"
ModelFn = Callable[[Tensor], Tensor]  # embeddings [N, D] -> hidden states after the final norm
CONTROL_VECTORS = "vectors"  # in thoughts.safetensors; not loaded, since the embedding table has them too


class ThoughtsConfig(ConfigModel):
    """Settings of the latent rollout, and the ids of the tokens whose embeddings are its control vectors."""

    method: str
    step: NonNegativeInt  # that was exported
    num_latents: Annotated[int, Field(ge=0, le=4096)]  # M
    schedule: Literal["jacobi", "sequential"]
    num_iterations: NonNegativeInt | None = None  # T; None for the sequential schedule
    projection: Literal["pccot", "codi", "none"]  # from a hidden state to the next vector
    projection_width: PositiveInt  # inner width of CODI's map
    begin_token_id: NonNegativeInt  # bot
    latent_token_id: NonNegativeInt  # placeholder
    end_token_id: NonNegativeInt  # eot
    suppress_token_ids: tuple[NonNegativeInt, ...] = ()  # further ids that are never generated

    @model_validator(mode="after")
    def check_combination(self) -> "ThoughtsConfig":
        if (self.num_iterations is None) != (self.schedule == "sequential"):
            raise ValueError(f"num_iterations={self.num_iterations}: a number for jacobi, null for sequential")
        if len(set(self.control_ids)) < 3:
            raise ValueError(f"token ids {self.control_ids}: expected three different ids")
        return self

    @property
    def control_ids(self) -> tuple[int, int, int]:
        return self.begin_token_id, self.latent_token_id, self.end_token_id

    @property
    def num_updates(self) -> int:
        """Number of Jacobi iterations; M of them compute the same as the sequential rollout."""
        return self.num_latents if self.num_iterations is None else self.num_iterations


class ServedThoughts(nn.Module):
    """Latent thoughts of an exported run, for a model that holds the control vectors as embeddings."""

    def __init__(self, config: Any, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        try:  # strict validation accepts arrays as tuples only in JSON
            self.config = ThoughtsConfig.model_validate_json(json.dumps(config))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join([CONFIG_KEY, *map(str, first["loc"])])
            reason = first["msg"].removeprefix("Value error, ")
            raise InputError(f"config.json: {place}: {reason}; {ADVICE}") from None
        suppressed = sorted({*self.config.control_ids, *self.config.suppress_token_ids})
        if suppressed[-1] >= vocab_size:
            message = f"config.json: laconic names token {suppressed[-1]}, but the model has {vocab_size}; {ADVICE}"
            raise InputError(message)
        self.register_buffer("suppressed", torch.tensor(suppressed), persistent=False)
        self.projection: Projection | None = None
        if self.config.projection != "none":
            width = self.config.projection_width
            self.projection = Projection(hidden_size, width, 0.0, torch.Generator()).float()
        self.eval().requires_grad_(False)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of thoughts.safetensors. Raises InputError if they are not those of the settings."""
        state = {name: tensor for name, tensor in tensors.items() if name != CONTROL_VECTORS}
        try:
            self.load_state_dict(state)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise InputError(f"thoughts.safetensors does not fit config.json: {reason}; {ADVICE}") from None

    def project(self, hidden_states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Return the vectors to read after these hidden states, in their dtype; computed in float32 as in training."""
        if self.projection is None:
            return hidden_states
        return self.projection(hidden_states.float()).to(hidden_states.dtype)

    def find_rows(self, input_ids: Int[Tensor, " N"], position_ids: Int[Tensor, " N"]) -> Int[Tensor, " rows"]:
        """Return the rows of latents in a packed batch; each follows bot or another latent of its request.

        Another row with the latent's id, which a client may have put anywhere, is an ordinary token: it must not read
        the hidden state of a neighbour in the batch that belongs to another request.
        """
        latent_id = self.config.latent_token_id
        is_control = (input_ids == self.config.begin_token_id) | (input_ids == latent_id)
        continues = position_ids[1:] == position_ids[:-1] + 1
        return ((input_ids[1:] == latent_id) & is_control[:-1] & continues).nonzero()[:, 0] + 1

    def run(
        self, run_model: ModelFn, inputs_embeds: Float[Tensor, "N D"], latent_rows: Int[Tensor, " rows"]
    ) -> Float[Tensor, "N D"]:
        """Read the placeholders, update all latents from the hidden states to their left, and repeat.

        `run_model` runs the model on all rows, and overwrites their keys and values. Rows before the latents are
        computed again, unchanged, in every call. Returns the hidden states of the last one.
        """
        hidden_states = run_model(inputs_embeds)
        for _ in range(self.config.num_updates):
            latents = self.project(hidden_states[latent_rows - 1])
            inputs_embeds = inputs_embeds.index_copy(0, latent_rows, latents)
            hidden_states = run_model(inputs_embeds)
        return hidden_states

    def mask_logits(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        return logits.index_fill(-1, self.get_buffer("suppressed"), -torch.inf)
