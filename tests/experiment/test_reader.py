"""A run that reads: texts side by side and one by one, in parts and at once, and prompts on what was read."""

from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.errors import CorruptArtifactError, InputError, LaconicError, UsageError
from laconic.experiment.compressor import TextCompressor, current_time
from laconic.generation.config import GenerationConfig
from tests.compression.compressors import reader
from tests.models.fixtures import FAMILIES
from tests.tolerances import FLOORS, ORACLE, largest

TEXTS = [
    "Three may keep a secret, if two of them are dead; and so on for a while.",
    "Short.",
    "A word to the wise is enough, and many words won't fill a bushel.",
]
CELLS: list[dict[str, Any]] = [
    {"length": "nested"},
    {"length": "stop"},
    {"length": "stop", "generator": "self"},
    {"length": "stop", "memory": "replace"},
    {"length": "nested", "memory": "replace", "generator": "self"},
    {"generator": "pool"},
    {"generator": "select"},
    {"length": "ratio"},
    {"memory": "fifo", "budget": 9},
    {"memory": "budgeted", "budget": 9},
    {"recurrent": False, "length": "stop"},
    {"bos": "sink"},
]


def name(cell: dict[str, Any]) -> str:
    return " ".join(str(value) for value in cell.values())


def same_memory(got: SummaryMemory, asked: SummaryMemory) -> None:
    """Slot by slot, row by row, whatever is dead beside them."""
    assert got.B == asked.B
    for row in range(got.B):
        one, two = got.select_rows([row]).compact(), asked.select_rows([row]).compact()
        assert one.segment_ids.equal(two.segment_ids)
        assert largest(one.vectors, two.vectors) <= FLOORS * ORACLE
        assert one.metadata == two.metadata


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_side_by_side_equals_one_by_one(cell: dict[str, Any]) -> None:
    run = reader(segment=32, **cell)
    rows = [run.compress([text], names=[f"text {i}"]) for i, text in enumerate(TEXTS, 1)]
    same_memory(run.compress(TEXTS), SummaryMemory.concat_rows(*rows))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_parts_of_any_size_equal_the_whole(family: str) -> None:
    """Law 10, for bytes: a character may be cut by a part, and a segment by a character."""
    run, text = reader(family, length="stop"), "Ein Stück weiter, dort. " * 4
    whole = run.compress([text], names=["stream"])
    for size in (1, 7, 1000):
        same_memory(run.stream(text[i : i + size] for i in range(0, len(text), size)), whole)


def test_independent_blocks_are_joined_as_if_read_in_a_row() -> None:
    """Law 8: without recurrence, what was written apart is what is written together."""
    run = reader(length="stop", recurrent=False)
    text = TEXTS[0][:64]
    parts = [run.compress([text[i : i + 16]]) for i in range(0, 64, 16)]
    joined, whole = SummaryMemory.concat_segments(*parts), run.compress([text])
    assert torch.equal(joined.segment_ids, whole.segment_ids)
    assert largest(joined.vectors, whole.vectors) <= FLOORS * ORACLE
    assert joined.num_tokens.equal(whole.num_tokens)
    again = reader(length="stop")
    apart = SummaryMemory.concat_segments(*(again.compress([text[i : i + 16]]) for i in range(0, 64, 16)))
    assert largest(apart.vectors[:, -1], again.compress([text]).vectors[:, -1]) > 1e-3


PLACES = {"rope": ("contiguous", "reserved"), "table": ("zero", "contiguous", "reserved")}
HEADS = [("llama", "none"), ("llama", "first"), ("opt", "none"), ("opt", "first")]


@pytest.mark.parametrize(("family", "bos"), [*((family, "sink") for family in FAMILIES), *HEADS])
def test_generating_equals_full_passes(family: str, bos: str) -> None:
    """Law 7: argmax over [bos; memory; prompt; answer so far], each time anew, for every way to stand."""
    for positions in PLACES[reader(family).decoder.config.position_encoding]:
        run = reader(family, positions=positions, bos=bos, length="stop")
        memory, prompts = run.compress(TEXTS[:2]), ["And then", "Why?"]
        found = run.generate(prompts, memory, config=GenerationConfig(max_tokens=3))
        for row, text in enumerate(prompts):
            ids = run.tokenizer.encode(text, add_special_tokens=False)
            assert greedy(run, memory.select_rows([row]), ids, 3) == found[row].token_ids


def greedy(run: TextCompressor, memory: SummaryMemory, ids: list[int], n: int) -> list[int]:
    """By whole passes of the method's own reading."""
    made: list[int] = []
    for _ in range(n):
        text = torch.tensor([ids + made])
        with torch.no_grad():
            hidden = run.method.read_text(text, memory=memory)
        made.append(int(run.decoder.logits(hidden[0, -1]).argmax()))
        if made[-1] == run.tokenizer.eos_token_id:
            break
    return made


def test_one_memory_is_shared_by_all_prompts_and_one_prompt_is_asked_of_all() -> None:
    run = reader(length="stop", positions="reserved")
    memory, prompts = run.compress(TEXTS), ["Why", "And what then?", "."]
    each = run.generate(prompts, memory, config=GenerationConfig(max_tokens=3))
    assert [
        run.generate([p], memory.select_rows([i]), config=GenerationConfig(max_tokens=3))[0].token_ids
        for i, p in enumerate(prompts)
    ] == [g.token_ids for g in each]
    shared = run.generate(prompts, memory.select_rows([1]), config=GenerationConfig(max_tokens=3))
    assert [
        g.token_ids for g in run.generate(prompts, memory.select_rows([1, 1, 1]), config=GenerationConfig(max_tokens=3))
    ] == [g.token_ids for g in shared]
    asked = run.generate(["Why"], memory, config=GenerationConfig(max_tokens=3))
    assert [g.token_ids for g in run.generate(["Why"] * 3, memory, config=GenerationConfig(max_tokens=3))] == [
        g.token_ids for g in asked
    ]
    assert run.generate(["Why"], config=GenerationConfig(max_tokens=3))[0].token_ids


