"""The object `laconic` in the config.json of a folder for vLLM: how the served model computes its latent thoughts."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, ValidationError, model_validator

from laconic.config.config_model import ConfigModel, PositiveInt
from laconic.errors import InputError

CONFIG_KEY = "laconic"


class ThoughtsConfig(ConfigModel):
    """Settings of the latent rollout, and the ids of the tokens whose embeddings are its control vectors.

    Attributes:
        method: Method of the run.
        step: Step that was exported.
        num_latents: M, the number of latents.
        schedule: "jacobi" or "sequential".
        num_iterations: Jacobi iterations T; None for the sequential schedule.
        projection: Map from a hidden state to the next vector.
        projection_width: Inner width of CODI's map.
        begin_token_id: Id of the begin vector (bot).
        latent_token_id: Id of the placeholder.
        end_token_id: Id of the end vector (eot).
        suppress_token_ids: Further ids that are never generated.
    """

    method: str
    step: NonNegativeInt
    num_latents: Annotated[int, Field(ge=0, le=4096)]
    schedule: Literal["jacobi", "sequential"]
    num_iterations: NonNegativeInt | None = None
    projection: Literal["pccot", "codi", "none"]
    projection_width: PositiveInt
    begin_token_id: NonNegativeInt
    latent_token_id: NonNegativeInt
    end_token_id: NonNegativeInt
    suppress_token_ids: tuple[NonNegativeInt, ...] = ()

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
    """Validate the value of `laconic` in config.json.

    Raises:
        InputError: If a key is missing or has an invalid value.
    """
    try:
        return ThoughtsConfig.model_validate_json(
            json.dumps(value)
        )  # strict validation accepts arrays as tuples only in JSON
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join([CONFIG_KEY, *map(str, first["loc"])])
        reason = first["msg"].removeprefix("Value error, ")
        reason = reason[:1].lower() + reason[1:]
        raise InputError(f"config.json: {place}: {reason}; write the folder with laconic export --to vllm") from None
