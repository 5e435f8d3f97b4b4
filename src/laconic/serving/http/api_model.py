"""The loaded model as the routes see it: its name, context, sampling defaults, and the memories it reads."""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from laconic.compression.kv.memory_file import KVMemoryMetadata
from laconic.compression.memory_file import MemoryMetadata
from laconic.data.documents.token_bytes import list_token_bytes
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.load_model import LoadedModel
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.experiment.text_models.kv_compressor import build_metadata
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.generation.published import PublishedSampling, read_published_sampling
from laconic.interfaces import PromptsAnswers
from laconic.models.decoder import Decoder
from laconic.serving.http.limits import ServerOptions
from laconic.serving.http.token_text import TokenBytes


@dataclass(frozen=True)
class ApiModel:
    """A loaded model under the name that requests give, with the server's options."""

    name: str
    model: LoadedModel
    options: ServerOptions = field(default_factory=ServerOptions)

    @property
    def decoder(self) -> Decoder:
        return self.model.decoder

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return list_token_bytes(self.tokenizer)

    @cached_property
    def published_sampling(self) -> PublishedSampling:
        return read_published_sampling(self.decoder.source_folder)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, at most."""
        return max(map(len, self.tokenizer.backend.get_vocab(with_added_tokens=True)))

    @property
    def context_size(self) -> int:
        return self.decoder.config.max_position_embeddings

    @property
    def has_logprobs(self) -> bool:
        """Whether answers have log probabilities; those of a method that only answers whole questions have none."""
        return not isinstance(self.model, Reasoner) or isinstance(self.model.method, PromptsAnswers)

    @property
    def memory_metadata(self) -> MemoryMetadata | KVMemoryMetadata | None:
        """Metadata of the memories that the model reads; None if it reads none."""
        if isinstance(self.model, TextCompressor):
            return self.model.metadata
        return build_metadata(self.decoder, self.tokenizer) if isinstance(self.model, LanguageModel) else None

    def check_reads_memories(self) -> None:
        """Raise UsageError if the model reads no memories."""
        if self.memory_metadata is None:
            hint = "/v1/sessions" if isinstance(self.model, NestedTextModel) else "laconic generate"
            raise UsageError(f"{self.name} reads no memories over HTTP; use {hint}")


def choose_model_name(path_or_name: str) -> str:
    """Return the name that requests give: the last part of a path, which says nothing about the machine's folders.

    Links are not followed. For a folder of the hub's cache, it is the model's name on the hub.
    """
    path = Path(os.path.abspath(path_or_name))  # Path.resolve would follow links
    if not path.exists():
        return path_or_name
    in_hub_cache = path.parent.name == "snapshots" and path.parts[-3].startswith("models--")
    return path.parts[-3].removeprefix("models--").replace("--", "/") if in_hub_cache else path.name
