"""Sampling filters equal transformers; samples follow the distribution; streamed text equals the whole text."""

import json
import math
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor

from laconic.errors import InputError
from laconic.generation import sampling
from laconic.generation.config import GenerationConfig
from laconic.generation.published import DEFAULTS, read_published_sampling
from laconic.generation.sampling import (
    Sampler,
    apply_filters,
    apply_repetition_penalty,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    sample_from_uniform,
)
from laconic.generation.text_stream import IncrementalDetokenizer, stop_prefix_length
from tests.conftest import needs, shared_dir


def logits_of(seed: int, B: int = 6, V: int = 200) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, V, generator=generator) * torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0, 9.0])[:B, None]


def is_kept(logits: Tensor) -> Tensor:
    return logits > -math.inf


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("candidates", [20, 256])
def test_filters_equal_transformers(seed: int, candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    monkeypatch.setattr(sampling, "TOP_P_CANDIDATES", candidates)
    none: Any = None
    logits = logits_of(seed)
    for k in (1, 2, 7, 50, 200, 1000):
        assert is_kept(filter_top_k(logits, k)).equal(is_kept(TopKLogitsWarper(k)(none, logits)))
    for p in (0.001, 0.1, 0.5, 0.9, 0.95, 0.999):
        assert is_kept(filter_top_p(logits, p)).equal(is_kept(TopPLogitsWarper(p)(none, logits)))
        assert is_kept(filter_min_p(logits, p)).equal(is_kept(MinPLogitsWarper(p)(none, logits)))
    config = GenerationConfig(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05)
    chain = TopKLogitsWarper(40)(none, logits / 0.7)
    chain = MinPLogitsWarper(0.05)(none, TopPLogitsWarper(0.9)(none, chain))
    assert is_kept(apply_filters(logits, config)).equal(is_kept(chain))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    needs("transformers")
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = logits_of(1)
    ids = torch.randint(0, 200, (6, 30), generator=torch.Generator().manual_seed(2))
    present = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    assert apply_repetition_penalty(logits, present, penalty).equal(
        RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    )


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    ids, _ = Sampler(GenerationConfig(), [0], [[]], [])(logits, block_eos=False)
    assert ids.tolist() == [1]
    assert is_kept(filter_top_k(logits, 1)).tolist() == [[False, True, True, False]]


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([[0.1, 0.0, 0.6, 0.3, 0.0]]).log()
    uniform = (torch.arange(1000, dtype=torch.float64)[:, None]) / 1000
    counts = sample_from_uniform(logits.expand(1000, -1), uniform).bincount(minlength=5).tolist()
    assert counts == pytest.approx([100, 0, 600, 300, 0], abs=1)
    ends = torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)
    assert sample_from_uniform(torch.tensor([[0.0, 1.0, 1.0, 0.0]]).log().expand(2, -1), ends).tolist() == [1, 2]


def test_repetition_penalty_covers_prompt_and_output() -> None:
    sampler = Sampler(GenerationConfig(repetition_penalty=10.0), [0, 0], [[3], [1]], [])
    logits = torch.tensor([[0.1, 0.3, 0.5, 0.6]] * 2)
    ids = [sampler(logits, block_eos=False)[0].tolist() for _ in range(3)]
    assert ids == [[2, 3], [1, 2], [0, 0]]
    sampler.select_rows([1])
    assert sampler(torch.tensor([[0.1, 0.3, 0.5, 0.6]]), block_eos=False)[0].tolist() == [3]


def test_sampler_blocks_eos() -> None:
    sampler = Sampler(GenerationConfig(), [0], [[]], [2, 3])
    logits = torch.tensor([[0.1, 0.3, 0.5, 0.6]])
    assert sampler(logits, block_eos=True)[0].tolist() == [1]
    assert sampler(logits, block_eos=False)[0].tolist() == [3]


