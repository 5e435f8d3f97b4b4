"""The ledger: every paper's equations, code, tests and page agree; and each check sees what it is there to see."""

from pathlib import Path

import pytest

from laconic.errors import InputError
from laconic.verification import ledger
from laconic.verification.paper_ledger import default_root, load_ledger
from tests.conftest import REPO

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
functions = ["laconic.methods.toy:twice"]
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
from laconic.methods.toy import twice
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
        "src/laconic/methods/toy.py": CODE,
        "src/laconic/recipes/small.toml": RECIPE,
        "tests/oracles/toy.py": ORACLES,
        "tests/methods/test_toy.py": TEST,
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


def test_the_ledger_of_this_checkout() -> None:
    assert [str(finding) for finding in ledger.check_ledger(REPO)] == []


def test_it_has_every_equation_of_the_decoder() -> None:
    ids = [equation.id for equation in load_ledger(REPO / "src/laconic/papers/llama.toml").equation]
    scalings = [f"C4{kind}" for kind in "abcdef"]
    assert ids == ["C1", "C2", "C3", *scalings, *(f"C{number}" for number in range(5, 23))]


def test_the_package_finds_its_checkout() -> None:
    assert default_root() == Path(ledger.__file__).resolve().parents[3]


def test_a_whole_checkout_has_no_findings(tmp_path: Path) -> None:
    assert ledger.check_ledger(checkout(tmp_path)) == []
    page = (tmp_path / "docs" / "ledger.md").read_text()
    assert "| [toy](#toy) | 1 | 1 | 2 | 1 | 1 |" in page
    assert "Misreadings told apart: square; half." in page
    assert "Selected by `sign`." in page


