"""Validation of the data table: combinations of keys, document lengths, synthetic tasks."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from laconic.config.data import DataConfig, FactRecallConfig, TextConfig, is_row_file

REFUSED: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (DataConfig, {}, "path"),
    (DataConfig, {"source": "digits", "format": "digits", "path": "x"}, "path"),
    (DataConfig, {"source": "digits"}, "format"),
    (DataConfig, {"path": "x", "format": "coconut"}, "uses every step"),
    (DataConfig, {"path": "x", "separator": "eos"}, "separator"),
    (DataConfig, {"path": "x", "name": "gsm8k"}, "name"),
    (DataConfig, {"path": "x", "data_dir": "data"}, "data_dir"),
    (DataConfig, {"source": "text"}, "path"),
    (DataConfig, {"source": "text", "path": "x", "name": "y/z"}, "path"),
    (DataConfig, {"source": "recall", "valid": "x"}, "valid"),
    (DataConfig, {"source": "catalog"}, "name"),
    (DataConfig, {"source": "catalog", "name": "gsm8k", "path": "x"}, "path"),
    (DataConfig, {"path": "x", "digits": {"num_operations": 13}}, "less than or equal to 12"),
    (DataConfig, {"path": "x", "unknown": 1}, "unknown"),
    (TextConfig, {"segment_tokens": (100, 200), "row_tokens": 300}, "segment_tokens"),
    (TextConfig, {"segment_tokens": (100, 200), "row_tokens": 400, "segment_lengths": "fixed"}, "400"),
    (TextConfig, {"segment_lengths": "fixed", "min_segment_tokens": 5}, "min_segment_tokens"),
    (TextConfig, {"segment_tokens": 100, "row_tokens": 250}, "row_tokens 250"),
    (TextConfig, {"segment_tokens": 128, "min_segment_tokens": 128}, "segment_tokens 128"),
    (TextConfig, {"held_out_fraction": 0.5}, "less than 0.5"),
    (TextConfig, {"segments_per_window": 1}, "segments_per_window"),
    (FactRecallConfig, {"num_facts": (4, 2)}, "num_facts"),
    (FactRecallConfig, {"num_facts": (17,), "segment_tokens": 64}, "num_facts 17"),
    (FactRecallConfig, {"segment_tokens": 4}, "segment_tokens 4"),
    (FactRecallConfig, {"segments_per_window": 0}, "segments_per_window"),
]


@pytest.mark.parametrize(("config", "values", "message"), REFUSED)
def test_data_config_refuses_invalid_combinations(
    config: type[BaseModel], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config.model_validate(values)


def test_fact_recall_config_window_is_all_segments_by_default() -> None:
    assert FactRecallConfig().window_and_overlap == (2, 0)
    assert FactRecallConfig(num_segments=4).window_and_overlap == (5, 0)
    assert FactRecallConfig(num_segments=4, segments_per_window=3, segment_overlap=1).window_and_overlap == (3, 1)


def test_data_config_name_accepts_a_string_or_list() -> None:
    for name in ("gsm8k", ("gsm8k",)):
        assert DataConfig.model_validate({"source": "catalog", "name": name}).name == ("gsm8k",)
    for text in ('"gsm8k"', '["gsm8k"]'):
        assert DataConfig.model_validate_json(f'{{"source": "catalog", "name": {text}}}').name == ("gsm8k",)
    assert {"type": "string"} in DataConfig.model_json_schema()["properties"]["name"]["anyOf"]


def test_is_row_file_by_suffix() -> None:
    assert all(map(is_row_file, ("a.jsonl", "b/a.parquet", "train.txt")))
    assert not any(map(is_row_file, ("gsm8k", "gsm8k-aug:valid", "a/b-v1.5")))
