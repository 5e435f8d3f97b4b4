"""Check the ledger, which links papers, code, tests and recipes, and write docs/ledger.md.

    python -m tools.ledger [--write]

Checks:
    1. Every listed function exists, and its docstring begins with its equation.
    2. Every function whose docstring begins with an equation is listed.
    3. Every equation has a marked test with an oracle that does not import laconic, and with gradient checks where the
       ledger says that a gradient flows or stops.
    4. Every marked test has misreadings: plausible but wrong forms that must differ from the oracle.
    5. Every recipe has the values of the table row that it names, except for its [deviations].
    6. docs/ledger.md is up to date.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from laconic.errors import InputError
from tools import equation_markers
from tools.paper_ledger import Equation, PaperLedger, PaperTable, SilentPoint, SourceTree, load_ledger

ROOT = Path(__file__).resolve().parents[1]
EQUATION_LINE = re.compile(r"Eq\. (\S+?)(?:, (\w+) Eq\. (\S+))?: ")  # Eq. 2: or Eq. 2, PCCoT Eq. 3:
TABLE_SOURCE = re.compile(r"(\S+) table (\S+)")
OWN_TABLE = "ours"  # `paper_table` of a recipe that is not a paper's
MarkedTests = Mapping[tuple[str, str], tuple[equation_markers.MarkedTest, ...]]

CHECK_TITLES = (
    "the ledgers are valid",
    "every listed function exists and names its equation",
    "every function that names an equation is listed",
    "every equation has an oracle test, with gradient checks",
    "every oracle test has misreadings",
    "every recipe has the values of its table row",
    "docs/ledger.md is up to date",
)


@dataclass(frozen=True)
class LedgerFinding:
    """A failed check; check 0 is loading the ledgers."""

    check: int
    subject: str
    message: str

    def __str__(self) -> str:
        return f"check {self.check}, {self.subject}: {self.message}"


def check_ledger(root: Path = ROOT) -> list[LedgerFinding]:
    """Return every failed check of the checkout `root`."""
    tree, findings = load_ledgers(root)
    if findings:
        return findings
    checks = (check_functions, check_unlisted, check_oracles, check_misreadings, check_recipes, check_page)
    for number, check in enumerate(checks, 1):
        try:
            findings += check(tree)
        except SyntaxError as error:
            findings.append(LedgerFinding(number, str(error.filename), f"not Python: {error}"))
    return findings


def findings_table(findings: list[LedgerFinding]) -> Table:
    """Return the checks and their findings as a table for the terminal."""
    table = Table("check", "verdict", "findings", title="ledger", title_justify="left")
    is_loaded = all(finding.check for finding in findings)
    for number, title in enumerate(CHECK_TITLES):
        messages = [f"{finding.subject}: {finding.message}" for finding in findings if finding.check == number]
        passed = "[green]passed[/]" if is_loaded or number == 0 else "[yellow]not run[/]"
        table.add_row(title, "[red]failed[/]" if messages else passed, escape("\n".join(messages)))
    return table


def load_ledgers(root: Path) -> tuple[SourceTree, list[LedgerFinding]]:
    """Load the ledgers of a checkout; return them with the errors of those that are invalid."""
    ledgers: dict[str, PaperLedger] = {}
    findings: list[LedgerFinding] = []
    for path in sorted((SourceTree(root).package_dir / "papers").glob("*.toml")):
        try:
            ledgers[path.stem] = load_ledger(path)
        except InputError as error:
            findings.append(LedgerFinding(0, path.stem, str(error)))
    if not ledgers and not findings:
        findings.append(LedgerFinding(0, "papers", f"no ledger below {root}"))
    return SourceTree(root, ledgers), findings


def implemented_equations(tree: SourceTree) -> Iterator[tuple[str, str, Equation]]:
    """Yield (paper, "paper id", equation) of every equation that has functions."""
    for paper, ledger in tree.ledgers.items():
        for equation in ledger.equation:
            if equation.functions:
                yield paper, f"{paper} {equation.id}", equation


def check_functions(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 1: every listed function exists and names its equation."""
    for paper, subject, equation in implemented_equations(tree):
        for function in equation.functions:
            path, name = tree.locate_function(function)
            docstrings = equation_markers.function_docstrings(path) if path.is_file() else {}
            if name not in docstrings:
                yield LedgerFinding(1, subject, f"{function} does not exist")
                continue
            match = EQUATION_LINE.match(docstrings[name])
            ids = (
                set[str]() if match is None else {match[1], *([match[3]] if (match[2] or "").lower() == paper else [])}
            )
            if equation.id not in ids:
                message = f"the docstring of {function} must begin with `Eq. {equation.id}: `"
                yield LedgerFinding(1, subject, message)


