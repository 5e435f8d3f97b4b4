"""Build the decoder, tokenizer, adapter and trainable extras of a recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from laconic.compression.memory_policy import check_fits
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig
from laconic.config.recipe import BUILT_IN_TOKENIZERS, LoraConfig, ModelConfig, Recipe
from laconic.data.synthetic.digit_documents import build_digit_documents_tokenizer
from laconic.data.synthetic.digits import build_digits_tokenizer
from laconic.data.synthetic.fact_recall import FactRecallDataset
from laconic.data.synthetic.formal_languages import FormalLanguageDataset
from laconic.data.synthetic.mqar import MQARDataset
from laconic.data.tokenizer import Tokenizer, build_byte_tokenizer, load_tokenizer
from laconic.errors import InputError, UsageError
from laconic.experiment.from_recipe import build_nested
from laconic.experiment.from_recipe.build_data import max_memory_slots
from laconic.experiment.from_recipe.custom_method import MethodParameters
from laconic.experiment.lora import lora as experiment_lora
from laconic.latent.thoughts import LatentThoughts
from laconic.models.checkpoints import weights
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.decoder import Decoder

if TYPE_CHECKING:
    from peft import PeftModel

TOKENIZER_FACTORIES = (
    build_digits_tokenizer,
    FactRecallDataset.build_tokenizer,
    build_byte_tokenizer,
    MQARDataset.build_tokenizer,
    FormalLanguageDataset.build_tokenizer,
    build_digit_documents_tokenizer,
)
TOKENIZERS_BY_NAME = dict(zip(BUILT_IN_TOKENIZERS, TOKENIZER_FACTORIES, strict=True))


@dataclass
class ModelParts:
    """The modules that are trained and saved; an adapter wraps the decoder in place.

    `base` is the fingerprint of the decoder before training.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    latents: LatentThoughts | None
    adapter: "PeftModel | None"
    base: str
    summary_parameters: SummaryParameters | None = None
    method_parameters: MethodParameters | None = None

    @property
    def extra_modules(self) -> dict[str, LatentThoughts | SummaryParameters | MethodParameters]:
        """Trainable modules beside the decoder, by their file name in a step."""
        modules = {
            "thoughts.safetensors": self.latents,
            "summaries.safetensors": self.summary_parameters,
            "method.safetensors": self.method_parameters,
        }
        return {name: module for name, module in modules.items() if module is not None}


def load_model_tokenizer(model: ModelConfig) -> Tokenizer:
    if model.tokenizer in TOKENIZERS_BY_NAME:
        return TOKENIZERS_BY_NAME[model.tokenizer]()
    name = model.tokenizer or model.name
    if name is None:
        raise InputError("model.tokenizer: missing; name the folder that holds tokenizer.json")
    return load_tokenizer(weights.find_checkpoint(name, model.revision, with_weights=False))


def build_config(model: ModelConfig, vocab_size: int) -> DecoderConfig:
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
    """Build a decoder with random weights from the model's seed, by default the run's."""
    seed = recipe.seed if recipe.model.init_seed is None else recipe.model.init_seed
    decoder = build_nested.create_decoder(recipe, config, seed)
    if recipe.model.init == "fan_in":
        build_nested.init_fan_in(decoder, recipe.model, seed)
    return decoder


def build_random_decoder(config: DecoderConfig, device: torch.device) -> Decoder:
    """Build a decoder with arbitrary weights quickly, directly on the device."""
    with torch.device("meta"):
        decoder = Decoder(config, seed=None)
    decoder.to_empty(device=device)
    for p in decoder.parameters():
        nn.init.normal_(p.data, 0.0 if p.ndim == 2 else 1.0, 0.02)
    return decoder


def add_lora(decoder: Decoder, config: LoraConfig, seed: int) -> "PeftModel":
    """Put LoRA by peft on the linear layers of the blocks; A is random, B is 0."""
    from peft import LoraConfig as PeftLoraConfig

    targets: str | list[str] = "all-linear"
    if config.target_modules == "attention":
        names = WEIGHT_NAMES[decoder.config.family]
        targets = [name for name in (names.q, names.k, names.v, names.qkv, names.o) if name is not None]
    peft_config = PeftLoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, bias="none", target_modules=targets
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return experiment_lora.add_adapter(decoder, peft_config)


def build_latents(decoder: Decoder, tokenizer: Tokenizer, recipe: Recipe) -> LatentThoughts | None:
    """Build the initial control vectors and projection of a recipe; None if the method has none."""
    config = recipe.latents
    if config is None or not recipe.num_latents:
        return None
    options: dict[str, Any] = config.model_dump()
    start = config.control_init
    if start.startswith("copy:"):
        ids = tokenizer.encode(start.removeprefix("copy:"), add_special_tokens=False)
        if tokenizer.special_token_id("unk_token") in ids:
            raise UsageError(f'latents.control_init "{start}": it contains unknown tokens; copy another text')
        options["control_init"] = tuple(ids)
    elif start not in ("mean", "normal"):
        raise UsageError(f'latents.control_init "{start}": write mean, normal, or copy:TEXT')
    options["num_iterations"] = options.pop("jacobi_iterations")
    del options["length_cost"], options["head_only_after"]  # of training
    return LatentThoughts(decoder, **options, seed=recipe.seed)


