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

from laconic.core.artifact import commit_folder, open_tensors, save_tensors
from laconic.core.decoder import Decoder
from laconic.core.errors import LaconicError
from laconic.core.strict import check_header, read_json
from laconic.verify.cases import Maker, inputs, live_rows
from laconic.verify.difference import visible
from laconic.verify.local import table
from laconic.verify.parity import FACTOR, FLOOR, Comparison, Finding, replay
from laconic.verify.reference import Transformers
from laconic.verify.traces import Case, Made, key, stream
from laconic.verify.twin import Widened

FORMAT, TABLE, NUMBERS = 1, "golden.json", "golden.safetensors"
SHIPPED = Path(__file__).parent / "bundles"
LONG = ("I1", "I2", "I10", "I14")
SAMPLE = 512
WHOLE = 1_250_000
"""Bytes up to which the small case is kept whole; a bundle is at most 1.5 MB."""
SIZES = (
    "family", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size",
)  # fmt: skip
HIDDEN = -3e38
"""Stands for minus infinity in a file of finite numbers."""


class NotRun(LaconicError):
    """A comparison that was asked for and could not be made."""

    code = 1


@dataclass(frozen=True)
class Bundle:
    """An opened bundle, every hash checked."""

    about: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        """Who made the numbers."""
        return f"golden bundle of {self.about['reference']}"

    @property
    def cases(self) -> list[Case]:
        """The inputs of the bundle."""
        return [case_of(entry["input"]) for entry in self.about["cases"]]

    def entry(self, name: str) -> dict[str, Any]:
        """What is said of one case."""
        return next(entry for entry in self.about["cases"] if entry["input"]["name"] == name)

    def whole(self, case: Case) -> bool:
        """Whether all numbers of a case are there."""
        return self.entry(case.name)["kind"] == "small"

    def stream(self, case: Case, decoder: Decoder) -> Iterator[Made]:
        """The stages of a case kept whole, in the order of computation."""
        found = {}
        for at, said in self.entry(case.name)["stages"].items():
            t = self.tensors[said["at"]].reshape(said["shape"])
            found[at] = t.masked_fill(t == HIDDEN, -math.inf) if t.is_floating_point() else t
        return replay(found, case, decoder)


def case_of(said: Mapping[str, Any]) -> Case:
    """A case from its JSON."""
    tensors: dict[str, Any] = {
        name: torch.tensor(said[name]) for name in ("ids", "positions") if said[name] is not None
    }
    live = None if said["live"] is None else torch.tensor(said["live"]).bool()
    rest = {name: said[name] for name in ("name", "given", "note")}
    return Case(**rest, **tensors, live=live, cuts=tuple(said["cuts"]), covers=tuple(said["covers"]))


def said_of(case: Case) -> dict[str, Any]:
    """A case of ids as JSON."""
    given = {name: getattr(case, name) for name in ("ids", "positions", "live")}
    rows = {name: None if t is None else t.int().tolist() for name, t in given.items()}
    return {**rows, "name": case.name, "given": case.given, "cuts": case.cuts, "covers": case.covers, "note": case.note}


def sha(t: Tensor) -> str:
    """SHA-256 of a tensor's bytes as stored."""
    return hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()


def open_bundle(folder: Path) -> Bundle:
    """Reads a bundle and checks every hash in it. Raises `NotRun` for one that is not what was written."""
    about = read_json(folder / TABLE)
    if about.get("format") != FORMAT:
        raise NotRun(f"{folder / TABLE}: format {about.get('format')}, known is {FORMAT}")
    tensors = open_tensors(folder / NUMBERS, check_header(folder / NUMBERS).tensors)
    for entry in about["cases"]:
        for at, said in entry["stages"].items():
            if said["at"] not in tensors:
                raise NotRun(f"{at}: not in the bundle: not run")
            if sha(tensors[said["at"]]) != said["sha256"]:
                where = f"{folder / NUMBERS}: {at} of case {entry['input']['name']}"
                raise NotRun(f"{where} has another hash; fetch it again")
    return Bundle(about, tensors)


