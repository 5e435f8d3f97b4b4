"""Load AutoCompressors as their authors publish them: a checkpoint that also holds the summary tokens.

arXiv:2305.14788, code princeton-nlp/AutoCompressors 80352a4. The tensor is `embed_summary.weight` [kappa, D];
config.json has `summary_length` (kappa) and `accumulate_summary`, which is false for RMT.
"""

from pathlib import Path

import torch

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.segment import resolve_position_scheme
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig
from laconic.data.tokenizer import load_tokenizer
from laconic.errors import InputError
from laconic.experiment.from_recipe.build_model import check_vocabulary
from laconic.experiment.load_run import read_run_method
from laconic.experiment.text_models.compressor import TextCompressor, compute_writer_fingerprint
from laconic.models.checkpoints.checkpoint_files import index_tensors
from laconic.models.decoder import Decoder
from laconic.storage.strict_json import read_foreign_json

SUMMARY_EMBEDDING = "embed_summary.weight"
SUMMARY_LENGTH_KEY, ACCUMULATE_KEY = "summary_length", "accumulate_summary"  # of config.json
TRAINED_SEGMENT_TOKENS = 1536  # mean segment length in the paper's training


def is_published_compressor(path: str | Path) -> bool:
    """Return whether a folder is a published AutoCompressor, whose config.json has a number of summary tokens."""
    config = Path(path) / "config.json"
    return config.is_file() and bool(read_foreign_json(config).get(SUMMARY_LENGTH_KEY))


def is_compressor(path: str | Path) -> bool:
    """Return whether a path is a run of method autocompressor or a published AutoCompressor."""
    method = read_run_method(path)
    return is_published_compressor(path) if method is None else method == "autocompressor"


def load_published_compressor(
    path: str | Path, device: torch.device, dtype: torch.dtype | None = None
) -> TextCompressor:
    """Load a published AutoCompressor (parallel summaries, no bos) with its tokenizer and a segment length for it."""
    folder = Path(path)
    config = read_foreign_json(folder / "config.json")
    tensors = index_tensors(folder)
    kappa = config[SUMMARY_LENGTH_KEY]
    accumulates = config.get(ACCUMULATE_KEY)
    if type(accumulates) is not bool:
        raise InputError(f"{folder}/config.json has no {ACCUMULATE_KEY}; add it: true, or false for RMT")
    if SUMMARY_EMBEDDING not in tensors:
        raise InputError(
            f"{folder} has no tensor {SUMMARY_EMBEDDING} with {kappa} rows as in config.json; transformers' classes "
            "drop it, so convert the published file tensor by tensor"
        )
    decoder = Decoder.from_pretrained(folder, dtype, device, ignore_tensors=(SUMMARY_EMBEDDING,))
    shape, D = tensors[SUMMARY_EMBEDDING].spec.shape, decoder.config.hidden_size
    if shape != (kappa, D):
        raise InputError(
            f"{SUMMARY_EMBEDDING} {list(shape)}, but config.json says {[kappa, D]}; use files of one model"
        )
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, decoder.config)
    policy = "accumulate" if accumulates else "replace"
    compression = CompressionConfig.model_validate(
        {"max_vectors": kappa, "memory_policy": policy, "summary_init": "normal", "bos": "none"}
    )
    summaries = SummaryParameters(decoder, compression, eos_token_id=None)
    assert summaries.tokens is not None
    with torch.no_grad():
        summaries.tokens.copy_(tensors[SUMMARY_EMBEDDING].load())
    method = AutoCompressor(decoder, summaries, compression, total_steps=1).eval()
    context = decoder.config.max_position_embeddings
    if resolve_position_scheme(compression, decoder.config) != "zero":  # the memory takes positions too
        context //= 2
    segment_tokens = min(TRAINED_SEGMENT_TOKENS, context)
    return TextCompressor(method, tokenizer, segment_tokens, decoder.fingerprint, compute_writer_fingerprint(method))
