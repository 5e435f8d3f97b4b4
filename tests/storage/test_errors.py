"""Exit codes of the error classes."""

from laconic import errors
from laconic.errors import LaconicError


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
