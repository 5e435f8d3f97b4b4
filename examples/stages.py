"""Look inside a pass: queries after rotation, probabilities, and what a head would say halfway."""

import torch

from laconic import Decoder, DecoderConfig

decoder = Decoder(DecoderConfig.tiny("gpt2"), seed=0).eval()
vectors = decoder.embed(torch.tensor([[5, 6, 7, 8]]))

seen = decoder(vectors, want=("q_rot.0", "probs", "hidden"))
for name, stage in seen.activations.items():
    print(f"{name:10} {list(stage.shape)}")

# What the model would say after each layer ("logit lens"): norm and head of the last layer on the others' output.
for layer in range(decoder.config.num_hidden_layers):
    early = decoder.logits(decoder.final_norm(seen.activations[f"hidden.{layer}"]))
    print(f"after layer {layer}:", early[0, -1].topk(3).indices.tolist())

# Asking for stages changes no bit of the result.
assert torch.equal(seen.hidden, decoder(vectors).hidden)
