"""A memory and a prompt as the vectors that another program reads: equal to reading both here, or refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.errors import CorruptArtifactError, LaconicError, UsageError
from laconic.models.decoder import Decoder
from laconic.models.embeddings import prompt_embeddings
from tests.compression.test_memory import ABOUT
from tests.core.readings import decoder_of, noise, same

IDS = [[5, 9, 3], [7]]


def memory_of(decoder: Decoder, **changes: Any) -> SummaryMemory:
    live = torch.tensor([[True, True, False], [True, True, True]])
    memory = SummaryMemory.empty(2, 48, torch.float64).append(noise(1, 2, 3, 48), live, torch.tensor([9, 9]))
    return replace(memory, metadata=replace(ABOUT, **{"width": 48, "reader": decoder.fingerprint, **changes}))


@pytest.mark.parametrize("bos", [None, 4])
def test_what_is_handed_on_reads_as_memory_and_prompt_do(bos: int | None) -> None:
    decoder = decoder_of("llama")
    memory = memory_of(decoder, bos="none" if bos is None else "sink")
    rows = prompt_embeddings(memory, IDS, decoder, bos)
    for b, row in enumerate(rows):
        lead = decoder.embed(torch.tensor([[bos]]))[:, :1] if bos is not None else torch.zeros(1, 0, 48).double()
        state = decoder(torch.cat([lead, memory.to_list()[b][None]], 1)).state
        apart = decoder(decoder.embed(torch.tensor([IDS[b]])), state).hidden[0, -1]
        same(decoder(row[None]).hidden[0, -1], apart)
        assert row.dtype == decoder.token_embedding.weight.dtype


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"width": 47},
            CorruptArtifactError,
            "prompt embeddings: vectors of width 48, this model reads 48; load the run",
        ),
        ({"reader": "9" * 64}, CorruptArtifactError, "prompt embeddings: written for weights 9999…99, this model is "),
        ({"positions": "zero"}, UsageError, 'prompt embeddings: positions "zero" cannot be said there; compress with'),
        ({"bos": "sink"}, UsageError, 'prompt embeddings: the memory was written with bos "sink"; give the id'),
    ],
)
def test_what_another_program_could_not_place(change: dict[str, Any], error: type[LaconicError], says: str) -> None:
    decoder = decoder_of("llama")
    with pytest.raises(error, match=says):
        prompt_embeddings(memory_of(decoder, **change), IDS, decoder)


def test_what_is_no_memory_of_a_file_and_other_numbers_of_rows() -> None:
    decoder = decoder_of("llama")
    memory = memory_of(decoder)
    for bad in (replace(memory, metadata=None), replace(memory, log_s=torch.zeros(2, 3))):
        with pytest.raises(UsageError, match="prompt embeddings of a memory that is soft or of no provenance; load it"):
            prompt_embeddings(bad, IDS, decoder)
    with pytest.raises(UsageError, match="prompt embeddings: 1 prompts on a memory of 2 texts; give one each"):
        prompt_embeddings(memory, IDS[:1], decoder)


class Adapted(torch.nn.Linear):
    """A map as adapters wrap it."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.base_layer = torch.nn.Linear(1, 1)


def test_an_adapter_is_merged_first() -> None:
    decoder = Decoder(decoder_of("llama").config)
    decoder.add_module("wrapped", Adapted())
    with pytest.raises(UsageError, match=r"the reader has an adapter; merge it first \(laconic export RUN\)"):
        prompt_embeddings(memory_of(decoder), IDS, decoder)
