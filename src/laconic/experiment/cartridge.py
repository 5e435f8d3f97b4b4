"""Fit a memory to a text with a plain checkpoint: select its keys and values, then train them by self-study."""

from collections.abc import Callable
from dataclasses import asdict, replace

from laconic.compression.cartridge import CartridgeConfig, fit_cartridge
from laconic.compression.kv_compress import KVCompressionConfig
from laconic.compression.kv_memory import KVMemory
from laconic.compression.self_study import Requests
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.kv_compressor import (
    MARK,
    SEPARATOR,
    build_repeat_prompt,
    compress_text,
    encode_document,
    split_template,
)
from laconic.models.decoder import Decoder

CHAT_REQUESTS = (
    "Summarize the text above in a few sentences.",
    "Ask a question that the text above answers, and answer it.",
    "Who or what appears in the text above, and what happens?",
    "List the most important facts of the text above.",
    "What does the text above say at its end?",
    "Write a short quiz about the text above, with the answers.",
)
TEXT_REQUESTS = ("", "\n\nQuestion:", "\n\nSummary:", "\n\nThe most important facts:\n1.")  # "": continue the text


def build_requests(tokenizer: Tokenizer, chat: bool) -> Requests:
    """Return the prompts of self-study: user messages for a memory of a chat, else beginnings of texts."""
    if chat:
        texts = [split_template(tokenizer, MARK + SEPARATOR + request)[1] for request in CHAT_REQUESTS]
    else:
        texts = list(TEXT_REQUESTS)
    ids = tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return Requests(ids, build_repeat_prompt(tokenizer))


def fit_text(
    decoder: Decoder,
    tokenizer: Tokenizer,
    text: str,
    selection: KVCompressionConfig,
    fit: CartridgeConfig,
    *,
    name: str = "text",
    chat: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> KVMemory:
    """Compress a text by selection, and train the memory to answer as the whole text does.

    Args:
        decoder: Model; its weights stay as they are.
        tokenizer: Its tokenizer.
        text: Document.
        selection: Method and size of the memory that training begins with.
        fit: Options of the training.
        name: Name of the text in the memory's metadata.
        chat: Read the document as the beginning of a user message.
        on_progress: Called with the current step, the number done, and their total.

    Raises:
        InputError: If the text is empty, or there is no chat template.
        UsageError: If the text does not fit the context, or `selection` measures its size.
    """
    if selection.max_loss is not None:
        raise UsageError("max_loss: fitting needs a fixed size; give keep or slots")
    ids, _ = encode_document(tokenizer, text, chat)
    selection = replace(selection, equal_heads=True)  # every slot of a cartridge is a position
    start = compress_text(decoder, tokenizer, text, selection, name=name, chat=chat, on_progress=on_progress).memory
    result = fit_cartridge(
        decoder,
        start,
        ids,
        fit,
        requests=build_requests(tokenizer, chat),
        on_progress=lambda label, done, total, loss: on_progress(
            label if loss is None else f"{label}, held-out loss {loss:.3f}", done, total
        ),
    )
    assert start.metadata is not None
    measured = {"fit": {"best_step": result.best_step, "held_out": {str(k): v for k, v in result.held_out.items()}}}
    settings = {**start.metadata.settings, "fit": asdict(fit)}
    return replace(result.memory, metadata=replace(start.metadata, settings=settings, measured=measured))
