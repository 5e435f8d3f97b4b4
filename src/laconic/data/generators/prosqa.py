"""Generate problems like ProsQA's (Coconut, arXiv:2412.06769): a graph of facts and a question which of two X is.

A graph begins with two names. Each later node has a few earlier ones as parents, mostly from one of the two sides. The
target is a leaf that the name in the question reaches and the other name does not; the wrong choice is the reverse.
Sizes, edges and path lengths are fitted to the 800 published graphs, whose generator is not public: they have 22.8
nodes, 36.0 edges, paths of 3.77 steps and 1.59 shortest paths on average.
"""

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, count, pairwise
from typing import Any

import numpy as np

from laconic.rng import uniform

NAME_LIST = "Alex Bob Carol Davis Eva Fae Gabriel Jack Max Oliver Polly Rex Sally Sam Stella Tom Wren"
NOUN_LIST = (
    "bompus boompus brimpus chorpus dumpus felpus fompus gerpus gorpus grimpus gwompus hilpus impus jelpus jompus "
    "kerpus lempus lorpus numpus quimpus rempus rompus rorpus scrompus shumpus sterpus storpus terpus timpus tumpus "
    "vumpus worpus wumpus yerpus yimpus yumpus zhorpus zumpus"
)
NAMES, NOUNS = NAME_LIST.split(), NOUN_LIST.split()
MIN_NODES, MAX_NODES, MEAN_NODES, NODES_STD = 14, 28, 22.8, 2.0
MIN_PATH, MAX_PATH = 3, 6  # steps from the name to the target
# Fitted: mean number of parents, share of parents from either side, preference for deep parents, rate of new names.
MEAN_PARENTS, CROSS_SIDE_SHARE, DEPTH_PREFERENCE, NEW_NAME_RATE = 1.85, 0.1, 0.38, 0.22
NODE_COUNT_WEIGHTS = [math.exp(-(((n - MEAN_NODES) / NODES_STD) ** 2) / 2) for n in range(MIN_NODES, MAX_NODES + 1)]
PARENT_COUNT_WEIGHTS = [MEAN_PARENTS**n / math.factorial(n) for n in range(1, 9)]  # Poisson, without 0
GRAPH, WORD, FACT = 1, 2, 3  # purposes of random numbers
BLOCK = 128

Edges = list[tuple[int, int]]


def iter_problems(seed: int) -> Iterator[dict[str, Any]]:
    for number in count():
        yield generate_problem(seed, number)


def generate_problem(seed: int, number: int) -> dict[str, Any]:
    """Return a problem with the fields of ProsQA, from the first random graph that allows a question."""
    attempts = (try_problem(seed, number, attempt) for attempt in count())
    return next(row for row in attempts if row is not None)


def try_problem(seed: int, number: int, attempt: int) -> dict[str, Any] | None:
    """Return the problem of one random graph, or None if it allows no question."""
    draw = iter_uniform(seed, GRAPH, number, attempt)
    names, edges = generate_graph(draw)
    targets = pick_targets(edges, draw)
    if targets is None:
        return None
    root, target, other = targets
    symbols = assign_symbols(names, max(b for _, b in edges) + 1, seed, number)
    path = shortest_path(edges, root, target, draw)
    facts = [format_fact(symbols, *edges[i]) for i in random_order(len(edges), seed, FACT, number)]
    choices = [symbols[target], symbols[other]]
    if next(draw) >= 0.5:
        choices.reverse()
    return {
        "id": f"prosqa-made-{seed}-{number:06d}",
        "question": f"{' '.join(facts)} Is {symbols[root]} a {choices[0]} or {choices[1]}?",
        "steps": [format_fact(symbols, a, b) for a, b in pairwise(path)],
        "answer": format_fact(symbols, root, target),
        "idx_to_symbol": symbols,
        "edges": [list(edge) for edge in edges],
        "root": root,
        "target": target,
        "neg_target": other,
    }


def iter_uniform(*key: int) -> Iterator[float]:
    for start in count(0, BLOCK):
        yield from uniform(*key, np.arange(start, start + BLOCK)).tolist()


