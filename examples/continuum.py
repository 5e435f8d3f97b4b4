"""A Llama whose MLPs go on learning while it reads: the same text with and without, and what was learned kept.

Without a step it is the donor bit for bit. Each layer is updated at its own frequency, the shallow ones every 16
tokens, the deep ones every 64.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import laconic
from laconic.config.nested import CMSOptions

SHARED = Path(os.environ.get("LACONIC_DATA") or Path(__file__).resolve().parents[2] / "shared")
donor = laconic.Decoder.from_pretrained(SHARED / "models/stories260k")
tokenizer = laconic.load_tokenizer(SHARED / "models/stories260k")
text = (SHARED / "data/text/tinyshakespeare.txt").read_text(encoding="utf-8")[:1500]
ids = torch.tensor([tokenizer.encode(text)[:512]])

still = laconic.HopeAttention.from_decoder(donor, (16, 64), options=CMSOptions(inner_lr=0.0))
assert torch.equal(still.read_tokens(ids).hidden_states, donor(donor.embed(ids)).hidden)


def nats(model: laconic.HopeAttention, learn: bool = True) -> tuple[float, Any]:
    """Per token, and the state after the text."""
    with torch.no_grad():
        seen = model.read_tokens(ids, update_weights=learn)
        return float(F.cross_entropy(model.logits(seen.hidden_states)[0, :-1], ids[0, 1:])), seen.cache


model = laconic.HopeAttention.from_decoder(donor, (16, 64), options=CMSOptions(inner_lr=0.03))
without, _ = nats(model, learn=False)
learning, state = nats(model)
print(f"{without:.2f} nats a token as it was, {learning:.2f} while it learns")
assert learning < without

with tempfile.TemporaryDirectory() as folder:
    model.save_state(state, Path(folder) / "me.safetensors")
    kept = model.load_state(Path(folder) / "me.safetensors")
fired = [[int(level.num_updates[0]) for level in layer.cms.levels] for layer in kept.layers if layer.cms]
print(f"tokens read {int(kept.position[0])}, updates of each layer's levels {fired}")
