"""Flags that several commands have: those of a model in `generate`, `chat` and `serve`, and those of sampling."""

from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import UseAppendAction

from laconic.cli.arguments import Device, OptionalDtype, OptionalFloat, OptionalInt, OptionalQuantization, OptionalStr
from laconic.console import is_interactive, log_note, status

if TYPE_CHECKING:
    from laconic.experiment.load_model import LoadedModel
    from laconic.generation.config import GenerationConfig

SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def import_with_status(text: str, module: str = "laconic.experiment.load_model") -> None:
    """Import a module, and torch with it, which takes seconds on a busy machine; a terminal shows a text meanwhile."""
    with status(text) if is_interactive() else nullcontext():
        import_module(module)


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The numbers of a model and where it runs."""

    dtype: OptionalDtype = None
    """compute dtype (default: the stored one; on a CPU that is slow at it, float32)"""
    quantize: OptionalQuantization = None
    """int8: round the weights of a checkpoint to 8 bits, which decodes faster on CPUs and takes less memory"""
    device: Device = "auto"
    revision: OptionalStr = None
    """commit, tag or branch on the hub"""

    def load_model(self, name: str, allow_missing: tuple[str, ...] = ()) -> "LoadedModel":
        """Load a checkpoint or a run, for which the flags other than `device` are refused."""
        import laconic

        return laconic.load(
            name,
            device=self.device,
            dtype=self.dtype,
            revision=self.revision,
            quantize=self.quantize,
            allow_missing=allow_missing,
        )


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling; without any of these flags the most likely token is taken."""

    sample: bool = False
    """sample as the model's generation_config.json says; the flags below take precedence over it"""
    temperature: OptionalFloat = None
    """0: take the most likely token (default: 0; as published, else 1, with --sample; 1 with --top-k, --top-p, --min-p
    or --seed)"""
    top_k: OptionalInt = None
    """sample from the k most likely tokens; 0: all"""
    top_p: OptionalFloat = None
    """sample from the most likely tokens whose probabilities add up to this"""
    min_p: OptionalFloat = None
    """sample from tokens at least this many times as likely as the most likely one"""
    repetition_penalty: OptionalFloat = None
    """values above 1 make tokens that occurred before less likely"""
    stop_string: UseAppendAction[tuple[str, ...]] = ()
    """end the output before this text"""
    seed: OptionalInt = None
    """random seed for sampling (default: 0)"""

    def sampling_config(self, max_tokens: int, folder: Path | None = None) -> "GenerationConfig":
        """Return the options of generation that the flags set; `folder` holds the published ones of `--sample`."""
        from laconic.generation.config import GenerationConfig
        from laconic.generation.published import read_published_sampling

        options: dict[str, Any] = {
            name: getattr(self, name) for name in SAMPLING_OPTIONS if getattr(self, name) is not None
        }
        if self.sample:
            published = read_published_sampling(folder)
            options = published.options | options
            log_note(published._replace(options=options).describe())
        elif self.temperature is None and any(x is not None for x in (self.top_k, self.top_p, self.min_p, self.seed)):
            options["temperature"] = 1.0  # these flags have no effect on the most likely token
        return GenerationConfig(max_tokens=max_tokens, stop_strings=self.stop_string, seed=self.seed or 0, **options)