@pytest.mark.parametrize(
    ("name", "old", "new", "number", "message"),
    [
        ("src/laconic/methods/toy.py", "def twice", "def thrice", 1, "laconic.methods.toy:twice is not there"),
        ("src/laconic/methods/toy.py", "Eq. 1: y", "Twice: y", 1, "does not begin with `Eq. 1: `"),
        ("src/laconic/methods/toy.py", "Eq. 1: y", "Eq. 11: y", 2, "says Eq. 11, which no ledger gives it"),
        (
            "src/laconic/methods/toy.py",
            "Eq. 1: y",
            "Eq. 1 and 2: y",
            2,
            "begins with Eq. and is no equation's one line",
        ),
        ("tests/methods/test_toy.py", '"toy", "1"', '"toy", "2"', 3, 'no test is marked equation("toy", "1")'),
        ("tests/methods/test_toy.py", '"toy", "1"', '"toy", "2"', 3, "marked for an equation that no ledger has"),
        ("tests/methods/test_toy.py", 'toy.ORACLE["1"]', "mine", 3, 'no marked test takes ORACLE["1"]'),
        ("tests/oracles/toy.py", 'ORACLE = {"1"', 'ORACLE = {"2"', 3, 'no marked test takes ORACLE["1"]'),
        ("tests/oracles/toy.py", "import math", "import laconic.core", 3, "the oracle in toy.py imports laconic"),
        ("tests/methods/test_toy.py", "gradcheck", "check", 3, "gradients flow to x; no marked test calls gradcheck"),
        ("tests/methods/test_toy.py", "z.grad is None", "z", 3, "gradients stop at z; no marked test asks for that"),
        ("tests/methods/test_toy.py", 'toy.MISREAD["1"]', "{}", 4, 'no marked test takes MISREAD["1"]'),
        ("tests/oracles/toy.py", '"square": lambda x: x * x, "half": lambda x: x / 2', "", 4, "with an entry"),
        ("src/laconic/recipes/small.toml", "0.1", "0.2", 5, "rate is 0.2, the table has 0.1; say why under [differs]"),
        ("src/laconic/recipes/small.toml", "std = true", "", 5, "std is 'absent', the table has True"),
        ("src/laconic/recipes/small.toml", "std = true", "std = 1", 5, "std is 1, the table has True"),
        ("src/laconic/recipes/small.toml", "[loss]", '[deviations]\nrate = "x"\n[loss]', 5, "which does not differ"),
        ("src/laconic/recipes/small.toml", "[loss]", '[deviations]\nx = "x"\n[loss]', 5, "which the row does not have"),
        ("src/laconic/recipes/small.toml", "table 6", "table 7", 5, "no such row"),
        ("src/laconic/recipes/small.toml", 'row = "small"', "", 5, "no such row"),
        ("src/laconic/recipes/small.toml", "toy table 6", "mine", 5, 'or source = "ours"'),
        ("src/laconic/recipes/small.toml", "source", "source source", 5, "not TOML"),
        ("docs/ledger.md", "Toy", "Toys", 6, "is out of date; run laconic verify ledger --write"),
        ("tests/methods/test_toy.py", "def test", "def 2", 3, "not Python"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, name: str, old: str, new: str, number: int, message: str) -> None:
    root = checkout(tmp_path)
    edit(root, name, old, new)
    assert [finding for finding in ledger.check_ledger(root) if finding.check == number and message in str(finding)]


def test_a_difference_with_its_reason_passes(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    edit(root, "src/laconic/recipes/small.toml", "rate = 0.1", "rate = 0.2")
    edit(root, "src/laconic/recipes/small.toml", "[loss]", '[deviations]\nrate = "one GPU"\n[loss]')
    assert ledger.check_ledger(root) == []


def test_a_recipe_of_our_own_names_no_table(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    edit(root, "src/laconic/recipes/small.toml", "toy table 6", "ours")
    edit(root, "src/laconic/recipes/small.toml", "rate = 0.1", "rate = 0.2")
    assert ledger.check_ledger(root) == []


def test_what_cannot_run_is_no_pass(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    installed = ledger.check_ledger(root / "src" / "laconic")
    assert [(finding.check, finding.status) for finding in installed] == [(n, "not run") for n in (3, 4, 6)]
    assert str(installed[0]) == f"check 3, tests: not run: {ledger.NEEDS_CLONE}"
    assert list(ledger.findings_table(installed).columns[2].cells)[3:] == [f"tests: {ledger.NEEDS_CLONE}"] * 2 + [
        "",
        f"docs/ledger.md: {ledger.NEEDS_CLONE}",
    ]
    with pytest.raises(InputError, match="no ledger page can be made of"):
        ledger.render_page(root / "src" / "laconic")
    (root / "docs" / "ledger.md").unlink()
    assert "is not there; run laconic verify ledger --write" in str(ledger.check_ledger(root)[0])
    (nothing,) = ledger.check_ledger(tmp_path / "nowhere")
    assert nothing.status == "not run"
    assert "no ledger below" in nothing.message
    assert [bool(cell) for cell in ledger.findings_table([nothing]).columns[2].cells] == [True, *[False] * 6]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "toy"', "id = 3", "paper.id: Input should be a valid string"),
        ('id = "toy"', 'id = "other"', "paper.id is 'other'; the file is named for it"),
        ("flows", "flow", "equation.0.flow: Extra inputs are not permitted"),
        ('functions = ["laconic.methods.toy:twice"]', "", "name its functions, or say why it is absent"),
        ("absent", 'functions = ["laconic.a:b"]\nabsent', "name its functions, or say why it is absent"),
        ("laconic.methods.toy:twice", "toy.twice", "is not of the form laconic.room.file:function"),
        ('id = "2"', 'id = "1"', "equation 1 stands there twice"),
        ('equations = ["1"]', 'equations = ["9"]', "silent: no equation 9"),
        ("arXiv:1234.56789", "arxiv:1234.56789", "write arXiv:1234.56789"),
        ("[paper]", "[paper", "toy.toml: not TOML: "),
        ("0.1", "nan", "toy.toml: a number in it is not finite"),
    ],
)
def test_a_ledger_is_read_strictly(tmp_path: Path, old: str, new: str, message: str) -> None:
    root = checkout(tmp_path)
    edit(root, "src/laconic/papers/toy.toml", old, new)
    with pytest.raises(InputError) as caught:
        load_ledger(root / "src/laconic/papers/toy.toml")
    assert message in str(caught.value)
    assert ledger.check_ledger(root)[0].check == 0
