"""The decoder of a recipe, its tokenizer, its adapter and what is learned beside it: from the hub, a run, or new."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from laconic.compression.memory_policy import check_fits
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig
from laconic.config.recipe import BUILT_IN_TOKENIZERS, LoraConfig, ModelConfig, Recipe
from laconic.data.synthetic.digits import build_digits_tokenizer
from laconic.data.synthetic.fact_recall import build_recall_tokenizer
from laconic.data.synthetic.formal_languages import build_languages_tokenizer
from laconic.data.synthetic.mqar import build_mqar_tokenizer
from laconic.data.tokenizer import Tokenizer, build_byte_tokenizer, load_tokenizer
from laconic.errors import InputError, UsageError
from laconic.experiment import build_nested
from laconic.experiment import lora as experiment_lora
from laconic.experiment.build_data import max_memory_slots
from laconic.latent.thoughts import LatentThoughts
from laconic.models import weights
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.decoder import Decoder

if TYPE_CHECKING:
    from peft import PeftModel

TOKENIZER_FACTORIES = (
    build_digits_tokenizer,
    build_recall_tokenizer,
    build_byte_tokenizer,
    build_mqar_tokenizer,
    build_languages_tokenizer,
)
TOKENIZERS_BY_NAME = dict(zip(BUILT_IN_TOKENIZERS, TOKENIZER_FACTORIES, strict=True))


@dataclass
class ModelParts:
    """What is trained and saved: the decoder, wrapped in place where there is an adapter, and what is learned beside.

    `base` is the fingerprint of the decoder before anything is put on it or trained.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    latents: LatentThoughts | None
    adapter: "PeftModel | None"
    base: str
    summary_parameters: SummaryParameters | None = None

    @property
    def extra_modules(self) -> dict[str, LatentThoughts | SummaryParameters]:
        """What is learned beside the decoder, by the file of a step that holds it."""
        found = {"thoughts.safetensors": self.latents, "summaries.safetensors": self.summary_parameters}
        return {name: module for name, module in found.items() if module is not None}


