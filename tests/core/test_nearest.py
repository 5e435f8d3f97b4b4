"""Distances by hand, and which key is meant."""

import pytest

from laconic.models.nearest import edit_distance, nearest_key


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [("", "", 0), ("lr", "lr", 0), ("", "abc", 3), ("ab", "ba", 1), ("ca", "abc", 2), ("kitten", "sitting", 3)],
)
def test_distances_known_by_hand(a: str, b: str, n: int) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == n


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.lrr", "train.learning_rate"),
        ("traim.lr", "train.learning_rate"),
        ("lr", "train.learning_rate"),
        ("optimizer.seed", "seed"),
        ("train.zzzzzz", None),
        ("x", None),
    ],
)
def test_the_path_first_then_its_last_part(key: str, meant: str | None) -> None:
    assert nearest_key(key, ["seed", "train", "train.learning_rate", "train.batch_size", "model.init_seed"]) == meant
