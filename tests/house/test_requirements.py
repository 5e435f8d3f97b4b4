"""requirements-hashed.txt: the versions of constraints.txt, every one with hashes, and all that the extras name."""

import re
import tomllib

from tests.conftest import REPO
from tools.hash_requirements import EXTRAS, FILE

PINS = re.compile(r"^([a-z0-9.-]+==\S+)(?: ;[^\n]*)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def test_hashed_requirements_are_the_constraints() -> None:
    text = FILE.read_text(encoding="utf-8")
    pins = [match[1] for match in PINS.finditer(text)]
    lines = [line for line in text.splitlines() if not line.startswith((" ", "#"))]
    assert len(pins) == len(lines) > 50, "every package has hashes"
    constraints = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [pin for pin in pins if pin not in constraints] == []


def test_hashed_requirements_name_what_the_extras_need() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *(n for extra in EXTRAS for n in project["optional-dependencies"][extra])]
    names = {re.split(r"[\[>=<]", need)[0].lower().replace("_", "-") for need in needed}
    pinned = {match[1].partition("==")[0] for match in PINS.finditer(FILE.read_text(encoding="utf-8"))}
    assert names - pinned == {"torch"}