def load_model_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer of a checkpoint or of a new decoder. Raises `BadInput` (66)."""
    if model.tokenizer in TOKENIZERS_BY_NAME:
        return TOKENIZERS_BY_NAME[model.tokenizer]()
    named = model.tokenizer or model.name
    if named is None:
        raise InputError("model.tokenizer: absent; name the folder that holds tokenizer.json")
    return load_tokenizer(weights.find_checkpoint(named, model.revision))


def download_config_and_tokenizer(name: str, revision: str | None) -> Path:
    """The configuration and the tokenizer of a model on the hub. Raises `BadInput` (66)."""
    from huggingface_hub import snapshot_download

    asked = ["*config.json", "tokenizer.json", "vocab.json", "merges.txt", "special_tokens_map.json"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=asked, etag_timeout=5))
    except Exception as error:  # the hub's client raises of many kinds
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"{name}: the hub gives no configuration: {said}; "
            "model.name=FOLDER takes one that holds config.json and tokenizer.json"
        ) from None


def build_config(model: ModelConfig, vocab_size: int) -> DecoderConfig:
    """The sizes of a new decoder for so many words."""
    D, H = model.hidden_size, model.num_attention_heads
    if D % H:
        raise UsageError(f"model.num_attention_heads {H} does not divide model.hidden_size {D}")
    return DecoderConfig.tiny(
        str(model.family),
        hidden_size=D,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=H,
        num_key_value_heads=model.num_key_value_heads or H,
        head_dim=D // H,
        intermediate_size=model.intermediate_size or 2 * D,
        vocab_size=vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=model.tie_word_embeddings,
    )


def build_decoder(recipe: Recipe, config: DecoderConfig) -> Decoder:
    """A decoder of these sizes, drawn from the model's seed, or the run's."""
    model = recipe.model
    seed = recipe.seed if model.init_seed is None else model.init_seed
    if recipe.method == "hope":
        return build_nested.build_nested_model(recipe, config, seed)
    decoder = Decoder(config, seed=seed)
    if model.init == "fan_in":
        init_fan_in(decoder, model, seed)
    return decoder


@torch.no_grad()
def init_fan_in(decoder: Decoder, model: ModelConfig, seed: int) -> None:
    """Maps with std 1/sqrt(inputs), those that end a residual branch / sqrt(2 L); words and head as they are asked."""
    names, L = decoder.weight_names, decoder.config.num_hidden_layers
    generator = torch.Generator().manual_seed(seed)
    for name, p in decoder.named_parameters():
        if p.ndim != 2:
            continue
        module = name.removesuffix(".weight")
        std = p.shape[1] ** -0.5
        if module in (names.token_embedding, names.position_embedding):
            std = model.embedding_init_std
        elif module == names.head:
            std = model.head_init_std
        elif module.endswith((f".{names.o}", f".{names.down}")):
            std /= math.sqrt(2 * L)
        p.copy_(torch.randn(p.shape, generator=generator, device="cpu") * std)


def build_random_decoder(config: DecoderConfig, device: torch.device) -> Decoder:
    """A decoder of these sizes, drawn quickly where it is to be; what its numbers are means nothing."""
    with torch.device("meta"):
        decoder = Decoder(config, seed=None)
    decoder.to_empty(device=device)
    for p in decoder.parameters():
        nn.init.normal_(p.data, 0.0 if p.ndim == 2 else 1.0, 0.02)
    return decoder


def add_lora(decoder: Decoder, settings: LoraConfig, seed: int) -> "PeftModel":
    """LoRA by peft on the maps of the blocks; A is drawn from the seed, B is 0."""
    from peft import LoraConfig

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        bias="none",
        target_modules=attention_projection_names(decoder) if settings.target_modules == "attention" else "all-linear",
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return experiment_lora.add_adapter(decoder, config)


def attention_projection_names(decoder: Decoder) -> list[str]:
    """The maps of attention: q, k, v and o, or GPT-2's two."""
    names = WEIGHT_NAMES[decoder.config.family]
    return [name for name in (names.q, names.k, names.v, names.qkv, names.o) if name is not None]


def build_latents(decoder: Decoder, tokenizer: Tokenizer, recipe: Recipe) -> LatentThoughts | None:
    """The control vectors and the map of a recipe, as they start; None where the method has none."""
    how = recipe.latents
    if how is None or "latents" in recipe.unused_tables:
        return None
    given: dict[str, Any] = how.model_dump()
    start = given["control_init"]
    if start.startswith("copy:"):
        ids = tokenizer.encode(start.removeprefix("copy:"), add_special_tokens=False)
        if tokenizer.special_token_id("unk_token") in ids:
            raise UsageError(
                f'latents.control_init "{start}": the tokenizer has no word for a part of it; copy another text'
            )
        given["control_init"] = tuple(ids)
    elif start not in ("mean", "normal"):
        raise UsageError(f'latents.control_init "{start}": write mean, normal, or copy:TEXT')
    given["num_iterations"] = given.pop("jacobi_iterations")
    return LatentThoughts(decoder, **given, seed=recipe.seed)


def build_summary_parameters(decoder: Decoder, tokenizer: Tokenizer, recipe: Recipe) -> SummaryParameters | None:
    """Summary tokens, maps and heads of a recipe, as they start; None where the method has none."""
    if recipe.compression is None or "compression" in recipe.unused_tables:
        return None
    eos = tokenizer.special_token_id("eos_token")
    if eos is None and decoder.config.eos_token_ids:
        eos = decoder.config.eos_token_ids[0]
    return SummaryParameters(
        decoder, resolve_bos(recipe.compression, tokenizer), recipe.stop_head, eos_token_id=eos, seed=recipe.seed
    )


def resolve_bos(reading: CompressionConfig, tokenizer: Tokenizer) -> CompressionConfig:
    """The settings with `bos` said: a sink where the tokenizer begins every text with one, else none."""
    if reading.bos is not None:
        return reading
    bos = tokenizer.special_token_id("bos_token")
    begins = bos is not None and tokenizer.encode("a")[0] == bos
    return reading.model_copy(update={"bos": "sink" if begins else "none"})