def test_filter_top_p_does_not_depend_on_other_rows() -> None:
    """Ties are many in bfloat16; a flat row beside them takes another path, which breaks ties in another way."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(1, 1000, generator=generator).mul(4).bfloat16().float()
        beside = torch.cat([logits, torch.zeros(1, 1000)])
        assert torch.equal(filter_top_p(logits, 0.9), filter_top_p(beside, 0.9)[:1])


@given(st.text(alphabet="ab", max_size=8), st.text(alphabet="ab", min_size=1, max_size=4))
def test_stop_prefix_length_is_the_longest_prefix_at_the_end(text: str, stop: str) -> None:
    expected = max(n for n in range(len(stop)) if n == 0 or text.endswith(stop[:n]))
    assert stop_prefix_length(text, stop) == expected


@given(st.text(alphabet="abé日😀 ", max_size=30), st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3))
def test_detokenizer_emits_the_text_up_to_the_first_stop(text: str, stop: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(lambda ids: bytes(ids).decode(errors="replace"), list("x é".encode()), stop)
    pieces: list[str] = []
    for byte in text.encode():
        pieces.append(detokenizer.append(byte))
        if detokenizer.found_stop:
            break
    pieces.append(detokenizer.flush())
    joined = "".join(pieces)
    assert detokenizer.text == joined
    assert detokenizer.found_stop == any(s in text for s in stop)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert joined == text
    else:
        prefix = text[: min(ends)]
        assert joined == prefix[: min(prefix.find(s) for s in stop if s in prefix)]


def test_detokenizer_of_a_real_tokenizer_emits_its_text() -> None:
    tokenizer = Tokenizer.from_file(str(shared_dir() / "models" / "stories260k" / "tokenizer.json"))
    draws = random.Random(0)
    words = ["Once", " upon", "  a", " naïve", "日本", "😀", "\n", " the", "!", " Lily's", "</s>"]
    for _ in range(50):
        text = "".join(draws.choices(words, k=12))
        ids = tokenizer.encode(text).ids
        cut = draws.randrange(1, len(ids))
        detokenizer = IncrementalDetokenizer(lambda ids: tokenizer.decode(ids), ids[:cut], ())
        joined = "".join(map(detokenizer.append, ids[cut:])) + detokenizer.flush()
        before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert before + joined == tokenizer.decode(ids)


def test_detokenizer_keeps_a_replacement_character_of_the_prompt_and_ends_at_a_late_stop() -> None:
    pieces = {0: b"a", 1: "\ufffd".encode(), 2: b" b", 3: b"abSTOP\xc3"}

    def decode(ids: list[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    detokenizer = IncrementalDetokenizer(decode, [0, 1], ())
    assert detokenizer.append(2) + detokenizer.flush() == " b"
    detokenizer = IncrementalDetokenizer(decode, [0], ["STOP"])
    assert detokenizer.append(3) + detokenizer.flush() == "ab"
    assert detokenizer.found_stop


@pytest.mark.parametrize("temperature", [1e-30, 1e-39, 1e-45, 1e-46, 5e-324])
def test_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.randn(3, 50)
    sampler = Sampler(GenerationConfig(temperature=temperature), [0, 1, 2], [[], [], []], [])
    assert torch.equal(sampler(logits, block_eos=False)[0], logits.argmax(-1))


@pytest.mark.parametrize("published", [{"top_p": 0}, {"top_p": 0.0, "temperature": 0.7, "top_k": 20}])
def test_published_top_p_of_zero_is_greedy_at_any_temperature(tmp_path: Path, published: dict[str, float]) -> None:
    """As transformers samples with such a file; a request that sets another top_p samples as usual."""
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    sampling_options = read_published_sampling(tmp_path)
    assert "top_p 0, so the most likely token" in sampling_options.describe()
    logits = logits_of(3)
    for changes in ({}, {"temperature": 2.0}):
        config = GenerationConfig(**sampling_options.options | changes)  # pyright: ignore[reportArgumentType]
        sampler = Sampler(config, list(range(6)), [[]] * 6, [])
        for _ in range(5):
            assert torch.equal(sampler(logits, block_eos=False)[0], logits.argmax(-1))
    changed = sampling_options._replace(options=sampling_options.options | {"top_p": 0.9})
    assert "top_p 0.9" in changed.describe()


@pytest.mark.parametrize(
    ("published", "names"),
    [
        ({}, ()),
        ({"repetition_penalty": 1.3}, ("repetition_penalty",)),
        ({"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.05}, ("repetition_penalty",)),
        ({"do_sample": False, "temperature": 0.7}, ()),
        ({"do_sample": True, "temperature": 0.7}, DEFAULTS),
        ({"temperature": 0.7}, DEFAULTS),  # as in vLLM, where transformers decodes greedily
    ],
)
def test_requests_are_sampled_as_published(tmp_path: Path, published: dict[str, Any], names: Collection[str]) -> None:
    """With `do_sample` false they are greedy as in transformers, and without options of sampling; others stay."""
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    sampling = read_published_sampling(tmp_path)
    defaults = sampling.request_defaults(asks_for_sampling=False)
    assert defaults == {name: sampling.options[name] for name in names}
    assert sampling.options["temperature"] == published.get("temperature", 1.0)
    assert sampling.request_defaults(asks_for_sampling=True) == sampling.options


def test_published_sampling_names_the_folder_of_a_broken_file(tmp_path: Path) -> None:
    for text, message in (("{\n x", ":2:2: not JSON"), ('{"top_p": -1}', ": top_p=-1 must be")):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(InputError, match=f"^{tmp_path}/generation_config.json{message}"):
            read_published_sampling(tmp_path)


def test_published_sampling_names_options_that_it_ignores(tmp_path: Path) -> None:
    """transformers writes all of its options in some versions, most with values that change nothing."""
    neutral = {
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "typical_p": 1.0,
        "bad_words_ids": None,
        "suppress_tokens": [],
        "min_length": 0,
    }
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(neutral | {"temperature": 0.6}))
    assert "ignored" not in read_published_sampling(tmp_path).describe()
    path.write_text(json.dumps(neutral | {"num_beams": 4, "min_length": 3}))
    assert "ignored: num_beams, min_length" in read_published_sampling(tmp_path).describe()
