"""Read a question once, continue it eight ways, roll back, and backpropagate to its embeddings."""

import torch

from laconic import Decoder, DecoderConfig

decoder = Decoder(DecoderConfig.tiny("llama"), seed=0).eval()  # or Decoder.from_pretrained("a/folder")
question = decoder.embed(torch.tensor([[1, 17, 42, 5, 8]])).detach().requires_grad_()

output = decoder(question)
cache = output.cache
print(f"{cache.S} positions cached, {cache.num_bytes} bytes")

# Eight continuations of the same cache: a single row is expanded without a copy, and no continuation sees another.
ids = torch.arange(8)[:, None]
continuations = decoder(decoder.embed(ids), cache.repeat_rows(8))
print("most likely next ids:", decoder.logits(continuations.hidden_states[:, -1]).argmax(-1).tolist())

# The cache is unchanged; cropped, it continues as if the rest had never been read.
again = decoder(question[:, 3:], cache.crop(3))
difference = (again.hidden_states - output.hidden_states[:, 3:]).abs().max().item()
print("largest difference after rolling back:", difference)

# Gradients flow through the cache, from the last logits to the first embedding.
decoder.logits(continuations.hidden_states[:, -1]).sum().backward()
assert question.grad is not None
print("gradient norm at each position:", [f"{g:.3f}" for g in question.grad.norm(dim=-1)[0]])
