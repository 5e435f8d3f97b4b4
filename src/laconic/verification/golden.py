"""Golden bundles: stored activations of a reference, so that parity can be checked without transformers.

`golden.json` has the metadata and the hash of every tensor; `golden.safetensors` has the numbers. The case `small` is
stored completely, so that local errors can be computed. Of each stage of the long cases only a sample is stored.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.errors import LaconicError
from laconic.models.decoder import Decoder
from laconic.storage.atomic import open_tensors
from laconic.storage.safetensors_header import read_safetensors_header
from laconic.storage.strict_json import read_json
from laconic.verification.golden_check import check_bundle
from laconic.verification.local import stages_at_layer
from laconic.verification.parity import MAX_ERROR_IN_FLOORS, MIN_FLOOR, StageResult, Verdict, replay_stages
from laconic.verification.traces import LayerActivations, ParityCase, iterate_stages, layer_index, stage_key

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


@dataclass(frozen=True)
class GoldenBundle:
    """A loaded bundle whose hashes have been checked."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        """The reference that computed the numbers."""
        return f"golden bundle of {self.metadata['reference']}"

    @property
    def cases(self) -> list[ParityCase]:
        return [case_from_json(entry["input"]) for entry in self.metadata["cases"]]

    def case_entry(self, name: str) -> dict[str, Any]:
        return next(entry for entry in self.metadata["cases"] if entry["input"]["name"] == name)

    def is_complete(self, case: ParityCase) -> bool:
        """Return whether all numbers of a case are stored."""
        return self.case_entry(case.name)["kind"] == "small"

    def iterate_stages(self, case: ParityCase, decoder: Decoder) -> Iterator[LayerActivations]:
        """Yield the stages of a completely stored case in the order of computation."""
        stages: dict[str, Tensor] = {}
        for key, entry in self.case_entry(case.name)["stages"].items():
            t = self.tensors[entry["at"]].reshape(entry["shape"])
            t = t.masked_fill(t == STORED_MINUS_INFINITY, -math.inf) if t.is_floating_point() else t
            stages[key] = t.to(case.device)
        return replay_stages(stages, case, decoder)


def case_from_json(data: Mapping[str, Any]) -> ParityCase:
    tensors = {name: None if data[name] is None else torch.tensor(data[name]) for name in ("ids", "positions", "live")}
    return ParityCase(
        name=data["name"],
        ids=tensors["ids"],
        positions=tensors["positions"],
        valid=None if tensors["live"] is None else tensors["live"].bool(),
        pass_positions=data["given"],
        piece_sizes=tuple(data["cuts"]),
        covered_inputs=tuple(data["covers"]),
    )


def tensor_sha256(t: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes as stored."""
    return hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()


def load_bundle(folder: Path) -> GoldenBundle:
    """Load a bundle and check the hash of every tensor.

    Raises:
        NotRunError: If a hash or the format differs (exit code 1).
        InputError: If a value of the metadata has the wrong type, or does not fit the tensors.
    """
    metadata = read_json(folder / METADATA_FILE)
    if metadata.get("format") != BUNDLE_FORMAT:
        raise NotRunError(
            f"{folder / METADATA_FILE}: unsupported format {metadata.get('format')} (expected {BUNDLE_FORMAT})"
        )
    tensors = open_tensors(folder / TENSOR_FILE, read_safetensors_header(folder / TENSOR_FILE).tensors)
    check_bundle(metadata, tensors, folder / METADATA_FILE)
    for case in metadata["cases"]:
        for key, entry in case["stages"].items():
            if entry["at"] not in tensors:
                raise NotRunError(f"{key}: not in the bundle: not run")
            if tensor_sha256(tensors[entry["at"]]) != entry["sha256"]:
                name = f"{folder / TENSOR_FILE}: {key} of case {case['input']['name']}"
                raise NotRunError(f"{name} has a different hash; download the bundle again")
    return GoldenBundle(metadata, tensors)


def check_compatible(bundle: GoldenBundle, decoder: Decoder) -> str:
    """Return a note if the bundle was written for other weights, else "".

    Raises:
        NotRunError: If it was written for a model of another shape.
    """
    theirs, ours = bundle.metadata["fingerprint"], decoder.fingerprint
    note = "" if theirs == ours else f"bundle is of weights {theirs[:4]}…, model is {ours[:4]}…"
    for name in SHAPE_FIELDS:
        value, expected = str(getattr(decoder.config, name)), bundle.metadata["config"].get(name)
        if value != expected:
            raise NotRunError(note or f"{name} is {value}, the bundle's {expected}: not run")
    return note


def find_shipped_bundle(decoder: Decoder) -> Path | None:
    """Return the bundle of these weights that comes with the package, or None."""
    for folder in sorted(BUNDLE_DIR.iterdir()) if BUNDLE_DIR.is_dir() else ():
        if read_json(folder / METADATA_FILE)["fingerprint"] == decoder.fingerprint:
            return folder
    return None


def compare_sampled(bundle: GoldenBundle, decoder: Decoder, case: ParityCase) -> list[StageResult]:
    """Return the propagated error of every stage in the last piece of a long case, at the sampled elements."""
    entries, n = bundle.case_entry(case.name)["stages"], len(case.pieces())
    results: list[StageResult] = []
    for recorded in iterate_stages(decoder, case):
        if recorded.piece < n - 1:
            continue
        layer = layer_index(decoder, recorded.layer)
        for stage in stages_at_layer(decoder, recorded.layer):
            key, x = stage_key(stage.name, layer, recorded.piece, n), recorded.activations[stage.name]
            if key in entries:
                results.append(compare_sample(case, stage.name, layer, x, entries[key], bundle.tensors))
            else:
                note = f"{key}: not in the bundle: not run"
                results.append(StageResult(case.name, stage.name, layer, "propagated", note=note))
    return results


def compare_sample(
    case: ParityCase, stage: str, layer: int | None, x: Tensor, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> StageResult:
    """Compare one stage of a long case at its sampled elements."""
    if list(x.shape) != entry["shape"]:
        note = f"shape {list(x.shape)}, reference {entry['shape']}"
        return StageResult(case.name, stage, layer, "propagated", math.inf, MIN_FLOOR, verdict="fail", note=note)
    index, theirs = tensors[entry["index"]].long(), tensors[entry["at"]].double()
    ours = x.flatten().cpu()[index].double()
    difference = (ours - theirs).abs().nan_to_num(math.inf, math.inf)
    error = float(difference.norm() / theirs.norm().clamp(min=1e-12))
    floor = max(entry["floor"], MIN_FLOOR)
    worst = tuple(int(i) for i in torch.unravel_index(index[difference.argmax()], x.shape))
    cosine = float(torch.nn.functional.cosine_similarity(ours, theirs, 0))
    verdict: Verdict = "pass" if error <= MAX_ERROR_IN_FLOORS * floor else "fail"
    return StageResult(
        case.name, stage, layer, "propagated", error, floor, float(difference.max()), worst, cosine, error == 0, verdict
    )
