"""The ledger: papers, code, tests and page agree; every check detects the error it is there for."""

from pathlib import Path

import pytest

from laconic.errors import InputError
from tests.conftest import REPO
from tools import ledger
from tools.paper_ledger import load_ledger

TOML = """
[paper]
id = "toy"
title = "Toy"
sources = ["arXiv:1234.56789"]
[[equation]]
id = "1"
name = "twice"
tex = "y = 2x"
sources = ["arXiv:1234.56789"]
functions = ["laconic.latent.toy:twice"]
flows = ["x"]
stops = ["z"]
[[equation]]
id = "2"
name = "remark"
tex = "y > x"
sources = ["laconic"]
absent = "a remark"
[[table]]
id = "6"
title = "settings"
[[table.row]]
name = "small"
values = { rate = 0.1, "loss.kind" = "l1", std = true }
[[silent]]
about = "the sign"
equations = ["1"]
says = "nothing."
choice = "plus."
alternative = "minus."
flag = "sign"
"""

CODE = '''
def twice(x):
    """Eq. 1: y = 2 x."""
    return 2 * x
'''

ORACLES = """
import math

def twice(x):
    return [v + v for v in x]

ORACLE = {"1": twice}
MISREAD = {"1": {"square": lambda x: x * x, "half": lambda x: x / 2}}
"""

TEST = """
import pytest
from laconic.latent.toy import twice
from tests.oracles import toy

@pytest.mark.equation("toy", "1")
def test_twice():
    agree(twice, toy.ORACLE["1"], toy.MISREAD["1"], [1.0])
    assert gradcheck(twice, x)
    assert z.grad is None
"""

RECIPE = """
paper_table = "toy table 6"
table_row = "small"
rate = 0.1
std = true
more = 1
[loss]
kind = "l1"
"""


def checkout(root: Path) -> Path:
    """A small checkout in which every check passes."""
    files = {
        "src/laconic/papers/toy.toml": TOML,
        "src/laconic/latent/toy.py": CODE,
        "src/laconic/recipes/small.toml": RECIPE,
        "tests/oracles/toy.py": ORACLES,
        "tests/latent/test_toy.py": TEST,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "docs").mkdir()
    (root / "docs" / "ledger.md").write_text(ledger.render_page(root))
    return root


def edit(root: Path, name: str, old: str, new: str) -> None:
    path = root / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.medium
def test_ledger_of_this_checkout_passes() -> None:
    assert [str(finding) for finding in ledger.check_ledger(REPO)] == []


def test_ledger_lists_every_equation_of_the_decoder() -> None:
    ids = [equation.id for equation in load_ledger(REPO / "src/laconic/papers/llama.toml").equation]
    scalings = [f"C4{kind}" for kind in "abcdef"]
    assert ids == ["C1", "C2", "C3", *scalings, *(f"C{number}" for number in range(5, 23))]


def test_ledger_complete_checkout_passes(tmp_path: Path) -> None:
    assert ledger.check_ledger(checkout(tmp_path)) == []
    page = (tmp_path / "docs" / "ledger.md").read_text()
    assert "| [toy](#toy) | 1 | 1 | 2 | 1 | 1 |" in page
    assert "Misreadings: square; half." in page
    assert "Set by `sign`." in page


