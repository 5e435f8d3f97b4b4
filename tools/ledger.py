"""The ledger, where paper, code, test and recipe meet: its checks, and the page made of it.

Check 1: every function named exists and says its equation. 2: no function says one that stands in no ledger.
3: every equation has an oracle in a marked test, apart from the code it judges, with gradients where they flow or stop.
4: each such test holds misreadings. 5: every recipe equals the table row it names. 6: docs/ledger.md is up to date.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from laconic.errors import InputError
from laconic.verification import equation_markers
from laconic.verification.paper_ledger import Equation, PaperLedger, SilentPoint, SourceTree, default_root, load_ledger
from laconic.verification.paper_ledger import PaperTable as PaperTable

EQUATION_LINE = re.compile(r"Eq\. (\S+): ")
TABLE_SOURCE = re.compile(r"(\S+) table (\S+)")
OWN_SOURCE = "ours"  # the source of a recipe that stands for no table
MarkedTests = Mapping[tuple[str, str], tuple[equation_markers.MarkedTest, ...]]

CHECK_TITLES = (
    "every function named exists and says its equation",
    "no function says an equation that stands in no ledger",
    "every equation has an oracle, and gradients where they flow or stop",
    "every oracle is told apart from misreadings",
    "every recipe equals the table row it names",
    "docs/ledger.md is up to date",
)
NEEDS_CLONE = "needs a clone of the repository"


@dataclass(frozen=True)
class LedgerFinding:
    """A check that failed, or could not run, which is no pass either. Check 0 is reading the ledgers."""

    check: int
    subject: str
    message: str
    status: Literal["failed", "not run"] = "failed"

    def __str__(self) -> str:
        return f"check {self.check}, {self.subject}: {'not run: ' if self.status == 'not run' else ''}{self.message}"


def check_ledger(root: Path | None = None) -> list[LedgerFinding]:
    """Everything that failed or could not run below `root`, a checkout or an installed package; empty if all passed."""
    root = default_root() if root is None else root
    tree, findings = load_ledgers(root)
    if findings:
        return findings
    checks = (check_functions, check_unlisted, check_oracles, check_misreadings, check_recipes, check_page)
    for number, run in enumerate(checks, 1):
        try:
            findings += run(tree)
        except SyntaxError as error:
            findings.append(LedgerFinding(number, str(error.filename), f"not Python: {error}", "not run"))
    return findings


def findings_table(findings: list[LedgerFinding]) -> Table:
    """The checks and what they found, for a terminal."""
    made = Table("check", "verdict", "found", title="ledger", title_justify="left")
    unread = [finding for finding in findings if finding.check == 0]
    for number, name in enumerate(("the ledgers can be read", *CHECK_TITLES)):
        mine = [finding for finding in findings if finding.check == number]
        states = {finding.status for finding in mine} or ({"not run"} if unread else set[str]())
        verdict = "[red]failed[/]" if "failed" in states else "[yellow]not run[/]" if states else "[green]passed[/]"
        made.add_row(name, verdict, "\n".join(f"{finding.subject}: {finding.message}" for finding in mine))
    return made


def load_ledgers(root: Path) -> tuple[SourceTree, list[LedgerFinding]]:
    """The ledgers below `root` and what was wrong with them."""
    ledgers: dict[str, PaperLedger] = {}
    findings: list[LedgerFinding] = []
    for path in sorted((SourceTree(root).package_dir / "papers").glob("*.toml")):
        try:
            ledgers[path.stem] = load_ledger(path)
        except InputError as error:
            findings.append(LedgerFinding(0, path.stem, str(error)))
    if not ledgers and not findings:
        findings.append(LedgerFinding(0, "papers", f"no ledger below {root}", "not run"))
    return SourceTree(root, ledgers), findings


def implemented_equations(tree: SourceTree) -> Iterator[tuple[str, str, Equation]]:
    """(paper, "paper id", equation) of every equation that is code."""
    for paper, ledger in tree.ledgers.items():
        for equation in ledger.equation:
            if equation.functions:
                yield paper, f"{paper} {equation.id}", equation


def check_functions(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 1."""
    for _, subject, equation in implemented_equations(tree):
        for function in equation.functions:
            path, name = tree.locate_function(function)
            found = equation_markers.function_docstrings(path) if path.is_file() else {}
            if name not in found:
                yield LedgerFinding(1, subject, f"{function} is not there")
            elif not found[name].startswith(f"Eq. {equation.id}: "):
                yield LedgerFinding(
                    1, subject, f"the docstring of {function} does not begin with `Eq. {equation.id}: `"
                )


