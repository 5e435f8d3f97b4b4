"""The decoder of a recipe, its tokenizer, its adapter and what is learned beside it: from the hub, a run, or new."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from laconic.core import weights
from laconic.core.decoder import Decoder
from laconic.core.errors import BadInput, Usage
from laconic.core.families import NAMES, DecoderConfig
from laconic.core.thoughts import Thoughts
from laconic.data.languages import languages_tokenizer
from laconic.data.mqar import mqar_tokenizer
from laconic.data.recall import recall_tokenizer
from laconic.data.synthetic import digits_tokenizer
from laconic.data.tokens import Tokenizer, byte_tokenizer, load_tokenizer
from laconic.methods.policies import check_room
from laconic.methods.settings import Reading
from laconic.methods.summaries import Summaries
from laconic.recipe import adapters, learners
from laconic.recipe.rows import slots_before
from laconic.recipe.schema import BUILT_IN, Adapter, Model, Recipe

if TYPE_CHECKING:
    from peft import PeftModel

TOKENIZERS = (digits_tokenizer, recall_tokenizer, byte_tokenizer, mqar_tokenizer, languages_tokenizer)
MADE = dict(zip(BUILT_IN, TOKENIZERS, strict=True))


@dataclass
class Parts:
    """What is trained and saved: the decoder, wrapped in place where there is an adapter, and what is learned beside.

    `base` is the fingerprint of the decoder before anything is put on it or trained.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    thoughts: Thoughts | None
    adapter: "PeftModel | None"
    base: str
    summaries: Summaries | None = None

    @property
    def beside(self) -> dict[str, Thoughts | Summaries]:
        """What is learned beside the decoder, by the file of a step that holds it."""
        found = {"thoughts.safetensors": self.thoughts, "summaries.safetensors": self.summaries}
        return {name: module for name, module in found.items() if module is not None}


def tokenizer_of(model: Model) -> Tokenizer:
    """The tokenizer of a checkpoint or of a new decoder. Raises `BadInput` (66)."""
    if model.tokenizer in MADE:
        return MADE[model.tokenizer]()
    named = model.tokenizer or model.name
    if named is None:
        raise BadInput("model.tokenizer: absent; name the folder that holds tokenizer.json")
    return load_tokenizer(weights.find(named, model.revision))


def small_files(name: str, revision: str | None) -> Path:
    """The configuration and the tokenizer of a model on the hub. Raises `BadInput` (66)."""
    from huggingface_hub import snapshot_download

    asked = ["*config.json", "tokenizer.json", "vocab.json", "merges.txt", "special_tokens_map.json"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=asked, etag_timeout=5))
    except Exception as error:  # the hub's client raises of many kinds
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BadInput(
            f"{name}: the hub gives no configuration: {said}; "
            "model.name=FOLDER takes one that holds config.json and tokenizer.json"
        ) from None


def new_config(model: Model, words: int) -> DecoderConfig:
    """The sizes of a new decoder for so many words."""
    D, H = model.hidden_size, model.num_attention_heads
    if D % H:
        raise Usage(f"model.num_attention_heads {H} does not divide model.hidden_size {D}")
    return DecoderConfig.small(
        str(model.family),
        hidden_size=D,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=H,
        num_key_value_heads=model.num_key_value_heads or H,
        head_dim=D // H,
        intermediate_size=model.intermediate_size or 2 * D,
        vocab_size=words,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=model.tie_word_embeddings,
    )


def new_decoder(recipe: Recipe, config: DecoderConfig) -> Decoder:
    """A decoder of these sizes, drawn from the model's seed, or the run's."""
    model = recipe.model
    seed = recipe.seed if model.seed is None else model.seed
    if recipe.method == "hope":
        return learners.new(recipe, config, seed)
    decoder = Decoder(config, seed=seed)
    if model.init == "fan_in":
        draw(decoder, model, seed)
    return decoder


@torch.no_grad()
def draw(decoder: Decoder, model: Model, seed: int) -> None:
    """Maps with std 1/sqrt(inputs), those that end a residual branch / sqrt(2 L); words and head as they are asked."""
    names, L = decoder.names, decoder.config.num_hidden_layers
    generator = torch.Generator().manual_seed(seed)
    for name, p in decoder.named_parameters():
        if p.ndim != 2:
            continue
        module = name.removesuffix(".weight")
        std = p.shape[1] ** -0.5
        if module in (names.words, names.places):
            std = model.init_words
        elif module == names.head:
            std = model.init_head
        elif module.endswith((f".{names.o}", f".{names.down}")):
            std /= math.sqrt(2 * L)
        p.copy_(torch.randn(p.shape, generator=generator, device="cpu") * std)


def drawn(config: DecoderConfig, device: torch.device) -> Decoder:
    """A decoder of these sizes, drawn quickly where it is to be; what its numbers are means nothing."""
    with torch.device("meta"):
        decoder = Decoder(config, seed=None)
    decoder.to_empty(device=device)
    for p in decoder.parameters():
        nn.init.normal_(p.data, 0.0 if p.ndim == 2 else 1.0, 0.02)
    return decoder


def with_adapter(decoder: Decoder, settings: Adapter, seed: int) -> "PeftModel":
    """LoRA by peft on the maps of the blocks; A is drawn from the seed, B is 0."""
    from peft import LoraConfig

    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        bias="none",
        target_modules=attention_maps(decoder) if settings.modules == "attention" else "all-linear",
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return adapters.adapted(decoder, config)


