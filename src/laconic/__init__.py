"""The public names of laconic, resolved on first use so that `import laconic` stays fast and does not import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.compression.memory import SummaryMemory
    from laconic.data.tokenizer import load_tokenizer
    from laconic.experiment.nested_model import load_text_model
    from laconic.generation.generate import Generation, generate
    from laconic.models.cache import KVCache
    from laconic.models.config import DecoderConfig
    from laconic.models.decoder import Decoder, DecoderOutput
    from laconic.nested.cms.layer import CMS
    from laconic.nested.hope.config import HopeConfig
    from laconic.nested.hope.model import Hope, HopeAttention
    from laconic.nested.optim.dgd import DGD
    from laconic.nested.optim.m3 import M3
    from laconic.nested.titans.layer import Titans

__version__ = "0.1.0"

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "DecoderOutput",
    "SummaryMemory",
    "Generation",
    "generate",
    "load_tokenizer",
    "load_text_model",
    "CMS",
    "DGD",
    "Hope",
    "HopeAttention",
    "HopeConfig",
    "M3",
    "Titans",
    "__version__",
]

_MODULES = {
    "Decoder": "laconic.models.decoder",
    "DecoderConfig": "laconic.models.config",
    "Cache": "laconic.models.cache",
    "Seen": "laconic.models.decoder",
    "Generation": "laconic.generation.generate",
    "generate": "laconic.generation.generate",
    "load_tokenizer": "laconic.data.tokenizer",
    "load": "laconic.experiment.nested_model",
    "Memory": "laconic.compression.memory",
    "CMS": "laconic.nested.cms.layer",
    "DGD": "laconic.nested.optim.dgd",
    "Hope": "laconic.nested.hope.model",
    "HopeAttention": "laconic.nested.hope.model",
    "HopeConfig": "laconic.nested.hope.config",
    "M3": "laconic.nested.optim.m3",
    "Titans": "laconic.nested.titans.layer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'laconic' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
