"""Errors of compression: settings that do not fit, segments that are too long, rules that were not trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.inference import StopRule
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig, StopHeadConfig
from laconic.errors import CorruptArtifactError, UsageError
from tests.compression.documents import compressor, documents
from tests.models.fixtures import fresh

TEXT = torch.tensor([[4, 5, 6, 7]])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"summary_positions": "zero"}, "not the RoPE of llama"),
        ({"adapter_scope": "write"}, "needs an adapter"),
        ({"bos": "sink"}, "no bos token"),
        ({"carry_between_windows": "soft"}, 'needs estimator = "soft"'),
        ({"summary": "pool", "memory_policy": "budgeted", "max_memory_vectors": 9}, "without text"),
        (
            {"summary": "autoregressive", "trigger_placement": "replace", "memory_policy": "budgeted"}
            | {"max_memory_vectors": 9},
            "this trigger_placement needs text",
        ),
        ({"memory_policy": "budgeted", "max_memory_vectors": 5}, "needs at least 6"),
        ({"length_policy": "stop_head"}, r"\[stop_head\]"),
    ],
)
def test_autocompressor_rejects_settings_that_do_not_fit(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compressor(**config)


@pytest.mark.parametrize(
    ("config_class", "values", "message"),
    [
        (
            CompressionConfig,
            {"summary": "pool", "length_policy": "stop_head"},
            'length_policy "stop_head": not for summary "pool"',
        ),
        (
            CompressionConfig,
            {"summary": "select", "length_policy": "nested_dropout"},
            'length_policy "nested_dropout" with summary "select"',
        ),
        (CompressionConfig, {"max_memory_vectors": 9}, "max_memory_vectors: set it for memory_policy"),
        (CompressionConfig, {"trigger_placement": "replace"}, 'trigger_placement "replace" with summary "parallel"'),
        (CompressionConfig, {"max_vectors": 4, "allowed_lengths": (2, 8)}, "must ascend to at most max_vectors 4"),
        (
            CompressionConfig,
            {"num_vectors": 3, "length_policy": "nested_dropout"},
            'num_vectors 3: only length_policy "fixed"',
        ),
        (CompressionConfig, {"num_vectors": 60}, "num_vectors 60: not one of allowed_lengths"),
        (
            CompressionConfig,
            {"summary_init": "last_tokens", "summary": "pool"},
            'summary_init "last_tokens": needs parallel',
        ),
        (
            CompressionConfig,
            {"summary_init": "last_tokens", "memory_policy": "budgeted", "max_memory_vectors": 200},
            'summary_init "last_tokens": needs parallel',
        ),
        (StopHeadConfig, {"head": "vocabulary"}, 'head "vocabulary" needs control_tokens'),
        (StopHeadConfig, {"control_tokens_in_softmax": True}, "control_tokens_in_softmax needs control_tokens"),
        (StopHeadConfig, {"soft_gate": "scale_vectors"}, 'soft_gate "scale_vectors" needs estimator "soft"'),
        (StopHeadConfig, {"stop_position": "mixture"}, 'stop_position "mixture" needs estimator "soft"'),
    ],
)
def test_config_rejects_combinations(config_class: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_class(**values)


def test_summary_tokens_start_as_the_eos_embedding_plus_noise() -> None:
    decoder = fresh("llama")
    with pytest.raises(UsageError, match="no eos token"):
        SummaryParameters(decoder, CompressionConfig(), eos_token_id=None)
    noise, copies = (
        SummaryParameters(decoder, CompressionConfig(summary_init=init), eos_token_id=2).tokens
        for init in ("normal", "eos")
    )
    assert noise is not None
    assert copies is not None
    assert noise.abs().max() < 0.2
    torch.testing.assert_close(copies - noise, decoder.token_embedding.weight[2].expand(50, -1))


@pytest.mark.parametrize(
    ("windows", "message"), [((1, 0), "segments_per_window = 1"), ((3, 1), "4 segments, but a window has 3")]
)
def test_forward_rejects_windows_that_train_nothing(windows: tuple[int, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compressor()(documents(windows=windows))


@pytest.mark.parametrize(
    ("sizes", "config", "earlier", "message"),
    [
        (
            {"max_position_embeddings": 6},
            {},
            0,
            "0 memory vectors, 4 text tokens and 3 .* has 6 positions; use segments of at most 3 tokens",
        ),
        ({"sliding_windows": (None, 6)}, {}, 0, "a sliding window of 6"),
        ({"max_position_embeddings": 12}, {}, 2, "or memory_policy = "),
        (
            {"max_position_embeddings": 8},
            {"summary": "autoregressive", "bos": "sink", "memory_policy": "replace"},
            0,
            "4 summary positions and bos",
        ),
        ({"max_position_embeddings": 7}, {}, 1, "3 memory vectors"),
    ],
)
def test_compress_rejects_segments_that_do_not_fit(
    sizes: dict[str, Any], config: dict[str, Any], earlier: int, message: str
) -> None:
    method, memory = compressor(sizes=sizes, bos_token_id=1, **config), None
    for _ in range(earlier):
        memory = method.compress(TEXT, None, memory)
    with pytest.raises(UsageError, match=message):
        method.compress(TEXT, None, memory)


def test_check_fits_blames_a_prompt_that_is_too_long_alone() -> None:
    method = compressor(sizes={"max_position_embeddings": 12})
    memory = method.compress(TEXT)
    with pytest.raises(UsageError, match=r"3 memory vectors, 20 text tokens .*; use shorter segments or prompts"):
        method.segment_model.check_fits(memory, 20, compresses=False)


@pytest.mark.parametrize(
    ("length_policy", "rule", "message"),
    [
        ("nested_dropout", StopRule("quantile"), 'needs a model of length_policy = "stop_head"'),
        ("stop_head", StopRule("classifier"), 'needs a model of length_policy = "classifier"'),
        ("fixed", StopRule("fixed", num_vectors=2), "always writes 3"),
        ("stop_head", StopRule("sample"), "uniforms"),
        ("stop_head", StopRule("quantile", quantile=1.0), "quantile 1.0"),
        ("stop_head", StopRule("threshold", threshold=0.0), "threshold 0.0"),
    ],
)
def test_compress_rejects_rules_that_were_not_trained(length_policy: str, rule: StopRule, message: str) -> None:
    method = compressor(stop_head={} if length_policy == "stop_head" else None, length_policy=length_policy)
    with pytest.raises(UsageError, match=message):
        method.compress(TEXT, rule=rule)


def test_compress_rejects_lengths_that_are_not_allowed() -> None:
    method = compressor(length_policy="nested_dropout", allowed_lengths=(1, 3))
    with pytest.raises(UsageError, match="allowed lengths are 1, 3"):
        method.compress(TEXT, rule=StopRule("fixed", num_vectors=2))
    with pytest.raises(UsageError, match="9 vectors: this model writes at most 3 per segment"):
        method.compress(TEXT, rule=StopRule("fixed", num_vectors=9))


def test_summary_parameters_save_and_load_check_their_settings(tmp_path: Path) -> None:
    decoder, path = fresh("llama"), tmp_path / "summaries.safetensors"
    config = CompressionConfig(max_vectors=3, length_policy="stop_head", summary="autoregressive")
    head = StopHeadConfig()
    saved = SummaryParameters(decoder, config, head, eos_token_id=2, seed=1)
    saved.save(path, {"base": "b"})
    loaded = SummaryParameters(decoder, config, head, eos_token_id=2, seed=2).load(path, {"base": "b"})
    assert saved.state_dict().keys() == loaded.state_dict().keys()
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in saved.state_dict().items())
    assert AutoCompressor(decoder, loaded, config, head, total_steps=1).compress(TEXT).num_segments == 1
    other = config.model_copy(update={"max_vectors": 2, "summary_map": "none"})
    with pytest.raises(CorruptArtifactError, match=r"compression\.max_vectors is 3.*compression\.summary_map"):
        SummaryParameters(decoder, other, head, eos_token_id=2).load(path, {"base": "b"})
    with pytest.raises(CorruptArtifactError, match="base is b"):
        loaded.load(path, {"base": "c"})
