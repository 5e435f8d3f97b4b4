"""Reading beyond the context: rows equal themselves alone, and pieces equal the whole, wherever caches are emptied."""

import copy
import random
import warnings
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import laconic
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import UsageError
from laconic.experiment.from_recipe.untrained_levels import parse_level_options
from laconic.experiment.resumable_stream import pad_segments
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.generation.config import GenerationConfig
from laconic.nested.cms import updates
from laconic.nested.cms.level import to_dense
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope
from laconic.nested.state import CMSLevelState, FastWeightState, LayerState, concat_rows
from tests.models.fixtures import fresh
from tests.nested.helpers import assert_close

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore:learning does harm")]
SHORT = GenerationConfig(max_tokens=3, eos_token_ids=())
CASES = [("llama", 16, (4, 8)), ("llama", 18, (4,)), ("gpt2", 16, (4, 8)), ("gpt2", 11, (4,))]


def build(family: str, window: int, chunk_sizes: tuple[int, ...], inner_lr: float = 0.3) -> NestedTextModel:
    """Return a small checkpoint in float64 with levels, which has `window` positions."""
    decoder = fresh(family, vocab_size=257, max_position_embeddings=window).double()
    levels = parse_level_options({"inner_lr": inner_lr, "chunk_sizes": chunk_sizes, "max_update_ratio": 0.1})
    return NestedTextModel.from_decoder(decoder, build_byte_tokenizer(), levels)


def random_row(generator: random.Random, length: int) -> list[int]:
    return [generator.randrange(256) for _ in range(length)]


def layer_tensors(layers: tuple[LayerState, ...], row: int) -> list[Tensor]:
    """Return what one row has learned, and the keys and values that it can attend to."""
    tensors: list[Tensor] = []
    for layer in layers:
        assert layer.cms is not None
        assert layer.cache is not None
        valid = layer.cache.valid[row]
        tensors += [to_dense(change)[row] for level in layer.cms.levels for change in level.change.values()]
        tensors += [layer.cache.positions[row, valid], layer.cache.keys[0][row, :, valid]]
        tensors.append(layer.cache.values[0][row, :, valid])
    return tensors


def assert_rows_equal(state: FastWeightState, row: int, other: FastWeightState, other_row: int = 0) -> None:
    """Compare two rows by counts, changes, and the slots in use of their caches."""
    chunk, other_chunk = state.open_chunk, other.open_chunk
    assert chunk is not None
    assert other_chunk is not None
    n = int(chunk.num_tokens[row])
    assert (int(state.position[row]), n) == (int(other.position[other_row]), int(other_chunk.num_tokens[other_row]))
    assert_close(layer_tensors(state.layers, row), layer_tensors(other.layers, other_row))
    if n:
        start, other_start = chunk.layers_at_start, other_chunk.layers_at_start
        assert_close(layer_tensors(start, row), layer_tensors(other_start, other_row))


@pytest.mark.medium
@pytest.mark.parametrize(("family", "window", "chunk_sizes"), CASES)
def test_read_ids_beyond_the_context_equals_each_row_alone(
    family: str, window: int, chunk_sizes: tuple[int, ...]
) -> None:
    model, generator = build(family, window, chunk_sizes), random.Random(window)
    for _ in range(2):
        first, second = ([random_row(generator, generator.randint(1, 2 * window + 3)) for _ in range(3)] for _ in "ab")
        prompts = [random_row(generator, n) for n in (1, window - 4, 3)]
        batch = model.read_ids(first)
        answers = model.generate_from_ids(prompts, batch, SHORT)
        both = model.read_ids(second, batch)
        for row in range(3):
            alone = model.read_ids([first[row]])
            assert_rows_equal(batch, row, alone)
            answer = model.generate_from_ids([prompts[row]], alone, SHORT)[0]
            assert answers[row].token_ids == answer.token_ids
            alone = model.read_ids([second[row]], alone)
            assert_rows_equal(both, row, alone)
            assert_rows_equal(model.read_ids([second[row]], batch.select_rows([row])), 0, alone)


@pytest.mark.medium
@pytest.mark.parametrize(("family", "window", "chunk_sizes"), CASES)
def test_read_ids_in_pieces_equals_reading_at_once(family: str, window: int, chunk_sizes: tuple[int, ...]) -> None:
    model, generator = build(family, window, chunk_sizes), random.Random(window)
    for n in (window, window + 1, 3 * window - 2):
        ids = random_row(generator, n)
        whole = model.read_ids([ids])
        assert whole.attention_cache is not None
        assert (n - 1) % window + 1 == whole.attention_cache.S
        for _ in range(3):
            cuts = [0, *sorted(generator.sample(range(1, n), 4)), n]
            state: FastWeightState | None = None
            for start, stop in pairwise(cuts):
                state = model.read_ids([ids[start:stop]], state)
            assert_rows_equal(cast(FastWeightState, state), 0, whole)


def test_compress_first_segment_with_bos_fits_the_position_table() -> None:
    tokenizer = laconic.load_tokenizer("stories260k")
    decoder = fresh("gpt2", vocab_size=512, max_position_embeddings=64)
    model = NestedTextModel.from_decoder(decoder, tokenizer, parse_level_options({"chunk_sizes": (64,)}))
    text = "Lily had a red ball. " * 20
    state = model.compress([text])
    assert state.position.tolist() == [len(tokenizer.encode(text))]
    assert tokenizer.encode(text)[0] == tokenizer.bos_token_id
    answer = model.generate([text], config=GenerationConfig(max_tokens=2, update_on_prompt=True))
    assert len(answer[0].token_ids) == 2


