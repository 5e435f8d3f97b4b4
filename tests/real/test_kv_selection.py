"""KV selection with SmolLM2-135M-Instruct: scores as in kvpress, quality at an eighth, and questions about a text."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import laconic
from laconic import Decoder, GenerationConfig, KVCache, KVCompressionConfig
from laconic.compression.kv import scores as kv_scores
from laconic.compression.kv import selection as kv_selection
from laconic.compression.kv.compress import compress_document
from laconic.compression.kv.selection import NO_REPEAT_PROMPT, DocumentReader, RepeatPrompt
from laconic.experiment.text_models.kv_compressor import build_repeat_prompt, compress_text, encode_messages
from tests.conftest import needs, shared_dir

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("unchecked")]
PRESSES = {"snapkv": "SnapKVPress", "expected": "ExpectedAttentionPress", "h2o": "ObservedAttentionPress"}


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    return Decoder.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def book() -> str:
    with (shared_dir() / "data/text/standard-ebooks.jsonl").open(encoding="utf-8") as file:
        return json.loads(file.readline())["text"]


@pytest.fixture(scope="module")
def ids(smollm2: Path, book: str) -> Tensor:
    return torch.tensor([laconic.load_tokenizer(smollm2).encode(book[:4000])[:400]])


def press_scores(model: Any, press: Any, ids: Tensor, attention: str) -> Tensor:
    """Return the scores that a kvpress class computes in every layer of a transformers model."""
    from transformers import DynamicCache

    model.set_attn_implementation(attention)
    scores: dict[int, Tensor] = {}

    def score(module: Any, inputs: Any, options: Any, output: Any) -> None:
        layer = options["past_key_values"].layers[module.layer_idx]
        arguments = (module, options["hidden_states"], layer.keys, layer.values, output[1], options)
        scores[module.layer_idx] = press.score(*arguments)

    hooks: list[Any] = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(score, with_kwargs=True))
    with torch.no_grad():
        model(ids, past_key_values=DynamicCache())
    for hook in hooks:
        hook.remove()
    return torch.stack([scores[i] for i in sorted(scores)])


def assert_same_selection(mine: Tensor, theirs: Tensor) -> None:
    """Assert equal scores, and the same best eighth in every head, up to ties (equal tokens have equal key norms)."""
    noise = 3e-5 * float(theirs.abs().max())  # products of other kernels on AMD processors: 1.4e-5
    assert float((mine - theirs).abs().max()) < noise
    count = mine.shape[-1] // 8
    least = mine.topk(count, -1).values[..., -1:]
    assert bool((mine.gather(-1, theirs.topk(count, -1).indices) >= least - 2 * noise).all())


@pytest.mark.parametrize("method", ["snapkv", "expected", "h2o", "knorm", "kvzip"])
def test_kv_selection_scores_equal_kvpress(
    method: Any, decoder: Decoder, smollm2: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("kvpress")
    kvpress = importlib.import_module("kvpress")
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(smollm2, attn_implementation="sdpa").eval()
    reader, scored = DocumentReader(decoder), slice(None)
    with torch.no_grad():
        if method == "snapkv":
            mine, scored = kv_selection.score_last_queries(reader, ids, "snapkv", 64)[1], slice(0, -64)
        elif method == "expected":
            mine, scored = kv_selection.score_expected_attention(reader, ids, 4)[1], slice(4, None)
        elif method == "h2o":
            mine = kv_selection.score_observed_attention(reader, ids)[1]
        elif method == "knorm":
            mine = torch.stack([kv_scores.key_norm_scores(k) for k in reader.read(ids).keys])
        else:
            monkeypatch.setattr(kv_selection, "REPEAT_TOKENS", 150)  # three pieces
            press = kvpress.KVzipPress(0.5, chunk_size=150)
            model.config.name_or_path = str(smollm2)
            final: list[Any] = []
            monkeypatch.setattr(press, "compress_post", lambda model: final.append(press.score_val))
            monkeypatch.setattr(press, "_reset_internal_parameters", lambda: None)
            with press(model):
                model(input_ids=ids, past_key_values=DynamicCache())
            first = press.prefix_length
            request = build_repeat_prompt(laconic.load_tokenizer(smollm2))
            prompt = RepeatPrompt(request.first, request.later, tuple(press._suffix_ids[0].tolist()))
            cache = reader.read(ids)
            mine = kv_selection.score_repetition(reader, ids, cache, 4, prompt, first)
            # here the prefix is scored with the first piece, there it is not scored
            scored, theirs = slice(first + 150, None), final[0]
            assert_same_selection(mine[..., scored], theirs[..., scored])
            return
    theirs = press_scores(model, getattr(kvpress, PRESSES.get(method, "KnormPress"))(0.5), ids,
                          "eager" if method == "h2o" else "sdpa")  # fmt: skip
    assert_same_selection(mine[..., scored], theirs[..., scored])


@torch.no_grad()
def copy_loss(decoder: Decoder, cache: KVCache | None, ids: Tensor, start: int) -> float:
    """Return nats per token on 48 tokens copied from the document, after the 8 tokens before them."""
    passage = ids[:, start - 8 : start + 48]
    hidden = decoder(decoder.embed(passage), cache).hidden_states[:, 7:-1]
    return float(F.cross_entropy(decoder.logits(hidden)[0], passage[0, 8:]))


def test_kvzip_keeps_copied_passages_at_an_eighth(decoder: Decoder, smollm2: Path, ids: Tensor) -> None:
    """An eighth of the keys and values keeps at least 80% of what the whole text gains; the last tokens do not."""
    prompt, document = build_repeat_prompt(laconic.load_tokenizer(smollm2)), ids[0].tolist()
    with torch.no_grad():
        whole = DocumentReader(decoder).read(ids)
    caches = {"none": None, "whole": whole}
    for method in ("kvzip", "window"):
        caches[method] = compress_document(decoder, document, KVCompressionConfig(method), prompt).memory.to_cache()
    losses = {
        name: sum(copy_loss(decoder, cache, ids, start) for start in (40, 160, 280)) / 3
        for name, cache in caches.items()
    }
    gain = {name: (losses["none"] - loss) / (losses["none"] - losses["whole"]) for name, loss in losses.items()}
    assert gain["kvzip"] > 0.8
    assert gain["window"] < 0.5


def test_kv_memory_of_everything_generates_what_the_text_does(decoder: Decoder, ids: Tensor) -> None:
    memory = compress_document(decoder, ids[0].tolist(), KVCompressionConfig("snapkv", keep=1.0), NO_REPEAT_PROMPT)
    config, question = GenerationConfig(max_tokens=24, eos_token_ids=()), [28, 253]
    after = laconic.generate(decoder, input_ids=[question], state=memory.memory.to_cache(), config=config)[0]
    whole = laconic.generate(decoder, input_ids=[ids[0].tolist() + question], config=config)[0]
    assert after.token_ids == whole.token_ids
    torch.testing.assert_close(torch.tensor(after.logprobs), torch.tensor(whole.logprobs), rtol=0, atol=1e-4)


def test_kv_memory_answers_a_question_about_its_text(decoder: Decoder, smollm2: Path, book: str) -> None:
    tokenizer = laconic.load_tokenizer(smollm2)
    text = f"{book[:1200]}\n\nThe secret code of the archive is 7341.\n\n{book[1200:2400]}"
    memory = compress_text(decoder, tokenizer, text, KVCompressionConfig(keep=0.2), chat=True).memory
    prompt = encode_messages(
        tokenizer, memory, [{"role": "user", "content": "What is the secret code of the archive?"}]
    )
    config = GenerationConfig(max_tokens=24)
    assert (
        "7341"
        in laconic.generate(decoder, tokenizer, input_ids=[prompt], state=memory.to_cache(), config=config)[0].text
    )
