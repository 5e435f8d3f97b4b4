"""What a recipe may not say of a method."""

import pytest
from pydantic import ValidationError

from laconic.config.methods import LatentConfig


def test_rounds_and_mode_go_together() -> None:
    with pytest.raises(ValidationError, match="rounds 3: sequential thoughts have no rounds; leave the key out"):
        LatentConfig(schedule="sequential", jacobi_iterations=3)
    with pytest.raises(ValidationError, match="rounds: absent; mode jacobi needs a number of rounds, 3 in the papers"):
        LatentConfig(schedule="jacobi")
    assert LatentConfig(schedule="jacobi", jacobi_iterations=0).jacobi_iterations == 0
    assert LatentConfig(schedule="sequential").jacobi_iterations is None


@pytest.mark.parametrize("changes", [{"count": 0}, {"rounds": -1}, {"project": "linear"}, {"rounds": "3"}, {"more": 1}])
def test_what_cannot_be_meant(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LatentConfig(**({"rounds": 3} | changes))  # type: ignore[arg-type]
