"""The public names of laconic, resolved on first use so that `import laconic` stays fast and does not import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.core.cache import KVCache
    from laconic.core.decoder import Decoder, DecoderOutput
    from laconic.core.families import DecoderConfig
    from laconic.core.generate import Generation, generate
    from laconic.core.memory import SummaryMemory
    from laconic.data.tokens import load_tokenizer
    from laconic.methods.cms_layer import CMS
    from laconic.methods.dgd_optimizer import DGD
    from laconic.methods.hope_config import HopeConfig
    from laconic.methods.hope_model import Hope, HopeAttention
    from laconic.methods.m3_optimizer import M3
    from laconic.methods.titans_layer import Titans
    from laconic.recipe.learned import load_text_model

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
    "Decoder": "laconic.core.decoder",
    "DecoderConfig": "laconic.core.families",
    "Cache": "laconic.core.cache",
    "Seen": "laconic.core.decoder",
    "Generation": "laconic.core.generate",
    "generate": "laconic.core.generate",
    "load_tokenizer": "laconic.data.tokens",
    "load": "laconic.recipe.learned",
    "Memory": "laconic.core.memory",
    "CMS": "laconic.methods.cms_layer",
    "DGD": "laconic.methods.dgd_optimizer",
    "Hope": "laconic.methods.hope_model",
    "HopeAttention": "laconic.methods.hope_model",
    "HopeConfig": "laconic.methods.hope_config",
    "M3": "laconic.methods.m3_optimizer",
    "Titans": "laconic.methods.titans_layer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'laconic' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
