"""What papers report: found by a recipe's row, with marks, and not known where nobody says."""

import tomllib

from laconic.evaluation.reported import figures, reported, words
from tests.conftest import REPO


def test_figures_are_found_by_the_row_of_a_recipe() -> None:
    assert words(reported("kava table 6", "1b aug", "gsm8k")) == "56.5 [P]"
    assert words(reported("codi table scripts", "llama1b-aug", "gsm8k")) == "55.6 [P v1] · 53.9 [P v2]"
    assert words(reported("codi table scripts", "gpt2-aug", "multiarith")) == "92.8 [CODI]"
    assert reported("kava table 6", "1b aug", "gsm8k-aug") == reported("kava table 6", "1b aug", "gsm8k")


def test_what_is_not_known_stays_so() -> None:
    for name in ("gsm-hard", "svamp", "svamp-300", "gsm8k-aug:valid", "gsm8k-nl"):
        assert words(reported("kava table 6", "1b aug", name)) == "not known"
    assert words(reported("kava table baselines", "nocot 3b aug", "gsm8k")) == "not known"
    assert words(reported("ours", "1b aug", "gsm8k")) == words(reported(None, None, "gsm8k")) == "–"


def test_every_row_is_one_that_a_recipe_names() -> None:
    named = {
        (recipe["source"], recipe["row"])
        for path in (REPO / "src/laconic/recipes").glob("*.toml")
        if "row" in (recipe := tomllib.loads(path.read_text(encoding="utf-8")))
    }
    assert figures().keys() <= named
    shares = [each.percent for sets in figures().values() for found in sets.values() for each in found]
    assert all(0 < share <= 100 for share in shares)
