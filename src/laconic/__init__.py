"""Language models that use few vectors instead of many tokens: latent reasoning, context compression, nested learning.

The names below are loaded on first use, so that `import laconic` stays fast and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.compression.memory import SummaryMemory
    from laconic.data.tokenizer import load_tokenizer
    from laconic.experiment.nested_model import load_text_model as load
    from laconic.generation.config import GenerationConfig
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

__version__ = "0.2.0"

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "KVCache",
    "GenerationConfig",
    "Generation",
    "generate",
    "load",
    "load_tokenizer",
    "SummaryMemory",
    "CMS",
    "DGD",
    "Hope",
    "HopeAttention",
    "HopeConfig",
    "M3",
    "Titans",
    "__version__",
]

_LOCATIONS = {
    "Decoder": "laconic.models.decoder",
    "DecoderConfig": "laconic.models.config",
    "DecoderOutput": "laconic.models.decoder",
    "KVCache": "laconic.models.cache",
    "GenerationConfig": "laconic.generation.config",
    "Generation": "laconic.generation.generate",
    "generate": "laconic.generation.generate",
    "load": "laconic.experiment.nested_model:load_text_model",
    "load_tokenizer": "laconic.data.tokenizer",
    "SummaryMemory": "laconic.compression.memory",
    "CMS": "laconic.nested.cms.layer",
    "DGD": "laconic.nested.optim.dgd",
    "Hope": "laconic.nested.hope.model",
    "HopeAttention": "laconic.nested.hope.model",
    "HopeConfig": "laconic.nested.hope.config",
    "M3": "laconic.nested.optim.m3",
    "Titans": "laconic.nested.titans.layer",
}


def __getattr__(name: str) -> Any:
    if name not in _LOCATIONS:
        raise AttributeError(f"module 'laconic' has no attribute {name!r}; public names: {', '.join(__all__)}")
    module, _, attribute = _LOCATIONS[name].partition(":")
    value = getattr(import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
