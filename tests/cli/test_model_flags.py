"""What the sampling flags of `laconic generate` and `laconic chat` set."""

from contextlib import nullcontext
from typing import Any

import pytest

from laconic.cli import model_flags
from laconic.cli.model_flags import SamplingFlags, import_with_status


@pytest.mark.parametrize(
    ("flags", "temperature"),
    [
        ({}, 0.0),
        ({"repetition_penalty": 1.3}, 0.0),
        ({"temperature": 0.5, "top_p": 0.9}, 0.5),
        ({"temperature": 0.0, "seed": 3}, 0.0),
        ({"top_k": 40}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"seed": 0}, 1.0),
        ({"sample": True}, 1.0),
    ],
)
def test_sampling_config_samples_if_a_flag_asks_for_it(flags: dict[str, Any], temperature: float) -> None:
    """Flags that filter tokens, or a seed, would otherwise be ignored."""
    config = SamplingFlags(**flags).sampling_config(max_tokens=5)
    assert config.temperature == temperature
    assert all(getattr(config, name) == value for name, value in flags.items() if name != "sample")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_import_shows_a_status_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    texts = list[str]()
    monkeypatch.setattr(model_flags, "is_interactive", lambda: is_terminal)
    monkeypatch.setattr(model_flags, "status", lambda text: nullcontext(texts.append(text)))
    import_with_status("loading smollm2", "json")
    assert texts == ["loading smollm2"] * is_terminal