def test_what_is_asked_for_rules_over_what_the_run_has() -> None:
    run = reader(length="stop", cap=8)
    text = [TEXTS[0]]
    assert (run.compress(text, num_vectors=3).vectors_per_segment == 3).all()
    assert int(run.compress(text, total_vectors=7).num_vectors) == 7
    drawn = [run.compress(text, stop_rule="sample", seed=seed).vectors_per_segment.tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    many = run.compress(TEXTS[::-1], stop_rule="sample", seed=1).vectors_per_segment[2]
    assert many.tolist() != drawn[0][0]  # the draws are of the third text now
    low, high = (int(run.compress(text, quantile=q).num_vectors) for q in (0.05, 0.95))
    assert low < int(run.compress(text).num_vectors) < high
    assert int(run.compress(text, threshold=0.01).num_vectors) < int(
        run.compress(text, stop_rule="threshold", threshold=0.99).num_vectors
    )
    assert run.compress(text, segment_tokens=8).num_segments == 2 * run.compress(text).num_segments - 1


REFUSED = [
    (lambda r: r.compress(["a", ""]), InputError, "text 2: empty; give a text to compress"),
    (lambda r: r.stream([]), InputError, "stream: empty; give a text to compress"),
    (lambda r: r.compress([]), UsageError, "texts: give a list of at least one text, and as many names"),
    (lambda r: r.compress("text"), UsageError, "texts: give a list of at least one text, and as many names"),
    (lambda r: r.compress(["a"], names=["a", "b"]), UsageError, "texts: give a list of at least one text"),
    (lambda r: r.compress(["a"], segment_tokens=0), UsageError, "segment 0: give 1 token or more"),
    (
        lambda r: r.compress(["a"], num_vectors=2, total_vectors=3),
        UsageError,
        "n and budget given; one of them says how many vectors",
    ),
    (lambda r: r.compress(["a"], stop_rule="sample", quantile=0.5), UsageError, "stop and q given; one of them says"),
    (lambda r: r.compress(["a"], quantile=0.5, threshold=0.5), UsageError, "q and tau given; one of them says"),
    (lambda r: r.compress(["a"], total_vectors=0), UsageError, "budget 0: give 1 vector or more"),
    (
        lambda r: r.compress(["a"], quantile=1.0),
        UsageError,
        "q 1.0: give a probability between 0 and 1, neither of them",
    ),
    (lambda r: r.compress(["a"], num_vectors=3), UsageError, "n 3: lengths 1, 2, 4 are allowed; choose one of them"),
    (
        lambda r: r.compress(["a " * 80], segment_tokens=140),
        UsageError,
        "segment: 0 vectors, 140 tokens and 4 places, llama has",
    ),
    (
        lambda r: r.compress(["a " * 300], num_vectors=4),
        UsageError,
        "memory that accumulates ends after 28 segments of 16; take memory",
    ),
    (
        lambda r: r.generate(["a", "b"], r.compress(["x", "y", "z"]), config=GenerationConfig(max_tokens=1)),
        UsageError,
        "2 prompts on a memory of 3 texts; give one prompt, or as many as texts",
    ),
    (
        lambda r: r.generate([""], r.compress(["x"]), config=GenerationConfig(max_tokens=1)),
        UsageError,
        "prompt 0 is empty; give text",
    ),
    (
        lambda r: r.generate(["a"], reader(seed=3).compress(["x"]), config=GenerationConfig(max_tokens=1)),
        CorruptArtifactError,
        r"memory: the one given was written for weights [0-9a-f]{4}…[0-9a-f]{2} \(llama, width \d+\), this model is",
    ),
]


@pytest.mark.parametrize(("do", "error", "says"), REFUSED)
def test_what_cannot_be_is_one_line(do: Any, error: type[LaconicError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        do(reader(room=128, length="stop", cap=4, allowed_lengths=(1, 2, 4)))
    assert "\n" not in str(caught.value)


def test_a_stop_that_was_not_learned() -> None:
    for asked in ({"stop": "quantile"}, {"q": 0.5}, {"budget": 5}):
        with pytest.raises(UsageError, match='lengths of this model are of kind "nested"; ask for a number of vectors'):
            reader(length="nested").compress(["a"], **asked)  # type: ignore[arg-type]


def test_memories_go_to_files_and_back(tmp_path: Any) -> None:
    run = reader(length="stop", dtype=torch.float32)
    memory = run.compress(TEXTS)
    memory.save(tmp_path / "x.safetensors")
    assert run.load(tmp_path / "x.safetensors").is_equal(memory)
    with pytest.raises(CorruptArtifactError, match="was written for weights"):
        reader(seed=3).load(tmp_path / "x.safetensors")
    for changes, what in (
        ({"positions": "reserved"}, "positions"), ({"bos": "sink"}, "bos"),
    ):  # fmt: skip
        other = reader(length="stop", dtype=torch.float32, **changes)
        with pytest.raises(CorruptArtifactError, match=f"was written with {what} "):
            other.load(tmp_path / "x.safetensors")


def test_the_time_may_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert current_time() == "1970-01-02T00:00:00+00:00"
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert current_time() > "2026"
