"""What all prompts of a batch begin with is read once, and each row gets what it gets alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.generation import prompt
from laconic.generation.config import GenerationConfig
from laconic.models.config import RopeConfig

pytestmark = pytest.mark.usefixtures("unchecked")
CONFIG = GenerationConfig(max_tokens=5, eos_token_ids=())
GENERATOR = torch.Generator().manual_seed(4)
SHARED = torch.randint(0, 97, (40,), generator=GENERATOR).tolist()
ROWS = [SHARED + torch.randint(0, 97, (n,), generator=GENERATOR).tolist() for n in (3, 1, 7)]


@pytest.fixture(autouse=True)
def few_positions_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "MIN_SHARED_POSITIONS", 60)


class CountingDecoder(laconic.Decoder):
    """A decoder that counts the positions of its passes, padding included."""

    num_positions = 0

    def forward(self, inputs_embeds: Tensor, *args: Any, **options: Any) -> Any:
        self.num_positions += inputs_embeds.shape[0] * inputs_embeds.shape[1]
        return super().forward(inputs_embeds, *args, **options)


def build_decoder(family: str = "llama", **options: Any) -> CountingDecoder:
    return CountingDecoder(laconic.DecoderConfig.tiny(family, **options), seed=2).eval()


def count_prompt_positions(decoder: CountingDecoder, **inputs: Any) -> tuple[list[laconic.Generation], int]:
    """Generate one token per row, which takes no pass after the prompt; return the results and positions read."""
    decoder.num_positions = 0
    results = laconic.generate(decoder, config=GenerationConfig(max_tokens=1, eos_token_ids=()), **inputs)
    return results, decoder.num_positions


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("gpt2", {}), ("mistral", {"sliding_window": 8})],
)
@pytest.mark.parametrize("chunk_size", [512, 9])
def test_shared_prompt_is_read_once_and_changes_nothing(family: str, options: dict[str, Any], chunk_size: int) -> None:
    decoder = build_decoder(family, **options)
    config = GenerationConfig(max_tokens=5, eos_token_ids=(), prefill_chunk_size=chunk_size)
    results = laconic.generate(decoder, input_ids=ROWS, config=config)
    for row, result in zip(ROWS, results, strict=True):
        alone = laconic.generate(decoder, input_ids=[row], config=config)[0]
        assert result.token_ids == alone.token_ids
        torch.testing.assert_close(result.last_hidden, alone.last_hidden, atol=1e-5, rtol=0)
        again = laconic.generate(decoder, input_ids=[[1]], state=result.state, config=CONFIG)[0]
        assert (
            again.token_ids == laconic.generate(decoder, input_ids=[[1]], state=alone.state, config=CONFIG)[0].token_ids
        )
    _, num_positions = count_prompt_positions(decoder, input_ids=ROWS)
    assert num_positions == 40 + 3 * 7


def test_shared_prompt_of_embeddings_is_read_once() -> None:
    decoder = build_decoder()
    width = max(map(len, ROWS))
    mask = torch.tensor([[i >= width - len(row) for i in range(width)] for row in ROWS])
    ids = torch.tensor([[0] * (width - len(row)) + row for row in ROWS])
    by_ids, _ = count_prompt_positions(decoder, input_ids=ROWS)
    results, num_positions = count_prompt_positions(decoder, inputs_embeds=decoder.embed(ids), attention_mask=mask)
    assert num_positions == 40 + 3 * 7
    assert [result.token_ids for result in results] == [result.token_ids for result in by_ids]


def test_equal_prompts_share_all_but_the_last_position() -> None:
    _, num_positions = count_prompt_positions(build_decoder(), input_ids=[SHARED] * 4)
    assert num_positions == 39 + 4


def test_passes_do_not_depend_on_the_other_rows() -> None:
    decoder = build_decoder()
    together = laconic.generate(decoder, input_ids=ROWS, config=CONFIG)
    alone = laconic.generate(decoder, input_ids=ROWS[:1], config=CONFIG)
    assert together[0].passes == alone[0].passes


def test_prompts_that_share_too_little_or_are_padded_inside_are_read_row_by_row() -> None:
    decoder = build_decoder()
    few = [row[-12:] for row in ROWS]
    _, num_positions = count_prompt_positions(decoder, input_ids=few)
    assert num_positions == 3 * 12
    padded = torch.ones(3, 41, dtype=torch.bool)
    padded[:, 20] = False
    embeds = decoder.embed(torch.tensor([[*SHARED, 5]])).expand(3, -1, -1)
    results, num_positions = count_prompt_positions(decoder, inputs_embeds=embeds, attention_mask=padded)
    assert num_positions == 3 * 41
    ids = [*SHARED[:20], *SHARED[21:], 5]
    assert results[0].token_ids == count_prompt_positions(decoder, input_ids=[ids])[0][0].token_ids


def test_prompts_whose_keys_depend_on_the_length_share_nothing() -> None:
    decoder = build_decoder(rope=RopeConfig(kind="dynamic", factor=2.0), max_position_embeddings=32)
    with pytest.warns(UserWarning, match="exceeds"):
        results, num_positions = count_prompt_positions(decoder, input_ids=ROWS)
    assert num_positions == 3 * 47
    with pytest.warns(UserWarning, match="exceeds"):
        alone, _ = count_prompt_positions(decoder, input_ids=[ROWS[0]])
    torch.testing.assert_close(results[0].last_hidden, alone[0].last_hidden, atol=1e-5, rtol=0)
