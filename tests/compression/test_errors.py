"""What reading and compressing refuse, each in one line that says what was asked, what there was and what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.inference import StopRule
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig, StopHeadConfig
from laconic.errors import CorruptArtifactError, UsageError
from laconic.storage.atomic import save_artifact
from tests.compression.documents import compressor, documents
from tests.core.readings import fresh

TEXT = torch.tensor([[4, 5, 6, 7]])


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (
            {"summary_positions": "zero"},
            'positions "zero": llama has RoPE, where each slot stands somewhere; take contiguous',
        ),
        (
            {"adapter_scope": "write"},
            'adapt "write": the decoder has no adapter that could write alone; train with lora',
        ),
        ({"bos": "sink"}, 'bos "sink": the tokenizer has no such token; take none'),
        (
            {"summary": "pool", "memory_policy": "budgeted", "max_memory_vectors": 9},
            'memory "budgeted" with generator "pool": a memory',
        ),
        (
            {"memory_policy": "budgeted", "max_memory_vectors": 5},
            'budget 5: memory "budgeted" needs room for 6 vectors; raise it',
        ),
        (
            {"memory_policy": "fifo", "max_memory_vectors": 2},
            'budget 2: memory "fifo" needs room for 3 vectors; raise it',
        ),
        (
            {"carry_between_windows": "soft"},
            'carry "soft": lengths are hard in training, and so is what is handed on; leave it out',
        ),
        ({"length_policy": "stop_head"}, 'length "stop" without the table halting: it says how the length is learned'),
    ],
)
def test_settings_that_cannot_be_meant(reading: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compressor(**reading)


@pytest.mark.parametrize(
    ("table", "given", "message"),
    [
        (
            CompressionConfig,
            {"summary": "pool", "length_policy": "stop_head"},
            'with generator "pool": a prefix of its spans is a prefix',
        ),
        (
            CompressionConfig,
            {"summary": "select", "length_policy": "nested_dropout"},
            '" with generator "select": it has fixed and ratio',
        ),
        (
            CompressionConfig,
            {"max_memory_vectors": 9},
            'budget 9 with memory "accumulate": budgeted and fifo need one, others none',
        ),
        (
            CompressionConfig,
            {"reread_memory": False, "memory_policy": "replace"},
            'memory "replace": the older memory would be lost unread',
        ),
        (
            CompressionConfig,
            {"trigger_placement": "replace"},
            'trigger "replace" with generator "parallel": it is self\'s',
        ),
        (
            CompressionConfig,
            {"max_vectors": 4, "allowed_lengths": (2, 8)},
            r"allowed \[2, 8\]: ascending lengths from 1 to cap 4",
        ),
        (
            CompressionConfig,
            {"num_vectors": 3, "length_policy": "nested_dropout"},
            'kappa 3 with length "nested": it is the fixed length; leave it out',
        ),
        (CompressionConfig, {"num_vectors": 60}, "kappa 60: none of the lengths"),
        (
            StopHeadConfig,
            {"head": "vocabulary"},
            'control "vectors": it is a row of the vocabulary; control = "rows"',
        ),
        (
            StopHeadConfig,
            {"control_tokens_in_softmax": True},
            'control_in_softmax with control "vectors": there are no rows to score; c',
        ),
        (
            StopHeadConfig,
            {"soft_gate": "scale_vectors"},
            'gate "scale" with estimator "ponder": soft reading alone has a gate',
        ),
        (StopHeadConfig, {"soft_gate": "none"}, 'gate "none" with estimator "ponder": soft reading alone has a gate'),
        (
            StopHeadConfig,
            {"stop_position": "mixture"},
            'index "split" with estimator "ponder": the original\'s, of soft alone',
        ),
    ],
)
def test_cells_of_the_grid_that_there_are_not(table: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(**given)


def test_summary_tokens_start_as_a_row_that_there_is() -> None:
    decoder = fresh("llama")
    with pytest.raises(UsageError, match='summary_init "eos": the model names no such id; take "normal"'):
        SummaryParameters(decoder, CompressionConfig(), eos_token_id=None)
    drawn, copied = (
        SummaryParameters(decoder, CompressionConfig(summary_init=how), eos_token_id=2).tokens
        for how in ("normal", "eos")
    )
    assert drawn is not None
    assert copied is not None
    assert drawn.abs().max() < 0.2
    torch.testing.assert_close(copied - drawn, decoder.token_embedding.weight[2].expand(50, -1))


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ((1, 0), "window: 1 leaves no segment that reads a summary inside its own window, so nothing would learn to "),
        ((3, 1), "window: 4 segments where windows are of 3; give the pieces of a batch one after another"),
    ],
)
def test_windows_in_which_nothing_learns(windows: tuple[int, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compressor()(documents(windows=windows))


def test_a_kernel_without_a_gradient_for_the_gate() -> None:
    method = compressor(halting={"estimator": "soft"}, length_policy="stop_head")
    method.decoder.attn_implementation = "flex"
    with pytest.raises(
        UsageError, match='attention "flex": this kernel has no gradient for a bias, so a gate cannot learn; '
    ):
        method(documents(((4, 4),), step=9))


@pytest.mark.parametrize(
    ("sizes", "reading", "message"),
    [
        (
            {"max_position_embeddings": 6},
            {},
            "segment: 0 vectors, 4 tokens and 3 places, llama has 6 positions; take",
        ),
        ({"windows": (None, 6)}, {}, "4 tokens and 3 places, llama has a sliding window of 6; take shorter segments"),
        (
            {"max_position_embeddings": 12},
            {},
            "segment: 6 vectors, 4 tokens and 3 places, llama has 12 positions: memory that accumulates ends after 2 "
            'segments of 4; take memory "budgeted", "fifo" or "replace"',
        ),
        (
            {"max_position_embeddings": 8},
            {"summary": "autoregressive", "bos": "first", "memory_policy": "replace"},
            "segment: 0 vectors, 4 tokens and 4 places and bos, llama has 8 positions; take shorter segments",
        ),
        (
            {"max_position_embeddings": 7},
            {"summary_positions": "reserved"},
            "segment: 3 vectors, 4 tokens and 3 places, llama",
        ),
    ],
)
def test_segments_that_do_not_fit(sizes: dict[str, Any], reading: dict[str, Any], message: str) -> None:
    method, memory = compressor(sizes=sizes, word=1, **reading), None
    held = int(message.split()[1]) if message.startswith("segment") else 0
    for _ in range(held // 3):
        memory = method.compress(TEXT, None, memory)
    with pytest.raises(UsageError, match=message):
        method.compress(TEXT, None, memory)


@pytest.mark.parametrize(
    ("length", "how", "message"),
    [
        ("nested", StopRule("quantile"), 'stop "quantile": lengths of this model are of kind "nested"; ask for a numb'),
        (
            "stop",
            StopRule("classifier"),
            'stop "classifier": lengths of this model are of kind "stop"; ask for a number',
        ),
        (
            "fixed",
            StopRule("fixed", num_vectors=2),
            "n 2: this model writes 3 vectors a segment; crop the memory, or take",
        ),
        ("stop", StopRule("sample"), 'stop "sample" without draws: give uniform numbers '),
        ("stop", StopRule("quantile", quantile=1.0), "q 1.0: give a probability between 0 and 1, neither of them"),
        ("stop", StopRule("threshold", threshold=0.0), "tau 0.0: give a probability between 0 and 1, neither of them"),
    ],
)
def test_ways_to_stop_that_were_not_learned(length: str, how: StopRule, message: str) -> None:
    method = compressor(halting={} if length == "stop" else None, length_policy=length)
    with pytest.raises(UsageError, match=message):
        method.compress(TEXT, rule=how)


def test_a_length_that_is_not_allowed() -> None:
    method = compressor(length_policy="nested_dropout", allowed_lengths=(1, 3))
    with pytest.raises(UsageError, match="n 2: lengths 1, 3 are allowed; choose one of them"):
        method.compress(TEXT, rule=StopRule("fixed", num_vectors=2))
    assert method.compress(TEXT, rule=StopRule("fixed", num_vectors=9)).num_vectors.tolist() == [3]


def test_summaries_are_saved_and_belong_to_their_settings(tmp_path: Path) -> None:
    decoder, reading, how = (
        fresh("llama"),
        CompressionConfig(max_vectors=3, length_policy="stop_head", summary="autoregressive"),
        StopHeadConfig(),
    )
    saved, path = SummaryParameters(decoder, reading, how, eos_token_id=2, seed=1), tmp_path / "summaries.safetensors"
    saved.save(path, {"base": "b"})
    other = SummaryParameters(decoder, reading, how, eos_token_id=2, seed=2).load(path, {"base": "b"})
    assert all(torch.equal(x, y) for x, y in zip(saved.state_dict().values(), other.state_dict().values(), strict=True))
    assert AutoCompressor(decoder, other, reading, how, total_steps=1).compress(TEXT).num_segments == 1
    scalars = {name: x.reshape(()) if x.numel() == 1 else x for name, x in saved.state_dict().items()}
    save_artifact(path, scalars, "summaries", {"base": "b", "settings": saved.settings})  # as files once had them
    assert torch.equal(
        SummaryParameters(decoder, reading, how, eos_token_id=2, seed=2).load(path, {"base": "b"}).b, saved.b
    )
    other_way = CompressionConfig(
        max_vectors=2, length_policy="stop_head", summary="autoregressive", summary_map="none"
    )
    with pytest.raises(CorruptArtifactError) as told:
        SummaryParameters(decoder, other_way, how, eos_token_id=2).load(path, {"base": "b"})
    assert str(told.value) == (
        f"{path} has settings.reading.cap 3, asked was 2; settings.reading.adapter null, asked was none; "
        "take what it was made with"
    )
    with pytest.raises(
        CorruptArtifactError, match=r"; settings\.halting a table, asked was null; take what it was made with"
    ):
        SummaryParameters(
            decoder, CompressionConfig(max_vectors=3, summary="autoregressive"), None, eos_token_id=2
        ).load(path, {"base": "b"})
    with pytest.raises(CorruptArtifactError, match="has base b, asked was c; take what it was made with"):
        other.load(path, {"base": "c"})
