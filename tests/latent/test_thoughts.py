"""LatentThoughts: initial values, projection, dtypes, rollout after a question, save and load."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from laconic.errors import CorruptArtifactError, UsageError
from laconic.latent.thoughts import LatentThoughts, init_control_vectors
from laconic.storage.atomic import save_artifact
from tests.models.fixtures import assert_close, decoder_of, fresh, noise

METADATA = {"base": "b", "tokenizer": "t"}


def build_latents(name: str = "llama", dtype: torch.dtype = torch.float64, **changes: object) -> LatentThoughts:
    settings = {"num_latents": 3, "num_iterations": 2, "seed": 1} | changes
    return LatentThoughts(decoder_of(name, dtype), **settings)  # type: ignore[arg-type]


def test_latents_control_init() -> None:
    table = decoder_of("llama").token_embedding.weight
    mean, copied, normal = (build_latents(control_init=init) for init in ("mean", (5, 7), "normal"))
    for vector in (mean.begin, mean.placeholder, mean.end):
        assert_close(vector, table.mean(0))
    assert_close(copied.placeholder, (table[5] + table[7]) / 2)
    assert 0.01 < normal.vectors.std() < 0.03
    assert not torch.equal(normal.begin, normal.end)
    assert torch.equal(normal.vectors, build_latents(control_init="normal").vectors)
    assert not torch.equal(normal.vectors, build_latents(control_init="normal", seed=2).vectors)
    with pytest.raises(UsageError, match="the text has no tokens"):
        build_latents(control_init=())


def test_latents_init_leaves_torchs_random_state() -> None:
    build_latents()  # builds the shared decoder, whose test weights take random numbers
    torch.manual_seed(3)
    build_latents(control_init="normal")
    number = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), number)


@pytest.mark.parametrize(("form", "width", "inner"), [("pccot", 20, 48), ("codi", 20, 20), ("codi", None, 48)])
def test_latents_projection(form: str, width: int | None, inner: int) -> None:
    latents = build_latents(projection=form, projection_width=width, projection_dropout=0.5)
    assert latents.projection is not None
    assert latents.projection.inner.weight.shape == (inner, 48)
    assert latents.projection.norm.eps == 1e-5
    assert all(linear.bias is not None for linear in (latents.projection.inner, latents.projection.outer))
    x = noise(1, 2, 3, 48)
    wide = torch.nn.functional.gelu(latents.projection.inner(x), approximate="none")
    mean, var = (y := latents.projection.outer(wide)).mean(-1, keepdim=True), y.var(-1, correction=0, keepdim=True)
    assert_close(latents.eval().project(x), (y - mean) / (var + 1e-5).sqrt())
    torch.manual_seed(1)
    dropped = latents.train().project(x)
    assert torch.allclose(dropped, latents.eval().project(x)) == (form == "pccot")


def test_latents_without_projection() -> None:
    x, latents = noise(1, 2, 48), build_latents(projection="none")
    assert latents.project(x) is x
    assert [name for name, _ in latents.named_parameters()] == ["vectors"]


def test_latents_projection_init_scale() -> None:
    latents, table = build_latents(projection_init_scale="embedding"), decoder_of("llama").token_embedding.weight
    assert latents.projection is not None
    assert_close(latents.projection.norm.weight, table.square().mean().sqrt().expand(48))
    assert build_latents().projection.norm.weight.eq(1).all()


def test_latents_parameters_are_at_least_float32() -> None:
    latents = build_latents(dtype=torch.bfloat16)
    decoder = fresh("llama").bfloat16()
    assert {p.dtype for p in latents.parameters()} == {torch.float32}
    assert latents.project(noise(1, 2, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16
    got = latents.think(decoder, decoder(noise(1, 2, 4, 48, dtype=torch.bfloat16)).cache)
    assert got.hidden_states.dtype == torch.bfloat16


@pytest.mark.parametrize("num_iterations", [0, 2, None])
def test_latents_after_a_cache_equal_those_after_embeddings(num_iterations: int | None) -> None:
    latents = build_latents(
        num_iterations=num_iterations, schedule="sequential" if num_iterations is None else "jacobi"
    )
    decoder, question = decoder_of("llama"), noise(1, 2, 4, 48)
    mask = torch.tensor([[True] * 4, [False] * 2 + [True] * 2])
    apart = latents.think(decoder, decoder(question, attention_mask=mask).cache, record_passes=True)
    at_once = latents.think(decoder, question=question, attention_mask=mask)
    assert_close(at_once.latents, apart.latents)
    assert_close(at_once.hidden_states, apart.hidden_states)
    assert len(apart.records) == (1 if num_iterations is None else num_iterations + 1)
    calls: list[int] = []
    prefix = latents.build_prefix(decoder, decoder(question, attention_mask=mask).cache)
    latents.compute_latents(
        lambda x, *args, **kwargs: calls.append(1) or decoder(x, *args, **kwargs), prefix, latents.num_latents
    )
    assert len(calls) == apart.passes[0].total


@pytest.mark.usefixtures("unchecked")
def test_latents_refuse_invalid_arguments() -> None:
    for changes, message in (
        ({"schedule": "seq", "num_iterations": None}, "schedule 'seq' is unknown; use one of 'jacobi', 'sequential'"),
        ({"projection": "foo"}, "projection 'foo' is unknown; use one of 'pccot'"),
        ({"projection_init_scale": "foo"}, "projection_init_scale 'foo' is unknown"),
        ({"length_policy": "foo"}, "length_policy 'foo' is unknown"),
        ({"control_init": "foo"}, "control_init 'foo' is unknown; use one of 'mean', 'normal'"),
        ({"num_latents": 0}, "num_latents=0, .*: give 1 latent or more"),
        ({"num_iterations": -1}, "num_iterations=-1: .* 0 iterations or more"),
        ({"num_latents": 2.0}, "num_latents, num_iterations=.* must be an integer"),
        ({"num_iterations": 1.5}, "num_latents, num_iterations=.* must be an integer"),
    ):
        with pytest.raises(UsageError, match=message):
            build_latents(**changes)
    with pytest.raises(UsageError, match=r"decoder: give a Decoder, such as model\.decoder, not str"):
        LatentThoughts("smollm2", num_latents=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="requires the cache"):
        build_latents().think(decoder_of("llama"))
    with pytest.raises(UsageError, match="num_iterations=None"):
        build_latents(num_iterations=None)
    with pytest.raises(UsageError, match="num_iterations=2"):
        build_latents(schedule="sequential")


def test_latents_save_and_load(tmp_path: Path) -> None:
    one, other = (build_latents(control_init="normal", seed=seed) for seed in (1, 2))
    one.save(tmp_path / "thoughts.safetensors", METADATA)
    other.load(tmp_path / "thoughts.safetensors", METADATA)
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("metadata", "changes", "message"),
    [
        ({"base": "c", "tokenizer": "t"}, {}, "base is b, expected c"),
        ({"base": "b", "tokenizer": "u"}, {}, "tokenizer is t, expected u"),
        (METADATA, {"num_latents": 4}, "settings.num_latents is 3, expected 4"),
        (METADATA, {"projection": "none"}, "settings.projection is pccot, expected none"),
    ],
)
def test_latents_refuse_a_file_of_other_settings(
    tmp_path: Path, metadata: dict[str, str], changes: dict[str, object], message: str
) -> None:
    build_latents().save(tmp_path / "t", METADATA)
    with pytest.raises(CorruptArtifactError) as caught:
        build_latents(**changes).load(tmp_path / "t", metadata)
    assert message in str(caught.value)
    assert caught.value.exit_code == 76


@pytest.mark.parametrize("case", ["missing", "unexpected", "of another shape"])
def test_latents_refuse_a_file_of_other_tensors(tmp_path: Path, case: str) -> None:
    latents = build_latents()
    tensors = dict(latents.state_dict())
    if case == "missing":
        del tensors["vectors"]
    elif case == "unexpected":
        tensors["more"] = torch.zeros(1)
    else:
        tensors["vectors"] = torch.zeros(2, 48)
    save_artifact(tmp_path / "t", tensors, "thoughts", {**METADATA, "settings": latents.settings})
    before = latents.vectors.clone()
    with pytest.raises(CorruptArtifactError, match=r"vectors is missing|more is missing"):
        latents.load(tmp_path / "t", METADATA)
    assert torch.equal(latents.vectors, before)


def test_mean_embedding_is_computed_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.randn(50, 600, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = table.float().mean(0)
    sizes: list[int] = []
    mean = Tensor.mean
    monkeypatch.setattr(Tensor, "mean", lambda x, *args, **keys: sizes.append(x.numel()) or mean(x, *args, **keys))
    vectors = init_control_vectors(table, "mean", torch.Generator())
    assert torch.equal(vectors, expected.expand(3, -1))
    assert max(sizes) < table.numel() / 2  # torch copies what it averages to float32
