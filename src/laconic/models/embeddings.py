"""A memory and a prompt as the vectors that another program reads in place of words: prompt embeddings, as vLLM's."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import abbreviate_hash
from laconic.errors import CorruptArtifactError, UsageError
from laconic.models.decoder import Decoder


def prompt_embeddings(
    memory: SummaryMemory, ids: Sequence[Sequence[int]], decoder: Decoder, bos: int | None = None
) -> list[Float[Tensor, "S D"]]:
    """Of each row [bos;] live vectors, then the vectors of its ids, in the decoder's type; hand them on as they are.

    `bos` is the id of the sink where the memory was written with one. Raises `Usage` (2) for what another program
    could not place: soft memories, positions that are not one after another, an adapter; `Damaged` (76) for a memory
    of another model.
    """
    about = memory.metadata
    if about is None or memory.log_s is not None:
        raise UsageError("prompt embeddings of a memory that is soft or of no provenance; load it from its file")
    if about.width != decoder.config.hidden_size or about.width != memory.D:
        raise CorruptArtifactError(
            f"prompt embeddings: vectors of width {memory.D}, this model reads {decoder.config.hidden_size}; "
            "load the run that wrote it"
        )
    if any(".base_layer." in name for name, _ in decoder.named_parameters()):
        raise UsageError("prompt embeddings: the reader has an adapter; merge it first (laconic export RUN)")
    if about.reader != decoder.fingerprint:
        raise CorruptArtifactError(
            f"prompt embeddings: written for weights {abbreviate_hash(about.reader)}, this model is "
            f"{abbreviate_hash(decoder.fingerprint)}; load the run that wrote it"
        )
    if about.positions != "contiguous":
        raise UsageError(
            f'prompt embeddings: positions "{about.positions}" cannot be said there; compress with contiguous'
        )
    if about.bos != "none" and bos is None:
        raise UsageError(f'prompt embeddings: the memory was written with bos "{about.bos}"; give the id')
    if len(ids) != memory.B:
        raise UsageError(f"prompt embeddings: {len(ids)} prompts on a memory of {memory.B} texts; give one each")
    table = decoder.token_embedding.weight
    lead = [bos] if about.bos == "sink" and bos is not None else []
    with torch.no_grad():
        rows = [
            torch.cat([embed_row(decoder, lead), vectors.to(table.device, table.dtype), embed_row(decoder, row)])
            for vectors, row in zip(memory.to_list(), ids, strict=True)
        ]
    return rows


def embed_row(decoder: Decoder, ids: Sequence[int]) -> Float[Tensor, "T D"]:
    """The vectors of a row of ids, which may be empty."""
    return decoder.embed(torch.tensor([list(ids)], dtype=torch.long, device=decoder.token_embedding.weight.device))[0]