@pytest.mark.parametrize(
    ("name", "old", "new", "number", "message"),
    [
        ("src/laconic/latent/toy.py", "def twice", "def thrice", 1, "laconic.latent.toy:twice does not exist"),
        ("src/laconic/latent/toy.py", "Eq. 1: y", "Twice: y", 1, "must begin with `Eq. 1: `"),
        ("src/laconic/latent/toy.py", "Eq. 1: y", "Eq. 11: y", 2, "names Eq. 11"),
        (
            "src/laconic/latent/toy.py",
            "Eq. 1: y",
            "Eq. 1 and 2: y",
            2,
            "begins with `Eq.` but not",
        ),
        ("tests/latent/test_toy.py", '"toy", "1"', '"toy", "2"', 3, 'no test is marked equation("toy", "1")'),
        ("tests/latent/test_toy.py", '"toy", "1"', '"toy", "2"', 3, "marked for an equation that has no function"),
        ("tests/latent/test_toy.py", 'toy.ORACLE["1"]', "mine", 3, 'no marked test uses ORACLE["1"]'),
        ("tests/oracles/toy.py", 'ORACLE = {"1"', 'ORACLE = {"2"', 3, 'no marked test uses ORACLE["1"]'),
        ("tests/oracles/toy.py", "import math", "import laconic.latent", 3, "the oracle in toy.py imports laconic"),
        ("tests/latent/test_toy.py", "gradcheck", "check", 3, "no marked test calls gradcheck"),
        ("tests/latent/test_toy.py", "z.grad is None", "z", 3, "no marked test checks grad"),
        ("tests/latent/test_toy.py", 'toy.MISREAD["1"]', "{}", 4, 'no marked test uses MISREAD["1"]'),
        ("tests/oracles/toy.py", '"square": lambda x: x * x, "half": lambda x: x / 2', "", 4, "with an entry"),
        (
            "src/laconic/recipes/small.toml",
            "0.1",
            "0.2",
            5,
            "rate is 0.2, the table has 0.1; say why under [deviations]",
        ),
        ("src/laconic/recipes/small.toml", "std = true", "", 5, "std is 'absent', the table has True"),
        ("src/laconic/recipes/small.toml", "std = true", "std = 1", 5, "std is 1, the table has True"),
        ("src/laconic/recipes/small.toml", "[loss]", '[deviations]\nrate = "x"\n[loss]', 5, "which does not deviate"),
        ("src/laconic/recipes/small.toml", "[loss]", '[deviations]\nx = "x"\n[loss]', 5, "which the row does not have"),
        ("src/laconic/recipes/small.toml", "table 6", "table 7", 5, "no row "),
        ("src/laconic/recipes/small.toml", 'table_row = "small"', "", 5, "no row "),
        ("src/laconic/recipes/small.toml", "toy table 6", "mine", 5, 'or paper_table = "ours"'),
        ("src/laconic/recipes/small.toml", "paper_table", "paper_table paper_table", 5, "not TOML"),
        ("docs/ledger.md", "Toy", "Toys", 6, "is out of date; run make ledger"),
        ("tests/latent/test_toy.py", "def test", "def 2", 3, "not Python"),
    ],
)
def test_ledger_detects_each_error(tmp_path: Path, name: str, old: str, new: str, number: int, message: str) -> None:
    root = checkout(tmp_path)
    edit(root, name, old, new)
    assert [finding for finding in ledger.check_ledger(root) if finding.check == number and message in str(finding)]


def test_ledger_accepts_an_explained_deviation(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    edit(root, "src/laconic/recipes/small.toml", "rate = 0.1", "rate = 0.2")
    edit(root, "src/laconic/recipes/small.toml", "[loss]", '[deviations]\nrate = "one GPU"\n[loss]')
    assert ledger.check_ledger(root) == []


def test_ledger_own_recipes_need_no_table(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    edit(root, "src/laconic/recipes/small.toml", "toy table 6", "ours")
    edit(root, "src/laconic/recipes/small.toml", "rate = 0.1", "rate = 0.2")
    assert ledger.check_ledger(root) == []


def test_ledger_without_page_or_papers(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "docs" / "ledger.md").unlink()
    assert "does not exist; run make ledger" in str(ledger.check_ledger(root)[0])
    (finding,) = ledger.check_ledger(tmp_path / "nowhere")
    assert "no ledger below" in finding.message
    verdicts = [str(cell) for cell in ledger.findings_table([finding]).columns[1].cells]
    assert verdicts == ["[red]failed[/]"] + ["[yellow]not run[/]"] * 6
    with pytest.raises(InputError, match="cannot render"):
        ledger.render_page(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "toy"', "id = 3", "paper.id: Input should be a valid string"),
        ('id = "toy"', 'id = "other"', "must equal the file name"),
        ("flows", "flow", "equation.0.flow: Extra inputs are not permitted"),
        ('functions = ["laconic.latent.toy:twice"]', "", "either functions or the reason"),
        ("absent", 'functions = ["laconic.a.b:c"]\nabsent', "either functions or the reason"),
        ("laconic.latent.toy:twice", "toy.twice", "is not of the form"),
        ('id = "2"', 'id = "1"', "equation 1 is defined twice"),
        ('equations = ["1"]', 'equations = ["9"]', "silent: no equation 9"),
        ("arXiv:1234.56789", "arxiv:1234.56789", "expected the form arXiv"),
        ("[paper]", "[paper", "toy.toml: not TOML: "),
        ("0.1", "nan", "not finite"),
    ],
)
def test_ledger_files_are_validated(tmp_path: Path, old: str, new: str, message: str) -> None:
    root = checkout(tmp_path)
    edit(root, "src/laconic/papers/toy.toml", old, new)
    with pytest.raises(InputError) as caught:
        load_ledger(root / "src/laconic/papers/toy.toml")
    assert message in str(caught.value)
    assert ledger.check_ledger(root)[0].check == 0
