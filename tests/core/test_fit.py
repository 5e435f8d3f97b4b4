"""Arguments of another shape or type, as a user gives them: a pass, generation."""

from typing import Any

import pytest
import torch

from laconic.errors import UsageError
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from tests.core.readings import FAMILIES, fresh, noise

pytestmark = pytest.mark.usefixtures("as_users_call_it")


def x(*shape: int) -> torch.Tensor:
    return noise(1, *shape, dtype=torch.float32)


@pytest.mark.parametrize(
    ("vectors", "named", "message"),
    [
        (x(5, 48), {}, "vectors are [5, 48]; give [B, T, D]"),
        (x(48)[0], {}, "vectors are []; give [B, T, D]"),
        (x(1, 5, 48), {"live": torch.ones(5).bool()}, "live is [5], vectors are [1, 5]"),
        (x(1, 5, 48), {"positions": torch.arange(5.0)[None]}, "positions are float32; give integers"),
        (x(1, 5, 48), {"positions": torch.ones(1, 5).bool()}, "positions are bool; give integers"),
        (x(1, 5, 48).double(), {}, "vectors are float64, weights float32; convert one of them"),
    ],
)
def test_a_pass(vectors: torch.Tensor, named: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as told:
        fresh("llama")(vectors, **named)
    assert str(told.value) == message


TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_types_are_refused_where_torch_would(name: str, weights: torch.dtype) -> None:
    decoder = fresh(name).to(weights)
    for vectors in TYPES:
        if torch.promote_types(vectors, weights) == weights:
            assert decoder(x(1, 2, 48).to(vectors)).hidden.dtype == weights
        else:
            with pytest.raises(ValueError, match=r"^vectors are \w+, weights \w+; convert one of them$"):
                decoder(x(1, 2, 48).to(vectors))
            with pytest.raises(RuntimeError, match=r"same dtype|expected scalar type|mixed dtype"):
                decoder.layers[0].part("up" if decoder.weight_names.up else "q")(x(1, 2, 48).to(vectors))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_autocast_takes_both_types(weights: torch.dtype) -> None:
    decoder = fresh("llama").to(weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for vectors in (torch.float32, torch.bfloat16):
            assert decoder(x(1, 2, 48).to(vectors)).hidden.isfinite().all()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"ids": torch.tensor([1, 2, 3])}, "ids are [3]; give one list a row, [[…]]"),
        ({"ids": torch.ones(1, 1, 2).long()}, "ids are [1, 1, 2]; give one list a row, [[…]]"),
        ({"ids": [1, 2, 3]}, "ids are [3]; give one list a row, [[…]]"),
        ({"ids": [[1], 2]}, "ids are [2]; give one list a row, [[…]]"),
        ({"ids": torch.ones(1, 3).long(), "live": torch.ones(1, 2).bool()}, "live is [1, 2], ids are [1, 3]"),
        ({"vectors": x(1, 3, 48), "live": torch.ones(3).bool()}, "live is [3], vectors are [1, 3]"),
        ({"ids": [[1]], "max_tokens": 1.5}, "max_tokens 1.5: must be an integer"),
        ({"ids": [[1]], "min_tokens": 0.5}, "min_tokens 0.5: must be an integer"),
        ({"ids": [[1]], "chunk": "many"}, "chunk 'many': must be an integer"),
    ],
)
def test_generation(named: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as told:
        generate(fresh("llama"), **{"max_tokens": 2, **named})
    assert str(told.value) == message


def test_vectors_to_generate_from() -> None:
    with pytest.raises(ValueError, match=r"^vectors are \[3, 48\]; give \[B, T, D\]$"):
        generate(fresh("llama"), inputs_embeds=x(3, 48), config=GenerationConfig(max_tokens=2))
    with pytest.raises(ValueError, match=r"^vectors are float64, weights float32; convert one of them$"):
        generate(fresh("llama"), inputs_embeds=x(1, 3, 48).double(), config=GenerationConfig(max_tokens=2))
