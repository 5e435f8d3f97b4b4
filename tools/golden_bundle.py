"""Write a golden bundle: transformers' activations for the tiny random model of a family, or for a checkpoint.

    python -m tools.golden_bundle tiny:llama src/laconic/verification/bundles/tiny-llama

`laconic verify parity --reference FOLDER` compares with it.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.models.decoder import Decoder
from laconic.storage.atomic import save_tensors, write_folder_atomically
from laconic.verification.error import valid_mask
from laconic.verification.golden import (
    BUNDLE_FORMAT,
    METADATA_FILE,
    STORED_MINUS_INFINITY,
    TENSOR_FILE,
    NotRunError,
    tensor_sha256,
)
from laconic.verification.hf_reference import TransformersReference
from laconic.verification.inputs import InputBuilder, build_inputs, left_padded_mask
from laconic.verification.local import stages_at_layer
from laconic.verification.parity import CaseComparison
from laconic.verification.run import load_parity_decoder, open_reference
from laconic.verification.traces import LayerActivations, ParityCase, layer_index, stage_key

LONG_INPUTS = ("I1", "I2", "I10", "I14")
SMALL_ROWS, SMALL_LENGTH = 2, 16  # of the small case
SAMPLE_SIZE = 512  # numbers of a stage, over all layers
MAX_WHOLE_BYTES = 1_250_000  # up to this size the small case is stored completely; a bundle has at most 1.5 MB


def case_to_json(case: ParityCase) -> dict[str, Any]:
    """Return a case of token ids as JSON; the keys are those of bundle format 1."""
    tensors = {"ids": case.ids, "positions": case.positions, "live": case.valid}
    rows = {name: None if t is None else t.int().tolist() for name, t in tensors.items()}
    return {
        **rows,
        "name": case.name,
        "given": case.pass_positions,
        "cuts": case.piece_sizes,
        "covers": case.covered_inputs,
    }


class BundleWriter:
    """Collects the tensors of a new bundle; equal tensors are stored once."""

    def __init__(self, decoder: Decoder, reference: TransformersReference) -> None:
        self.decoder, self.reference = decoder, reference
        self.tensors: dict[str, Tensor] = {}
        self.name_by_hash: dict[str, str] = {}

    def store_tensor(self, name: str, t: Tensor) -> dict[str, str]:
        """Store a tensor and return the entry that points to it."""
        stored_name = self.name_by_hash.setdefault(tensor_sha256(t), name)
        self.tensors.setdefault(stored_name, t.contiguous().clone())
        return {"at": stored_name, "sha256": tensor_sha256(t)}

    def record_case(self, case: ParityCase, is_complete: bool) -> dict[str, Any]:
        """Run the reference on a case and return its entry. Raises `NotRunError` if we differ from the reference."""
        comparison, n = CaseComparison(self.decoder, case), len(case.pieces())
        entries: dict[str, dict[str, Any]] = {}

        def record_layers() -> Iterator[LayerActivations]:
            for recorded in self.reference.iterate_stages(case):
                if recorded.piece == n - 1:
                    entries.update(self.record_layer(case, recorded, is_complete))
                yield recorded

        results = comparison.run(record_layers())
        if bad := [result for result in results if result.verdict in ("fail", "not run")]:
            name = f"{bad[0].stage} of case {case.name}"
            raise NotRunError(f"{name} fails against {self.reference.name}; no bundle is written")
        for key, entry in entries.items():
            entry["floor"] = comparison.get_floor("propagated", key.partition("/")[0])
        return {"kind": "small" if is_complete else "long", "input": case_to_json(case), "stages": entries}

    def record_layer(
        self, case: ParityCase, recorded: LayerActivations, is_complete: bool
    ) -> dict[str, dict[str, Any]]:
        """Store the stages of a layer, or a sample of each, and return their entries by key."""
        layer, (S, T) = layer_index(self.decoder, recorded.layer), case.pieces()[recorded.piece]
        entries: dict[str, dict[str, Any]] = {}
        for stage in stages_at_layer(self.decoder, recorded.layer):
            key = stage_key(stage.name, layer, recorded.piece, len(case.pieces()))
            t = recorded.activations[stage.name]
            mask = valid_mask(stage.shape, t.shape, case.valid_mask[:, : S + T], S)
            t = t.to(torch.float32 if t.is_floating_point() else torch.int32)
            entry: dict[str, Any] = {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            if is_complete:
                entries[key] = entry | self.store_tensor(f"{case.name}/{key}", t.clamp(min=STORED_MINUS_INFINITY))
            else:
                entries[key] = entry | self.record_sample(case, key, t, mask)
        return entries

    def record_sample(self, case: ParityCase, key: str, t: Tensor, mask: Tensor) -> dict[str, Any]:
        """Store a random sample of a stage at valid positions; the same indices for equal shapes."""
        flat = (mask & torch.isfinite(t)).flatten().nonzero()[:, 0]
        layers = len(self.decoder.layers) if "." in key else 1
        count = min(len(flat), math.ceil(SAMPLE_SIZE / layers))
        generator = torch.Generator().manual_seed(t.numel())
        index = flat[torch.randperm(len(flat), generator=generator)[:count]].sort().values.int()
        finite = t.flatten()[flat].double()
        statistics = {"norm": float(finite.norm()), "largest": float(finite.abs().max())}
        index_name = self.store_tensor(f"{case.name}/{key}/index", index)["at"]
        entry = self.store_tensor(f"{case.name}/{key}", t.flatten()[index.long()])
        return entry | {"index": index_name} | statistics


def bundle_cases(decoder: Decoder) -> list[ParityCase]:
    """Return the small case, and the long ones that this model can have."""
    T = SMALL_LENGTH
    inputs = build_inputs(decoder)
    properties = [name for case in inputs.cases for name in case.covered_inputs if name in ("I3", "I4", "I6")]
    small = ParityCase(
        "small",
        InputBuilder(decoder).random_ids(SMALL_ROWS, T),
        valid=left_padded_mask([T, T - 5], T),
        covered_inputs=("I8", *properties),
    )
    return [small, *(replace(case, covered_inputs=(case.name,)) for case in inputs.cases if case.name in LONG_INPUTS)]


def estimate_bytes(decoder: Decoder) -> int:
    """Estimate the bytes of all stages of the small case, in float32."""
    c = decoder.config
    H, G, E = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    of_layer = 6 * c.hidden_size + 3 * H * E + 3 * G * E + 3 * c.intermediate_size + 3 * H * SMALL_LENGTH
    of_token = of_layer * c.num_hidden_layers + c.vocab_size + 2 * c.hidden_size
    return 4 * SMALL_ROWS * SMALL_LENGTH * of_token


def write_bundle(decoder: Decoder, reference: TransformersReference, folder: Path) -> None:
    """Write a new bundle of the reference's activations. Raises `NotRunError` if the decoder differs from it."""
    writer = BundleWriter(decoder, reference)
    is_complete = estimate_bytes(decoder) <= MAX_WHOLE_BYTES
    config = {name: str(value) for name, value in asdict(replace(decoder.config, source="")).items()}
    metadata: dict[str, Any] = {
        "format": BUNDLE_FORMAT, "fingerprint": decoder.fingerprint, "reference": reference.name,
        "versions": {"torch": torch.__version__}, "config": config,
    }  # fmt: skip

    def write(path: Path) -> None:
        cases = bundle_cases(decoder)
        metadata["cases"] = [writer.record_case(case, is_complete and case.name == "small") for case in cases]
        (path / METADATA_FILE).write_text(json.dumps(metadata, ensure_ascii=False) + "\n", encoding="utf-8")
        save_tensors(path / TENSOR_FILE, writer.tensors, {"format": "pt"})

    write_folder_atomically(folder, write)


def write_reference_bundle(model: str, folder: Path) -> None:
    """Write the bundle of a model, a folder or `tiny:FAMILY`, to a new folder."""
    with torch.no_grad():
        decoder, source = load_parity_decoder(model, torch.float32)
        with open_reference(decoder, source, torch.float32) as reference:
            write_bundle(decoder, reference, folder)


if __name__ == "__main__":
    write_reference_bundle(sys.argv[1], Path(sys.argv[2]))
