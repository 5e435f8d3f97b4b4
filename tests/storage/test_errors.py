"""Exit codes of the error classes, and the folder that they name."""

from pathlib import Path

import pytest

from laconic import errors
from laconic.errors import InputError, LaconicError, name_folder_in_errors


def test_errors_exit_codes() -> None:
    codes = {
        "UsageError": 2, "NonFiniteError": 65, "InputError": 66, "LaconicError": 70, "OutOfMemoryError": 71,
        "BusyError": 73, "DiskError": 74, "PreemptedError": 75, "CorruptArtifactError": 76, "UnsafeFileError": 77,
    }  # fmt: skip
    for name, code in codes.items():
        kind = getattr(errors, name)
        assert issubclass(kind, LaconicError)
        assert kind.exit_code == code
        assert str(kind("one line")) == "one line"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("config.json: vocab_size=1", "b: config.json: vocab_size=1"),  # a folder of one letter, which the text has
        ("b/config.json:1:1: not JSON", "b/config.json:1:1: not JSON"),
        ("no tokenizer.json in b", "no tokenizer.json in b"),
        ("b: lm_head.weight: NaN", "b: lm_head.weight: NaN"),
    ],
)
def test_name_folder_in_errors_that_do_not_have_it(text: str, named: str) -> None:
    with pytest.raises(InputError) as error, name_folder_in_errors(Path("b")):
        raise InputError(text)
    assert str(error.value) == named
