"""Turn a pretrained Llama into a Hope-Attention model, whose MLPs learn while they read, and save what it learned.

With an inner learning rate of 0 the model equals the pretrained one bit for bit. Otherwise each layer's MLP is updated
at its own frequency: the shallow ones every 16 tokens, the deep ones every 64.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import laconic
from laconic.config.nested import CMSOptions

CHAPTER = Path(__file__).resolve().parents[1] / "src/laconic/evaluation/compression/falling_star.txt"
pretrained = laconic.Decoder.from_pretrained("stories260k")
tokenizer = laconic.load_tokenizer("stories260k")
text = CHAPTER.read_text(encoding="utf-8")[:1500]
ids = torch.tensor([tokenizer.encode(text)[:512]])

frozen = laconic.HopeAttention.from_decoder(pretrained, (16, 64), options=CMSOptions(inner_lr=0.0))
assert torch.equal(frozen.read_tokens(ids).hidden_states, pretrained(pretrained.embed(ids)).hidden_states)


def read(model: laconic.HopeAttention, update_weights: bool) -> tuple[float, Any]:
    """Return the mean NLL per token and the state after the text."""
    with torch.no_grad():
        output = model.read_tokens(ids, update_weights=update_weights)
        return float(F.cross_entropy(model.logits(output.hidden_states)[0, :-1], ids[0, 1:])), output.cache


model = laconic.HopeAttention.from_decoder(pretrained, (16, 64), options=CMSOptions(inner_lr=0.03))
static_nll, _ = read(model, update_weights=False)
learning_nll, state = read(model, update_weights=True)
print(f"nats per token: {static_nll:.2f} without updates, {learning_nll:.2f} with updates")
assert learning_nll < static_nll

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "state.safetensors"
    model.save_state(state, path)
    restored = model.load_state(path)
updates = [[int(level.num_updates[0]) for level in layer.cms.levels] for layer in restored.layers if layer.cms]
print(f"tokens read: {int(restored.position[0])}; updates of each layer's levels: {updates}")
