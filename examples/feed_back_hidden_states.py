"""Feed the last hidden state back as the next input embedding, six times, then generate an answer on the KV cache."""

import torch

from laconic import Decoder, DecoderConfig, GenerationConfig, generate

decoder = Decoder(DecoderConfig.tiny("qwen3"), seed=0).eval()
input_ids = torch.tensor([[3, 14, 15, 92, 65]])

with torch.no_grad():
    output = decoder(decoder.embed(input_ids))
    for _ in range(6):
        latent = output.hidden_states[:, -1:]  # after the final norm
        output = decoder(latent, output.cache)

print(f"the cache has {output.cache.S} positions: {input_ids.shape[1]} tokens and 6 latents")

# `generate` reads at least one input itself, so it gets the last latent, and the cache without it.
cache = output.cache.crop(output.cache.S - 1)
answer = generate(decoder, inputs_embeds=latent, state=cache, config=GenerationConfig(max_tokens=5))[0]
print(f"answer {answer.token_ids} in {answer.passes.total} forward passes; stopped because of: {answer.stop_reason}")
