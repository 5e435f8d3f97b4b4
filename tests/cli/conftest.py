"""A tiny checkpoint with a chat template, for commands that generate."""

from pathlib import Path

import pytest

from laconic import Decoder, DecoderConfig
from laconic.data.tokenizer import build_byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama on bytes with 256 positions, which samples as its generation_config.json says."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    config = DecoderConfig.tiny("llama", vocab_size=257, max_position_embeddings=256, eos_token_ids=())
    Decoder(config, seed=1).save_pretrained(folder)
    build_byte_tokenizer().save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9, "top_k": null}')
    return folder