def build_parts(recipe: Recipe, decoder: Decoder, tokenizer: Tokenizer, base: str) -> ModelParts:
    """Adapter and all beside a decoder, at their start, and only what is to be trained asking for gradients."""
    thoughts, summaries = (
        build_latents(decoder, tokenizer, recipe),
        build_summary_parameters(decoder, tokenizer, recipe),
    )
    decoder.requires_grad_(recipe.train.trainable == "full")
    lora = recipe.lora if recipe.train.trainable == "lora" else None
    adapter = add_lora(decoder, lora, recipe.seed) if lora else None
    return ModelParts(decoder, tokenizer, thoughts, adapter, base, summaries)


def check_context_length(recipe: Recipe, config: DecoderConfig) -> None:
    """Sizes that do not go together, with both numbers, before a weight is read. Raises `Usage` (2)."""
    limit, asked = config.max_position_embeddings, recipe.data.max_tokens or 0
    count = recipe.latents.num_latents if recipe.latents else 0
    if asked + count > limit:
        raise UsageError(
            f"data.max_tokens {asked} and latents.num_latents {count} are {asked + count} positions, "
            f"the model has {limit}; lower one of them"
        )
    check_segment_fits(recipe, limit, config)
    layers = recipe.kv_distillation.layers if recipe.kv_distillation and recipe.kv_distillation.layers else ()
    if layers and max(layers) >= config.num_hidden_layers:
        raise UsageError(
            f"kv_distillation.layers names layer {max(layers)}, the model has {config.num_hidden_layers}, from 0; "
            "leave it out"
        )


def check_segment_fits(recipe: Recipe, limit: int, config: DecoderConfig) -> None:
    """Raises `Usage` (2) where a segment of a row, with the longest memory that can stand before it, does not fit."""
    how, task, text = recipe.compression, recipe.data.recall, recipe.data.text
    if (
        recipe.method == "lm"
        and recipe.data.source == "text"
        and text.segments_per_window * text.mean_segment_tokens > limit
    ):
        raise UsageError(
            f"data.text.segments_per_window {text.segments_per_window} of {text.mean_segment_tokens} tokens: plain text is read at once, and the model has "
            f"{limit} positions; lower one of them"
        )
    if recipe.method == "hope" and recipe.data.source == "text" and text.row_tokens > limit:
        raise UsageError(
            f"data.text.row_tokens {text.row_tokens}: attention reads a row at once, and the model has {limit} positions; "
            "lower it"
        )
    if how is None or recipe.method != "autocompressor":
        return
    lead = int(how.bos in ("sink", "first"))
    if recipe.data.source == "recall":
        lengths, n = (task.segment_tokens, 2 * task.num_queries), task.num_segments + 1
    else:
        lengths, n = (
            (text.mean_segment_tokens, text.max_segment_tokens or text.mean_segment_tokens),
            text.row_tokens // text.mean_segment_tokens,
        )
    for length in lengths:
        check_fits(config, how, lead, length, max_memory_slots(how, n - 1))


def check_vocabulary(tokenizer: Tokenizer, config: DecoderConfig) -> None:
    """Raises `BadInput` (66) for a tokenizer of more words than the decoder has; tokens added to it may be unused."""
    own = tokenizer.backend.get_vocab_size(with_added_tokens=False)
    ends = [id + 1 for name in ("bos_token", "eos_token") if (id := tokenizer.special_token_id(name)) is not None]
    if (asked := max(own, *ends, 0)) > config.vocab_size:
        raise InputError(
            f"the tokenizer has {asked} words, the model {config.vocab_size}; take the one it was made with"
        )


def load_decoder_config(recipe: Recipe, tokenizer: Tokenizer, folder: Path | None) -> DecoderConfig:
    """The decoder's sizes, without its weights."""
    if folder is not None:
        return build_nested.read_decoder_config(folder)
    config = build_config(recipe.model, tokenizer.vocab_size)
    return build_nested.adapt_config(recipe, config) if recipe.method == "hope" else config
