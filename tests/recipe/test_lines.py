"""Where keys stand in a file."""

import pytest

from laconic.config.lines import keys, line_of

TEXT = '''# a comment = not a key
method = "kava"
[ model ]
name = """
x = 1
"""
"quoted key" = 2
sub.key = [1,
  2, # ]
  3]
last = 1

[[row]]
a = "["
[[row]]
a = { b = 1 }
'''


def test_every_key_has_its_line() -> None:
    assert dict(keys(TEXT)) == {
        "method": 2, "model": 3, "model.name": 4, "model.quoted key": 7, "model.sub.key": 8, "model.last": 11,
        "row.0": 13, "row.0.a": 14, "row.1": 15, "row.1.a": 16,
    }  # fmt: skip


@pytest.mark.parametrize(("key", "line"), [("model.last", 11), ("model.none", 3), ("row.1.a.b", 16), ("no.such", None)])
def test_the_nearest_table_has_the_line_of_what_is_inside(key: str, line: int | None) -> None:
    assert line_of(key, dict(keys(TEXT))) == line


def test_an_array_that_never_ends_is_scanned_quickly() -> None:
    assert list(keys("a = [\n" + "1,\n" * 20_000)) == [("a", 1)]
