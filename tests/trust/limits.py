"""The numbers of limits.toml for tests."""

import tomllib
from pathlib import Path

LIMITS = tomllib.loads(Path(__file__).with_name("limits.toml").read_text(encoding="utf-8"))
