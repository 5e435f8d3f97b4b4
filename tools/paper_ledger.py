"""Read `src/laconic/papers/*.toml`: a paper's equations, its tables of settings, and the points it leaves open."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from laconic.errors import InputError

FUNCTION_PATTERN = re.compile(r"(laconic|tests)(\.\w+)+:\w+(\.\w+)*")
ARXIV_PATTERN = re.compile(r"arXiv:\d{4}\.\d{5}")


class StrictModel(BaseModel):
    """A model that converts no types and rejects unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Paper(StrictModel):
    """A paper; `id` is the name of its file."""

    id: str = Field(min_length=1)
    title: str = Field(min_length=1)
    sources: tuple[str, ...] = Field(min_length=1)


class Equation(StrictModel):
    """One equation: the functions that implement it, or why there are none.

    `flows` lists the symbols that a gradient flows to, `stops` those at which the paper stops it.
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
            raise ValueError(f"{self.id}: give either functions or the reason why it is absent")
        bad = [name for name in self.functions if not FUNCTION_PATTERN.fullmatch(name)]
        if bad:
            raise ValueError(f"{self.id}: {bad[0]!r} is not of the form laconic.package.module:function")
        return self


class PaperTableRow(StrictModel):
    """One row of a table: recipe keys, dotted or nested, and the paper's values."""

    name: str = Field(min_length=1)
    values: Mapping[str, Any] = Field(min_length=1)


class PaperTable(StrictModel):
    """A table of settings; a recipe refers to it with `paper_table = "PAPER table ID"` and `table_row = "NAME"`."""

    id: str = Field(min_length=1, pattern=r"^\S+$")
    title: str = Field(min_length=1)
    row: tuple[PaperTableRow, ...] = Field(min_length=1)


class SilentPoint(StrictModel):
    """A point on which a paper is silent, or contradicts itself or its code.

    `says` is what the paper and its code say, `choice` ours, `flag` the option that selects the `alternative`, if any.
    """

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
            duplicates = sorted({name for name in names if names.count(name) > 1})
            if duplicates:
                raise ValueError(f"{kind} {duplicates[0]} is defined twice")
        unknown = [id for silent in self.silent for id in silent.equations if id not in ids]
        if unknown:
            raise ValueError(f"silent: no equation {unknown[0]}")
        sources = [*self.paper.sources, *(source for equation in self.equation for source in equation.sources)]
        bad = [
            source for source in sources if source.lower().startswith("arxiv") and not ARXIV_PATTERN.fullmatch(source)
        ]
        if bad:
            raise ValueError(f"{bad[0]!r}: expected the form arXiv:1234.56789")
        return self


def load_ledger(path: Path) -> PaperLedger:
    """Load one ledger. Raises `InputError` with every error of the file."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path.name}: not TOML: {error}") from None
    try:  # strict pydantic accepts an array for a tuple only in JSON
        text = json.dumps(content, default=str, allow_nan=False)
    except ValueError:
        raise InputError(f"{path.name}: contains a number that is not finite") from None
    try:
        ledger = PaperLedger.model_validate_json(text)
    except ValidationError as error:
        errors = (f"{'.'.join(map(str, item['loc'])) or 'ledger'}: {item['msg']}" for item in error.errors())
        raise InputError(f"{path.name}: {'; '.join(errors)}") from None
    if ledger.paper.id != path.stem:
        raise InputError(f"{path.name}: paper.id {ledger.paper.id!r} must equal the file name")
    return ledger


@dataclass(frozen=True)
class SourceTree:
    """The directories of a checkout, and its ledgers."""

    root: Path
    ledgers: Mapping[str, PaperLedger] = field(default_factory=dict)

    @property
    def package_dir(self) -> Path:
        """The package `laconic`."""
        return self.root / "src" / "laconic"

    @property
    def tests_dir(self) -> Path:
        """The tests."""
        return self.root / "tests"

    @property
    def page_path(self) -> Path:
        """The page that `render_page` generates."""
        return self.root / "docs" / "ledger.md"

    def equation_files(self) -> list[tuple[str, Path]]:
        """Return (module, file) of every file that may implement an equation: the package and tests/reference."""
        roots = (self.package_dir.parent, self.package_dir), (self.root, self.tests_dir / "reference")
        return [
            (".".join(path.relative_to(base).with_suffix("").parts), path)
            for base, folder in roots
            for path in sorted(folder.rglob("*.py"))
        ]

    def locate_function(self, function: str) -> tuple[Path, str]:
        """Return the file of `laconic.models.rope:rotate_pairs`, and the name inside it."""
        module, _, name = function.partition(":")
        base = self.package_dir.parent if module.startswith("laconic.") else self.root
        path = base.joinpath(*module.split("."))
        return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")), name
