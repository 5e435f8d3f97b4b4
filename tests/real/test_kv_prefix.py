"""KV memories with a length per head on SmolLM2-135M-Instruct: logits as transformers with masked heads, and bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic import Decoder, GenerationConfig, KVCompressionConfig, KVMemory, compress_kv
from laconic.experiment.text_models.kv_compressor import build_repeat_prompt
from tests import tolerances
from tests.conftest import needs, shared_dir

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("unchecked")]
NUM_TOKENS, PROMPT = 400, [28, 253, 1194, 282, 260]


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    return Decoder.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def memories(decoder: Decoder, smollm2: Path) -> list[KVMemory]:
    """Memories of an eighth of two books, by KVzip."""
    tokenizer, books = laconic.load_tokenizer(smollm2), dict[str, str]()
    with (shared_dir() / "data/text/standard-ebooks.jsonl").open(encoding="utf-8") as file:
        while len(books) < 2:
            row = json.loads(file.readline())
            books.setdefault(row["book"], row["text"])
    prompt = build_repeat_prompt(tokenizer)
    ids, config = [tokenizer.encode(t[:4000])[:NUM_TOKENS] for t in books.values()], KVCompressionConfig(keep=0.125)
    return [compress_kv(decoder, document, config, repeat_prompt=prompt) for document in ids]


def masked_logits(smollm2: Path, memory: KVMemory, ids: list[int]) -> Tensor:
    """Return transformers' logits of ids after a memory, whose heads are padded to the longest and masked."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(smollm2, attn_implementation="sdpa").eval()
    (L, _, G), M, T = memory.slots.shape, memory.M, len(ids)
    repeats = model.config.num_attention_heads // G
    cache, masks = DynamicCache(), list[Tensor]()
    keys, values = memory.split_heads(torch.cat(memory.keys)), memory.split_heads(torch.cat(memory.values))
    for layer in range(L):
        padded = [torch.full((1, G, M, keys[0].shape[1]), 9.0) for _ in range(2)]
        mask = torch.ones(1, G, T, M + T, dtype=torch.bool).tril(M)
        for g in range(G):
            n = len(keys[layer * G + g])
            padded[0][0, g, :n], padded[1][0, g, :n] = keys[layer * G + g], values[layer * G + g]
            mask[0, g, :, n:M] = False
        cache.update(padded[0], padded[1], layer)
        masks.append(mask.repeat_interleave(repeats, 1))
    for layer, mask in zip(model.model.layers, masks, strict=True):

        def mask_heads(module: Any, arguments: Any, options: dict[str, Any], mask: Tensor = mask) -> Any:
            return arguments, options | {"attention_mask": mask}

        layer.self_attn.register_forward_pre_hook(mask_heads, with_kwargs=True)
    positions = torch.arange(T)[None] + memory.num_tokens
    with torch.no_grad():
        return model(torch.tensor([ids]), past_key_values=cache, position_ids=positions).logits[0]


def test_kv_prefix_logits_equal_transformers_with_masked_heads(
    decoder: Decoder, smollm2: Path, memories: list[KVMemory]
) -> None:
    needs("transformers")
    memory = memories[0]
    assert memory.M > 0.9 * NUM_TOKENS
    config = GenerationConfig(max_tokens=16, eos_token_ids=())
    generation = laconic.generate(decoder, input_ids=[PROMPT], state=memory.to_cache(), config=config)[0]
    ids = [*PROMPT, *generation.token_ids]
    expected = masked_logits(smollm2, memory, ids)
    with torch.no_grad():
        actual = decoder.logits(decoder(decoder.embed(torch.tensor([ids])), memory.to_cache()).hidden_states)[0]
    assert tolerances.error(actual, expected) < tolerances.FLOAT32
    scored = expected[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert scored.argmax(-1).tolist() == generation.token_ids
    torch.testing.assert_close(torch.tensor(generation.logprobs), scored.amax(-1), rtol=0, atol=1e-4)


def test_kv_prefix_takes_the_bytes_of_the_memory_file(decoder: Decoder, memories: list[KVMemory]) -> None:
    """An eighth of the text's cache, while the longest head keeps nearly all positions; 10% more in a batch."""
    whole = NUM_TOKENS * 30 * 3 * 2 * 64 * 4
    for memory in memories:
        assert memory.to_cache().kv_bytes == memory.num_bytes == whole // 8
    batch = KVMemory.concat_rows(*memories).to_cache()
    assert batch.num_bytes < 1.1 * 2 * whole / 8
    config = GenerationConfig(max_tokens=8, eos_token_ids=())
    joint = laconic.generate(decoder, input_ids=[PROMPT, PROMPT[1:]], state=batch, config=config)
    for ids, memory, generation in zip((PROMPT, PROMPT[1:]), memories, joint, strict=True):
        alone = laconic.generate(decoder, input_ids=[ids], state=memory.to_cache(), config=config)[0]
        assert generation.token_ids == alone.token_ids
