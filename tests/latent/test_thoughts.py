"""What is learned beside the decoder: how it starts, what it does to a type, what a file of it belongs to."""

from pathlib import Path

import pytest
import torch

from laconic.errors import CorruptArtifactError, UsageError
from laconic.latent.thoughts import LatentThoughts
from laconic.storage.atomic import save_artifact
from tests.core.readings import decoder_of, fresh, noise, same

ABOUT = {"base": "b", "tokenizer": "t"}


def thoughts(name: str = "llama", dtype: torch.dtype = torch.float64, **changes: object) -> LatentThoughts:
    settings = {"count": 3, "rounds": 2, "seed": 1} | changes
    return LatentThoughts(decoder_of(name, dtype), **settings)  # type: ignore[arg-type]


def test_where_the_three_vectors_start() -> None:
    table = decoder_of("llama").token_embedding.weight
    mean, copied, normal = (thoughts(control_init=how) for how in ("mean", (5, 7), "normal"))
    for vector in (mean.begin, mean.placeholder, mean.end):
        same(vector, table.mean(0))
    same(copied.placeholder, (table[5] + table[7]) / 2)
    assert 0.01 < normal.vectors.std() < 0.03
    assert not torch.equal(normal.begin, normal.end)
    assert torch.equal(normal.vectors, thoughts(control_init="normal").vectors)
    assert not torch.equal(normal.vectors, thoughts(control_init="normal", seed=2).vectors)
    with pytest.raises(UsageError, match="control_init copies the rows of no token"):
        thoughts(control_init=())


def test_a_start_leaves_the_stream_of_torch_alone() -> None:
    torch.manual_seed(3)
    thoughts(control_init="normal")
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)


@pytest.mark.parametrize(("form", "width", "inner"), [("pccot", 20, 48), ("codi", 20, 20), ("codi", None, 48)])
def test_forms_of_the_map(form: str, width: int | None, inner: int) -> None:
    made = thoughts(project=form, projection_width=width, projection_dropout=0.5)
    assert made.projection is not None
    assert made.projection.inner.weight.shape == (inner, 48)
    assert made.projection.norm.eps == 1e-5
    assert all(linear.bias is not None for linear in (made.projection.inner, made.projection.outer))
    x = noise(1, 2, 3, 48)
    wide = torch.nn.functional.gelu(made.projection.inner(x), approximate="none")
    mean, var = (y := made.projection.outer(wide)).mean(-1, keepdim=True), y.var(-1, correction=0, keepdim=True)
    same(made.eval().project(x), (y - mean) / (var + 1e-5).sqrt())
    torch.manual_seed(1)
    dropped = made.train().project(x)
    assert torch.allclose(dropped, made.eval().project(x)) == (form == "pccot")


def test_no_map_gives_back_what_it_gets() -> None:
    x, made = noise(1, 2, 48), thoughts(project="none")
    assert made.project(x) is x
    assert [name for name, _ in made.named_parameters()] == ["vectors"]


def test_a_scale_that_makes_thoughts_the_size_of_words() -> None:
    made, table = thoughts(projection_init_scale="embedding"), decoder_of("llama").token_embedding.weight
    assert made.projection is not None
    same(made.projection.norm.weight, table.square().mean().sqrt().expand(48))
    assert thoughts().projection.norm.weight.eq(1).all()


