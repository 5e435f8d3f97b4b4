"""Learn a map online from inputs of very different lengths: the delta rule at any step size, beside plain descent."""

import math

import torch
from torch import Tensor, nn

from laconic import DGD
from laconic.nested.optim.input_recording import record_inputs

torch.set_num_threads(1)  # all of it is small
D_IN, D_OUT, N = 16, 8, 600

# Inputs that resemble their predecessors (.9), of lengths .3 to 3, and what a fixed map makes of them.
draw = torch.Generator().manual_seed(0)
asked, X = torch.randn(D_OUT, D_IN, generator=draw) / 4, torch.randn(N, D_IN, generator=draw)
for t in range(1, N):
    X[t] = 0.9 * X[t - 1] + math.sqrt(0.19) * X[t]
X = X / X.norm(dim=1, keepdim=True) * 0.3 * 10 ** torch.rand(N, 1, generator=draw)
Y = X @ asked.mT


def learn(model: nn.Linear, optimizer: torch.optim.Optimizer) -> float:
    """One input at a time, once; the mean loss over the last quarter, each before its step."""
    nn.init.zeros_(model.weight)
    losses: list[float] = []
    for x, y in zip(X, Y, strict=True):
        loss = 0.5 * (model(x[None]) - y).square().sum()
        if not loss.item() < 1e6:
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-N // 4 :]) / (N // 4)


def fresh() -> nn.Linear:
    return nn.Linear(D_IN, D_OUT, bias=False)


def told(x: Tensor | float) -> str:
    return "diverges" if math.isinf(float(x)) else f"{float(x):.2e}"


print("predicting zero:", told(0.5 * Y[-N // 4 :].square().sum(1).mean()))
print("step    plain descent    delta rule    delta rule, value='target'")
for lr in (0.01, 0.1, 1.0, 10.0):
    plain = fresh()
    found = [learn(plain, torch.optim.SGD(plain.parameters(), lr=lr))]
    for value in ("minus_delta", "target"):  # the paper's rule also erases: it settles at half of what is asked
        model = record_inputs(fresh())
        found.append(learn(model, DGD(model.parameters(), lr=lr, inputs="raw", value=value)))
    print(f"{lr:<7} {told(found[0]):>13} {told(found[1]):>13} {told(found[2]):>13}")
