"""Read a question once, continue it eight ways, roll back, and take a gradient to the vectors that were read."""

import torch

from laconic import Decoder, DecoderConfig

decoder = Decoder(DecoderConfig.tiny("llama"), seed=0).eval()  # or Decoder.from_pretrained("a/folder")
question = decoder.embed(torch.tensor([[1, 17, 42, 5, 8]])).detach().requires_grad_()

read = decoder(question)
print(f"read {read.state.S} positions, {read.state.bytes} bytes")

# Eight continuations of the one cache; it is a view, nothing is copied, and none sees the others.
ids = torch.arange(8)[:, None]
eight = decoder(decoder.embed(ids), read.state.fork(8))
print("most likely after each:", decoder.logits(eight.hidden[:, -1]).argmax(-1).tolist())

# The cache that was forked is what it was; rolled back, it goes on as if the rest had never been read.
again = decoder(question[:, 3:], read.state.crop(3))
print("largest difference after rolling back:", (again.hidden - read.hidden[:, 3:]).abs().max().item())

# The backward pass goes through the cache: from the last logits to the first vector.
decoder.logits(eight.hidden[:, -1]).sum().backward()
print("gradient at each position of the question:", [f"{g:.3f}" for g in question.grad.norm(dim=-1)[0]])
