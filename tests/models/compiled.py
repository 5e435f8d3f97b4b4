"""Jobs of test_compile.py, run in a process without jaxtyping's checks; prints one JSON line."""

import json
import sys

import torch

from laconic.models.block import Block, ForwardContext, PastKeyValues
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from tests.models.fixtures import fresh, noise
from tests.tolerances import error

ONE_LAYER = {"num_hidden_layers": 1, "sliding_windows": (None,), "attention_scales": (0.25,)}


def run_steps(name: str) -> dict[str, object]:
    """Prefill and three steps, twice with different sizes; return the number of graphs and the largest error."""
    decoder = fresh(name).requires_grad_(False)
    torch._dynamo.reset()
    graphs: list[int] = []

    def count_graphs(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(decoder, fullgraph=True, dynamic=True, backend=count_graphs)
    worst, counts = 0.0, []
    for B, T in ((3, 7), (5, 9)):  # all sizes differ, because the compiler treats equal sizes as the same symbol
        a: KVCache | None = None
        b: KVCache | None = None
        for new in (T, 1, 1, 1):
            embeds = noise(B * T + new, B, new, 48, dtype=torch.float32)
            actual, expected = compiled(embeds, a), decoder(embeds, b)
            a, b = actual.cache, expected.cache
            pairs = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
            worst = max(worst, error(actual.hidden_states, expected.hidden_states), *(error(x, y) for x, y in pairs))
            assert torch.equal(a.positions, b.positions)
        counts.append(len(graphs))
    return {"graphs": counts, "worst": worst}


def run_all_arguments(name: str) -> float:
    """Pass mask, positions, bias and capture to one compiled call; return the largest error."""
    decoder = fresh(name).requires_grad_(False)
    torch._dynamo.reset()
    cache = decoder(noise(1, 2, 4, 48, dtype=torch.float32)).cache
    mask = torch.tensor([[False, True, True], [True, True, True]])
    options = {
        "attention_mask": mask,
        "position_ids": torch.tensor([[0, 4, 5], [4, 5, 6]]),
        "attention_bias": noise(2, 1, 3, 7, dtype=torch.float32),
        "capture": ("probs", "hidden", "logits"),
    }
    embeds = noise(3, 2, 3, 48, dtype=torch.float32)
    compiled = torch.compile(decoder, fullgraph=True, dynamic=True, backend="eager")
    actual, expected = compiled(embeds, cache, **options), decoder(embeds, cache, **options)
    assert actual.activations.keys() == expected.activations.keys()
    errors = [error(actual.activations[name], x) for name, x in expected.activations.items()]
    return max(error(actual.hidden_states[mask], expected.hidden_states[mask]), *errors)


def list_operations(decoder: Decoder, capture: tuple[str, ...]) -> list[str]:
    """Return the operations of a forward pass as the compiler sees them."""
    operations: list[str] = []

    def collect(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        operations.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(decoder, fullgraph=True, dynamic=True, backend=collect)
    compiled(noise(1, 3, 4, 48).float(), capture=capture)
    return operations


def compare_operations(name: str) -> dict[str, object]:
    """List the operations without capture, with capture, and of blocks written without capture."""
    decoder = fresh(name, **ONE_LAYER).requires_grad_(False)
    operations = {
        "plain": list_operations(decoder, ()),
        "captured": list_operations(decoder, ("scores", "logits")),
    }
    for block in decoder.layers:
        assert isinstance(block, Block)
        block.forward = bare_forward(block)  # type: ignore[method-assign]
    return operations | {"bare": list_operations(decoder, ())}


def bare_forward(block: Block) -> object:
    """Return equation C19 without capture."""

    def forward(x: torch.Tensor, past: PastKeyValues | None, context: ForwardContext, names: object) -> object:
        out, k, v = block.self_attention(block.submodule("norm1")(x), past, context)
        r = x + out
        return r + block.mlp_forward(block.submodule("norm2")(r)), k, v, {}

    return forward


def compare_gradients(name: str) -> float:
    """Return the largest error of the gradients of a compiled training step."""
    results = []
    for is_compiled in (False, True):
        decoder = fresh(name, **ONE_LAYER).train()
        torch._dynamo.reset()
        call = torch.compile(decoder, fullgraph=True, dynamic=True, backend="aot_eager") if is_compiled else decoder
        embeds = noise(1, 2, 5, 48, dtype=torch.float32).requires_grad_()
        call(embeds).hidden_states.square().sum().backward()
        results.append([embeds.grad, *(p.grad for p in decoder.parameters() if p.grad is not None)])
    return max(error(x, y) for x, y in zip(*results, strict=True))


JOBS = {
    "steps": run_steps,
    "arguments": run_all_arguments,
    "operations": compare_operations,
    "gradients": compare_gradients,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {job: JOBS[job.split(",")[0]](*job.split(",")[1:]) for job in sys.argv[1:]}
    sys.stdout.write(json.dumps(results))
