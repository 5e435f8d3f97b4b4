"""Feed hidden states back as inputs, six times, and generate from the resulting cache."""

import torch

from laconic import Decoder, DecoderConfig, GenerationConfig, generate

decoder = Decoder(DecoderConfig.tiny("qwen3"), seed=0).eval()
ids = torch.tensor([[3, 14, 15, 92, 65]])

with torch.no_grad():
    output = decoder(decoder.embed(ids))
    thought = output.hidden_states[:, -1:]
    for _ in range(6):
        thought = output.hidden_states[:, -1:]  # after the final norm, as `logits` reads it
        output = decoder(thought, output.cache)

cache = output.cache
print(f"{cache.S} positions cached: {ids.shape[1]} tokens and 6 thoughts")

# Generate the answer from the cache of question and thoughts; the last thought is the prompt.
config = GenerationConfig(max_tokens=5)
answer = generate(decoder, inputs_embeds=thought, state=cache.crop(cache.S - 1), config=config)[0]
print("answer ids:", answer.token_ids, "in", answer.passes.total, "passes, because of", answer.stop_reason)
