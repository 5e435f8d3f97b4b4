"""Configuration and tokenizer files of published checkpoints, cut to tiny sizes, against transformers.

tests/real_configs/SOURCES.md says where each folder comes from and what was cut.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from laconic.data.tokenizer import load_tokenizer
from laconic.errors import InputError
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.models.checkpoints.hf_fields import FAMILIES
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.conftest import needs
from tests.tolerances import FLOAT32, error

CORPUS = Path(__file__).parent / "real_configs"
SUPPORTED = sorted(folder for folder in (CORPUS / "supported").iterdir())
UNSUPPORTED = sorted(folder for folder in (CORPUS / "unsupported").iterdir())
TEXTS = [
    "", " ", "  ", "   x", "x   ", "Hello world", " Hello", "Hello ", "a  b   c", "\n", "\n\n\n",
    "\t tab", "\r\n\r\n x",
    "1234567890", "3.14159 1,000,000", "1st 2nd 10th", "don't I'll WE'VE they'd", "naïve café", "A\u030a Å",
    "ﬁ ﬀ Ⅷ ½",
    "日本語のテキスト", "中文 和 English 混排", "한국어", "мир и война", "مرحبا بالعالم", "שלום",
    "हिन्दी", "ไทย",
    "🙂", "🙂🏽👩‍👩‍👧", "a\u200bb", "\ufeffx", "\u0000x", "\x7f", "\ud7ff\ue000", "x" * 70,
    "aaaa bbbb aaaa", "ĠHello Ċ",
    "def f(x):\n    return x**2\n", "if (a&&b) { c->d(); }", "https://a.b/c?d=e&f", '{"a": [1, 2.5e-3]}',
    "x_1 = y[0] # z",
    "▁x ▁", "<s>hello</s> world", "  <s>  x </s>  y", "<unk> <|endoftext|>x", "<|im_start|>user\nhi<|im_end|>\n",
    "[INST] hi [/INST] yo", "<|begin_of_text|>a<|eot_id|>", "<think>\nx</think>",
    "<｜User｜>a<｜Assistant｜>b", "<pad><mask>",
    "<tool_call>{}</tool_call>", "<|fim_prefix|>a<|fim_suffix|>", "<repo_name>x", "▁<PRE> a ▁<SUF>", "<0x0A> <0xFF>",
    "the and of to in", "Once upon a time, there was a world.",
]  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief."}
FIRST_TURN = {"role": "user", "content": " Hi\n"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number", "description": "one"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]
CONVERSATIONS: list[list[dict[str, str]]] = [
    [FIRST_TURN],
    [SYSTEM, FIRST_TURN],
    [SYSTEM, FIRST_TURN, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}, FIRST_TURN],
    [FIRST_TURN, FIRST_TURN],
]
REBUILT = ("LlamaTokenizer", "CodeLlamaTokenizer")  # classes of transformers 5 that replace the published pipeline
by_name = pytest.mark.parametrize("folder", SUPPORTED, ids=lambda folder: folder.name)


def transformers() -> Any:
    needs("transformers")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def read_with_transformers(folder: Path) -> Any:
    """Return AutoTokenizer's tokenizer, or the generic one where the class would replace tokenizer.json's pipeline."""
    tokenizer = transformers().AutoTokenizer.from_pretrained(folder)
    if type(tokenizer).__name__ in REBUILT:
        return transformers().TokenizersBackend.from_pretrained(folder)
    return tokenizer


def render(apply: Any, messages: list[dict[str, str]], **options: Any) -> str:
    """Render a conversation, or return "refused" where the template rejects it."""
    try:
        return apply(messages, **options)
    except Exception:
        return "refused"


@by_name
def test_decoder_from_published_config_equals_transformers(folder: Path, tmp_path: Path) -> None:
    library = transformers()
    reference_config = library.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    reference = library.AutoModelForCausalLM.from_config(reference_config, dtype=torch.float32).eval()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file(dict(unique_tensors(reference)), tmp_path / "model.safetensors")
    decoder = Decoder.from_pretrained(tmp_path, dtype="float32")
    ids = torch.randint(0, reference_config.vocab_size, (2, 24))
    with torch.no_grad():
        logits, expected = decoder.logits(decoder(decoder.embed(ids)).hidden_states), reference(ids).logits
    assert error(logits, expected) < FLOAT32
    has_generation = (folder / "generation_config.json").is_file()
    generation = library.GenerationConfig.from_pretrained(folder) if has_generation else reference.generation_config
    eos = generation.eos_token_id
    assert decoder.config.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))
    assert DecoderConfig.from_dict(decoder.config.to_config_json()).rope == decoder.config.rope


def unique_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's tensors without the head that shares the token embedding, as checkpoints have them."""
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@by_name
def test_load_tokenizer_of_published_files_equals_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), read_with_transformers(folder)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert ours.special_token_id(role) == getattr(theirs, f"{role}_id"), role
    assert ours.vocab_size == len(theirs)
    batch = ours(TEXTS[:8])
    assert [row[mask].tolist() for row, mask in zip(*batch, strict=True)] == theirs(TEXTS[:8]).input_ids
    assert bool(ours.chat_template) == bool(theirs.chat_template)
    for messages in CONVERSATIONS if theirs.chat_template else ():
        for prompt in (True, False):
            expected = render(theirs.apply_chat_template, messages, tokenize=False, add_generation_prompt=prompt)
            assert render(ours.apply_chat_template, messages, add_generation_prompt=prompt) == expected
        expected = render(theirs.apply_chat_template, messages, tokenize=False, tools=TOOLS)
        assert render(ours.apply_chat_template, messages, add_generation_prompt=False, tools=TOOLS) == expected


