"""The templates of pages, which lie beside this file; what they hold is escaped unless it is marked as safe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template


def load_template(name: str, **filters: Callable[..., Any]) -> Template:
    """A page to be rendered, with filters of its own."""
    lies = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=lies, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= filters
    return environment.get_template(name)
