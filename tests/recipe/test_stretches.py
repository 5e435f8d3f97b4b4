"""Plans of recipes that read documents: rows counted or assumed, positions, memory, what does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.batches import DocumentBatch
from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.errors import InputError, UsageError
from laconic.experiment import dry_run as planning
from laconic.experiment import pace, sketch, stretches
from laconic.experiment.build_data import load_training_rows
from laconic.experiment.build_model import build_config, check_context_length, load_model_tokenizer
from laconic.experiment.dry_run import plan, told
from laconic.experiment.lengths import foreseen
from laconic.experiment.load_run import load_config_and_tokenizer
from laconic.experiment.need import followed, settled, tracked
from laconic.models.decoder import Decoder

CPU = torch.device("cpu")
TINY = """method = "autocompressor"
[model]
family = "llama"
tokenizer = "bytes"
hidden_size = 32
num_hidden_layers = 6
num_attention_heads = 4
max_position_embeddings = 256
[compression]
max_vectors = 4
[data]
source = "text"
path = "text.txt"
text = { row_tokens = 120, segment_tokens = 30, segment_lengths = "fixed", segments_per_window = 2, segment_overlap = 0 }
[train]
steps = 5
batch_size = 3
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    """A recipe that reads, with keys changed; its text is there if it is given."""

    def make(*keys: str, text: str = "") -> Recipe:
        (tmp_path / "tiny.toml").write_text(TINY)
        if text:
            (tmp_path / "text.txt").write_text(text)
        return load_recipe(tmp_path / "tiny.toml", keys)[0]

    return make


def first(recipe: Recipe, rows: int = 3, step: int = 0) -> tuple[Any, Any, DocumentBatch]:
    """The recipe's configuration, tokenizer, and a batch of its first rows."""
    config, tokenizer = load_config_and_tokenizer(recipe)
    batch = foreseen(recipe, tokenizer, config.max_position_embeddings).source.batch(range(rows), 0, step)
    assert isinstance(batch, DocumentBatch)
    return config, tokenizer, batch


def test_documents_that_are_not_at_hand_are_as_long_as_they_can_be(tiny: Any) -> None:
    recipe = tiny()
    found = foreseen(recipe, load_model_tokenizer(recipe.model), 256)
    assert (found.rows, found.assumed, found.parts) == (15, True, ("document",))
    assert "text.txt is not at hand: rows of 120 tokens, as many as the steps ask for" in found.notes[0]
    batch = first(recipe)[2]
    assert (batch.segment_ends, int(batch.attention_mask.sum())) == ((30, 60, 90, 120), 360)
    drawn = tiny("data.text.segment_lengths=random", "data.name=a/b")
    assert first(drawn, step=1)[2].segment_ends != first(drawn, step=2)[2].segment_ends
    with pytest.raises(InputError, match=r"no file .*text\.txt"):
        foreseen(
            tiny("data.text.held_out_fraction=0").model_copy(update={"train": whole_epochs(recipe)}),
            load_config_and_tokenizer(recipe)[1],
            256,
        )


def whole_epochs(recipe: Recipe) -> Any:
    """The same training by epochs, whose steps nobody knows without the documents."""
    return recipe.train.model_copy(update={"steps": None, "epochs": 1.0})


