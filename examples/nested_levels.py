"""HopeAttention on a pretrained Llama: its MLPs keep learning while it reads; save and load the fast weights.

With an inner learning rate of 0 the model equals the donor to the bit. Shallow layers are updated every 16 tokens, deep
ones every 64.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import laconic
from laconic.config.nested import CMSOptions

SHARED = Path(os.environ.get("LACONIC_DATA") or Path(__file__).resolve().parents[2] / "shared")
donor = laconic.Decoder.from_pretrained(SHARED / "models/stories260k")
tokenizer = laconic.load_tokenizer(SHARED / "models/stories260k")
text = (SHARED / "data/text/tinyshakespeare.txt").read_text(encoding="utf-8")[:1500]
ids = torch.tensor([tokenizer.encode(text)[:512]])

frozen = laconic.HopeAttention.from_decoder(donor, (16, 64), options=CMSOptions(inner_lr=0.0))
assert torch.equal(frozen.read_tokens(ids).hidden_states, donor(donor.embed(ids)).hidden_states)


def loss(model: laconic.HopeAttention, update_weights: bool = True) -> tuple[float, laconic.FastWeightState]:
    """Return the loss in nats per token, and the state after the text."""
    with torch.no_grad():
        output = model.read_tokens(ids, update_weights=update_weights)
        state = output.cache
        assert isinstance(state, laconic.FastWeightState)
        return float(F.cross_entropy(model.logits(output.hidden_states)[0, :-1], ids[0, 1:])), state


model = laconic.HopeAttention.from_decoder(donor, (16, 64), options=CMSOptions(inner_lr=0.03))
before, _ = loss(model, update_weights=False)
after, state = loss(model)
print(f"{before:.2f} nats per token with frozen levels, {after:.2f} while learning")
assert after < before

with tempfile.TemporaryDirectory() as folder:
    model.save_state(state, Path(folder) / "state.safetensors")
    loaded = model.load_state(Path(folder) / "state.safetensors")
updates = [[int(level.num_updates[0]) for level in layer.cms.levels] for layer in loaded.layers if layer.cms]
print(f"{int(loaded.position[0])} tokens read; updates of each layer's levels: {updates}")