def test_load_tokenizer_keeps_the_published_pipeline_of_sentencepiece_models() -> None:
    """AutoTokenizer of transformers 5 drops one leading space, which tokenizer.json and SentencePiece keep."""
    folder = CORPUS / "supported" / "meta-llama--Llama-2-7b-hf"
    ours, auto = load_tokenizer(folder), transformers().AutoTokenizer.from_pretrained(folder)
    differing = [text for text in TEXTS if ours.encode(text) != auto.encode(text)]
    special = ("<s>", "</s>", "<unk>")
    assert all(text.startswith((" ", "▁")) or any(token in text for token in special) for text in differing)
    assert ours.encode(" Hello", add_special_tokens=False)[0] == ours.backend.token_to_id(
        "▁▁"
    ) or ours.backend.token_to_id("▁")


def test_generate_with_an_added_token_that_has_no_embedding() -> None:
    """CodeLlama's tokenizer adds <FILL_ME>, which is one id more than the model has."""
    folder = CORPUS / "supported" / "codellama--CodeLlama-7b-Instruct-hf"
    decoder, tokenizer = Decoder(DecoderConfig.from_folder(folder)), load_tokenizer(folder)
    assert tokenizer.vocab_size == decoder.config.vocab_size + 1
    config = GenerationConfig(max_tokens=2, eos_token_ids=())
    assert len(generate(decoder, tokenizer, ["hello"], config=config)[0].token_ids) == 2
    with pytest.raises(InputError, match="outside the vocabulary"):
        generate(decoder, tokenizer, ["<FILL_ME>"], config=config)


@pytest.mark.parametrize("folder", UNSUPPORTED, ids=lambda folder: folder.name)
def test_config_names_what_unsupported_models_need(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        DecoderConfig.from_folder(folder)
    message = str(caught.value)
    assert "\n" not in message
    source = json.loads((folder / "config.json").read_text())
    if method := source.get("quantization_config", {}).get("quant_method"):
        assert f"{method} weights are not supported" in message
        return
    assert all(family in message for family in FAMILIES)
    assert f'"{source["model_type"]}"' in message
    assert "it has " in message or "it wraps a text model" in message
    assert ("(auto_map) is not run" in message) == ("auto_map" in source)


def test_config_warns_of_code_that_is_not_run() -> None:
    with pytest.warns(UserWarning, match="auto_map names Python code"):
        DecoderConfig.from_folder(CORPUS / "supported" / "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B")
