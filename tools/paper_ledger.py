"""The form of papers/*.toml: per paper its equations, its tables of settings, and where it is silent; read strictly."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from laconic.errors import InputError

FUNCTION_PATTERN = re.compile(r"laconic(\.\w+)+:\w+(\.\w+)*")
ARXIV_PATTERN = re.compile(r"arXiv:\d{4}\.\d{5}")


class StrictModel(BaseModel):
    """Strict: nothing is coerced, unknown keys are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Paper(StrictModel):
    """Whose equations these are; `id` is the name of the file."""

    id: str = Field(min_length=1)
    title: str = Field(min_length=1)
    sources: tuple[str, ...] = Field(min_length=1)


class Equation(StrictModel):
    """One equation: the functions that are it, or why there are none.

    `flows` lists the symbols a gradient flows to, `stops` those at which the paper stops it.
    """

    id: str = Field(min_length=1, pattern=r"^\S+$")
    name: str = Field(min_length=1)
    tex: str = Field(min_length=1)
    sources: tuple[str, ...] = Field(min_length=1)
    functions: tuple[str, ...] = ()
    absent: str | None = None
    symbols: Mapping[str, str] = Field(default_factory=dict)
    flows: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()

    @model_validator(mode="after")
    def check_functions_or_absent(self) -> Self:
        if bool(self.functions) == bool(self.absent):
            raise ValueError(f"{self.id}: name its functions, or say why it is absent; one of the two")
        bad = [name for name in self.functions if not FUNCTION_PATTERN.fullmatch(name)]
        if bad:
            raise ValueError(f"{self.id}: {bad[0]!r} is not of the form laconic.room.file:function")
        return self


class PaperTableRow(StrictModel):
    """One row of a table: recipe keys, dotted or nested, and what the paper used."""

    name: str = Field(min_length=1)
    values: Mapping[str, Any] = Field(min_length=1)


class PaperTable(StrictModel):
    """A table of settings; a recipe names it as `source = "PAPER table ID"` and its row as `row = "NAME"`."""

    id: str = Field(min_length=1, pattern=r"^\S+$")
    title: str = Field(min_length=1)
    row: tuple[PaperTableRow, ...] = Field(min_length=1)


class SilentPoint(StrictModel):
    """Where the source is silent or contradicts itself or its code: our choice, and the flag of the other, if any."""

    about: str = Field(min_length=1)
    equations: tuple[str, ...] = ()
    says: str = Field(min_length=1)
    choice: str = Field(min_length=1)
    alternative: str = Field(min_length=1)
    flag: str | None = None


class PaperLedger(StrictModel):
    """One file of papers/."""

    paper: Paper
    symbols: Mapping[str, str] = Field(default_factory=dict)
    equation: tuple[Equation, ...] = Field(min_length=1)
    table: tuple[PaperTable, ...] = ()
    silent: tuple[SilentPoint, ...] = ()

    @model_validator(mode="after")
    def check_names(self) -> Self:
        ids = [equation.id for equation in self.equation]
        for kind, names in (("equation", ids), ("table", [table.id for table in self.table])):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} {twice[0]} stands there twice")
        strange = [id for silent in self.silent for id in silent.equations if id not in ids]
        if strange:
            raise ValueError(f"silent: no equation {strange[0]}")
        sources = [*self.paper.sources, *(source for equation in self.equation for source in equation.sources)]
        bad = [
            source for source in sources if source.lower().startswith("arxiv") and not ARXIV_PATTERN.fullmatch(source)
        ]
        if bad:
            raise ValueError(f"{bad[0]!r}: write arXiv:1234.56789")
        return self


def load_ledger(path: Path) -> PaperLedger:
    """One ledger. Raises `BadInput` (66) with every fault of the file."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path.name}: not TOML: {error}") from None
    try:  # by way of JSON, where strict pydantic takes an array for a tuple and nothing else for anything else
        text = json.dumps(content, default=str, allow_nan=False)
    except ValueError:
        raise InputError(f"{path.name}: a number in it is not finite") from None
    try:
        ledger = PaperLedger.model_validate_json(text)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc'])) or 'ledger'}: {fault['msg']}" for fault in error.errors())
        raise InputError(f"{path.name}: {'; '.join(faults)}") from None
    if ledger.paper.id != path.stem:
        raise InputError(f"{path.name}: paper.id is {ledger.paper.id!r}; the file is named for it")
    return ledger


@dataclass(frozen=True)
class SourceTree:
    """Where things lie: a checkout, or an installed package, which has neither tests nor docs."""

    root: Path
    ledgers: Mapping[str, PaperLedger] = field(default_factory=dict)

    @property
    def package_dir(self) -> Path:
        checkout = self.root / "src" / "laconic"
        return checkout if checkout.is_dir() else self.root

    @property
    def tests_dir(self) -> Path | None:
        return self.root / "tests" if self.package_dir != self.root and (self.root / "tests").is_dir() else None

    @property
    def page_path(self) -> Path | None:
        return self.root / "docs" / "ledger.md" if self.package_dir != self.root else None

    def locate_function(self, function: str) -> tuple[Path, str]:
        """The file of `laconic.models.rope:rotate`, and the name inside."""
        module, _, name = function.partition(":")
        path = self.package_dir.joinpath(*module.split(".")[1:])
        return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")), name


def default_root() -> Path:
    """The checkout this package lies in, or the package itself where it is installed."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    return checkout if package.parent.name == "src" and (checkout / "tests").is_dir() else package