def build_summary_parameters(decoder: Decoder, tokenizer: Tokenizer, recipe: Recipe) -> SummaryParameters | None:
    """Build the initial summary tokens, maps and heads of a recipe; None if the method has none."""
    if recipe.compression is None or "compression" in recipe.unused_tables:
        return None
    eos = tokenizer.special_token_id("eos_token")
    if eos is None and decoder.config.eos_token_ids:
        eos = decoder.config.eos_token_ids[0]
    config = resolve_summary_init(resolve_bos(recipe.compression, tokenizer), recipe.model)
    stop_head = recipe.stop_head if recipe.method == "autocompressor" else None
    return SummaryParameters(decoder, config, stop_head, eos_token_id=eos, seed=recipe.seed)


def resolve_summary_init(config: CompressionConfig, model: ModelConfig) -> CompressionConfig:
    """Return the options with `summary_init` set: the last tokens for a checkpoint, which untrained vectors harm."""
    if config.summary_init is not None:
        return config
    copies = model.name is not None and config.can_copy_last_tokens
    return config.model_copy(update={"summary_init": "last_tokens" if copies else "eos"})


def resolve_bos(config: CompressionConfig, tokenizer: Tokenizer) -> CompressionConfig:
    """Return the options with `bos` set: a sink if the tokenizer adds one to every text, else none."""
    if config.bos is not None:
        return config
    bos = tokenizer.special_token_id("bos_token")
    is_added = bos is not None and tokenizer.encode("a")[0] == bos
    return config.model_copy(update={"bos": "sink" if is_added else "none"})


def build_parts(
    recipe: Recipe, decoder: Decoder, tokenizer: Tokenizer, base: str, adapter_folder: Path | None = None
) -> ModelParts:
    """Build the extras of a decoder, and its adapter, or load that; only trainable parameters require gradients."""
    latents = build_latents(decoder, tokenizer, recipe)
    summary_parameters = build_summary_parameters(decoder, tokenizer, recipe)
    decoder.requires_grad_(recipe.train.trainable == "full")
    adapter = None
    if recipe.train.trainable == "lora" and adapter_folder is not None:
        adapter = experiment_lora.load_adapter(decoder, adapter_folder, trainable=True)
    elif recipe.train.trainable == "lora" and recipe.lora is not None:
        adapter = add_lora(decoder, recipe.lora, recipe.seed)
    return ModelParts(decoder, tokenizer, latents, adapter, base, summary_parameters)


def check_context_length(recipe: Recipe, config: DecoderConfig) -> None:
    """Raise UsageError if rows, segments or layers of a recipe do not fit the decoder; no weight is needed."""
    limit = config.max_position_embeddings
    row_tokens = recipe.data.max_tokens or 0
    num_latents = recipe.num_latents
    if row_tokens + num_latents > limit:
        raise UsageError(
            f"data.max_tokens {row_tokens} and latents.num_latents {num_latents} need {row_tokens + num_latents} "
            f"positions, the model has {limit}; lower one of them"
        )
    check_segment_fits(recipe, config)
    layers = recipe.kv_distillation.layers if recipe.kv_distillation and recipe.method == "kava" else None
    if layers and max(layers) >= config.num_hidden_layers:
        raise UsageError(f"kv_distillation.layers names layer {max(layers)}; the model has {config.num_hidden_layers}")


def check_segment_fits(recipe: Recipe, config: DecoderConfig) -> None:
    """Raise UsageError if a segment with the longest memory before it exceeds the context."""
    compression, task, text = recipe.compression, recipe.data.recall, recipe.data.text
    limit, has_text = config.max_position_embeddings, recipe.data.source == "text"
    if recipe.method == "lm" and has_text and text.segments_per_window * text.mean_segment_tokens > limit:
        raise UsageError(
            f"data.text.segments_per_window {text.segments_per_window} of {text.mean_segment_tokens} tokens: a "
            f"window is read at once, but the model has {limit} positions; lower one of them"
        )
    if recipe.method == "hope" and has_text and text.row_tokens > limit:
        raise UsageError(
            f"data.text.row_tokens {text.row_tokens}: attention reads a row at once, but the model has {limit} "
            "positions; lower it"
        )
    if compression is None or "compression" in recipe.unused_tables:
        return
    prefix_length = int(compression.bos == "sink")
    if recipe.reads_documents:  # the number of segments is known once the rows are
        segment_tokens, document_tokens = recipe.data.segment_tokens, recipe.data.digits.document_tokens
        lengths = (min(segment_tokens, document_tokens or segment_tokens),)
        n = 1
    elif recipe.data.source == "recall":
        lengths = (task.segment_tokens, 2 * task.num_queries)
        n = task.num_segments + 1
    else:
        lengths = (text.mean_segment_tokens, text.max_segment_tokens or text.mean_segment_tokens)
        n = text.row_tokens // text.mean_segment_tokens
    for length in lengths:
        check_fits(config, compression, prefix_length, length, max_memory_slots(compression, n - 1))


def check_vocabulary(tokenizer: Tokenizer, config: DecoderConfig) -> None:
    """Raise InputError if the tokenizer has more tokens than the decoder; added tokens may be unused."""
    base = tokenizer.backend.get_vocab_size(with_added_tokens=False)
    special = [tokenizer.special_token_id(name) for name in ("bos_token", "eos_token")]
    needed = max(base, *(id + 1 for id in special if id is not None), 0)
    if needed > config.vocab_size:
        raise InputError(f"the tokenizer has {needed} tokens, the model {config.vocab_size}; use the model's own")
