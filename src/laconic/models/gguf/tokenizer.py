"""Rebuild tokenizer.json and the chat template from the vocabulary in a GGUF file.

With `tokenizer.ggml.model` = `gpt2`, a file holds byte-level BPE and names its pre-tokenizer; with `llama`, it holds a
SentencePiece BPE without its merges, which follow from the scores. Tokens are those of the published tokenizers, and
of llama.cpp.
"""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from laconic.errors import InputError
from laconic.models.gguf.header import GGUFHeader

PREFIX = "tokenizer.ggml."
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_SPLIT, DIGITS_SPLIT = "gpt2", "digits"
SPLITS = {  # name in the file -> regular expression, GPT-2's, or GPT-2's after single digits
    "gpt-2": GPT2_SPLIT,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS_SPLIT),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2_SPLIT),
    "tekken": TEKKEN_SPLIT,
}
MAX_TOKEN_LENGTH = 256  # longer tokens of SentencePiece are not built from merges
# Pre-tokenizers of architectures, for older files that name none.
DEFAULT_SPLIT = {"gpt2": "gpt-2", "llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "smollm3": "smaug-bpe"}
WHOLE_WORD_SPLITS = (LLAMA3_SPLIT, TEKKEN_SPLIT)  # words in the vocabulary are not built from merges
WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")  # unless the file says otherwise


def build_tokenizer_files(header: GGUFHeader, vocab_size: int) -> dict[str, str]:
    """Return the tokenizer files of a Hugging Face folder, by name; none if the file has no vocabulary."""
    kind = header.get(f"{PREFIX}model", str)
    if kind is None or kind == "none":
        return {}
    if kind not in ("gpt2", "llama"):
        raise InputError(f"{header.path.name}: {PREFIX}model={kind!r} is not supported; supported: gpt2, llama")
    tokens = header.get_list(f"{PREFIX}tokens", str)
    types = header.get_list(f"{PREFIX}token_type", int) or [1] * len(tokens)
    if not 0 < len(tokens) <= vocab_size or len(types) != len(tokens):
        counts = f"{len(tokens):,} tokens with {len(types):,} types"
        raise InputError(f"{header.path.name}: {counts} for {vocab_size:,} rows of the embedding; download it again")
    special = find_special_tokens(header, tokens)
    try:
        backend = build_byte_level(header, tokens, types) if kind == "gpt2" else build_sentencepiece(header, tokens)
        add_tokens(backend, tokens, types)
        backend.post_processor = build_post_processor(
            header, special, kind == "llama" or find_pre_tokenizer(header) in WITH_BOS
        )
    except InputError:
        raise
    except Exception as error:  # tokenizers raises bare exceptions
        raise InputError(f"{header.path.name}: invalid vocabulary: {str(error)[:200]}") from None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.get(f"{header.require('general.architecture', str)}.context_length", int),
        **special,
    }
    files = {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
    template = header.get("tokenizer.chat_template", str)
    return files | ({"chat_template.jinja": template} if template else {})


def find_special_tokens(header: GGUFHeader, tokens: Sequence[str]) -> dict[str, str]:
    special: dict[str, str] = {}
    for role, name in SPECIAL_TOKENS.items():
        index = header.get_token_id(name)
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            key = f"{PREFIX}{name}_token_id"
            raise InputError(f"{header.path.name}: {key}={index:,} is not one of {len(tokens):,} tokens")
        special[role] = tokens[index]
    return special


def find_pre_tokenizer(header: GGUFHeader) -> str:
    """Return the name of a file's pre-tokenizer, or of the usual one of its architecture."""
    name = header.get(f"{PREFIX}pre", str)
    return DEFAULT_SPLIT[header.require("general.architecture", str)] if name in (None, "default") else name


def build_byte_level(header: GGUFHeader, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Build the byte-level BPE of a file; unused rows of the embedding get no token."""
    name = find_pre_tokenizer(header)
    if name not in SPLITS:
        raise InputError(f"{header.path.name}: pre-tokenizer {name!r} is not supported; supported: {', '.join(SPLITS)}")
    split = SPLITS[name]
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    pairs = [merge.split(" ") for merge in header.get_list(f"{PREFIX}merges", str)]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise InputError(f"{header.path.name}: {PREFIX}merges does not hold pairs of tokens; download it again")
    merges: list[tuple[str, str]] = [(left, right) for left, right in pairs]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split in WHOLE_WORD_SPLITS))
    if split in (GPT2_SPLIT, DIGITS_SPLIT):
        words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if split == DIGITS_SPLIT else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])
    else:
        regex = pre_tokenizers.Split(Regex(split), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([regex, to_bytes])
    if split == QWEN2_SPLIT:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def build_sentencepiece(header: GGUFHeader, tokens: Sequence[str]) -> Tokenizer:
    """Build the BPE of SentencePiece: spaces are `▁`, unknown characters become bytes, and scores order the merges."""
    scores = header.get_list(f"{PREFIX}scores", float, int)
    if len(scores) != len(tokens):
        raise InputError(f"{header.path.name}: {len(tokens):,} tokens with {len(scores):,} scores; download it again")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=derive_merges(vocab, scores),
            unk_token=tokens[header.get_token_id("unknown") or 0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = header.get(f"{PREFIX}add_space_prefix", bool) is not False
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if has_prefix else [replace])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]  # pyright: ignore[reportCallIssue]
    )
    return backend


def derive_merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every split of a token into two tokens; merges into tokens of high score come first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        for cut in range(1, min(len(token), MAX_TOKEN_LENGTH)):
            left = vocab.get(token[:cut])
            right = vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right, token[:cut], token[cut:]))
    return [(left, right) for *_, left, right in sorted(ranked)]


def add_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Add control tokens as special tokens, and user-defined ones as plain tokens; their ids are in the vocabulary."""
    for kind in (CONTROL, USER_DEFINED):
        texts = [token for token, its_kind in zip(tokens, types, strict=True) if its_kind == kind]
        added = [AddedToken(text, normalized=False, special=kind == CONTROL) for text in texts]
        backend.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]


def build_post_processor(header: GGUFHeader, special: dict[str, str], has_bos: bool) -> Any:
    add_bos, add_eos = (header.get(f"{PREFIX}add_{name}_token", bool) for name in ("bos", "eos"))
    first = special.get("bos_token") if (has_bos if add_bos is None else add_bos) else None
    last = special.get("eos_token") if add_eos else None
    named = {token: name for token, name in ((first, "bos"), (last, "eos")) if token}
    ids = [(token, header.require(f"{PREFIX}{name}_token_id", int)) for token, name in named.items()]
    single = [token for token in (first, "$A", last) if token]
    return processors.TemplateProcessing(single=single, pair=None, special_tokens=ids)