def check_unlisted(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 2: every function that names an equation is listed."""
    listed = {(f, equation.id) for _, _, equation in implemented_equations(tree) for f in equation.functions}
    for module, path in tree.equation_files():
        for name, text in equation_markers.function_docstrings(path).items():
            match, function = EQUATION_LINE.match(text), f"{module}:{name}"
            if match and (function, match[1]) not in listed:
                yield LedgerFinding(2, function, f"names Eq. {match[1]}, but no ledger lists this function for it")
            elif text.startswith("Eq.") and not match:
                yield LedgerFinding(2, function, "the docstring begins with `Eq.` but not with `Eq. ID: `")


def check_oracles(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 3: every equation has an oracle test, with gradient checks."""
    marked = equation_markers.find_marked_tests(tree.root, tree.tests_dir)
    implemented = {(paper, equation.id) for paper, _, equation in implemented_equations(tree)}
    for key in sorted(marked.keys() - implemented):
        yield LedgerFinding(3, " ".join(key), f"{marked[key][0].name} is marked for an equation that has no function")
    for paper, subject, equation in implemented_equations(tree):
        tests = marked.get((paper, equation.id), ())
        oracles = [oracle for test in tests for oracle in test.oracles]
        mentions = frozenset[str]().union(*(test.mentions for test in tests))
        if not tests:
            yield LedgerFinding(3, subject, f'no test is marked equation("{paper}", "{equation.id}")')
        elif not any(oracle.names for oracle in oracles):
            yield LedgerFinding(3, subject, f'no marked test uses ORACLE["{equation.id}"]')
        for file in sorted({oracle.file for oracle in oracles}):
            if equation_markers.imports_package(tree.root, file, "laconic"):
                yield LedgerFinding(3, subject, f"the oracle in {file.name} imports laconic, the code under test")
        if tests and equation.flows and "gradcheck" not in mentions:
            symbols = ", ".join(equation.flows)
            yield LedgerFinding(3, subject, f"gradients flow to {symbols}, but no marked test calls gradcheck")
        if tests and equation.stops and mentions.isdisjoint({"grad", "requires_grad"}):
            symbols = ", ".join(equation.stops)
            yield LedgerFinding(3, subject, f"gradients stop at {symbols}, but no marked test checks grad")


def check_misreadings(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 4: every marked test has misreadings."""
    marked = equation_markers.find_marked_tests(tree.root, tree.tests_dir)
    for paper, subject, equation in implemented_equations(tree):
        tests = marked.get((paper, equation.id), ())
        if not any(entry.names for test in tests for entry in test.misread):
            yield LedgerFinding(4, subject, f'no marked test uses MISREAD["{equation.id}"] with an entry')


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def check_recipes(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 5: every recipe has the values of its table row."""
    for path in sorted((tree.package_dir / "recipes").glob("*.toml")):
        try:
            recipe = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            yield LedgerFinding(5, path.stem, f"not TOML: {error}")
            continue
        source, row = recipe.get("paper_table"), recipe.get("table_row")
        if source == OWN_TABLE:
            continue
        match = TABLE_SOURCE.fullmatch(str(source))
        tables = tree.ledgers[match[1]].table if match and match[1] in tree.ledgers else ()
        rows = {row.name: row.values for table in tables if match and table.id == match[2] for row in table.row}
        if row in rows:
            yield from compare_recipe(path.stem, recipe, flatten(rows[row]))
        else:
            expected = 'expected paper_table = "PAPER table ID" and table_row = "NAME", or paper_table = "ours"'
            yield LedgerFinding(5, path.stem, f"no row {row!r} in paper_table {source!r}; {expected}")


def compare_recipe(name: str, recipe: dict[str, Any], row: dict[str, Any]) -> Iterator[LedgerFinding]:
    """Compare a recipe with its row, key by key."""
    values, deviations = flatten(recipe), flatten(recipe.get("deviations", {}))
    for key, value in row.items():
        is_equal = key in values and values[key] == value and isinstance(values[key], bool) == isinstance(value, bool)
        if not is_equal and not deviations.get(key):
            ours = values.get(key, "absent")
            yield LedgerFinding(5, name, f"{key} is {ours!r}, the table has {value!r}; say why under [deviations]")
        if is_equal and key in deviations:
            yield LedgerFinding(5, name, f"[deviations] names {key}, which does not deviate")
    for key in deviations.keys() - row.keys():
        yield LedgerFinding(5, name, f"[deviations] names {key}, which the row does not have")


def check_page(tree: SourceTree) -> Iterator[LedgerFinding]:
    """Check 6: docs/ledger.md is up to date."""
    if not tree.page_path.is_file():
        yield LedgerFinding(6, "docs/ledger.md", "does not exist; run make ledger")
    elif tree.page_path.read_text(encoding="utf-8") != render_page(tree.root):
        yield LedgerFinding(6, "docs/ledger.md", "is out of date; run make ledger")


def render_page(root: Path = ROOT) -> str:
    """Return docs/ledger.md of the checkout `root`."""
    tree, findings = load_ledgers(root)
    if findings:
        raise InputError(f"cannot render the ledger of {root}: {findings[0]}")
    marked = equation_markers.find_marked_tests(tree.root, tree.tests_dir)
    lines = [
        "# Ledger of equations",
        "",
        "Generated by `make ledger` from `src/laconic/papers/*.toml`, the docstrings and the tests; do not edit.",
        "",
        "Each equation is linked to the function that implements it and to the test that compares that function with",
        "an oracle: loops in float64 that do not import laconic. A misreading is a plausible but wrong form of the",
        "equation. It must differ from the oracle on the inputs of the test, so that the test would detect it.",
        "An open point is one on which a paper is silent, or contradicts itself or its code.",
        "",
        "| paper | equations | not implemented | misreadings | open points | tables |",
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
            lines += ["", f"Symbols: {symbol_list(ledger.symbols)}."]
        for equation in ledger.equation:
            lines += equation_section(tree, marked, id, equation)
        lines += [line for table in ledger.table for line in table_section(table)]
        lines += silence_section(ledger.silent)
    return "\n".join(lines) + "\n"


def misreading_names(marked: MarkedTests, paper: str, equation: Equation) -> tuple[str, ...]:
    """Return the names of the misreadings in the tests of an equation."""
    tests = marked.get((paper, equation.id), ())
    return tuple(dict.fromkeys(name for test in tests for entry in test.misread for name in entry.names))


def source_links(sources: tuple[str, ...]) -> str:
    """Return sources as Markdown, with links to arXiv."""
    return ", ".join(f"[{s}](https://arxiv.org/abs/{s[6:]})" if s.startswith("arXiv:") else s for s in sources)


def symbol_list(symbols: Mapping[str, str]) -> str:
    """Return symbols with their meaning as Markdown."""
    return "; ".join(f"`{name}` {text}" for name, text in symbols.items())


def equation_section(tree: SourceTree, marked: MarkedTests, paper: str, equation: Equation) -> list[str]:
    """Return the lines of one equation."""
    lines = ["", f"### {equation.id} {equation.name}", "", "$$", equation.tex.strip(), "$$", ""]
    if equation.symbols:
        lines.append(f"- Symbols: {symbol_list(equation.symbols)}.")
    lines.append(f"- Source: {source_links(equation.sources)}.")
    if equation.absent:
        return [*lines, f"- Not implemented: {equation.absent}."]
    files = [(tree.locate_function(function)[0], function) for function in equation.functions]
    code = (f"[`{function}`](../{file.relative_to(tree.root).as_posix()})" for file, function in files)
    lines.append(f"- Code: {', '.join(code)}.")
    tests = marked.get((paper, equation.id), ())
    names = (f"[`{t.name}`](../{t.file.relative_to(tree.root).as_posix()})" for t in tests)
    lines.append(f"- Tests: {', '.join(names) or 'none'}.")
    for verb, symbols in (("flows to", equation.flows), ("stops at", equation.stops)):
        if symbols:
            lines.append(f"- Gradient {verb} {', '.join(symbols)}.")
    lines.append(f"- Misreadings: {'; '.join(misreading_names(marked, paper, equation)) or 'none'}.")
    return lines


def table_section(table: PaperTable) -> list[str]:
    """Return the lines of a table of settings, with a line per key and a column per row of the paper."""
    rows = [flatten(row.values) for row in table.row]
    keys = dict.fromkeys(key for row in rows for key in row)
    header = ["", f"### Table {table.id}: {table.title}", "", f"| key | {' | '.join(row.name for row in table.row)} |"]
    lines = [f"| `{key}` | " + " | ".join(str(row.get(key, "")) for row in rows) + " |" for key in keys]
    return [*header, "|---" * (len(rows) + 1) + "|", *lines]


def silence_section(entries: tuple[SilentPoint, ...]) -> list[str]:
    """Return the lines of the open points of a paper."""
    if not entries:
        return []
    lines = ["", "### Open points", ""]
    for entry in entries:
        equations = f" ({', '.join(entry.equations)})" if entry.equations else ""
        lines += [f"- **{entry.about}**{equations}", f"  - Source: {entry.says}", f"  - Our choice: {entry.choice}"]
        if entry.alternative != "None.":
            option = f"Set by `{entry.flag}`." if entry.flag else "Not an option."
            lines.append(f"  - Alternative: {entry.alternative} {option}")
    return lines


def main() -> int:
    """Run the checks; return 1 if one fails. With `--write`, write docs/ledger.md first."""
    parser = argparse.ArgumentParser(prog="python -m tools.ledger", description="Check the ledger.")
    parser.add_argument("--write", action="store_true", help="write docs/ledger.md first")
    if parser.parse_args().write:
        SourceTree(ROOT).page_path.write_text(render_page(), encoding="utf-8")
    findings = check_ledger()
    Console().print(findings_table(findings))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
