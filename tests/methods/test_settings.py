"""What a recipe may not say of a method."""

import pytest
from pydantic import ValidationError

from laconic.methods.settings import Thinking


def test_rounds_and_mode_go_together() -> None:
    with pytest.raises(ValidationError, match="rounds 3: sequential thoughts have no rounds; leave the key out"):
        Thinking(mode="sequential", rounds=3)
    with pytest.raises(ValidationError, match="rounds: absent; mode jacobi needs a number of rounds, 3 in the papers"):
        Thinking(mode="jacobi")
    assert Thinking(mode="jacobi", rounds=0).rounds == 0
    assert Thinking(mode="sequential").rounds is None


@pytest.mark.parametrize("changes", [{"count": 0}, {"rounds": -1}, {"project": "linear"}, {"rounds": "3"}, {"more": 1}])
def test_what_cannot_be_meant(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Thinking(**({"rounds": 3} | changes))  # type: ignore[arg-type]
