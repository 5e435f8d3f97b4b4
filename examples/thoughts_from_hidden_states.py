"""Feed hidden states back as input, six times: vectors that are no words, on a cache that is a value."""

import torch

from laconic import Decoder, DecoderConfig, generate
from laconic.generation.config import GenerationConfig

decoder = Decoder(DecoderConfig.tiny("qwen3"), seed=0).eval()
ids = torch.tensor([[3, 14, 15, 92, 65]])

with torch.no_grad():
    seen = decoder(decoder.embed(ids))
    for _ in range(6):
        thought = seen.hidden[:, -1:]  # after the final norm, as `logits` reads it
        seen = decoder(thought, seen.state)

print(f"{seen.state.S} positions held: {ids.shape[1]} words and 6 thoughts")

# The answer is generated on the cache of question and thoughts.
answer = generate(
    decoder, inputs_embeds=thought, state=seen.state.crop(seen.state.S - 1), config=GenerationConfig(max_tokens=5)
)[0]
print("answer ids:", answer.token_ids, "in", answer.passes.total, "passes, because of", answer.stop_reason)
