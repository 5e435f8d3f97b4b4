"""Metadata of a saved KV memory (model, method, texts, measurements), and its file format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.compression.memory_file import BaseMetadata, SourceDocument

FILE_KIND = "kv-memory"


@dataclass(frozen=True, kw_only=True)
class KVMemoryMetadata(BaseMetadata):
    """Describes which model wrote a KV memory and may read it, how its slots were chosen, and which texts were read."""

    READER_FIELDS: ClassVar = {"model": "for weights", "tokenizer": "with tokenizer"}
    JOINED_FIELDS: ClassVar = ("chat", "model", "tokenizer")

    model: str  # fingerprint of the weights that wrote it and must read it
    kv_heads: int
    head_size: int
    method: str  # kvzip, snapkv, …
    chat: bool = False  # the text opens a user turn of the chat template, which the prompt continues
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    measured: Mapping[str, Any] = field(default_factory=dict[str, Any])  # losses in nats per token, for example

    @property
    def shape_text(self) -> str:
        return f"{self.family}, {self.layers} layers, {self.kv_heads} KV heads of {self.head_size}"

    def keep_top_slots(self, num_slots: int) -> "KVMemoryMetadata":
        """Return the metadata of a smaller memory of `num_slots` per head, without the larger one's measurements."""
        settings = {name: value for name, value in self.settings.items() if name not in ("keep", "max_loss")}
        return replace(self, settings={**settings, "slots": num_slots}, measured={})

    @staticmethod
    def concat_documents(parts: Sequence["KVMemoryMetadata"]) -> "KVMemoryMetadata":
        """Return the metadata of memories side by side, row by row, without measurements."""
        if len(parts) == 1:
            return parts[0]
        rows = list[tuple[SourceDocument, ...]]()
        for row in zip(*(part.documents for part in parts), strict=True):
            documents = sum(row, ())
            starts = accumulate((len(d.segments) for d in documents[:-1]), initial=0)
            rows.append(tuple(replace(d, first=start) for d, start in zip(documents, starts, strict=False)))
        return replace(parts[0], documents=tuple(rows), measured={})

    def first_invalid_tensor(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Return the name of the first tensor that is missing, unknown or inconsistent; None if all are good.

        Keys and values of a layer hold the slots in use of all documents and heads, one after the other; `slots`
        [L, B, G] counts them.
        """
        layers = [f"{kind}.{i}" for kind in ("keys", "values") for i in range(self.layers)]
        dtypes = {"positions": torch.int32, "ranks": torch.int32, "slots": torch.long, "num_tokens": torch.long}
        bad = min(tensors.keys() ^ {*layers, *dtypes}, default=None)
        if bad is None:
            bad = next((name for name, dtype in dtypes.items() if tensors[name].dtype != dtype), None)
        if bad is not None:
            return bad
        L, B = self.layers, len(self.documents)
        slots = tensors["slots"]
        if tuple(slots.shape) != (L, B, self.kv_heads) or not slots.numel() or bool((slots < 0).any()):
            return "slots"
        shapes: dict[str, tuple[int, ...]] = {"num_tokens": (B,)}
        shapes |= dict.fromkeys(("positions", "ranks"), (int(slots.sum()),))
        for name in layers:
            shapes[name] = (int(slots[int(name.partition(".")[2])].sum()), self.head_size)
        bad = next((name for name, shape in shapes.items() if tuple(tensors[name].shape) != shape), None)
        if bad is not None:
            return bad
        last = tensors["num_tokens"][None, :, None].expand_as(slots).flatten().repeat_interleave(slots.flatten()) - 1
        positions = tensors["positions"]
        if not bool(((positions >= 0) & (positions <= last)).all()):
            return "positions"
        if bool((tensors["ranks"] < 0).any()):
            return "ranks"
        dtype = tensors[layers[0]].dtype
        is_float = dtype.is_floating_point and dtype.itemsize > 1
        return next((name for name in layers if tensors[name].dtype != dtype or not is_float), None)
