"""What a language model of memories at several frequencies is: a decoder's sizes, and what its layers are made of.

Nested Learning arXiv:2512.24695, sections 7 and 8.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from laconic.config.config_model import ConfigModel
from laconic.config.nested import MixerKind
from laconic.errors import InputError, UsageError
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.nested.cms import config as cms_config
from laconic.nested.hope import hope_shape
from laconic.nested.titans import config as titans_config
from laconic.storage.strict_json import read_json

OptionsT = TypeVar("OptionsT", bound=ConfigModel)
MODEL_TYPE = "hope"
UNLIMITED_POSITIONS = 1 << 20  # positions of a model that has none


@dataclass(frozen=True)
class HopeConfig:
    """`decoder` says widths, layers, words, norms and MLP; `chunks` the levels of each layer, fastest first.

    `memory` are the options of what stands in the place of attention: of a self-modifying memory, its `heads` of width
    `head`, or of a Titans memory of that `chunk`; None keeps the decoder's attention. `gated` False leaves out the gate
    of a family that has one. Raises `Usage` (2) for what cannot be meant.
    """

    decoder: DecoderConfig
    chunk_sizes: tuple[tuple[int, ...], ...]
    cms: cms_config.Options
    memory: hope_shape.Options | titans_config.Options | None = None
    num_heads: int = 4
    head_dim: int | None = None
    memory_chunk_size: int = 64
    gated_mlp: bool = True

    def __post_init__(self) -> None:
        if len(self.chunk_sizes) != self.decoder.num_hidden_layers:
            raise UsageError(
                f"hope: chunks of {len(self.chunk_sizes)} layers, the decoder has {self.decoder.num_hidden_layers}; give "
                "each its levels"
            )
        for n in range(len(self.chunk_sizes)):
            self.cms_shape(n)
        if isinstance(self.memory, titans_config.Options):
            if self.head_dim not in (None, self.decoder.hidden_size // self.num_heads):
                raise UsageError(f"hope: heads of {self.head_dim}; those of Titans share the width, leave head out")
            titans_config.TitansShape(self.decoder.hidden_size, self.num_heads, self.memory_chunk_size, self.memory)

    @classmethod
    def attention_free(
        cls,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        *,
        chunk_sizes: Sequence[int] = (16, 64, 256),
        intermediate_size: int | None = None,
        num_heads: int = 4,
        head_dim: int | None = None,
        memory: hope_shape.Options | titans_config.Options | None = None,
        memory_chunk_size: int = 64,
        cms: cms_config.Options | None = None,
        tie_word_embeddings: bool = True,
    ) -> "HopeConfig":
        """A model without attention, of Llama's norms and gated MLPs, the same levels in every layer.

        `hidden` is the MLPs' inner width, by default 2 `width`.
        """
        sizes = {"hidden_size": hidden_size, "num_hidden_layers": num_layers, "vocab_size": vocab_size}
        sizes |= {
            "intermediate_size": intermediate_size or 2 * hidden_size,
            "max_position_embeddings": UNLIMITED_POSITIONS,
        }
        one = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": hidden_size + hidden_size % 2}
        decoder = replace(DecoderConfig.tiny("llama", **sizes, **one), tie_word_embeddings=tie_word_embeddings)
        each = (tuple(chunk_sizes),) * num_layers
        return cls(
            decoder,
            each,
            cms or cms_config.Options(),
            memory or hope_shape.Options(),
            num_heads,
            head_dim,
            memory_chunk_size,
        )

    @property
    def mixer(self) -> MixerKind:
        """What stands in the place of attention, or attention."""
        return next(mixer for mixer, kind in MIXER_OPTIONS.items() if isinstance(self.memory, kind))

    @property
    def mlp_projections(self) -> tuple[str, ...]:
        """The names of an MLP's maps in this family."""
        names = WEIGHT_NAMES[self.decoder.family]
        three = self.gated_mlp and self.decoder.gated_mlp
        roles = (names.gate, names.up, names.down) if three else (names.up, names.down)
        return tuple(str(name).rpartition(".")[2] for name in roles)

    def cms_shape(self, layer: int) -> cms_config.CMSShape:
        """The continuum memory of a layer."""
        d = self.decoder
        return cms_config.CMSShape(
            d.hidden_size,
            d.intermediate_size,
            self.chunk_sizes[layer],
            self.cms,
            d.activation,
            self.mlp_projections,
            d.mlp_bias,
            d.norm_eps,
        )

    def to_config_json(self) -> dict[str, Any]:
        """What config.json has beside the decoder's fields."""
        own = {name: getattr(self, name) for name in ("chunks", "heads", "head", "chunk", "mixer", "gated")}
        own |= {
            name: None if kept is None else kept.model_dump()
            for name, kept in (("cms", self.cms), ("memory", self.memory))
        }
        return {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURES[self.memory is None]],
                "decoder_type": self.decoder.family, "hope": own}  # fmt: skip

    @classmethod
    def from_folder(cls, folder: Path) -> "HopeConfig":
        """From the config.json of a folder. Raises `BadInput` (66) for one of another model, or what is unknown."""
        file = read_json(folder / "config.json")
        if file.get("model_type") != MODEL_TYPE or not isinstance(file.get("hope"), dict):
            raise InputError(
                f"config.json: model_type {file.get('model_type')!r}; a Hope has {MODEL_TYPE!r}; see stack()"
            )
        own = cast(dict[str, Any], file.pop("hope"))
        family = file.pop("decoder_type", None)
        file |= {"model_type": family, "architectures": []}
        try:
            kind = MIXER_OPTIONS[own["mixer"]]
            return cls(
                DecoderConfig.from_dict(file),
                tuple(tuple(int(C) for C in chunks) for chunks in own["chunks"]),
                parse_options(cms_config.Options, own["cms"]),
                None if kind is NoneType else parse_options(kind, own["memory"]),
                own["heads"],
                own["head"],
                own["chunk"],
                own["gated"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"config.json: hope: {error}; take another copy, or the version that wrote it") from error


ARCHITECTURES = {False: "Hope", True: "HopeAttention"}
MIXER_OPTIONS: dict[MixerKind, type[Any]] = {
    "self_modifying": hope_shape.Options,
    "titans": titans_config.Options,
    "attention": NoneType,
}


def parse_options(kind: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
    """Options as they were written. Raises `BadInput` (66) for one that is unknown, or has another value."""
    try:
        return kind.model_validate_json(json.dumps(values))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key, what = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Input ").lower()
        raise InputError(f"config.json: hope: {key}: {what}; take the version that wrote it") from error
