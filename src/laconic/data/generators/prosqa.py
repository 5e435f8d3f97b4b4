"""Graphs of facts and a question about them, as ProsQA has them (Coconut, arXiv:2412.06769): which of two things is X?

Two names begin; each later node has a few earlier ones before it, mostly of one of the two sides. The target is a leaf
that the name asked about reaches and the other does not; the wrong choice, the other way round. Sizes, edges and path
lengths are fitted to the 800 published graphs, whose own generator is not public: theirs have 22.8 nodes, 36.0 edges,
paths of 3.77 steps, 1.59 shortest ones.
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
MIN_NODES, MAX_NODES, MEAN_NODES, NODES_STD = 14, 28, 22.8, 2.0  # nodes
MIN_PATH, MAX_PATH = 3, 6  # steps from the name to the target
MEAN_PARENTS, CROSS_SIDE_SHARE, DEPTH_PREFERENCE, NEW_NAME_RATE = (
    1.85,
    0.1,
    0.38,
    0.22,
)  # fitted: nodes before one, share of either side, pull of depth, names
NODE_COUNT_WEIGHTS = [math.exp(-(((n - MEAN_NODES) / NODES_STD) ** 2) / 2) for n in range(MIN_NODES, MAX_NODES + 1)]
PARENT_COUNT_WEIGHTS = [MEAN_PARENTS**n / math.factorial(n) for n in range(1, 9)]  # Poisson, without 0
GRAPH, WORD, FACT = 1, 2, 3  # purposes of keyed draws
BLOCK = 128

Edges = list[tuple[int, int]]


def iter_problems(seed: int) -> Iterator[dict[str, Any]]:
    """Problem after problem, without an end, each a function of the seed and its number."""
    for number in count():
        yield generate_problem(seed, number)


def generate_problem(seed: int, number: int) -> dict[str, Any]:
    """One problem in the fields of ProsQA: graphs are drawn until one has what is asked about."""
    return next(row for attempt in count() if (row := try_problem(seed, number, attempt)))


def try_problem(seed: int, number: int, attempt: int) -> dict[str, Any] | None:
    """The problem of one graph, or None."""
    draw = iter_draws(seed, GRAPH, number, attempt)
    names, edges = generate_graph(draw)
    found = pick_targets(edges, draw)
    if found is None:
        return None
    root, target, other = found
    symbols = assign_symbols(names, max(b for _, b in edges) + 1, seed, number)
    steps = shortest_path(edges, root, target, draw)
    facts = [format_fact(symbols, *edges[i]) for i in random_order(len(edges), seed, FACT, number)]
    choice = [symbols[target], symbols[other]][:: 1 if next(draw) < 0.5 else -1]
    return {
        "id": f"prosqa-made-{seed}-{number:06d}",
        "question": f"{' '.join(facts)} Is {symbols[root]} a {choice[0]} or {choice[1]}?",
        "steps": [format_fact(symbols, a, b) for a, b in pairwise(steps)],
        "answer": format_fact(symbols, root, target),
        "idx_to_symbol": symbols,
        "edges": [list(edge) for edge in edges],
        "root": root,
        "target": target,
        "neg_target": other,
    }


def iter_draws(*key: int) -> Iterator[float]:
    """Numbers in [0, 1) of a key, without an end."""
    for begin in count(0, BLOCK):
        yield from uniform(*key, np.arange(begin, begin + BLOCK)).tolist()


def weighted_choice(weights: Sequence[float], draw: float) -> int:
    """A place, as likely as its weight."""
    sums = list(accumulate(weights))
    return min(bisect(sums, draw * sums[-1]), len(sums) - 1)


def random_order(n: int, *key: int) -> list[int]:
    """The numbers below n in an order of the key."""
    return np.argsort(uniform(*key, np.arange(n)), kind="stable").tolist()


def generate_graph(draw: Iterator[float]) -> tuple[set[int], Edges]:
    """The nodes that are names, and the edges, those into a node after those into earlier ones."""
    nodes = MIN_NODES + weighted_choice(NODE_COUNT_WEIGHTS, next(draw))
    sides, depths, names, edges = [1, 2], [0, 0], {0, 1}, list[tuple[int, int]]()
    for node in range(2, nodes):
        before: list[int] = []
        if next(draw) * node < NEW_NAME_RATE:
            names.add(node)
        else:
            before = draw_parents(sides, depths, draw)
        sides.append(0)
        for parent in before:
            sides[node] |= sides[parent]
            edges.append((parent, node))
        depths.append(1 + min((depths[parent] for parent in before), default=-1))
    return names, edges


def draw_parents(sides: Sequence[int], depths: Sequence[int], draw: Iterator[float]) -> list[int]:
    """Different nodes that stand before the next one: of one side or of none, seldom of any; deep ones rather."""
    side = 3 if next(draw) < CROSS_SIDE_SHARE else 1 + (next(draw) < 0.5)
    there = [node for node, other in enumerate(sides) if other | side == side]
    weights = [math.exp(DEPTH_PREFERENCE * depths[node]) for node in there]
    found = [
        there[weighted_choice(weights, next(draw))]
        for _ in range(1 + weighted_choice(PARENT_COUNT_WEIGHTS, next(draw)))
    ]
    return list(dict.fromkeys(found))


def compute_distances(edges: Iterable[tuple[int, int]], start: int) -> dict[int, int]:
    """Steps from a node to each that it reaches; edges come in the order of the nodes they lead to."""
    found = {start: 0}
    for a, b in edges:
        if a in found:
            found[b] = min(found.get(b, MAX_NODES), found[a] + 1)
    return found


def pick_targets(edges: Edges, draw: Iterator[float]) -> tuple[int, int, int] | None:
    """The name asked about, its target and the wrong choice; None where the graph has none that do."""
    inner = {a for a, _ in edges}
    reached = [compute_distances(edges, name) for name in (0, 1)]
    leaves = [[n for n in reached[i] if n not in inner and n not in reached[1 - i]] for i in (0, 1)]
    if not all(leaves):
        return None
    deepest = [max(reached[i][leaf] for leaf in leaves[i]) for i in (0, 1)]
    root = int(deepest[1] > deepest[0]) if deepest[0] != deepest[1] else int(next(draw) < 0.5)
    ends = [leaf for leaf in leaves[root] if reached[root][leaf] == deepest[root]]
    if not MIN_PATH <= deepest[root] <= MAX_PATH or 1 - root in leaves[1 - root]:
        return None
    return root, ends[int(next(draw) * len(ends))], leaves[1 - root][int(next(draw) * len(leaves[1 - root]))]


def shortest_path(edges: Edges, root: int, target: int, draw: Iterator[float]) -> list[int]:
    """One of the shortest paths."""
    far, nodes = compute_distances(edges, root), [target]
    while nodes[-1] != root:
        before = [a for a, b in edges if b == nodes[-1] and far.get(a) == far[b] - 1]
        nodes.append(before[int(next(draw) * len(before))])
    return nodes[::-1]


def assign_symbols(names: set[int], nodes: int, seed: int, number: int) -> list[str]:
    """A word for each node, none twice."""
    people = (NAMES[i] for i in random_order(len(NAMES), seed, WORD, number, 0))
    things = (NOUNS[i] for i in random_order(len(NOUNS), seed, WORD, number, 1))
    return [next(people) if node in names else next(things) for node in range(nodes)]


def format_fact(symbols: Sequence[str], a: int, b: int) -> str:
    """An edge as a sentence."""
    return f"{symbols[a]} is a {symbols[b]}." if symbols[a][0].isupper() else f"Every {symbols[a]} is a {symbols[b]}."