def test_parameters_are_float32_at_least_and_types_are_kept() -> None:
    made = thoughts(dtype=torch.bfloat16)
    decoder = fresh("llama").bfloat16()
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    assert made.project(noise(1, 2, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16
    got = made.think(decoder, decoder(noise(1, 2, 4, 48, dtype=torch.bfloat16)).state)
    assert got.hidden_states.dtype == torch.bfloat16


@pytest.mark.parametrize("rounds", [0, 2, None])
def test_thoughts_on_a_state_are_those_on_a_question_read_with_bot(rounds: int | None) -> None:
    made = thoughts(rounds=rounds, mode="sequential" if rounds is None else "jacobi")
    decoder, question = decoder_of("llama"), noise(1, 2, 4, 48)
    live = torch.tensor([[True] * 4, [False] * 2 + [True] * 2])
    apart = made.think(decoder, decoder(question, live=live).state, record_passes=True)
    at_once = made.think(decoder, question=question, attention_mask=live)
    same(at_once.latents, apart.latents)
    same(at_once.hidden_states, apart.hidden_states)
    assert len(apart.records) == (1 if rounds is None else rounds + 1)
    read: list[int] = []
    made.think(decoder, apart.cache, forward_fn=lambda x, *rest, **named: read.append(1) or decoder(x, *rest, **named))
    assert len(read) == apart.passes.total


def test_thoughts_need_something_to_follow() -> None:
    with pytest.raises(UsageError, match="thoughts follow nothing; give the state of a question"):
        thoughts().think(decoder_of("llama"))
    with pytest.raises(UsageError, match="rounds None: mode jacobi needs a number, sequential has none"):
        thoughts(rounds=None)
    with pytest.raises(UsageError, match="rounds 2: mode jacobi needs a number"):
        thoughts(mode="sequential")


def test_rows_of_a_tied_head_are_scored_and_no_others() -> None:
    """As three words appended to the vocabulary would be: their columns stand behind those of the words."""
    hidden, tied = noise(1, 2, 48), decoder_of("llama, one head of keys, tied")
    rows = thoughts("llama, one head of keys, tied", control="rows", control_init="normal")
    same(rows.logits(tied, hidden), torch.cat([tied.logits(hidden), hidden @ rows.vectors.mT], -1))
    (grad,) = torch.autograd.grad(rows.logits(tied, hidden).logsumexp(-1).sum(), rows.vectors)
    assert grad.any()
    for made, decoder in (
        (thoughts("llama, one head of keys, tied"), tied),
        (thoughts(control="rows"), decoder_of("llama")),
    ):
        assert torch.equal(made.logits(decoder, hidden), decoder.logits(hidden))


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    one, other = (thoughts(control_init="normal", seed=seed) for seed in (1, 2))
    one.save(tmp_path / "thoughts.safetensors", ABOUT)
    other.load(tmp_path / "thoughts.safetensors", ABOUT)
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("about", "changes", "message"),
    [
        ({"base": "c", "tokenizer": "t"}, {}, "has base b, asked was c; take what it was made with"),
        ({"base": "b", "tokenizer": "u"}, {}, "has tokenizer t, asked was u; take what it was made with"),
        (ABOUT, {"count": 4}, "has settings.count 3, asked was 4; take what"),
        (ABOUT, {"project": "none"}, "has settings.project pccot, asked was none; take what"),
    ],
)
def test_thoughts_of_something_else(
    tmp_path: Path, about: dict[str, str], changes: dict[str, object], message: str
) -> None:
    thoughts().save(tmp_path / "t", ABOUT)
    with pytest.raises(CorruptArtifactError) as told:
        thoughts(**changes).load(tmp_path / "t", about)
    assert message in str(told.value)
    assert told.value.exit_code == 76


@pytest.mark.parametrize("what", ["missing", "unexpected", "of another shape"])
def test_names_are_neither_missing_nor_unexpected(tmp_path: Path, what: str) -> None:
    made = thoughts()
    tensors = dict(made.state_dict())
    if what == "missing":
        del tensors["vectors"]
    elif what == "unexpected":
        tensors["more"] = torch.zeros(1)
    else:
        tensors["vectors"] = torch.zeros(2, 48)
    save_artifact(tmp_path / "t", tensors, "thoughts", {**ABOUT, "settings": made.settings})
    before = made.vectors.clone()
    with pytest.raises(CorruptArtifactError, match="is missing, unexpected or of another shape; take another copy"):
        made.load(tmp_path / "t", ABOUT)
    assert torch.equal(made.vectors, before)
