"""Golden bundles: what a reference made of a few cases, kept in two small files, so that parity needs no reference.

`golden.json` says what it is of and what each stage looks like; `golden.safetensors` has the numbers. The case `small`
is kept whole, so that local errors can be computed; of the long ones a sample of each stage is kept.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.errors import LaconicError
from laconic.models.decoder import Decoder
from laconic.storage.atomic import open_tensors, save_tensors, write_folder_atomically
from laconic.storage.strict_json import read_json, read_safetensors_header
from laconic.verification.error import valid_mask
from laconic.verification.float64_copy import Float64Decoder
from laconic.verification.hf_reference import TransformersReference
from laconic.verification.inputs import InputBuilder, build_inputs, left_padded_mask
from laconic.verification.local import stages_at_layer
from laconic.verification.parity import MAX_ERROR_IN_FLOORS, MIN_FLOOR, CaseComparison, StageResult, replay_stages
from laconic.verification.traces import LayerActivations, ParityCase, iterate_stages, stage_key

BUNDLE_FORMAT, METADATA_FILE, TENSOR_FILE = 1, "golden.json", "golden.safetensors"
BUNDLE_DIR = Path(__file__).parent / "bundles"
LONG_INPUTS = ("I1", "I2", "I10", "I14")
SAMPLE_SIZE = 512
MAX_WHOLE_BYTES = 1_250_000
"""Bytes up to which the small case is kept whole; a bundle is at most 1.5 MB."""
SHAPE_FIELDS = (
    "family", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size",
)  # fmt: skip
MINUS_INFINITY = -3e38
"""Stands for minus infinity in a file of finite numbers."""


class NotRunError(LaconicError):
    """A comparison that was asked for and could not be made."""

    code = 1


@dataclass(frozen=True)
class GoldenBundle:
    """An opened bundle, every hash checked."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        """Who made the numbers."""
        return f"golden bundle of {self.metadata['reference']}"

    @property
    def cases(self) -> list[ParityCase]:
        """The inputs of the bundle."""
        return [case_from_json(entry["input"]) for entry in self.metadata["cases"]]

    def case_entry(self, name: str) -> dict[str, Any]:
        """What is said of one case."""
        return next(entry for entry in self.metadata["cases"] if entry["input"]["name"] == name)

    def is_complete(self, case: ParityCase) -> bool:
        """Whether all numbers of a case are there."""
        return self.case_entry(case.name)["kind"] == "small"

    def iterate_stages(self, case: ParityCase, decoder: Decoder) -> Iterator[LayerActivations]:
        """The stages of a case kept whole, in the order of computation."""
        found = {}
        for at, said in self.case_entry(case.name)["stages"].items():
            t = self.tensors[said["at"]].reshape(said["shape"])
            found[at] = t.masked_fill(t == MINUS_INFINITY, -math.inf) if t.is_floating_point() else t
        return replay_stages(found, case, decoder)


def case_from_json(data: Mapping[str, Any]) -> ParityCase:
    """A case from its JSON."""
    tensors: dict[str, Any] = {
        name: torch.tensor(data[name]) for name in ("ids", "positions") if data[name] is not None
    }
    live = None if data["live"] is None else torch.tensor(data["live"]).bool()
    rest = {name: data[name] for name in ("name", "given", "note")}
    return ParityCase(
        **rest, **tensors, valid=live, piece_sizes=tuple(data["cuts"]), covered_inputs=tuple(data["covers"])
    )


def case_to_json(case: ParityCase) -> dict[str, Any]:
    """A case of ids as JSON."""
    given = {name: getattr(case, name) for name in ("ids", "positions", "live")}
    rows = {name: None if t is None else t.int().tolist() for name, t in given.items()}
    return {
        **rows,
        "name": case.name,
        "given": case.pass_positions,
        "cuts": case.piece_sizes,
        "covers": case.covered_inputs,
        "note": case.note,
    }


def tensor_sha256(t: Tensor) -> str:
    """SHA-256 of a tensor's bytes as stored."""
    return hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()