def attention_maps(decoder: Decoder) -> list[str]:
    """The maps of attention: q, k, v and o, or GPT-2's two."""
    names = NAMES[decoder.config.family]
    return [name for name in (names.q, names.k, names.v, names.qkv, names.o) if name is not None]


def new_thoughts(decoder: Decoder, tokenizer: Tokenizer, recipe: Recipe) -> Thoughts | None:
    """The control vectors and the map of a recipe, as they start; None where the method has none."""
    how = recipe.thinking
    if how is None or "thinking" in recipe.unread:
        return None
    given: dict[str, Any] = how.model_dump()
    start = given["control_init"]
    if start.startswith("copy:"):
        ids = tokenizer.encode(start.removeprefix("copy:"), special=False)
        if tokenizer.id_of("unk_token") in ids:
            raise Usage(
                f'thinking.control_init "{start}": the tokenizer has no word for a part of it; copy another text'
            )
        given["control_init"] = tuple(ids)
    elif start not in ("mean", "normal"):
        raise Usage(f'thinking.control_init "{start}": write mean, normal, or copy:TEXT')
    return Thoughts(decoder, **given, seed=recipe.seed)


def new_summaries(decoder: Decoder, tokenizer: Tokenizer, recipe: Recipe) -> Summaries | None:
    """Summary tokens, maps and heads of a recipe, as they start; None where the method has none."""
    if recipe.reading is None or "reading" in recipe.unread:
        return None
    eos = tokenizer.id_of("eos_token")
    if eos is None and decoder.config.eos:
        eos = decoder.config.eos[0]
    return Summaries(decoder, settled(recipe.reading, tokenizer), recipe.halting, eos=eos, seed=recipe.seed)


def settled(reading: Reading, tokenizer: Tokenizer) -> Reading:
    """The settings with `bos` said: a sink where the tokenizer begins every text with one, else none."""
    if reading.bos is not None:
        return reading
    bos = tokenizer.id_of("bos_token")
    begins = bos is not None and tokenizer.encode("a")[0] == bos
    return reading.model_copy(update={"bos": "sink" if begins else "none"})


def fresh(recipe: Recipe, decoder: Decoder, tokenizer: Tokenizer, base: str) -> Parts:
    """Adapter and all beside a decoder, at their start, and only what is to be trained asking for gradients."""
    thoughts, summaries = new_thoughts(decoder, tokenizer, recipe), new_summaries(decoder, tokenizer, recipe)
    decoder.requires_grad_(recipe.train.what == "full")
    lora = recipe.lora if recipe.train.what == "lora" else None
    adapter = with_adapter(decoder, lora, recipe.seed) if lora else None
    return Parts(decoder, tokenizer, thoughts, adapter, base, summaries)


def check_context(recipe: Recipe, config: DecoderConfig) -> None:
    """Sizes that do not go together, with both numbers, before a weight is read. Raises `Usage` (2)."""
    limit, asked = config.max_position_embeddings, recipe.data.max_tokens or 0
    count = recipe.thinking.count if recipe.thinking else 0
    if asked + count > limit:
        raise Usage(
            f"data.max_tokens {asked} and thinking.count {count} are {asked + count} positions, "
            f"the model has {limit}; lower one of them"
        )
    check_segments(recipe, limit, config)
    layers = recipe.matching.kv_layers if recipe.matching and recipe.matching.kv_layers else ()
    if layers and max(layers) >= config.num_hidden_layers:
        raise Usage(
            f"matching.kv_layers names layer {max(layers)}, the model has {config.num_hidden_layers}, from 0; "
            "leave it out"
        )


def check_segments(recipe: Recipe, limit: int, config: DecoderConfig) -> None:
    """Raises `Usage` (2) where a segment of a row, with the longest memory that can stand before it, does not fit."""
    how, task, text = recipe.reading, recipe.data.recall, recipe.data.text
    if recipe.method == "plain" and recipe.data.kind == "text" and text.window * text.mean > limit:
        raise Usage(
            f"data.text.window {text.window} of {text.mean} tokens: plain text is read at once, and the model has "
            f"{limit} positions; lower one of them"
        )
    if recipe.method == "hope" and recipe.data.kind == "text" and text.tokens > limit:
        raise Usage(
            f"data.text.tokens {text.tokens}: attention reads a row at once, and the model has {limit} positions; "
            "lower it"
        )
    if how is None or recipe.method != "autocompressor":
        return
    lead = int(how.bos in ("sink", "first"))
    if recipe.data.kind == "recall":
        lengths, n = (task.length, 2 * task.queries), task.segments + 1
    else:
        lengths, n = (text.mean, text.high or text.mean), text.tokens // text.mean
    for length in lengths:
        check_room(config, how, lead, length, slots_before(how, n - 1))


def check_words(tokenizer: Tokenizer, config: DecoderConfig) -> None:
    """Raises `BadInput` (66) for a tokenizer of more words than the decoder has; tokens added to it may be unused."""
    own = tokenizer.inner.get_vocab_size(with_added_tokens=False)
    ends = [id + 1 for name in ("bos_token", "eos_token") if (id := tokenizer.id_of(name)) is not None]
    if (asked := max(own, *ends, 0)) > config.vocab_size:
        raise BadInput(f"the tokenizer has {asked} words, the model {config.vocab_size}; take the one it was made with")


def configured(recipe: Recipe, tokenizer: Tokenizer, folder: Path | None) -> DecoderConfig:
    """The decoder's sizes, without its weights."""
    if folder is not None:
        return learners.config_of(folder)
    config = new_config(recipe.model, tokenizer.vocab_size)
    return learners.sized(recipe, config) if recipe.method == "hope" else config
