"""A memory and a prompt as the vectors that another program reads in place of words: prompt embeddings, as vLLM's."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.core.decoder import Decoder
from laconic.core.errors import Damaged, Usage
from laconic.core.memory import Memory
from laconic.core.provenance import short


def prompt_embeddings(
    memory: Memory, ids: Sequence[Sequence[int]], decoder: Decoder, bos: int | None = None
) -> list[Float[Tensor, "S D"]]:
    """Of each row [bos;] live vectors, then the vectors of its ids, in the decoder's type; hand them on as they are.

    `bos` is the id of the sink where the memory was written with one. Raises `Usage` (2) for what another program
    could not place: soft memories, positions that are not one after another, an adapter; `Damaged` (76) for a memory
    of another model.
    """
    about = memory.provenance
    if about is None or memory.log_s is not None:
        raise Usage("prompt embeddings of a memory that is soft or of no provenance; load it from its file")
    if about.width != decoder.config.hidden_size or about.width != memory.D:
        raise Damaged(
            f"prompt embeddings: vectors of width {memory.D}, this model reads {decoder.config.hidden_size}; "
            "load the run that wrote it"
        )
    if any(".base_layer." in name for name, _ in decoder.named_parameters()):
        raise Usage("prompt embeddings: the reader has an adapter; merge it first (laconic export RUN)")
    if about.reader != decoder.fingerprint:
        raise Damaged(
            f"prompt embeddings: written for weights {short(about.reader)}, this model is "
            f"{short(decoder.fingerprint)}; load the run that wrote it"
        )
    if about.positions != "contiguous":
        raise Usage(f'prompt embeddings: positions "{about.positions}" cannot be said there; compress with contiguous')
    if about.bos != "none" and bos is None:
        raise Usage(f'prompt embeddings: the memory was written with bos "{about.bos}"; give the id')
    if len(ids) != memory.B:
        raise Usage(f"prompt embeddings: {len(ids)} prompts on a memory of {memory.B} texts; give one each")
    table = decoder.words.weight
    lead = [bos] if about.bos == "sink" and bos is not None else []
    with torch.no_grad():
        rows = [
            torch.cat([embedded(decoder, lead), vectors.to(table.device, table.dtype), embedded(decoder, row)])
            for vectors, row in zip(memory.ragged(), ids, strict=True)
        ]
    return rows


def embedded(decoder: Decoder, ids: Sequence[int]) -> Float[Tensor, "T D"]:
    """The vectors of a row of ids, which may be empty."""
    return decoder.embed(torch.tensor([list(ids)], dtype=torch.long, device=decoder.words.weight.device))[0]
