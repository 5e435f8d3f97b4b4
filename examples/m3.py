"""Train a small decoder on bytes with M3, and with AdamW as the control, each at three rates."""

import random

import torch
import torch.nn.functional as F

from laconic import M3, Decoder, DecoderConfig

torch.set_num_threads(1)  # all of it is small
STEPS, ROWS, LENGTH = 60, 8, 48

# Sums in words: the next byte can be told from what came before, some of it only by adding.
names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
draw = random.Random(0)
pairs = [(draw.randrange(5), draw.randrange(5)) for _ in range(2000)]
text = "".join(f"{names[a]} and {names[b]} make {names[a + b]}. " for a, b in pairs)
ids = torch.tensor(list(text.encode()))


def train(make: type[torch.optim.Optimizer], lr: float) -> float:
    """Nats per byte over the last ten of the steps, the same rows for all."""
    decoder = Decoder(DecoderConfig.tiny("llama", vocab_size=128, initializer_range=0.05), seed=0)
    optimizer = M3(M3.build_param_groups(decoder), lr=lr) if make is M3 else make(decoder.parameters(), lr=lr)
    rows = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for _ in range(STEPS):
        start = torch.randint(len(ids) - LENGTH - 1, (ROWS, 1), generator=rows)
        read = ids[start + torch.arange(LENGTH + 1)]
        logits = decoder.logits(decoder(decoder.embed(read[:, :-1])).hidden_states)
        loss = F.cross_entropy(logits.flatten(0, 1), read[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


print("rate      AdamW       M3   (nats per byte; matrices by M3, the table, the head and norms by AdamW)")
for lr in (5e-3, 1e-2, 2e-2):
    print(f"{lr:<7} {train(torch.optim.AdamW, lr):>7.3f}  {train(M3, lr):>7.3f}")
