"""Golden bundles: stored activations of a reference, so that parity can be checked without transformers.

`golden.json` has the metadata and the hash of every tensor; `golden.safetensors` has the numbers. The case `small` is
stored completely, so that local errors can be computed. Of each stage of the long cases only a sample is stored.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor

from laconic.errors import InputError, LaconicError
from laconic.models.checkpoints.hf_fields import JsonModel
from laconic.models.decoder import Decoder
from laconic.storage.atomic import open_tensors
from laconic.storage.safetensors_header import read_safetensors_header
from laconic.storage.strict_json import read_json, validate_json
from laconic.verification.parity import MAX_ERROR_IN_FLOORS, MIN_FLOOR, StageResult
from laconic.verification.traces import LayerActivations, ParityCase, parse_stage_key, replay_stages, trace_stages

BUNDLE_FORMAT, METADATA_FILE, TENSOR_FILE = 1, "golden.json", "golden.safetensors"
BUNDLE_DIR = Path(__file__).parent / "bundles"
SHAPE_FIELDS = (
    "family", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size",
)  # fmt: skip
STORED_MINUS_INFINITY = -3e38  # replaces minus infinity in the file, whose numbers are all finite


class NotRunError(LaconicError):
    """A comparison that was requested cannot be made."""

    exit_code = 1


class BundleInput(JsonModel):
    name: str
    ids: Annotated[list[list[Annotated[int, Field(ge=0, lt=2**31)]]], Field(min_length=1)]
    positions: list[list[NonNegativeInt]] | None
    live: list[list[Literal[0, 1]]] | None
    pass_positions: bool = Field(alias="given")
    cuts: list[PositiveInt]
    covers: list[str]

    @model_validator(mode="after")
    def check_lengths(self) -> Self:
        B, T = len(self.ids), len(self.ids[0])
        for name, rows in (("ids", self.ids), ("positions", self.positions), ("live", self.live)):
            if rows is not None and (len(rows) != B or any(len(row) != T for row in rows)):
                raise ValueError(f"{name} is not {B} rows of {T}")
        if T == 0 or (self.cuts and sum(self.cuts) != T):
            raise ValueError(f"cuts {self.cuts[:8]} do not add up to {T} tokens")
        return self

    def build_case(self) -> ParityCase:
        ids, positions, live = (None if x is None else torch.tensor(x) for x in (self.ids, self.positions, self.live))
        return ParityCase(
            name=self.name,
            ids=ids,
            positions=positions,
            valid=None if live is None else live.bool(),
            pass_positions=self.pass_positions,
            piece_sizes=tuple(self.cuts),
            covered_inputs=tuple(self.covers),
        )


class BundleStage(JsonModel):
    shape: list[NonNegativeInt]
    at: str
    sha256: str
    floor: NonNegativeFloat
    index: str = ""


class BundleCase(JsonModel):
    """A case with its stages; all numbers of a small one are stored."""

    kind: Literal["small", "long"]
    input: BundleInput
    stages: dict[str, BundleStage]


class BundleMetadata(JsonModel):
    format: Literal[1]  # BUNDLE_FORMAT
    reference: str
    fingerprint: str
    config: dict[str, str]
    cases: list[BundleCase]


@dataclass(frozen=True)
class GoldenBundle:
    """A loaded bundle whose hashes have been checked."""

    metadata: BundleMetadata
    tensors: Mapping[str, Tensor]

    def iterate_stages(self, entry: BundleCase, case: ParityCase, decoder: Decoder) -> Iterator[LayerActivations]:
        """Yield the stages of a completely stored case in the order of computation."""
        stages: dict[str, Tensor] = {}
        for key, stage in entry.stages.items():
            t = self.tensors[stage.at].reshape(stage.shape)
            t = t.masked_fill(t == STORED_MINUS_INFINITY, -math.inf) if t.is_floating_point() else t
            stages[key] = t.to(case.device)
        return replay_stages(stages, case, len(decoder.layers))

    def compare_sampled(self, entry: BundleCase, case: ParityCase, decoder: Decoder) -> list[StageResult]:
        """Return the propagated error of every stage in the last piece of a long case, at the sampled elements."""
        results: list[StageResult] = []
        for key, x in trace_stages(decoder, case).items():
            name, layer, piece = parse_stage_key(key)
            if piece == len(case.pieces()) - 1:
                result = StageResult(case.name, name, layer, "propagated", note=f"{key}: not in the bundle: not run")
                results.append(self.compare_sample(result, x, entry.stages[key]) if key in entry.stages else result)
        return results

    def compare_sample(self, not_run: StageResult, x: Tensor, entry: BundleStage) -> StageResult:
        if list(x.shape) != entry.shape:
            note = f"shape {list(x.shape)}, reference {entry.shape}"
            return replace(not_run, error=math.inf, floor=MIN_FLOOR, verdict="fail", note=note)
        index, theirs = self.tensors[entry.index].long(), self.tensors[entry.at].double()
        ours = x.flatten().cpu()[index].double()
        difference = (ours - theirs).abs().nan_to_num(math.inf, math.inf)
        error = float(difference.norm() / theirs.norm().clamp(min=1e-12))
        floor = max(entry.floor, MIN_FLOOR)
        return replace(
            not_run,
            error=error,
            floor=floor,
            max_abs=float(difference.max()),
            index=tuple(int(i) for i in torch.unravel_index(index[difference.argmax()], x.shape)),
            cosine=float(torch.nn.functional.cosine_similarity(ours, theirs, 0)),
            bitwise=error == 0,
            verdict="pass" if error <= MAX_ERROR_IN_FLOORS * floor else "fail",
            note="",
        )


def tensor_sha256(t: Tensor) -> str:
    return hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()


def load_bundle(folder: Path) -> GoldenBundle:
    """Load a bundle, which may come from anywhere, and check the hash of every tensor.

    Raises:
        NotRunError: If a hash differs (exit code 1).
        InputError: If a value of the metadata has the wrong type, or does not fit the tensors.
    """
    path = folder / METADATA_FILE
    metadata = validate_json(BundleMetadata, read_json(path), str(path), "download the bundle again")
    tensors = open_tensors(folder / TENSOR_FILE, read_safetensors_header(folder / TENSOR_FILE).tensors)
    for case in metadata.cases:
        for key, stage in case.stages.items():
            if stage.at not in tensors:
                raise NotRunError(f"{key}: not in the bundle: not run")
            place = f"{folder / TENSOR_FILE}: {key} of case {case.input.name}"
            if tensor_sha256(tensors[stage.at]) != stage.sha256:
                raise NotRunError(f"{place} has a different hash; download the bundle again")
            if not is_consistent(case.kind, stage, tensors):
                raise InputError(f"{place} does not fit its shape {stage.shape}; download the bundle again")
    return GoldenBundle(metadata, tensors)


def is_consistent(kind: str, stage: BundleStage, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a stage has as many numbers as its shape says, or a long one an index of each number into it."""
    values = tensors[stage.at]
    index = tensors.get(stage.index)
    size = math.prod(stage.shape)
    if kind == "small":
        return values.numel() == size
    if index is None or index.shape != values.shape or index.is_floating_point() or index.ndim != 1:
        return False
    return index.numel() > 0 and 0 <= int(index.min()) <= int(index.max()) < size


def check_compatible(bundle: GoldenBundle, decoder: Decoder) -> str:
    """Return a note if the bundle was written for other weights; raise NotRunError for a model of another shape."""
    theirs, ours = bundle.metadata.fingerprint, decoder.fingerprint
    note = "" if theirs == ours else f"bundle is of weights {theirs[:4]}…, model is {ours[:4]}…"
    for name in SHAPE_FIELDS:
        value = str(getattr(decoder.config, name))
        expected = bundle.metadata.config.get(name)
        if value != expected:
            raise NotRunError(note or f"{name} is {value}, the bundle's {expected}: not run")
    return note


def find_shipped_bundle(decoder: Decoder) -> Path | None:
    for folder in sorted(BUNDLE_DIR.iterdir()) if BUNDLE_DIR.is_dir() else ():
        if read_json(folder / METADATA_FILE)["fingerprint"] == decoder.fingerprint:
            return folder
    return None
