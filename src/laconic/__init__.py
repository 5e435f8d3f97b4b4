"""Language models that use few vectors instead of many tokens: latent reasoning, context compression, nested learning.

Decoding: `Decoder`, `DecoderConfig`, `KVCache`, `generate`, `GenerationConfig`, `load_tokenizer`, `quantize_decoder`,
`pack_weights`.
Latent reasoning: `Kava`, `Codi`, `Pccot`, `Coconut`, `Icot`, `Cot`, `NoCot` on `LatentThoughts`.
Context compression: `AutoCompressor` writes `SummaryMemory`; `compress_kv` writes `KVMemory` without training.
Nested learning: `Hope`, `HopeAttention`, `CMS`, `Titans` update `FastWeightState`; optimizers `DGD` and `M3`.
Checkpoints and trained runs: `load` returns a `LanguageModel`, `Reasoner`, `TextCompressor` or `NestedTextModel`.

Names are loaded on first use, so that `import laconic` is fast and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.compression.autocompressor import AutoCompressor as AutoCompressor
    from laconic.compression.kv.compress import compress_kv as compress_kv
    from laconic.compression.kv.config import KVCompressionConfig as KVCompressionConfig
    from laconic.compression.kv.memory import KVMemory as KVMemory
    from laconic.compression.memory import SummaryMemory as SummaryMemory
    from laconic.data.tokenizer import load_tokenizer as load_tokenizer
    from laconic.errors import LaconicError as LaconicError
    from laconic.experiment.compress import SummaryLength as SummaryLength
    from laconic.experiment.load_model import load as load
    from laconic.experiment.text_models.chat_session import ChatSession as ChatSession
    from laconic.experiment.text_models.compressor import TextCompressor as TextCompressor
    from laconic.experiment.text_models.language_model import LanguageModel as LanguageModel
    from laconic.experiment.text_models.nested_model import NestedTextModel as NestedTextModel
    from laconic.experiment.text_models.reasoner import Reasoner as Reasoner
    from laconic.experiment.text_models.state_chat import StateChatSession as StateChatSession
    from laconic.generation.config import GenerationConfig as GenerationConfig
    from laconic.generation.generate import Generation as Generation
    from laconic.generation.generate import generate as generate
    from laconic.latent.coconut import Coconut as Coconut
    from laconic.latent.codi import Codi as Codi
    from laconic.latent.cot import Cot as Cot
    from laconic.latent.cot import NoCot as NoCot
    from laconic.latent.icot import Icot as Icot
    from laconic.latent.kava import Kava as Kava
    from laconic.latent.pccot import Pccot as Pccot
    from laconic.latent.thoughts import LatentThoughts as LatentThoughts
    from laconic.models.cache import KVCache as KVCache
    from laconic.models.config import DecoderConfig as DecoderConfig
    from laconic.models.decoder import Decoder as Decoder
    from laconic.models.decoder import DecoderOutput as DecoderOutput
    from laconic.models.ops.packed_linear import pack_weights as pack_weights
    from laconic.models.quantize import quantize_decoder as quantize_decoder
    from laconic.nested.cms.layer import CMS as CMS
    from laconic.nested.hope.config import HopeConfig as HopeConfig
    from laconic.nested.hope.model import Hope as Hope
    from laconic.nested.hope.model import HopeAttention as HopeAttention
    from laconic.nested.optim.dgd import DGD as DGD
    from laconic.nested.optim.m3 import M3 as M3
    from laconic.nested.state import FastWeightState as FastWeightState
    from laconic.nested.titans.layer import Titans as Titans

__version__ = "0.1.0"

_LOCATIONS = {
    "Decoder": "laconic.models.decoder",
    "DecoderConfig": "laconic.models.config",
    "DecoderOutput": "laconic.models.decoder",
    "quantize_decoder": "laconic.models.quantize",
    "pack_weights": "laconic.models.ops.packed_linear",
    "KVCache": "laconic.models.cache",
    "GenerationConfig": "laconic.generation.config",
    "Generation": "laconic.generation.generate",
    "generate": "laconic.generation.generate",
    "load_tokenizer": "laconic.data.tokenizer",
    "ChatSession": "laconic.experiment.text_models.chat_session",
    "StateChatSession": "laconic.experiment.text_models.state_chat",
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
__all__ = [*_LOCATIONS, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _LOCATIONS:
        raise AttributeError(f"module 'laconic' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(_LOCATIONS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