def foreign(bundle: Bundle, decoder: Decoder) -> str:
    """What to say if the bundle is of other weights, else nothing. Raises `NotRun` if it is of another shape."""
    theirs, ours = bundle.about["fingerprint"], decoder.fingerprint
    said = "" if theirs == ours else f"bundle is of weights {theirs[:4]}…, model is {ours[:4]}…"
    for name in SIZES:
        mine, other = str(getattr(decoder.config, name)), bundle.about["config"][name]
        if mine != other:
            raise NotRun(said or f"{name} is {mine}, the bundle's {other}: not run")
    return said


def shipped(decoder: Decoder) -> Path | None:
    """The bundle that comes with this package for these weights."""
    for folder in sorted(SHIPPED.iterdir()) if SHIPPED.is_dir() else ():
        if read_json(folder / TABLE)["fingerprint"] == decoder.fingerprint:
            return folder
    return None


def sampled(bundle: Bundle, decoder: Decoder, case: Case) -> list[Finding]:
    """The propagated error of every stage of a long case, in its last piece, at the numbers that were kept."""
    entry, n, L, found = bundle.entry(case.name)["stages"], len(case.pieces()), len(decoder.blocks), []
    for made in stream(decoder, case):
        if made.piece < n - 1:
            continue
        inside = made.layer if 0 <= made.layer < L else None
        for stage in table(decoder, made.layer):
            at = key(stage.name, inside, made.piece, n)
            if at not in entry:
                note = f"{at}: not in the bundle: not run"
                found.append(Finding(case.name, stage.name, inside, "propagated", note=note))
                continue
            found.append(sample_finding(case, stage.name, inside, made.stages[stage.name], entry[at], bundle.tensors))
    return found