def load_bundle(folder: Path) -> GoldenBundle:
    """Reads a bundle and checks every hash in it. Raises `NotRun` for one that is not what was written."""
    about = read_json(folder / METADATA_FILE)
    if about.get("format") != BUNDLE_FORMAT:
        raise NotRunError(f"{folder / METADATA_FILE}: format {about.get('format')}, known is {BUNDLE_FORMAT}")
    tensors = open_tensors(folder / TENSOR_FILE, read_safetensors_header(folder / TENSOR_FILE).tensors)
    for entry in about["cases"]:
        for at, said in entry["stages"].items():
            if said["at"] not in tensors:
                raise NotRunError(f"{at}: not in the bundle: not run")
            if tensor_sha256(tensors[said["at"]]) != said["sha256"]:
                where = f"{folder / TENSOR_FILE}: {at} of case {entry['input']['name']}"
                raise NotRunError(f"{where} has another hash; fetch it again")
    return GoldenBundle(about, tensors)


def check_compatible(bundle: GoldenBundle, decoder: Decoder) -> str:
    """What to say if the bundle is of other weights, else nothing. Raises `NotRun` if it is of another shape."""
    theirs, ours = bundle.metadata["fingerprint"], decoder.fingerprint
    said = "" if theirs == ours else f"bundle is of weights {theirs[:4]}…, model is {ours[:4]}…"
    for name in SHAPE_FIELDS:
        mine, other = str(getattr(decoder.config, name)), bundle.metadata["config"][name]
        if mine != other:
            raise NotRunError(said or f"{name} is {mine}, the bundle's {other}: not run")
    return said


def find_shipped_bundle(decoder: Decoder) -> Path | None:
    """The bundle that comes with this package for these weights."""
    for folder in sorted(BUNDLE_DIR.iterdir()) if BUNDLE_DIR.is_dir() else ():
        if read_json(folder / METADATA_FILE)["fingerprint"] == decoder.fingerprint:
            return folder
    return None


def compare_sampled(bundle: GoldenBundle, decoder: Decoder, case: ParityCase) -> list[StageResult]:
    """The propagated error of every stage of a long case, in its last piece, at the numbers that were kept."""
    entry, n, L, found = bundle.case_entry(case.name)["stages"], len(case.pieces()), len(decoder.layers), []
    for made in iterate_stages(decoder, case):
        if made.piece < n - 1:
            continue
        inside = made.layer if 0 <= made.layer < L else None
        for stage in stages_at_layer(decoder, made.layer):
            at = stage_key(stage.name, inside, made.piece, n)
            if at not in entry:
                note = f"{at}: not in the bundle: not run"
                found.append(StageResult(case.name, stage.name, inside, "propagated", note=note))
                continue
            found.append(
                compare_sample(case, stage.name, inside, made.activations[stage.name], entry[at], bundle.tensors)
            )
    return found


