"""The object `laconic` in the config.json of a folder for vLLM: how the served model computes its latent thoughts."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, ValidationError, model_validator

from laconic.config.config_model import ConfigModel, PositiveInt
from laconic.errors import InputError

CONFIG_KEY = "laconic"


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
        """Ids of begin, latent and end."""
        return self.begin_token_id, self.latent_token_id, self.end_token_id

    @property
    def num_updates(self) -> int:
        """Number of Jacobi iterations; M of them compute the same as the sequential rollout."""
        return self.num_latents if self.num_iterations is None else self.num_iterations


def parse_thoughts_config(value: Any) -> ThoughtsConfig:
    """Validate the value of `laconic` in config.json. Raises InputError if it is invalid."""
    try:  # strict validation accepts arrays as tuples only in JSON
        return ThoughtsConfig.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join([CONFIG_KEY, *map(str, first["loc"])])
        reason = first["msg"].removeprefix("Value error, ")
        message = f"config.json: {place}: {reason}; write the folder with laconic export --to vllm"
        raise InputError(message) from None
