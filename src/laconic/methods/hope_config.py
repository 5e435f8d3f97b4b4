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

from laconic.core.artifact import read_json
from laconic.core.errors import BadInput, Usage
from laconic.core.families import NAMES, DecoderConfig
from laconic.methods import cms_shape, hope_shape, titans_shape
from laconic.methods.learning_settings import Mixer
from laconic.methods.settings import Settings

Kept = TypeVar("Kept", bound=Settings)
MODEL_TYPE = "hope"
FAR = 1 << 20  # positions of a model that has none


@dataclass(frozen=True)
class HopeConfig:
    """`decoder` says widths, layers, words, norms and MLP; `chunks` the levels of each layer, fastest first.

    `memory` are the options of what stands in the place of attention: of a self-modifying memory, its `heads` of width
    `head`, or of a Titans memory of that `chunk`; None keeps the decoder's attention. `gated` False leaves out the gate
    of a family that has one. Raises `Usage` (2) for what cannot be meant.
    """

    decoder: DecoderConfig
    chunks: tuple[tuple[int, ...], ...]
    cms: cms_shape.Options
    memory: hope_shape.Options | titans_shape.Options | None = None
    heads: int = 4
    head: int | None = None
    chunk: int = 64
    gated: bool = True

    def __post_init__(self) -> None:
        if len(self.chunks) != self.decoder.num_hidden_layers:
            raise Usage(
                f"hope: chunks of {len(self.chunks)} layers, the decoder has {self.decoder.num_hidden_layers}; give "
                "each its levels"
            )
        for n in range(len(self.chunks)):
            self.levels(n)
        if isinstance(self.memory, titans_shape.Options):
            if self.head not in (None, self.decoder.hidden_size // self.heads):
                raise Usage(f"hope: heads of {self.head}; those of Titans share the width, leave head out")
            titans_shape.Shape(self.decoder.hidden_size, self.heads, self.chunk, self.memory)

    @classmethod
    def of(
        cls,
        vocab_size: int,
        width: int,
        layers: int,
        *,
        chunks: Sequence[int] = (16, 64, 256),
        hidden: int | None = None,
        heads: int = 4,
        head: int | None = None,
        memory: hope_shape.Options | titans_shape.Options | None = None,
        chunk: int = 64,
        cms: cms_shape.Options | None = None,
        tied: bool = True,
    ) -> "HopeConfig":
        """A model without attention, of Llama's norms and gated MLPs, the same levels in every layer.

        `hidden` is the MLPs' inner width, by default 2 `width`.
        """
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": vocab_size}
        sizes |= {"intermediate_size": hidden or 2 * width, "max_position_embeddings": FAR}
        one = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": width + width % 2}
        decoder = replace(DecoderConfig.small("llama", **sizes, **one), tie_word_embeddings=tied)
        each = (tuple(chunks),) * layers
        return cls(decoder, each, cms or cms_shape.Options(), memory or hope_shape.Options(), heads, head, chunk)

    @property
    def mixer(self) -> Mixer:
        """What stands in the place of attention, or attention."""
        return next(mixer for mixer, kind in MIXERS.items() if isinstance(self.memory, kind))

    @property
    def maps(self) -> tuple[str, ...]:
        """The names of an MLP's maps in this family."""
        names = NAMES[self.decoder.family]
        three = self.gated and self.decoder.gated
        roles = (names.gate, names.up, names.down) if three else (names.up, names.down)
        return tuple(str(name).rpartition(".")[2] for name in roles)

    def levels(self, n: int) -> cms_shape.Shape:
        """The continuum memory of a layer."""
        d = self.decoder
        return cms_shape.Shape(
            d.hidden_size, d.intermediate_size, self.chunks[n], self.cms, d.act, self.maps, d.mlp_bias, d.eps
        )

    def to_source(self) -> dict[str, Any]:
        """What config.json has beside the decoder's fields."""
        own = {name: getattr(self, name) for name in ("chunks", "heads", "head", "chunk", "mixer", "gated")}
        own |= {
            name: None if kept is None else kept.model_dump()
            for name, kept in (("cms", self.cms), ("memory", self.memory))
        }
        return {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURES[self.memory is None]],
                "decoder_type": self.decoder.family, "hope": own}  # fmt: skip

    @classmethod
    def read(cls, folder: Path) -> "HopeConfig":
        """From the config.json of a folder. Raises `BadInput` (66) for one of another model, or what is unknown."""
        file = read_json(folder / "config.json")
        if file.get("model_type") != MODEL_TYPE or not isinstance(file.get("hope"), dict):
            raise BadInput(
                f"config.json: model_type {file.get('model_type')!r}; a Hope has {MODEL_TYPE!r}; see stack()"
            )
        own = cast(dict[str, Any], file.pop("hope"))
        family = file.pop("decoder_type", None)
        file |= {"model_type": family, "architectures": []}
        try:
            kind = MIXERS[own["mixer"]]
            return cls(
                DecoderConfig.parse(file),
                tuple(tuple(int(C) for C in chunks) for chunks in own["chunks"]),
                options(cms_shape.Options, own["cms"]),
                None if kind is NoneType else options(kind, own["memory"]),
                own["heads"],
                own["head"],
                own["chunk"],
                own["gated"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"config.json: hope: {error}; take another copy, or the version that wrote it") from error


ARCHITECTURES = {False: "Hope", True: "HopeAttention"}
MIXERS: dict[Mixer, type[Any]] = {"self": hope_shape.Options, "titans": titans_shape.Options, "attention": NoneType}


def options(kind: type[Kept], given: Mapping[str, Any]) -> Kept:
    """Options as they were written. Raises `BadInput` (66) for one that is unknown, or has another value."""
    try:
        return kind.model_validate_json(json.dumps(given))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key, what = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Input ").lower()
        raise BadInput(f"config.json: hope: {key}: {what}; take the version that wrote it") from error
