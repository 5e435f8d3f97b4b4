"""Sizes and options of Hope, and of its self-modifying memory: Nested Learning arXiv:2512.24695, sections 7 and 8."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from pydantic import ValidationError

from laconic.config.config_model import ConfigModel, PositiveInt, drop_former_options
from laconic.config.nested import CMSOptions, MixerKind, SelfModifyingOptions, TitansOptions
from laconic.errors import InputError, UsageError
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.nested.cms.level import CMSShape
from laconic.nested.titans.equations import TitansShape
from laconic.storage.strict_json import read_json

OptionsT = TypeVar("OptionsT", bound=ConfigModel)
MODEL_TYPE = "hope"
UNLIMITED_POSITIONS = 1 << 20  # max_position_embeddings of a model without attention
ARCHITECTURES = {False: "Hope", True: "HopeAttention"}  # by whether attention stays
MIXER_OPTIONS: dict[MixerKind, type[Any]] = {
    "self_modifying": SelfModifyingOptions,
    "titans": TitansOptions,
    "attention": NoneType,
}


class HopeFields(ConfigModel):
    """The table `hope` of a config.json, as `HopeConfig.to_config_json` writes it."""

    chunk_sizes: tuple[tuple[PositiveInt, ...], ...]
    num_heads: PositiveInt
    head_dim: PositiveInt | None
    memory_chunk_size: PositiveInt
    mixer: MixerKind
    gated_mlp: bool
    cms: CMSOptions
    memory: Mapping[str, Any] | None


@dataclass(frozen=True)
class HopeConfig:
    """Configuration of a Hope or Hope-Attention model. Raises `UsageError` if its parts do not fit together.

    Attributes:
        decoder: Widths, layers, vocabulary, norms and MLP.
        chunk_sizes: For each layer the chunk sizes of its levels, fastest first.
        cms: Options of the levels.
        memory: Options of the memory in place of attention, None to keep attention.
        num_heads: Heads of the memory.
        head_dim: Head width of a self-modifying memory, by default the width divided by the heads.
        memory_chunk_size: Chunk size of a Titans memory.
        gated_mlp: False leaves out the gate of a family whose MLP has one.

    Examples:
        >>> import laconic
        >>> config = laconic.HopeConfig.attention_free(257, 32, 2, chunk_sizes=(4, 8))
        >>> config.chunk_sizes
        ((4, 8), (4, 8))
    """

    decoder: DecoderConfig
    chunk_sizes: tuple[tuple[int, ...], ...]
    cms: CMSOptions
    memory: SelfModifyingOptions | TitansOptions | None = None
    num_heads: int = 4
    head_dim: int | None = None
    memory_chunk_size: int = 64
    gated_mlp: bool = True

    def __post_init__(self) -> None:
        if len(self.chunk_sizes) != self.decoder.num_hidden_layers:
            raise UsageError(
                f"hope: chunk_sizes for {len(self.chunk_sizes)} layers, the decoder has "
                f"{self.decoder.num_hidden_layers}"
            )
        for layer in range(len(self.chunk_sizes)):
            self.cms_shape(layer)
        D = self.decoder.hidden_size
        if isinstance(self.memory, TitansOptions):
            shape = TitansShape(D, self.num_heads, self.memory_chunk_size, self.memory)
            if self.head_dim not in (None, shape.head_dim):
                raise UsageError(f"hope: head_dim {self.head_dim} is fixed by the width for Titans; remove it")
        elif self.memory is not None:
            if self.num_heads < 1 or (self.head_dim is None and D % self.num_heads):
                raise UsageError(f"hope: width {D} is not divisible by {self.num_heads} heads; set head_dim")
            if self.head_dim is not None and self.head_dim < 1:
                raise UsageError(f"hope: head_dim {self.head_dim}: must be at least 1")

    @classmethod
    def attention_free(
        cls,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        *,
        chunk_sizes: Sequence[int] = (16, 64, 256),
        num_heads: int = 4,
        head_dim: int | None = None,
        memory: SelfModifyingOptions | TitansOptions | None = None,
        cms: CMSOptions | None = None,
    ) -> "HopeConfig":
        """Build the configuration of a model without attention, with Llama's norms and gated MLPs.

        The inner width of the MLPs is twice the width, and the output embedding is the input embedding.

        Args:
            vocab_size: Number of tokens.
            hidden_size: Width of the model.
            num_layers: Number of layers, all with the same levels.
            chunk_sizes: Chunk sizes of the levels, fastest first.
            num_heads: Heads of the memory.
            head_dim: Head width of a self-modifying memory.
            memory: Options of the memory, by default a self-modifying one.
            cms: Options of the levels.
        """
        decoder = attention_free_decoder("llama", vocab_size, hidden_size, num_layers, 2 * hidden_size)
        return cls(
            replace(decoder, tie_word_embeddings=True),
            chunk_sizes=(tuple(chunk_sizes),) * num_layers,
            cms=cms or CMSOptions(),
            memory=memory or SelfModifyingOptions(),
            num_heads=num_heads,
            head_dim=head_dim,
        )

    @property
    def mixer(self) -> MixerKind:
        return next(mixer for mixer, kind in MIXER_OPTIONS.items() if isinstance(self.memory, kind))

    @property
    def mlp_projections(self) -> tuple[str, ...]:
        """Names of an MLP's linear maps in this family."""
        names = WEIGHT_NAMES[self.decoder.family]
        is_gated = self.gated_mlp and self.decoder.gated_mlp
        roles = (names.gate, names.up, names.down) if is_gated else (names.up, names.down)
        return tuple(str(name).rpartition(".")[2] for name in roles)

    def cms_shape(self, layer: int) -> CMSShape:
        """Return the sizes of the CMS in a layer, whose index is `layer`."""
        d = self.decoder
        return CMSShape(
            width=d.hidden_size,
            intermediate_size=d.intermediate_size,
            chunk_sizes=self.chunk_sizes[layer],
            options=self.cms,
            activation=d.activation,
            projections=self.mlp_projections,
            has_bias=d.mlp_bias,
            eps=d.norm_eps,
        )

    def to_config_json(self) -> dict[str, Any]:
        """Return the fields of config.json beside the decoder's."""
        fields = ("chunk_sizes", "num_heads", "head_dim", "memory_chunk_size", "mixer", "gated_mlp")
        hope: dict[str, Any] = {name: getattr(self, name) for name in fields}
        hope["cms"] = self.cms.model_dump()
        hope["memory"] = None if self.memory is None else self.memory.model_dump()
        return {
            "model_type": MODEL_TYPE,
            "architectures": [ARCHITECTURES[self.memory is None]],
            "decoder_type": self.decoder.family,
            "hope": hope,
        }

    @classmethod
    def from_folder(cls, folder: Path) -> "HopeConfig":
        """Read the config.json of a Hope checkpoint. Raises `InputError` for another model or unknown fields."""
        file = read_json(folder / "config.json")
        if file.get("model_type") != MODEL_TYPE or not isinstance(file.get("hope"), dict):
            raise InputError(
                f"config.json: model_type is {file.get('model_type')!r}, expected {MODEL_TYPE!r}; "
                "use HopeAttention.from_decoder for other models"
            )
        fields = dict(parse_options(HopeFields, file.pop("hope")))
        kind = MIXER_OPTIONS[fields.pop("mixer")]
        fields["memory"] = None if kind is NoneType else parse_options(kind, fields["memory"])
        file |= {"model_type": file.pop("decoder_type", None), "architectures": []}
        try:
            return cls(DecoderConfig.from_dict(file), **fields)
        except UsageError as error:
            raise InputError(f"config.json: {error}; use an intact copy") from error


def attention_free_decoder(
    family: str, vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int
) -> DecoderConfig:
    """Return the sizes of a decoder whose attention is not used: it has no heads and no limit of positions."""
    return DecoderConfig.tiny(
        family, vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=num_layers,
        intermediate_size=intermediate_size, max_position_embeddings=UNLIMITED_POSITIONS, num_attention_heads=1,
        num_key_value_heads=1, head_dim=hidden_size + hidden_size % 2,
    )  # fmt: skip


def parse_options(kind: type[OptionsT], values: Mapping[str, Any] | None) -> OptionsT:
    """Validate options read from a file. Raises `InputError` for an unknown option or an invalid value."""
    try:
        return kind.model_validate_json(json.dumps(drop_former_options(values)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        problem = first["msg"].removeprefix("Input ").lower()
        raise InputError(f"config.json: hope: {key}: {problem}; load it with the version that wrote it") from error