def sample_finding(
    case: Case, stage: str, layer: int | None, x: Tensor, said: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Finding:
    """One stage of a long case: at the kept numbers, relative to them."""
    if list(x.shape) != said["shape"]:
        note = f"shape {list(x.shape)}, reference {said['shape']}"
        return Finding(case.name, stage, layer, "propagated", math.inf, FLOOR, verdict="fail", note=note)
    where, y = tensors[said["index"]].long(), tensors[said["at"]].double()
    mine = x.flatten()[where].double()
    gap = (mine - y).abs().nan_to_num(math.inf, math.inf)
    error = float(gap.norm() / y.norm().clamp(min=1e-12))
    floor = max(said["floor"], FLOOR)
    worst = tuple(int(i) for i in torch.unravel_index(where[gap.argmax()], x.shape))
    cosine = float(torch.nn.functional.cosine_similarity(mine, y, 0))
    verdict = "pass" if error <= FACTOR * floor else "fail"
    return Finding(
        case.name, stage, layer, "propagated", error, floor, float(gap.max()), worst, cosine, error == 0, verdict
    )


class Writer:
    """Gathers the numbers of a bundle; equal tensors are kept once."""

    def __init__(self, decoder: Decoder, reference: Transformers, numbers: int) -> None:
        self.decoder, self.reference, self.numbers = decoder, reference, numbers
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}

    def keep(self, name: str, t: Tensor) -> dict[str, str]:
        """Where a tensor is and its hash."""
        at = self.names.setdefault(sha(t), name)
        self.tensors.setdefault(at, t.contiguous().clone())
        return {"at": at, "sha256": sha(t)}

    def case(self, case: Case, whole: bool) -> dict[str, Any]:
        """One case as the reference reads it, with our floors."""
        twin, n, L = Widened.of(self.decoder), len(case.pieces()), len(self.decoder.blocks)
        comparison, stages = Comparison(self.decoder, case, None, twin), {}
        sides = (self.reference.stream(case), stream(self.decoder, case), stream(twin, case))
        for made, own, wide in zip(*sides, strict=True):
            comparison.add(made, own, wide)
            if made.piece < n - 1:
                continue
            inside = made.layer if 0 <= made.layer < L else None
            for stage in table(self.decoder, made.layer):
                at = key(stage.name, inside, made.piece, n)
                S, T = case.pieces()[made.piece]
                where = visible(stage.shape, made.stages[stage.name].shape, case.alive[:, : S + T], S)
                t = made.stages[stage.name]
                t = t.to(torch.float32 if t.is_floating_point() else torch.int32)
                said: dict[str, Any] = {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
                stages[at] = said | (
                    self.keep(f"{case.name}/{at}", t.clamp(min=HIDDEN)) if whole else self.sample(case, at, t, where)
                )
        if bad := [f for f in comparison.findings() if f.verdict in ("fail", "not run")]:
            what = f"{bad[0].stage} of case {case.name}"
            raise NotRun(f"{what} fails against {self.reference.name}; no bundle is written")
        floors = comparison.measured().propagated
        for at, said in stages.items():
            said["floor"] = floors[at.partition("/")[0]]
        return {"kind": "small" if whole else "long", "input": said_of(case), "stages": stages}

    def sample(self, case: Case, at: str, t: Tensor, where: Tensor) -> dict[str, Any]:
        """Some numbers of a stage, shared out among the layers, at live slots; the same ones in equal shapes."""
        flat = (where & torch.isfinite(t)).flatten().nonzero()[:, 0]
        layers = len(self.decoder.blocks) if "." in at else 1
        count = min(len(flat), math.ceil(self.numbers / layers))
        generator = torch.Generator().manual_seed(t.numel())
        index = flat[torch.randperm(len(flat), generator=generator)[:count]].sort().values.int()
        finite = t.flatten()[flat].double()
        size = {"norm": float(finite.norm()), "largest": float(finite.abs().max())}
        place = self.keep(f"{case.name}/{at}/index", index)["at"]
        return self.keep(f"{case.name}/{at}", t.flatten()[index.long()]) | {"index": place} | size


def golden_cases(decoder: Decoder) -> list[Case]:
    """The small case, then the long ones that this model can have."""
    T = 16
    made = inputs(decoder)
    covered = [name for case in made.cases for name in case.covers if name in ("I3", "I4", "I6")]
    small = Case("small", Maker(decoder).ids(2, T), live=live_rows([T, T - 5], T), covers=("I8", *covered))
    return [small, *(replace(case, covers=(case.name,)) for case in made.cases if case.name in LONG)]


def size_of(decoder: Decoder) -> int:
    """Bytes of all stages of the small case, about."""
    c, rows = decoder.config, 32
    H, G, E = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    row = 6 * c.hidden_size + 3 * H * E + 3 * G * E + 3 * c.intermediate_size + 3 * H * 16
    return 4 * rows * (row * c.num_hidden_layers + c.vocab_size + 2 * c.hidden_size)


def write_bundle(decoder: Decoder, reference: Transformers, folder: Path, numbers: int = SAMPLE) -> None:
    """A new bundle of what the reference makes of this model; refused where we differ from it."""
    writer = Writer(decoder, reference, numbers)
    whole = size_of(decoder) <= WHOLE
    config = {name: str(value) for name, value in asdict(replace(decoder.config, source="")).items()}
    about = {
        "format": FORMAT, "fingerprint": decoder.fingerprint, "reference": reference.name,
        "versions": {"torch": torch.__version__}, "config": config,
    }  # fmt: skip

    def write(to: Path) -> None:
        about["cases"] = [writer.case(case, whole and case.name == "small") for case in golden_cases(decoder)]
        (to / TABLE).write_text(json.dumps(about, ensure_ascii=False, indent=None) + "\n", encoding="utf-8")
        save_tensors(to / NUMBERS, writer.tensors, {"format": "pt"})

    commit_folder(folder, write)
