"""Fit a linear map online from inputs of very different norms: delta gradient descent (DGD) against SGD."""

import math

import torch
from torch import Tensor, nn

from laconic import DGD
from laconic.nested.optim.input_recording import record_inputs

torch.set_num_threads(1)  # the tensors are small
D_IN, D_OUT, N = 16, 8, 600

# Inputs with an autocorrelation of 0.9 and norms from 0.3 to 3, and the outputs of a fixed linear map.
generator = torch.Generator().manual_seed(0)
W, X = torch.randn(D_OUT, D_IN, generator=generator) / 4, torch.randn(N, D_IN, generator=generator)
for t in range(1, N):
    X[t] = 0.9 * X[t - 1] + math.sqrt(0.19) * X[t]
X = X / X.norm(dim=1, keepdim=True) * 0.3 * 10 ** torch.rand(N, 1, generator=generator)
Y = X @ W.mT


def fit(model: nn.Linear, optimizer: torch.optim.Optimizer) -> float:
    """Train on every input once, in order; return the mean loss before each update over the last quarter."""
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


def linear() -> nn.Linear:
    return nn.Linear(D_IN, D_OUT, bias=False)


def format_loss(loss: Tensor | float) -> str:
    return "diverges" if math.isinf(float(loss)) else f"{float(loss):.2e}"


print("loss of predicting zero:", format_loss(0.5 * Y[-N // 4 :].square().sum(1).mean()))
print("lr                SGD           DGD    DGD, value='target'")
for lr in (0.01, 0.1, 1.0, 10.0):
    model = linear()
    losses = [fit(model, torch.optim.SGD(model.parameters(), lr=lr))]
    for value in ("minus_delta", "target"):  # the paper's rule, "minus_delta", also erases: it converges to half of y
        model = record_inputs(linear())
        losses.append(fit(model, DGD(model.parameters(), lr=lr, inputs="raw", value=value)))
    print(f"{lr:<7} {format_loss(losses[0]):>13} {format_loss(losses[1]):>13} {format_loss(losses[2]):>13}")