def compare_sample(
    case: ParityCase, stage: str, layer: int | None, x: Tensor, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> StageResult:
    """One stage of a long case: at the kept numbers, relative to them."""
    if list(x.shape) != entry["shape"]:
        note = f"shape {list(x.shape)}, reference {entry['shape']}"
        return StageResult(case.name, stage, layer, "propagated", math.inf, MIN_FLOOR, verdict="fail", note=note)
    where, y = tensors[entry["index"]].long(), tensors[entry["at"]].double()
    mine = x.flatten()[where].double()
    gap = (mine - y).abs().nan_to_num(math.inf, math.inf)
    error = float(gap.norm() / y.norm().clamp(min=1e-12))
    floor = max(entry["floor"], MIN_FLOOR)
    worst = tuple(int(i) for i in torch.unravel_index(where[gap.argmax()], x.shape))
    cosine = float(torch.nn.functional.cosine_similarity(mine, y, 0))
    verdict = "pass" if error <= MAX_ERROR_IN_FLOORS * floor else "fail"
    return StageResult(
        case.name, stage, layer, "propagated", error, floor, float(gap.max()), worst, cosine, error == 0, verdict
    )


class BundleWriter:
    """Gathers the numbers of a bundle; equal tensors are kept once."""

    def __init__(self, decoder: Decoder, reference: TransformersReference, sample_size: int) -> None:
        self.decoder, self.reference, self.sample_size = decoder, reference, sample_size
        self.tensors: dict[str, Tensor] = {}
        self.name_by_hash: dict[str, str] = {}

    def store_tensor(self, name: str, t: Tensor) -> dict[str, str]:
        """Where a tensor is and its hash."""
        at = self.name_by_hash.setdefault(tensor_sha256(t), name)
        self.tensors.setdefault(at, t.contiguous().clone())
        return {"at": at, "sha256": tensor_sha256(t)}

    def record_case(self, case: ParityCase, is_complete: bool) -> dict[str, Any]:
        """One case as the reference reads it, with our floors."""
        twin, n, L = Float64Decoder.from_decoder(self.decoder), len(case.pieces()), len(self.decoder.layers)
        comparison, stages = CaseComparison(self.decoder, case, None, twin), {}
        sides = (self.reference.iterate_stages(case), iterate_stages(self.decoder, case), iterate_stages(twin, case))
        for made, own, wide in zip(*sides, strict=True):
            comparison.add_layer(made, own, wide)
            if made.piece < n - 1:
                continue
            inside = made.layer if 0 <= made.layer < L else None
            for stage in stages_at_layer(self.decoder, made.layer):
                at = stage_key(stage.name, inside, made.piece, n)
                S, T = case.pieces()[made.piece]
                where = valid_mask(stage.shape, made.activations[stage.name].shape, case.valid_mask[:, : S + T], S)
                t = made.activations[stage.name]
                t = t.to(torch.float32 if t.is_floating_point() else torch.int32)
                said: dict[str, Any] = {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
                stages[at] = said | (
                    self.store_tensor(f"{case.name}/{at}", t.clamp(min=MINUS_INFINITY))
                    if is_complete
                    else self.record_sample(case, at, t, where)
                )
        if bad := [f for f in comparison.results() if f.verdict in ("fail", "not run")]:
            what = f"{bad[0].stage} of case {case.name}"
            raise NotRunError(f"{what} fails against {self.reference.name}; no bundle is written")
        floors = comparison.measured_floors().propagated
        for at, said in stages.items():
            said["floor"] = floors[at.partition("/")[0]]
        return {"kind": "small" if is_complete else "long", "input": case_to_json(case), "stages": stages}

    def record_sample(self, case: ParityCase, at: str, t: Tensor, mask: Tensor) -> dict[str, Any]:
        """Some numbers of a stage, shared out among the layers, at live slots; the same ones in equal shapes."""
        flat = (mask & torch.isfinite(t)).flatten().nonzero()[:, 0]
        layers = len(self.decoder.layers) if "." in at else 1
        count = min(len(flat), math.ceil(self.sample_size / layers))
        generator = torch.Generator().manual_seed(t.numel())
        index = flat[torch.randperm(len(flat), generator=generator)[:count]].sort().values.int()
        finite = t.flatten()[flat].double()
        size = {"norm": float(finite.norm()), "largest": float(finite.abs().max())}
        place = self.store_tensor(f"{case.name}/{at}/index", index)["at"]
        return self.store_tensor(f"{case.name}/{at}", t.flatten()[index.long()]) | {"index": place} | size


def bundle_cases(decoder: Decoder) -> list[ParityCase]:
    """The small case, then the long ones that this model can have."""
    T = 16
    made = build_inputs(decoder)
    covered = [name for case in made.cases for name in case.covered_inputs if name in ("I3", "I4", "I6")]
    small = ParityCase(
        "small",
        InputBuilder(decoder).random_ids(2, T),
        valid=left_padded_mask([T, T - 5], T),
        covered_inputs=("I8", *covered),
    )
    return [small, *(replace(case, covered_inputs=(case.name,)) for case in made.cases if case.name in LONG_INPUTS)]


def estimate_bytes(decoder: Decoder) -> int:
    """Bytes of all stages of the small case, about."""
    c, rows = decoder.config, 32
    H, G, E = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    row = 6 * c.hidden_size + 3 * H * E + 3 * G * E + 3 * c.intermediate_size + 3 * H * 16
    return 4 * rows * (row * c.num_hidden_layers + c.vocab_size + 2 * c.hidden_size)


def write_bundle(
    decoder: Decoder, reference: TransformersReference, folder: Path, sample_size: int = SAMPLE_SIZE
) -> None:
    """A new bundle of what the reference makes of this model; refused where we differ from it."""
    writer = BundleWriter(decoder, reference, sample_size)
    whole = estimate_bytes(decoder) <= MAX_WHOLE_BYTES
    config = {name: str(value) for name, value in asdict(replace(decoder.config, source="")).items()}
    about = {
        "format": BUNDLE_FORMAT, "fingerprint": decoder.fingerprint, "reference": reference.name,
        "versions": {"torch": torch.__version__}, "config": config,
    }  # fmt: skip

    def write(to: Path) -> None:
        about["cases"] = [writer.record_case(case, whole and case.name == "small") for case in bundle_cases(decoder)]
        (to / METADATA_FILE).write_text(json.dumps(about, ensure_ascii=False, indent=None) + "\n", encoding="utf-8")
        save_tensors(to / TENSOR_FILE, writer.tensors, {"format": "pt"})

    write_folder_atomically(folder, write)
