"""Capture activations of a forward pass: rotated queries, attention probabilities, and a logit lens."""

import torch

from laconic import Decoder, DecoderConfig

decoder = Decoder(DecoderConfig.tiny("gpt2"), seed=0).eval()
embeds = decoder.embed(torch.tensor([[5, 6, 7, 8]]))

output = decoder(embeds, capture=("q_rot.0", "probs", "hidden"))
for name, activation in output.activations.items():
    print(f"{name:10} {list(activation.shape)}")

# Logit lens: the final norm and the head applied to the output of every layer.
for layer in range(decoder.config.num_hidden_layers):
    logits = decoder.logits(decoder.final_norm(output.activations[f"hidden.{layer}"]))
    print(f"after layer {layer}:", logits[0, -1].topk(3).indices.tolist())

# Capturing does not change a bit of the result.
assert torch.equal(output.hidden_states, decoder(embeds).hidden_states)