def weighted_choice(weights: Sequence[float], draw: float) -> int:
    sums = list(accumulate(weights))
    return min(bisect(sums, draw * sums[-1]), len(sums) - 1)


def random_order(n: int, *key: int) -> list[int]:
    return np.argsort(uniform(*key, np.arange(n)), kind="stable").tolist()


def generate_graph(draw: Iterator[float]) -> tuple[set[int], Edges]:
    """Return the nodes that are names, and the edges, ordered by the node they lead to."""
    num_nodes = MIN_NODES + weighted_choice(NODE_COUNT_WEIGHTS, next(draw))
    names = {0, 1}
    edges: list[tuple[int, int]] = []
    sides, depths = [1, 2], [0, 0]  # of each node: bits of the first two names that reach it, and steps to a name
    for node in range(2, num_nodes):
        parents: list[int] = []
        if next(draw) * node < NEW_NAME_RATE:
            names.add(node)
        else:
            parents = draw_parents(sides, depths, draw)
        sides.append(0)
        for parent in parents:
            sides[node] |= sides[parent]
            edges.append((parent, node))
        depths.append(1 + min((depths[parent] for parent in parents), default=-1))
    return names, edges


def draw_parents(sides: Sequence[int], depths: Sequence[int], draw: Iterator[float]) -> list[int]:
    """Return different parents of the next node: of one side or none, rarely of both; deep ones are preferred."""
    side = 3 if next(draw) < CROSS_SIDE_SHARE else 1 + (next(draw) < 0.5)
    candidates = [node for node, other in enumerate(sides) if other | side == side]
    weights = [math.exp(DEPTH_PREFERENCE * depths[node]) for node in candidates]
    num_parents = 1 + weighted_choice(PARENT_COUNT_WEIGHTS, next(draw))
    return list(dict.fromkeys(candidates[weighted_choice(weights, next(draw))] for _ in range(num_parents)))


def compute_distances(edges: Iterable[tuple[int, int]], start: int) -> dict[int, int]:
    """Return the steps from a node to all that it reaches; edges must be ordered by the node they lead to."""
    distances = {start: 0}
    for a, b in edges:
        if a in distances:
            distances[b] = min(distances.get(b, MAX_NODES), distances[a] + 1)
    return distances


def pick_targets(edges: Edges, draw: Iterator[float]) -> tuple[int, int, int] | None:
    """Return the name in the question, its target and the wrong choice; None if the graph has none."""
    inner = {a for a, _ in edges}
    reached = [compute_distances(edges, name) for name in (0, 1)]
    leaves = [[n for n in reached[i] if n not in inner and n not in reached[1 - i]] for i in (0, 1)]
    if not all(leaves):
        return None
    deepest = [max(reached[i][leaf] for leaf in leaves[i]) for i in (0, 1)]
    root = int(deepest[1] > deepest[0]) if deepest[0] != deepest[1] else int(next(draw) < 0.5)
    targets = [leaf for leaf in leaves[root] if reached[root][leaf] == deepest[root]]
    if not MIN_PATH <= deepest[root] <= MAX_PATH or 1 - root in leaves[1 - root]:
        return None
    others = leaves[1 - root]
    return root, targets[int(next(draw) * len(targets))], others[int(next(draw) * len(others))]


def shortest_path(edges: Edges, root: int, target: int, draw: Iterator[float]) -> list[int]:
    distances = compute_distances(edges, root)
    nodes = [target]
    while nodes[-1] != root:
        parents = [a for a, b in edges if b == nodes[-1] and distances.get(a) == distances[b] - 1]
        nodes.append(parents[int(next(draw) * len(parents))])
    return nodes[::-1]


def assign_symbols(names: set[int], num_nodes: int, seed: int, number: int) -> list[str]:
    people = (NAMES[i] for i in random_order(len(NAMES), seed, WORD, number, 0))
    nouns = (NOUNS[i] for i in random_order(len(NOUNS), seed, WORD, number, 1))
    return [next(people) if node in names else next(nouns) for node in range(num_nodes)]


def format_fact(symbols: Sequence[str], a: int, b: int) -> str:
    return f"{symbols[a]} is a {symbols[b]}." if symbols[a][0].isupper() else f"Every {symbols[a]} is a {symbols[b]}."
