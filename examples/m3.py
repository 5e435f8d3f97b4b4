"""Train a small decoder on bytes with M3 and, as the baseline, with AdamW, each at three learning rates."""

import random

import torch
import torch.nn.functional as F

from laconic import M3, Decoder, DecoderConfig

torch.set_num_threads(1)  # the tensors are small
STEPS, ROWS, LENGTH = 60, 8, 48

# Sums in words. Most bytes follow from the context; the result needs an addition.
names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
rng = random.Random(0)
pairs = [(rng.randrange(5), rng.randrange(5)) for _ in range(2000)]
text = "".join(f"{names[a]} and {names[b]} make {names[a + b]}. " for a, b in pairs)
ids = torch.tensor(list(text.encode()))


def train(optimizer_class: type[torch.optim.AdamW] | type[M3], lr: float) -> float:
    """Return the mean loss in nats per byte over the last ten steps; the batches are the same in every run."""
    decoder = Decoder(DecoderConfig.tiny("llama", vocab_size=128, initializer_range=0.05), seed=0)
    params = M3.build_param_groups(decoder) if optimizer_class is M3 else decoder.parameters()
    optimizer = optimizer_class(params, lr=lr)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for _ in range(STEPS):
        start = torch.randint(len(ids) - LENGTH - 1, (ROWS, 1), generator=generator)
        batch = ids[start + torch.arange(LENGTH + 1)]
        logits = decoder.logits(decoder(decoder.embed(batch[:, :-1])).hidden_states)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


print("nats per byte; M3 updates the matrices, and AdamW the embeddings, the head and the norms")
print("lr        AdamW       M3")
for lr in (5e-3, 1e-2, 2e-2):
    print(f"{lr:<7} {train(torch.optim.AdamW, lr):>7.3f}  {train(M3, lr):>7.3f}")
