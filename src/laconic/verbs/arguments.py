"""Arguments that several verbs take: text in UTF-8, types by name."""

import os
from typing import Any, Literal

from laconic.core.errors import Usage

Dtype = Literal["float32", "float64", "bfloat16", "float16"]


def torch_dtype(name: Dtype | None) -> Any:
    """The torch type of a name."""
    import torch

    return None if name is None else getattr(torch, name)


def utf8(text: str) -> str:
    """An argument as UTF-8, whatever the locale took it for."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise Usage(f"{text!r} is not UTF-8") from None