def test_reading_refuses_chunks_beyond_the_position_table() -> None:
    model = build("gpt2", 16, (32,))
    with pytest.raises(UsageError, match=r"a chunk of 32 tokens exceeds the model's 16 positions; set 16"):
        model.compress(["a" * 40])
    assert build("llama", 16, (32,)).compress(["a" * 40]).position.tolist() == [40]


def test_reading_without_learning_does_no_harm() -> None:
    """What a state that has learned nothing is compared with knows the text before a segment too."""
    model = NestedTextModel.from_pretrained("stories260k", inner_lr=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = model.compress(["Lily and Max went to the park. They saw a big dog and they had a lot of fun. " * 3])
        model.compress(["The heat of the burning gas drove the crowd of men back from the pit. " * 2], state)


def test_a_prompt_that_is_learned_stays_whole_in_attention() -> None:
    model, generator = build("llama", 32, (8,)), random.Random(0)
    state = model.read_ids([random_row(generator, 28)])
    for update_on_prompt in (True, False):
        config = GenerationConfig(max_tokens=2, update_on_prompt=update_on_prompt)
        (answer,) = model.generate_from_ids([random_row(generator, 10)], state, config)
        cache = cast(FastWeightState, answer.state).attention_cache
        assert cache is not None
        assert cache.S == 12


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    """In memory as from a file: with other levels, other weights, or weights that were trained in between."""
    model = build("llama", 64, (8,))
    state = model.compress(["a text that is longer than a chunk"])
    after = model.generate("b", GenerationConfig(max_tokens=2), memory=state)[0].state
    model.save(state, tmp_path / "state")
    copies = [state, cast(FastWeightState, after), model.load_memory(tmp_path / "state"), state.detach()]
    others = [build("llama", 64, (16,)), build("qwen2", 64, (8,))]
    refusal = r"^state: it was read by another model"
    for read in copies:
        model.compress(["more"], read)
        for other in others:
            with pytest.raises(UsageError, match=refusal):
                other.compress(["more"], read)
            with pytest.raises(UsageError, match=refusal):
                other.save(read, tmp_path / "other")
    with torch.no_grad():
        next(model.model.parameters()).mul_(1.5)
    with pytest.raises(UsageError, match=refusal):
        model.generate("b", memory=state)


def test_state_is_read_by_a_copy_of_a_model_in_another_dtype(tmp_path: Path) -> None:
    Hope(HopeConfig.attention_free(257, 16, 1, chunk_sizes=(4,), num_heads=2, head_dim=8)).save_pretrained(tmp_path)
    model = NestedTextModel(Hope.from_pretrained(tmp_path, torch.bfloat16), build_byte_tokenizer())
    state = model.compress(["a text that is longer than a chunk"])
    texts = [x.generate("b", SHORT, memory=state)[0].text for x in (model, copy.deepcopy(model))]
    assert texts[0] == texts[1]


def test_concat_rows_of_two_models_is_refused() -> None:
    states = [build("llama", 64, sizes).compress(["a text"]) for sizes in ((8,), (16,))]
    with pytest.raises(UsageError, match=r"^concat_rows: the states were read by different models"):
        concat_rows(*states)
    assert concat_rows(states[0], states[0]).model_key == states[0].model_key


def test_file_of_a_state_read_in_larger_chunks_is_refused(tmp_path: Path) -> None:
    """By a model of the same weights."""
    models = [
        NestedTextModel(
            Hope(HopeConfig.attention_free(257, 16, 1, chunk_sizes=(C,), num_heads=2, head_dim=8)),
            build_byte_tokenizer(),
        )
        for C in (16, 4)
    ]
    models[1].model.load_state_dict(models[0].model.state_dict())
    models[0].save(models[0].compress(["ten tokens"]), tmp_path / "state")
    with pytest.raises(UsageError, match=r"read by a model with other chunk sizes"):
        models[1].compress(["more"], tmp_path / "state")


def test_parse_level_options_names_the_option() -> None:
    with pytest.raises(UsageError, match=r"^inner_lr=-1\.0: should be greater"):
        parse_level_options({"inner_lr": -1.0})


def test_reading_frees_each_change_once_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a level is updated, one change of each map is alive, and its new change in that level."""
    model = build("llama", 64, (4,))
    count, apply_update = len(model.model.blocks) * 3, updates.apply_update
    alive = weakref.WeakSet[Tensor]()
    most = 0

    def counted(*args: Any) -> CMSLevelState:
        nonlocal most
        new = apply_update(*args)
        alive.update(change for change in new.change.values() if isinstance(change, Tensor))
        most = max(most, len({x.data_ptr() for x in alive}))
        return new

    monkeypatch.setattr(updates, "apply_update", counted)
    job = model.start_reading()
    job.current = job.advance(pad_segments([random_row(random.Random(0), 44)], job.device))
    assert alive, "no change is dense; read more tokens"
    for n in range(3):
        job.current = job.advance(pad_segments([random_row(random.Random(n), 20)], job.device))
    assert count <= most <= count + 3