def test_documents_at_hand_are_counted(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny("data.text.held_out_fraction=0", text="word " * 250)
    config, tokenizer = load_config_and_tokenizer(recipe)
    found, real = foreseen(recipe, tokenizer, 256), load_training_rows(recipe, tokenizer, 256).source
    lengths = [int(real.batch([i], 0, 0).num_tokens) for i in range(len(real))]
    assert (found.rows, found.lengths[:, 0].tolist(), found.assumed) == (len(real), lengths, False)
    monkeypatch.setattr(stretches, "LOOK", 100)
    assert foreseen(recipe, tokenizer, config.max_position_embeddings).lengths.tolist() == found.lengths.tolist()
    monkeypatch.setattr(planning, "tracked", lambda *_: 1000.0)
    text = told(plan(recipe, CPU))
    for word in ("document 120 / 120 / 120", "update of 3 rows, measured", "1 documents of about 1,2"):
        assert word in text


def test_a_document_that_is_looked_at_in_part_is_counted_by_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.data.documents.load import Document
    from laconic.data.tokenizer import build_byte_tokenizer

    monkeypatch.setattr(stretches, "LOOK", 20)
    found = stretches.tokens_of(
        [Document(n, ("ab" * k,)) for n, k in (("a", 5), ("b", 30), ("c", 7))], build_byte_tokenizer()
    )
    assert found == [10, 60, 14]
    assert [stretches.cut(n, 30) for n in (60, 61, 75)] == [[30, 30], [30, 30], [30, 30, 15]]


@pytest.mark.parametrize(
    "keys",
    [
        (), ("data.text.segments_per_window=3", "data.text.segment_overlap=1"), ("compression.memory_policy=replace",), ("compression.reread_memory=false",),
        ("compression.summary=autoregressive", "model.family=opt"), ("compression.summary=pool",),
        ("compression.memory_policy=fifo", "compression.max_memory_vectors=6"), ("method=plain",),
    ],
)  # fmt: skip
def test_positions_are_those_that_are_read(tiny: Any, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = settled(tiny(*keys))
    config, tokenizer, batch = first(recipe)
    method: Any = sketch.filled(sketch.sketched(recipe, config, tokenizer, 5), CPU)
    seen, real = [0], Decoder.forward

    def counting(self: Decoder, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
        seen[0] += x.shape[1]
        return real(self, x, *rest, **more)

    monkeypatch.setattr(Decoder, "forward", counting)
    state = None
    for piece in batch.sequential_parts:
        state = method(piece, state).state
    found = sum(pace.reads(recipe, piece).positions for piece in batch.sequential_parts)
    fifo = (
        "compression.max_memory_vectors=6" in keys
    )  # a block that does not go in whole is dropped, so fewer stand before a segment
    assert (seen[0] <= found <= 1.05 * seen[0]) if fifo else (found == seen[0])


def test_while_the_head_learns_nothing_has_a_gradient(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny("compression.length_policy=stop_head", "stop_head.estimator=ponder", "train.batch_size=1")
    config, tokenizer, batch = first(recipe, 1, 4)
    reads = [pace.reads(recipe, piece, head=True) for piece in batch.sequential_parts]
    assert sum(read.positions for read in reads) == 0
    once = [pace.reads(recipe, piece).positions for piece in batch.sequential_parts]
    assert [read.free for read in reads] == [once[0] + 4 * (4 + 30), once[1] + 4 * (12 + 30)]
    asked: list[bool] = []

    def timed(recipe: Recipe, method: Any, batch: DocumentBatch, *_: Any) -> float:
        asked.append(method.phase(batch.step) == "head")
        return 3.0 if asked[-1] else 1.0

    monkeypatch.setattr(pace, "measured", timed)
    method = sketch.sketched(recipe, config, tokenizer, 5)
    rows = foreseen(recipe, tokenizer, 256)
    _, found = planning.typical(recipe, config, method, rows, 1, CPU, 1)
    assert asked == [False, True]
    assert found.seconds == pytest.approx(0.8 * 1.0 + 0.2 * 3.0)
    assert found.by.endswith(", and one of the head alone")


@pytest.mark.parametrize(
    ("keys", "off"),
    [
        ((), 0.05),
        pytest.param(
            ("compression.summary=autoregressive", "compression.length_policy=stop_head", "stop_head.estimator=soft"),
            0.05,
            marks=pytest.mark.slow,
        ),
        pytest.param(("compression.checkpoint_segments=true",), 0.15, marks=pytest.mark.slow),
    ],
)
def test_two_layers_tell_what_all_take(tiny: Any, keys: tuple[str, ...], off: float) -> None:
    recipe = settled(
        tiny(*keys, "data.text.row_tokens=120", "data.text.segment_tokens=60", "compression.max_vectors=2")
    )
    config, tokenizer, batch = first(recipe)
    whole, _ = followed(recipe, config, tokenizer, batch, CPU)
    assert abs(tracked(recipe, config, tokenizer, [batch], CPU) * batch.B / whole - 1) < off


@pytest.mark.slow
def test_segments_computed_again_take_less(tiny: Any) -> None:
    found = [
        tracked(recipe, *first(recipe)[:2], [first(recipe)[2]], CPU)
        for recipe in (tiny(), tiny("compression.checkpoint_segments=true"))
    ]
    assert found[1] < 0.75 * found[0]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("model.max_position_embeddings=40",),
         r'12 vectors, 30 tokens and 4 places, llama has 40 positions: memory that accumulates ends after 2 segments of'
         r' 30; take memory "budgeted", "fifo" or "replace"$'),
        (("model.max_position_embeddings=33", "compression.memory_policy=replace"),
         r"4 vectors, 30 tokens and 4 places, llama has 33 positions; take shorter segments$"),
        (("model.max_position_embeddings=60", "data.text.segment_lengths=random", "data.text.max_segment_tokens=50"),
         r"12 vectors, 50 tokens and 4 places, llama has 60 positions"),
        (("model.max_position_embeddings=50", "method=plain"),
         r"^data\.text\.window 2 of 30 tokens: plain text is read at once, and the model has 50 positions; lower one "),
        (("data.source=recall", "model.tokenizer=recall", "model.max_position_embeddings=20"),
         r"4 vectors, 16 tokens and 4 places, llama has 20 positions"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_read(tiny: Any, keys: tuple[str, ...], said: str) -> None:
    recipe = tiny(*keys) if "data.source=recall" not in keys else recalls(tiny, keys)
    with pytest.raises(UsageError, match=said):
        check_context_length(recipe, build_config(recipe.model, 300))


def recalls(tiny: Any, keys: tuple[str, ...]) -> Recipe:
    """The same on the recall task, which has no file."""
    made = tiny(*(key for key in keys if key != "data.source=recall"))
    data = made.data.model_copy(update={"kind": "recall", "path": None})
    return made.model_copy(update={"data": data})


def test_recall_is_planned(tiny: Any) -> None:
    recipe = recalls(tiny, ("model.tokenizer=recall", "model.num_hidden_layers=1"))
    found = foreseen(recipe, load_model_tokenizer(recipe.model), 256)
    assert (found.rows, found.lengths[0, 0], found.assumed) == (100_000, 32, False)
    planned = plan(recipe, CPU)
    assert planned["memory"]["by"] == "followed through fake tensors"
    assert planned["memory"]["bytes"] > 3 * planned["bytes"]
