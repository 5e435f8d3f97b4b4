"""Capture activations of a forward pass: queries after RoPE, attention probabilities, and a logit lens."""

import torch

from laconic import Decoder, DecoderConfig

decoder = Decoder(DecoderConfig.tiny("gpt2"), seed=0).eval()
inputs_embeds = decoder.embed(torch.tensor([[5, 6, 7, 8]]))

output = decoder(inputs_embeds, capture=("q_rot.0", "probs", "hidden"))
for name, activation in output.activations.items():
    print(f"{name:10} {list(activation.shape)}")

# Logit lens: apply the final norm and the language model head to the output of every layer.
for layer in range(decoder.config.num_hidden_layers):
    logits = decoder.logits(decoder.final_norm(output.activations[f"hidden.{layer}"]))
    print(f"top tokens after layer {layer}:", logits[0, -1].topk(3).indices.tolist())

# Capturing activations does not change the result by a single bit.
assert torch.equal(output.hidden_states, decoder(inputs_embeds).hidden_states)
