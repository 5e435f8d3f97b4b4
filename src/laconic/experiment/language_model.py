"""A plain language model: continue texts with a checkpoint, or with the decoder that a run trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.export import export_model
from laconic.generation.config import GREEDY, GenerationConfig
from laconic.generation.generate import Generation, generate
from laconic.models.decoder import Decoder


@dataclass(frozen=True)
class LanguageModel:
    """A decoder with its tokenizer, as `laconic.load` returns it for a checkpoint.

    Attributes:
        decoder: The decoder.
        tokenizer: Its tokenizer.
        recipe: Recipe of the run that trained it; None for a checkpoint.

    Example:
        >>> import laconic
        >>> from laconic.data.tokenizer import build_byte_tokenizer
        >>> tokenizer = build_byte_tokenizer()
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama", vocab_size=tokenizer.vocab_size))
        >>> model = laconic.LanguageModel(decoder, tokenizer)
        >>> len(model.generate(["Once", "The end"], laconic.GenerationConfig(max_tokens=4)))
        2
        >>> model
        LanguageModel(llama, 2 layers, width 48)
    """

    decoder: Decoder
    tokenizer: Tokenizer
    recipe: Recipe | None = None

    def generate(self, prompts: Sequence[str] | str, config: GenerationConfig = GREEDY) -> list[Generation]:
        """Continue prompts.

        Args:
            prompts: Texts; a single text is one prompt.
            config: Length, sampling, stop conditions and streaming, as in `laconic.generate`.

        Returns:
            One `laconic.Generation` per prompt.

        Raises:
            UsageError: If a prompt is empty, or the options do not fit the model.
        """
        return generate(self.decoder, self.tokenizer, prompts, config=config)

    def save(self, folder: str | Path) -> None:
        """Write the model as a Hugging Face folder, which transformers and `laconic.load` read.

        Args:
            folder: Must not exist, or be empty.

        Raises:
            BusyError: If the folder is not empty.
            DiskError: If the disk is full.
        """
        export_model(self.decoder, folder, self.tokenizer)

    def __repr__(self) -> str:
        return f"LanguageModel({describe_decoder(self.decoder)})"


def describe_decoder(decoder: Decoder) -> str:
    """Return name, layers and width of a decoder on one line."""
    config = decoder.config
    return f"{Path(decoder.name_or_path).name}, {config.num_hidden_layers} layers, width {config.hidden_size}"
