"""AutoCompressors as their authors publish them: a decoder's checkpoint with the summary tokens beside its weights.

arXiv:2305.14788, code princeton-nlp/AutoCompressors 80352a4. The tensor is `embed_summary.weight` [kappa, D];
config.json says `summary_length`, kappa, and `accumulate_summary`, false for RMT.
"""

import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.segment import resolve_position_scheme
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig
from laconic.data.tokenizer import Tokenizer, load_tokenizer
from laconic.errors import InputError, UnsafeFileError
from laconic.experiment.build_model import check_vocabulary
from laconic.models.checkpoint_files import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE, index_tensors
from laconic.models.decoder import Decoder
from laconic.storage.strict_json import read_json

SUMMARY_EMBEDDING, SUMMARY_LENGTH_KEY, ACCUMULATE_KEY = "embed_summary.weight", "summary_length", "accumulate_summary"
TRAINED_SEGMENT_TOKENS = 1536  # tokens of a segment, the mean with which the paper's models were trained


class PublishedAutoCompressor(NamedTuple):
    """What a folder holds, and a length of segments that it can read."""

    method: AutoCompressor
    tokenizer: Tokenizer
    segment_tokens: int


def is_published(path: str | Path) -> bool:
    """Whether a path is a folder whose config.json has a number of summary tokens."""
    config = Path(path) / "config.json"
    return config.is_file() and bool(read_json(config).get(SUMMARY_LENGTH_KEY))


def load_published(path: str | Path, device: torch.device) -> PublishedAutoCompressor:
    """Parallel summaries of a fixed number, accumulated or replaced as config.json says, and no bos before a segment.

    Raises `Unsafe` (77) for pickles, `BadInput` (66) for a folder that is no whole one of this layout.
    """
    folder = Path(path)
    check_not_pickle(folder)
    config, held = read_json(folder / "config.json"), index_tensors(folder)
    grows, kappa = config.get(ACCUMULATE_KEY), config[SUMMARY_LENGTH_KEY]
    if type(grows) is not bool:
        raise InputError(f"{folder}/config.json has no {ACCUMULATE_KEY}; write it there: true, or false for RMT")
    if SUMMARY_EMBEDDING not in held:
        raise InputError(
            f"{folder} has no tensor {SUMMARY_EMBEDDING}, of which config.json says that it has {kappa} rows; the classes of "
            "transformers leave it out, so convert the published file tensor by tensor"
        )
    decoder = Decoder.from_pretrained(folder, device=device, ignore_tensors=(SUMMARY_EMBEDDING,))
    shape, D = held[SUMMARY_EMBEDDING].spec.shape, decoder.config.hidden_size
    if shape != (kappa, D):
        raise InputError(
            f"{SUMMARY_EMBEDDING} {list(shape)}, config.json says {[kappa, D]}; take the two from one place"
        )
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, decoder.config)
    memory = "accumulate" if grows else "replace"
    reading = CompressionConfig.model_validate(
        {"max_vectors": kappa, "memory_policy": memory, "summary_init": "normal", "bos": "none"}
    )
    summaries = SummaryParameters(decoder, reading, eos_token_id=None)
    assert summaries.tokens is not None
    with torch.no_grad():
        summaries.tokens.copy_(held[SUMMARY_EMBEDDING].load())
    method = AutoCompressor(decoder, summaries, reading, total_steps=1).eval()
    return PublishedAutoCompressor(method, tokenizer, choose_segment_length(decoder, reading))


def check_not_pickle(folder: Path) -> None:
    """Raises `Unsafe` (77) where the weights are pickles alone, with the one way to convert them that keeps all."""
    pickle = next((path.name for path in sorted(folder.iterdir()) if path.name.endswith(PICKLE_SUFFIXES)), None)
    if pickle and not any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        raise UnsafeFileError(
            f"{pickle} is a pickle and can run code; not opened. In an environment you trust, write the tensors of "
            f"torch.load(..., weights_only=True) by safetensors.torch.save_file as {SINGLE_FILE}; save_pretrained of "
            f"transformers would leave out {SUMMARY_EMBEDDING}"
        )


def choose_segment_length(decoder: Decoder, reading: CompressionConfig) -> int:
    """As the paper's models were trained, or less where there is no room; warns of a row that nothing may read."""
    config, zero = decoder.config, resolve_position_scheme(reading, decoder.config) == "zero"
    if zero and decoder.weight_names.position_embedding is not None and config.position_offset:
        row = decoder.get_submodule(decoder.weight_names.position_embedding).get_parameter("weight")[
            config.position_offset - 1
        ]
        if bool(row.any()):
            warnings.warn(
                f"row {config.position_offset - 1} of {decoder.weight_names.position_embedding} is not zero; memory has no position, so it is not "
                "read",
                stacklevel=3,
            )
    return min(TRAINED_SEGMENT_TOKENS, config.max_position_embeddings if zero else config.max_position_embeddings // 2)
