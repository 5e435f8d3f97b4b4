"""Equations C3 to C7 against their oracles: frequencies, six scalings, cos/sin tables, rotation, pairs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.models.checkpoints.llama2c import half_split
from laconic.models.config import RopeConfig
from laconic.models.ops.rope_scaling import (
    ROPE_SCALINGS,
    dynamic_frequencies,
    linear_frequencies,
    llama3_frequencies,
    longrope_frequencies,
    yarn_frequencies,
)
from laconic.models.rope import cos_sin_tables, default_frequencies, frequencies, rotate_pairs
from tests import tolerances
from tests.conftest import needs
from tests.oracles import llama_rope, llama_rotation
from tests.oracles.compare import agree, distance, relative
from tests.reference.weight_formats import interleave

FLOAT32 = {"tolerance": 2e-6, "margin": 1e-2, "measure": relative}  # theta^(2i/E) in float32 at theta = 1e6
LONGEST = torch.tensor([5, 64, 65, 200, 256])

SHORT, LONG = tuple(1 + 0.05 * i for i in range(8)), tuple(1 + 0.7 * i * i for i in range(8))
LINEAR = RopeConfig("linear", 1e4, factor=2.5)
DYNAMIC = RopeConfig("dynamic", 1e4, factor=3.0, max_position_embeddings=64)
LLAMA3 = RopeConfig("llama3", 5e5, factor=8.0, original_max_position_embeddings=8192, max_position_embeddings=131072)
YARN = RopeConfig("yarn", 1e4, factor=4.0, original_max_position_embeddings=512, max_position_embeddings=2048)
LONGROPE = RopeConfig(
    "longrope",
    1e4,
    original_max_position_embeddings=64,
    max_position_embeddings=256,
    short_factor=SHORT,
    long_factor=LONG,
)
ROPES = [RopeConfig(theta=1e6), LINEAR, DYNAMIC, LLAMA3, YARN, LONGROPE]


def rows(scaling: Any) -> Any:
    """Expand the frequencies to every row, as the oracles have them."""

    def wrapped(rope: RopeConfig, E: int, longest: Tensor) -> tuple[Tensor, float]:
        omega, a = scaling(rope, E, longest)
        assert omega.dtype == torch.float32
        return omega.expand(len(longest), E // 2), a

    return wrapped


@pytest.mark.equation("llama", "C3")
@pytest.mark.parametrize(("theta", "E"), [(5e5, 64), (1e6, 6), (500.0, 10)])
def test_frequencies(theta: float, E: int) -> None:
    assert frequencies(theta, E).dtype == torch.float32
    assert frequencies(theta, E)[0] == 1.0
    agree(frequencies, llama_rope.ORACLE["C3"], llama_rope.MISREAD["C3"], theta, E, **FLOAT32)


@pytest.mark.equation("llama", "C4a")
def test_default_frequencies() -> None:
    rope = RopeConfig("default", 5e5, factor=4.0)
    agree(rows(default_frequencies), llama_rope.ORACLE["C4a"], llama_rope.MISREAD["C4a"], rope, 16, LONGEST, **FLOAT32)


@pytest.mark.equation("llama", "C4b")
def test_linear_frequencies() -> None:
    agree(rows(linear_frequencies), llama_rope.ORACLE["C4b"], llama_rope.MISREAD["C4b"], LINEAR, 16, LONGEST, **FLOAT32)


@pytest.mark.equation("llama", "C4c")
@pytest.mark.parametrize("E", [6, 16])
def test_dynamic_frequencies(E: int) -> None:
    agree(
        rows(dynamic_frequencies), llama_rope.ORACLE["C4c"], llama_rope.MISREAD["C4c"], DYNAMIC, E, LONGEST, **FLOAT32
    )


@pytest.mark.equation("llama", "C4c")
@pytest.mark.parametrize("factor", [1.0, 1.1, 1.3, 2.0, 2.5, 3.7, 8.0, 10.0])
def test_dynamic_frequencies_are_unscaled_up_to_the_limit(factor: float) -> None:
    for longest in (1, 1999, 2048):
        omega, _ = dynamic_frequencies(RopeConfig("dynamic", 1e4, factor=factor), 16, torch.tensor([longest]))
        assert torch.equal(omega[0], frequencies(1e4, 16))


@pytest.mark.equation("llama", "C4d")
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies(factor: float) -> None:
    rope = RopeConfig(**{**vars(LLAMA3), "factor": factor})
    agree(rows(llama3_frequencies), llama_rope.ORACLE["C4d"], llama_rope.MISREAD["C4d"], rope, 64, LONGEST, **FLOAT32)


@pytest.mark.equation("llama", "C4e")
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_frequencies(truncate: bool) -> None:
    rope = RopeConfig(**{**vars(YARN), "truncate": truncate})
    agree(rows(yarn_frequencies), llama_rope.ORACLE["C4e"], llama_rope.MISREAD["C4e"], rope, 64, LONGEST, **FLOAT32)


@pytest.mark.equation("llama", "C4e")
@pytest.mark.parametrize(
    "fields",
    [
        {"mscale": 0.707, "mscale_all_dim": 1.2},
        {"mscale": 0.707},
        {"mscale_all_dim": 0.707},
        {"attention_factor": 1.5, "mscale": 0.707, "mscale_all_dim": 1.2},
        {"factor": None},
        {"factor": 1.0},
        {"beta_fast": 8.0, "beta_slow": 2.0},
        {"original_max_position_embeddings": 7, "truncate": False, "beta_fast": 2.0, "beta_slow": 2.0},
        {"original_max_position_embeddings": None},
    ],
    ids=str,
)
def test_yarn_frequencies_with_optional_fields(fields: dict[str, Any]) -> None:
    rope = RopeConfig(**{**vars(YARN), **fields})
    agree(rows(yarn_frequencies), llama_rope.ORACLE["C4e"], {}, rope, 64, LONGEST, **FLOAT32)


@pytest.mark.equation("llama", "C4f")
def test_longrope_frequencies() -> None:
    oracle, misread = llama_rope.ORACLE["C4f"], llama_rope.MISREAD["C4f"]
    agree(rows(longrope_frequencies), oracle, misread, LONGROPE, 16, LONGEST, **FLOAT32)


@pytest.mark.equation("llama", "C4f")
@pytest.mark.parametrize("fields", [{"attention_factor": 1.25}, {"factor": 1.0}, {"factor": 32.0}], ids=str)
def test_longrope_frequencies_with_optional_fields(fields: dict[str, Any]) -> None:
    rope = RopeConfig(**{**vars(LONGROPE), **fields})
    agree(rows(longrope_frequencies), llama_rope.ORACLE["C4f"], {}, rope, 16, LONGEST, **FLOAT32)


@pytest.mark.equation("llama", "C5")
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_cos_sin_tables(rope: RopeConfig) -> None:
    p = torch.tensor([[1, 2, 3, 300, 4000, 131071], [5, 7, 8, 9, 63, 64]])
    longest = p.amax(1) + 1
    exact, a = llama_rope.ORACLE[f"C4{'abcdef'[list(ROPE_SCALINGS).index(rope.kind)]}"](rope, 16, longest)
    omega, factor = ROPE_SCALINGS[rope.kind](rope, 16, longest)
    bound = a * (p * tolerances.TABLE_PER_POSITION + tolerances.TABLE_BASE)[:, None, :, None]
    expected = llama_rotation.ORACLE["C5"](p, exact, a)
    for dtype in (torch.float32, torch.float64):
        for actual, wanted in zip(cos_sin_tables(p, omega, factor, dtype), expected, strict=True):
            assert actual.dtype == dtype
            assert ((actual.double() - wanted).abs() <= bound).all()
    for name, wrong in llama_rotation.MISREAD["C5"].items():
        if a == 1 and name.startswith("a "):
            continue
        errors = [((x - y).abs() / bound).max() for x, y in zip(wrong(p, exact, a), expected, strict=True)]
        assert max(errors) > 100, name


@pytest.mark.equation("llama", "C5")
def test_cos_sin_tables_use_float32_angles_for_every_dtype() -> None:
    """Angles are float32 also in a float64 model, because the table is part of the model."""
    p, omega = torch.tensor([[130000, 17, 4]]), frequencies(1e4, 16)
    tables = cos_sin_tables(p, omega, 1.1, torch.float32)
    for dtype in (torch.float64, torch.bfloat16):
        for narrow, other in zip(tables, cos_sin_tables(p, omega, 1.1, dtype), strict=True):
            assert torch.equal(narrow.to(dtype), other)


@pytest.mark.equation("llama", "C5")
@pytest.mark.parametrize("rope", [*ROPES, RopeConfig(**{**vars(YARN), "factor": 3.7})], ids=lambda rope: rope.kind)
@pytest.mark.parametrize("last", [60, 200])
def test_cos_sin_tables_equal_transformers(rope: RopeConfig, last: int) -> None:
    """Equal to the bit, below and above the length at which dynamic and longrope switch."""
    needs("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
        "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    }[rope.kind]
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta} | {name: getattr(rope, name) for name in fields}
    parameters = {name: list(x) if isinstance(x, tuple) else x for name, x in parameters.items()}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": rope.max_position_embeddings}
    config = LlamaConfig(**sizes, rope_parameters=parameters)
    p = torch.arange(last)[None]
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), p)
    ours = cos_sin_tables(p, *ROPE_SCALINGS[rope.kind](rope, 16, p.amax(1) + 1), torch.float32)
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine[:, 0], reference)


def angles(a: float = 1.0) -> tuple[Tensor, Tensor]:
    p = torch.tensor([[0, 3, 11], [4, 5, 90]])
    return cos_sin_tables(p, frequencies(100.0, 8), a, torch.float64)


@pytest.mark.equation("llama", "C6")
def test_rotate_pairs() -> None:
    x = torch.randn(2, 3, 3, 8, dtype=torch.float64)
    agree(rotate_pairs, llama_rotation.ORACLE["C6"], llama_rotation.MISREAD["C6"], x, *angles(), margin=1e-1)
    assert torch.autograd.gradcheck(lambda x: rotate_pairs(x, *angles(1.3)), x.requires_grad_())


@pytest.mark.parametrize("a", [1.0, 1.3])
def test_rotate_pairs_preserves_norms_up_to_the_factor(a: float) -> None:
    x = torch.randn(2, 3, 3, 8, dtype=torch.float64)
    squares = rotate_pairs(x, *angles(a)).square().sum(-1) / a**2
    assert distance(squares, x.square().sum(-1)) < 1e-6


@pytest.mark.equation("llama", "C7")
@pytest.mark.parametrize("heads", [1, 3])
def test_half_split(heads: int) -> None:
    w = torch.randn(heads * 8, 5, dtype=torch.float64)
    misread = llama_rotation.MISREAD["C7"]
    misread = {name: wrong for name, wrong in misread.items() if heads > 1 or name != "one head for all"}
    agree(half_split, llama_rotation.ORACLE["C7"], misread, w, heads, tolerance=0.0, margin=1e-1)
    assert torch.equal(interleave(w, heads), llama_rotation.interleaved(w, heads))
    assert torch.equal(half_split(w[:, 0], heads), half_split(w, heads)[:, 0])


@pytest.mark.equation("llama", "C7")
def test_pairings_turn_alike() -> None:
    """Rotating the neighbours of a Meta query is rotating the halves of the converted one, up to the order of dims."""
    heads, w, y = 3, torch.randn(24, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    meta = llama_rotation.neighbours((y @ w.mT).unflatten(-1, (heads, 8)).transpose(1, 2), *angles())
    ours = rotate_pairs((y @ half_split(w, heads).mT).unflatten(-1, (heads, 8)).transpose(1, 2), *angles())
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    assert distance(ours, meta[..., order]) < tolerances.ORACLE
