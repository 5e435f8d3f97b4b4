"""Run by test_compile.py in a process of its own, where no shape check wraps the functions: prints one JSON line."""

import json
import sys

import torch

from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from tests.models.fixtures import fresh, noise
from tests.tolerances import error

ONE_LAYER = {"num_hidden_layers": 1, "windows": (None,), "score_scale": (0.25,)}


def steps(name: str) -> dict[str, object]:
    """Prefill, first step, two more, twice, the second time with other sizes: graphs and largest error."""
    decoder = fresh(name).requires_grad_(False)
    torch._dynamo.reset_rope()
    graphs: list[int] = []

    def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    fast = torch.compile(decoder, fullgraph=True, dynamic=True, backend=counted)
    worst, after = 0.0, []
    for B, T in ((3, 7), (5, 9)):  # no size equal to another: the compiler takes equal ones for the same
        a: KVCache | None = None
        b: KVCache | None = None
        for new in (T, 1, 1, 1):
            vectors = noise(B * T + new, B, new, 48, dtype=torch.float32)
            got, asked = fast(vectors, a), decoder(vectors, b)
            a, b = got.state, asked.state
            pairs = [(got.hidden, asked.hidden), *zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)]
            worst = max(worst, *(error(x, y) for x, y in pairs))
            assert torch.equal(a.positions, b.positions)
        after.append(len(graphs))
    return {"graphs": after, "worst": worst}


def with_everything(name: str) -> float:
    """live, positions, bias and want under one compiled call."""
    decoder = fresh(name).requires_grad_(False)
    torch._dynamo.reset_rope()
    state = decoder(noise(1, 2, 4, 48, dtype=torch.float32)).cache
    live = torch.tensor([[False, True, True], [True, True, True]])
    given = {"live": live, "positions": torch.tensor([[0, 4, 5], [4, 5, 6]]), "want": ("probs", "hidden", "logits")}
    bias, vectors = noise(2, 1, 3, 7, dtype=torch.float32), noise(3, 2, 3, 48, dtype=torch.float32)
    fast = torch.compile(decoder, fullgraph=True, dynamic=True, backend="eager")
    got, asked = (
        fast(vectors, state, attention_bias=bias, **given),
        decoder(vectors, state, attention_bias=bias, **given),
    )
    assert got.activations.keys() == asked.activations.keys()
    pairs = [(got.hidden[live], asked.hidden[live]), *((got.activations[k], v) for k, v in asked.activations.items())]
    return max(error(x, y) for x, y in pairs)


def operations(decoder: Decoder, want: tuple[str, ...]) -> list[str]:
    """What the compiler sees of a pass, in order."""
    found: list[str] = []

    def listed(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    torch._dynamo.reset_rope()
    torch.compile(decoder, fullgraph=True, dynamic=True, backend=listed)(noise(1, 3, 4, 48).float(), capture=want)
    return found


def without_stages(name: str) -> dict[str, object]:
    """The operations of a pass that wants nothing: as it is, with blocks that know no stages, and with stages."""
    decoder = fresh(name, **ONE_LAYER).requires_grad_(False)
    found = {"plain": operations(decoder, ()), "looked": operations(decoder, ("scores", "logits"))}
    for block in decoder.layers:
        block.forward = bare(block)
    return found | {"bare": operations(decoder, ())}


def bare(block: torch.nn.Module) -> object:
    """C19 alone, written without notes."""

    def forward(x: torch.Tensor, past: object, frame: object, want: object) -> tuple[object, ...]:
        out, k, v = block.attention(block.part("norm1")(x), past, frame)
        r = x + out
        return r + block.mlp_forward(block.part("norm2")(r)), k, v, {}

    return forward


def gradients(name: str) -> float:
    """A training step under the compiler: gradients against those of the eager pass."""
    found = []
    for fast in (False, True):
        decoder = fresh(name, **ONE_LAYER).train()
        torch._dynamo.reset_rope()
        call = torch.compile(decoder, fullgraph=True, dynamic=True, backend="aot_eager") if fast else decoder
        vectors = noise(1, 2, 5, 48, dtype=torch.float32).requires_grad_()
        call(vectors).hidden.square().sum().backward()
        found.append([vectors.grad, *(p.grad for p in decoder.parameters() if p.grad is not None)])
    return max(error(x, y) for x, y in zip(*found, strict=True))


WORK = {
    "steps": steps,
    "everything": with_everything,
    "stages": without_stages,
    "gradients": gradients,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    done = {line: WORK[line.split(",")[0]](*line.split(",")[1:]) for line in sys.argv[1:]}
    sys.stdout.write(json.dumps(done))
