"""Language models that use few vectors instead of many tokens: latent reasoning, context compression, nested learning.

Decoding: `Decoder`, `DecoderConfig`, `KVCache`, `generate`, `GenerationConfig`, `load_tokenizer`, `quantize_decoder`.
Latent reasoning: `Kava`, `Codi`, `Pccot`, `Coconut`, `Icot`, `Cot`, `NoCot` on `LatentThoughts`.
Context compression: `AutoCompressor` writes `SummaryMemory`; `compress_kv` writes `KVMemory` without training.
Nested learning: `Hope`, `HopeAttention`, `CMS`, `Titans` update `FastWeightState`; optimizers `DGD` and `M3`.
Checkpoints and trained runs: `load` returns a `LanguageModel`, `Reasoner`, `TextCompressor` or `NestedTextModel`.

Names are loaded on first use, so that `import laconic` is fast and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.compression.autocompressor import AutoCompressor
    from laconic.compression.kv.compress import compress_kv
    from laconic.compression.kv.config import KVCompressionConfig
    from laconic.compression.kv.memory import KVMemory
    from laconic.compression.memory import SummaryMemory
    from laconic.data.tokenizer import load_tokenizer
    from laconic.errors import LaconicError
    from laconic.experiment.compress import SummaryLength
    from laconic.experiment.load_model import load
    from laconic.experiment.text_models.chat_session import ChatSession
    from laconic.experiment.text_models.compressor import TextCompressor
    from laconic.experiment.text_models.language_model import LanguageModel
    from laconic.experiment.text_models.nested_model import NestedTextModel
    from laconic.experiment.text_models.reasoner import Reasoner
    from laconic.generation.config import GenerationConfig
    from laconic.generation.generate import Generation, generate
    from laconic.latent.coconut import Coconut
    from laconic.latent.codi import Codi
    from laconic.latent.cot import Cot, NoCot
    from laconic.latent.icot import Icot
    from laconic.latent.kava import Kava
    from laconic.latent.pccot import Pccot
    from laconic.latent.thoughts import LatentThoughts
    from laconic.models.cache import KVCache
    from laconic.models.config import DecoderConfig
    from laconic.models.decoder import Decoder, DecoderOutput
    from laconic.models.quantize import quantize_decoder
    from laconic.nested.cms.layer import CMS
    from laconic.nested.hope.config import HopeConfig
    from laconic.nested.hope.model import Hope, HopeAttention
    from laconic.nested.optim.dgd import DGD
    from laconic.nested.optim.m3 import M3
    from laconic.nested.state import FastWeightState
    from laconic.nested.titans.layer import Titans

__version__ = "0.1.0"

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "quantize_decoder",
    "KVCache",
    "GenerationConfig",
    "Generation",
    "generate",
    "load_tokenizer",
    "ChatSession",
    "load",
    "LanguageModel",
    "Reasoner",
    "TextCompressor",
    "SummaryLength",
    "NestedTextModel",
    "LatentThoughts",
    "Cot",
    "NoCot",
    "Icot",
    "Coconut",
    "Codi",
    "Pccot",
    "Kava",
    "AutoCompressor",
    "SummaryMemory",
    "KVMemory",
    "KVCompressionConfig",
    "compress_kv",
    "FastWeightState",
    "CMS",
    "Titans",
    "Hope",
    "HopeAttention",
    "HopeConfig",
    "DGD",
    "M3",
    "LaconicError",
    "__version__",
]

_LOCATIONS = {
    "Decoder": "laconic.models.decoder",
    "DecoderConfig": "laconic.models.config",
    "DecoderOutput": "laconic.models.decoder",
    "quantize_decoder": "laconic.models.quantize",
    "KVCache": "laconic.models.cache",
    "GenerationConfig": "laconic.generation.config",
    "Generation": "laconic.generation.generate",
    "generate": "laconic.generation.generate",
    "load_tokenizer": "laconic.data.tokenizer",
    "ChatSession": "laconic.experiment.text_models.chat_session",
    "load": "laconic.experiment.load_model",
    "LanguageModel": "laconic.experiment.text_models.language_model",
    "Reasoner": "laconic.experiment.text_models.reasoner",
    "TextCompressor": "laconic.experiment.text_models.compressor",
    "SummaryLength": "laconic.experiment.compress",
    "NestedTextModel": "laconic.experiment.text_models.nested_model",
    "LatentThoughts": "laconic.latent.thoughts",
    "Cot": "laconic.latent.cot",
    "NoCot": "laconic.latent.cot",
    "Icot": "laconic.latent.icot",
    "Coconut": "laconic.latent.coconut",
    "Codi": "laconic.latent.codi",
    "Pccot": "laconic.latent.pccot",
    "Kava": "laconic.latent.kava",
    "AutoCompressor": "laconic.compression.autocompressor",
    "SummaryMemory": "laconic.compression.memory",
    "KVMemory": "laconic.compression.kv.memory",
    "KVCompressionConfig": "laconic.compression.kv.config",
    "compress_kv": "laconic.compression.kv.compress",
    "FastWeightState": "laconic.nested.state",
    "CMS": "laconic.nested.cms.layer",
    "Titans": "laconic.nested.titans.layer",
    "Hope": "laconic.nested.hope.model",
    "HopeAttention": "laconic.nested.hope.model",
    "HopeConfig": "laconic.nested.hope.config",
    "DGD": "laconic.nested.optim.dgd",
    "M3": "laconic.nested.optim.m3",
    "LaconicError": "laconic.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _LOCATIONS:
        raise AttributeError(f"module 'laconic' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(_LOCATIONS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
