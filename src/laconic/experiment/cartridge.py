"""Fit the selected keys and values of a text by self-study, with a plain checkpoint."""

from dataclasses import asdict, replace

from laconic.compression.kv.cartridge import CartridgeConfig, fit_cartridge
from laconic.compression.kv.compress import DocumentCompression
from laconic.compression.self_study import Requests
from laconic.console import ProgressFn
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.text_models.kv_compressor import (
    MARK,
    SEPARATOR,
    build_repeat_prompt,
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
TEXT_REQUESTS = ("", "\n\nQuestion:", "\n\nThe most important facts:\n1.", "\n\nQuestion:")  # "": continue the text
QUOTE = (SEPARATOR + '"...', '..."')  # around a passage that a request refers to


def build_requests(tokenizer: Tokenizer, chat: bool) -> Requests:
    """Return the prompts of self-study: user messages for a memory of a chat, else beginnings of texts."""
    if chat:
        texts = [split_template(tokenizer, MARK + SEPARATOR + request)[1] for request in CHAT_REQUESTS]
    else:
        texts = list(TEXT_REQUESTS)
    ids, (before, after) = (
        tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in some) for some in (texts, QUOTE)
    )
    return Requests(ids, build_repeat_prompt(tokenizer), (before, after))


def fit_text(
    decoder: Decoder,
    tokenizer: Tokenizer,
    text: str,
    selection: DocumentCompression,
    config: CartridgeConfig,
    *,
    on_progress: ProgressFn = lambda label, done, total: None,
) -> DocumentCompression:
    """Train a selection of a text's keys and values so that the model answers as with the whole text.

    The metadata of the result have the held-out loss by step.
    """
    metadata = selection.memory.metadata
    assert metadata is not None
    result = fit_cartridge(
        decoder,
        selection.memory,
        encode_document(tokenizer, text, metadata.chat)[0],
        config,
        requests=build_requests(tokenizer, metadata.chat),
        on_progress=lambda label, done, total, loss: on_progress(
            label if loss is None else f"{label}, held-out loss {loss:.3f}", done, total
        ),
    )
    fit = {
        "best_step": result.best_step,
        "held_out": {str(step): loss for step, loss in result.held_out_losses.items()},
    }
    fitted = replace(
        metadata, settings={**metadata.settings, "fit": asdict(config)}, measured={**metadata.measured, "fit": fit}
    )
    return selection._replace(memory=replace(result.memory, metadata=fitted))
