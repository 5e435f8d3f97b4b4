"""Use the immutable KV cache: encode a prompt once, branch into eight continuations, roll back, and backpropagate."""

import torch

from laconic import Decoder, DecoderConfig

decoder = Decoder(DecoderConfig.tiny("llama"), seed=0).eval()  # or Decoder.from_pretrained("path/to/checkpoint")
prompt = decoder.embed(torch.tensor([[1, 17, 42, 5, 8]])).detach().requires_grad_()

output = decoder(prompt)
print(f"the cache has {output.cache.S} positions and {output.cache.num_bytes} bytes")

# Continue the same cache with eight different tokens. `repeat_rows` of one row is a view: nothing is copied.
ids = torch.arange(8)[:, None]
branches = decoder(decoder.embed(ids), output.cache.repeat_rows(8))
print("most likely next tokens:", decoder.logits(branches.hidden_states[:, -1]).argmax(-1).tolist())

# The original cache is unchanged. Crop it to three positions and read the rest of the prompt again.
repeated = decoder(prompt[:, 3:], output.cache.crop(3))
difference = (repeated.hidden_states - output.hidden_states[:, 3:]).abs().max()
print("largest difference after rolling back:", difference.item())

# Gradients flow through the cache, from the last logits back to the prompt embeddings.
decoder.logits(branches.hidden_states[:, -1]).sum().backward()
assert prompt.grad is not None
print("gradient norm per prompt position:", [f"{g:.3f}" for g in prompt.grad.norm(dim=-1)[0]])