def check_unlisted(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 2, over the rooms where equations live."""
    known = {(f, equation.id) for _, _, equation in implemented_equations(tree) for f in equation.functions}
    for room in ("core", "methods"):
        for path in sorted((tree.package_dir / room).rglob("*.py")):
            module = ".".join(("laconic", *path.relative_to(tree.package_dir).with_suffix("").parts))
            for name, text in equation_markers.function_docstrings(path).items():
                says, function = EQUATION_LINE.match(text), f"{module}:{name}"
                if says and (function, says[1]) not in known:
                    yield LedgerFinding(2, function, f"says Eq. {says[1]}, which no ledger gives it")
                elif text.startswith("Eq.") and not says:
                    yield LedgerFinding(2, function, "begins with Eq. and is no equation's one line `Eq. ID: …`")


def check_oracles(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 3."""
    if tree.tests_dir is None:
        yield LedgerFinding(3, "tests", NEEDS_CLONE, "not run")
        return
    marked = equation_markers.find_marked_tests(tree.root, tree.tests_dir)
    known = {(paper, equation.id) for paper, _, equation in implemented_equations(tree)}
    for key in sorted(marked.keys() - known):
        yield LedgerFinding(
            3, " ".join(key), f"{marked[key][0].name} is marked for an equation that no ledger has as code"
        )
    for paper, subject, equation in implemented_equations(tree):
        tests = marked.get((paper, equation.id), ())
        oracles = [oracle for test in tests for oracle in test.oracles]
        mentions = frozenset[str]().union(*(test.mentions for test in tests))
        if not tests:
            yield LedgerFinding(3, subject, f'no test is marked equation("{paper}", "{equation.id}")')
        elif not any(oracle.names for oracle in oracles):
            yield LedgerFinding(3, subject, f'no marked test takes ORACLE["{equation.id}"]')
        for file in sorted({oracle.file for oracle in oracles}):
            if equation_markers.imports_package(tree.root, file, "laconic"):
                yield LedgerFinding(3, subject, f"the oracle in {file.name} imports laconic, the code it judges")
        if tests and equation.flows and "gradcheck" not in mentions:
            yield LedgerFinding(
                3, subject, f"gradients flow to {', '.join(equation.flows)}; no marked test calls gradcheck"
            )
        if tests and equation.stops and mentions.isdisjoint({"grad", "requires_grad"}):
            yield LedgerFinding(
                3, subject, f"gradients stop at {', '.join(equation.stops)}; no marked test asks for that"
            )


def check_misreadings(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 4."""
    if tree.tests_dir is None:
        yield LedgerFinding(4, "tests", NEEDS_CLONE, "not run")
        return
    marked = equation_markers.find_marked_tests(tree.root, tree.tests_dir)
    for paper, subject, equation in implemented_equations(tree):
        tests = marked.get((paper, equation.id), ())
        if not any(entry.names for test in tests for entry in test.misread):
            yield LedgerFinding(4, subject, f'no marked test takes MISREAD["{equation.id}"] with an entry')


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def check_recipes(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 5, of whatever recipes there are."""
    for path in sorted((tree.package_dir / "recipes").glob("*.toml")):
        try:
            recipe = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            yield LedgerFinding(5, path.stem, f"not TOML: {error}")
            continue
        if recipe.get("source") == OWN_SOURCE:
            continue
        says = TABLE_SOURCE.fullmatch(str(recipe.get("source", "")))
        tables = tree.ledgers[says[1]].table if says and says[1] in tree.ledgers else ()
        rows = {row.name: row.values for table in tables if says and table.id == says[2] for row in table.row}
        if recipe.get("row") not in rows:
            named = f"source {recipe.get('source')!r}, row {recipe.get('row')!r}"
            asked = 'write source = "PAPER table ID" and row = "NAME", or source = "ours"'
            yield LedgerFinding(5, path.stem, f"{named}: no such row; {asked}")
            continue
        yield from compare_recipe(path.stem, recipe, flatten(rows[recipe["row"]]))


def compare_recipe(name: str, recipe: dict[str, Any], row: dict[str, Any]) -> Iterator[LedgerFinding]:
    """A recipe and its row, key by key."""
    ours, differs = flatten(recipe), flatten(recipe.get("differs", {}))
    for key, value in row.items():
        equal = key in ours and ours[key] == value and isinstance(ours[key], bool) == isinstance(value, bool)
        if not equal and not differs.get(key):
            yield LedgerFinding(
                5, name, f"{key} is {ours.get(key, 'absent')!r}, the table has {value!r}; say why under [differs]"
            )
        if equal and key in differs:
            yield LedgerFinding(5, name, f"[differs] names {key}, which does not differ")
    for key in differs.keys() - row.keys():
        yield LedgerFinding(5, name, f"[differs] names {key}, which the row does not have")


def check_page(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 6."""
    page = tree.page_path
    if page is None or tree.tests_dir is None:
        yield LedgerFinding(6, "docs/ledger.md", NEEDS_CLONE, "not run")
    elif not page.is_file():
        yield LedgerFinding(6, "docs/ledger.md", "is not there; run laconic verify ledger --write")
    elif page.read_text(encoding="utf-8") != render_page(tree.root):
        yield LedgerFinding(6, "docs/ledger.md", "is out of date; run laconic verify ledger --write")


def render_page(root: Path) -> str:
    """docs/ledger.md of the checkout `root`."""
    tree, findings = load_ledgers(root)
    if findings or tree.tests_dir is None:
        raise InputError(f"no ledger page can be made of {root}: {findings[0] if findings else NEEDS_CLONE}")
    marked = equation_markers.find_marked_tests(tree.root, tree.tests_dir)
    lines = [
        "# The ledger",
        "",
        "Made by `laconic verify ledger --write` from `src/laconic/papers/*.toml`, the docstrings and the tests;",
        "not written by hand. A misreading is a form of the equation that somebody got wrong or might: each must",
        "differ from the oracle on the inputs of the tests, so that the tests can tell.",
        "",
        "| paper | equations | absent | misreadings told apart | places where it is silent | tables |",
        "|---|---|---|---|---|---|",
    ]
    papers = list(tree.ledgers.items())
    for id, ledger in papers:
        absent = sum(not equation.functions for equation in ledger.equation)
        misread = sum(len(misreading_names(marked, id, equation)) for equation in ledger.equation)
        counts = (len(ledger.equation) - absent, absent, misread, len(ledger.silent), len(ledger.table))
        lines.append(f"| [{id}](#{id}) | {' | '.join(map(str, counts))} |")
    for id, ledger in papers:
        lines += ["", f"## {id}", "", f"{ledger.paper.title}. Sources: {source_links(ledger.paper.sources)}."]
        if ledger.symbols:
            lines += ["", "Symbols: " + "; ".join(f"`{name}` {text}" for name, text in ledger.symbols.items()) + "."]
        for equation in ledger.equation:
            lines += equation_section(tree, marked, id, equation)
        lines += [line for table in ledger.table for line in table_section(table)]
        lines += silence_section(ledger.silent)
    return "\n".join(lines) + "\n"


def misreading_names(marked: MarkedTests, paper: str, equation: Equation) -> tuple[str, ...]:
    """The names of all misreadings that the tests of an equation take, each once."""
    tests = marked.get((paper, equation.id), ())
    return tuple(dict.fromkeys(name for test in tests for entry in test.misread for name in entry.names))


def source_links(sources: tuple[str, ...]) -> str:
    """Sources, those of arXiv with their address."""
    return ", ".join(f"[{s}](https://arxiv.org/abs/{s[6:]})" if s.startswith("arXiv:") else s for s in sources)


def equation_section(tree: SourceTree, marked: MarkedTests, paper: str, equation: Equation) -> list[str]:
    """The lines of one equation."""
    lines = ["", f"### {equation.id} {equation.name}", "", "$$", equation.tex.strip(), "$$", ""]
    if equation.symbols:
        lines.append("- Symbols: " + "; ".join(f"`{name}` {text}" for name, text in equation.symbols.items()) + ".")
    lines.append(f"- Source: {source_links(equation.sources)}.")
    if equation.absent:
        return [*lines, f"- Absent: {equation.absent}."]
    files = [(tree.locate_function(function), function) for function in equation.functions]
    code = (f"[`{function}`](../{file.relative_to(tree.root).as_posix()})" for (file, _), function in files)
    lines.append(f"- Code: {', '.join(code)}.")
    tests = marked.get((paper, equation.id), ())
    named = (f"[`{t.name}`](../{t.file.relative_to(tree.root).as_posix()})" for t in tests)
    lines.append(f"- Tests: {', '.join(named) or 'none'}.")
    for verb, symbols in (("flows to", equation.flows), ("stops at", equation.stops)):
        if symbols:
            lines.append(f"- Gradient {verb} {', '.join(symbols)}.")
    lines.append(f"- Misreadings told apart: {'; '.join(misreading_names(marked, paper, equation)) or 'none'}.")
    return lines


def table_section(table: PaperTable) -> list[str]:
    """A table of settings, keys down, rows across."""
    rows = [flatten(row.values) for row in table.row]
    keys = dict.fromkeys(key for row in rows for key in row)
    lines = [
        "",
        f"### Table {table.id}: {table.title}",
        "",
        "| key | " + " | ".join(row.name for row in table.row) + " |",
    ]
    lines.append("|---" * (len(rows) + 1) + "|")
    return lines + [f"| `{key}` | " + " | ".join(str(row.get(key, "")) for row in rows) + " |" for key in keys]


def silence_section(entries: tuple[SilentPoint, ...]) -> list[str]:
    """Where the sources leave us to choose."""
    if not entries:
        return []
    lines = ["", "### Where the sources are silent, or say two things", ""]
    for entry in entries:
        where = f" ({', '.join(entry.equations)})" if entry.equations else ""
        lines += [
            f"- **{entry.about}**{where}: {entry.says}",
            f"  Ours: {entry.choice} The other: {entry.alternative}"
            + (f" Selected by `{entry.flag}`." if entry.flag else " No flag selects it."),
        ]
    return lines
