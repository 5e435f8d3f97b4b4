"""The page of `laconic report`: what it says about each run."""

from laconic.config.load import load_recipe
from laconic.evaluation.report.build import describe_run


def test_describe_run_joins_what_a_recipe_says() -> None:
    """A row of a table need not come with the table."""
    recipe = load_recipe("demo-kava", ["paper_table=", "table_row="])[0]
    row = recipe.model_copy(update={"table_row": "KaVa"})
    paper = row.model_copy(update={"paper_table": "kava table 1", "seed": 1})
    assert describe_run([recipe]) == "method kava, data digits, seeds 0"
    assert describe_run([row]) == "method kava, data digits, KaVa, seeds 0"
    assert describe_run([paper, row]) == "method kava, data digits, kava table 1, KaVa, seeds 1, 0"
