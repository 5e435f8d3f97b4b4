"""AutoCompressors as their authors publish them: a decoder's checkpoint with the summary tokens beside its weights.

arXiv:2305.14788, code princeton-nlp/AutoCompressors 80352a4. The tensor is `embed_summary.weight` [kappa, D];
config.json says `summary_length`, kappa, and `accumulate_summary`, false for RMT.
"""

import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from laconic.core.artifact import read_json
from laconic.core.decoder import Decoder
from laconic.core.errors import BadInput, Unsafe
from laconic.core.folder import INDEX, PICKLES, WHOLE, sources
from laconic.data.tokens import Tokenizer, load_tokenizer
from laconic.methods.autocompressor import AutoCompressor
from laconic.methods.segments import positions_of
from laconic.methods.settings import Reading
from laconic.methods.summaries import Summaries
from laconic.recipe.models import check_words

TENSOR, KAPPA, GROWS = "embed_summary.weight", "summary_length", "accumulate_summary"
TRAINED = 1536  # tokens of a segment, the mean with which the paper's models were trained


class Published(NamedTuple):
    """What a folder holds, and a length of segments that it can read."""

    method: AutoCompressor
    tokenizer: Tokenizer
    segment: int


def is_published(path: str | Path) -> bool:
    """Whether a path is a folder whose config.json has a number of summary tokens."""
    config = Path(path) / "config.json"
    return config.is_file() and bool(read_json(config).get(KAPPA))


def published(path: str | Path, device: torch.device) -> Published:
    """Parallel summaries of a fixed number, accumulated or replaced as config.json says, and no bos before a segment.

    Raises `Unsafe` (77) for pickles, `BadInput` (66) for a folder that is no whole one of this layout.
    """
    folder = Path(path)
    refuse_pickle(folder)
    config, held = read_json(folder / "config.json"), sources(folder)
    grows, kappa = config.get(GROWS), config[KAPPA]
    if type(grows) is not bool:
        raise BadInput(f"{folder}/config.json has no {GROWS}; write it there: true, or false for RMT")
    if TENSOR not in held:
        raise BadInput(
            f"{folder} has no tensor {TENSOR}, of which config.json says that it has {kappa} rows; the classes of "
            "transformers leave it out, so convert the published file tensor by tensor"
        )
    decoder = Decoder.from_pretrained(folder, device=device, beside=(TENSOR,))
    shape, D = held[TENSOR].entry.shape, decoder.config.hidden_size
    if shape != (kappa, D):
        raise BadInput(f"{TENSOR} {list(shape)}, config.json says {[kappa, D]}; take the two from one place")
    tokenizer = load_tokenizer(folder)
    check_words(tokenizer, decoder.config)
    memory = "accumulate" if grows else "replace"
    reading = Reading.model_validate({"cap": kappa, "memory": memory, "summary_init": "normal", "bos": "none"})
    summaries = Summaries(decoder, reading, eos=None)
    assert summaries.tokens is not None
    with torch.no_grad():
        summaries.tokens.copy_(held[TENSOR].read())
    method = AutoCompressor(decoder, summaries, reading, steps=1).eval()
    return Published(method, tokenizer, segment(decoder, reading))


def refuse_pickle(folder: Path) -> None:
    """Raises `Unsafe` (77) where the weights are pickles alone, with the one way to convert them that keeps all."""
    pickle = next((path.name for path in sorted(folder.iterdir()) if path.name.endswith(PICKLES)), None)
    if pickle and not any((folder / name).exists() for name in (WHOLE, INDEX)):
        raise Unsafe(
            f"{pickle} is a pickle and can run code; not opened. In an environment you trust, write the tensors of "
            f"torch.load(..., weights_only=True) by safetensors.torch.save_file as {WHOLE}; save_pretrained of "
            f"transformers would leave out {TENSOR}"
        )


def segment(decoder: Decoder, reading: Reading) -> int:
    """As the paper's models were trained, or less where there is no room; warns of a row that nothing may read."""
    config, zero = decoder.config, positions_of(reading, decoder.config) == "zero"
    if zero and decoder.names.places is not None and config.offset:
        row = decoder.get_submodule(decoder.names.places).get_parameter("weight")[config.offset - 1]
        if bool(row.any()):
            warnings.warn(
                f"row {config.offset - 1} of {decoder.names.places} is not zero; memory has no position, so it is not "
                "read",
                stacklevel=3,
            )
    return min(TRAINED, config.max_position_embeddings if zero else config.max_position_embeddings // 2)
