"""SmolLM2-135M-Instruct beside transformers: every stage, greedy text, long prompts, trained adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic.data.tokenizer import load_tokenizer
from laconic.models.decoder import Decoder
from laconic.verification.run import run_parity
from tests.conftest import needs
from tests.house.source import sandbox
from tests.house.warm import laconic as run_command
from tests.tolerances import FLOAT32, error

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("unchecked")]
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "To be, or not to be,",
    "The three primary colours are",
    "Dear Sir or Madam,\n\n",
    "import numpy as np\n\nx =",
    "Die Hauptstadt von Deutschland ist",
    "La recette des crêpes :",
    "<|im_start|>user\nWhat is 7 times 8?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a joke.<|im_end|>\n<|im_start|>assistant\n",
    "Q: Who wrote Hamlet?\nA:",
    "| city | country |\n|---|---|\n| Rome | Italy |\n|",
    "The mitochondria is",
    "Yesterday I went to the market and bought",
    "SELECT name FROM users WHERE",
    "In 1969, humans first",
    "a",
)
NEW_TOKENS, LONG, HALF = 16, 7900, 4000
KAVA = """
method = "kava"
[model]
name = "smollm2"
[latents]
num_latents = 3
jacobi_iterations = 2
[data]
source = "catalog"
name = "gsm8k"
valid = "gsm8k-aug:valid"
data_dir = "../shared/data"
max_train_rows = 16
max_tokens = 200
on_too_long = "drop"
[train]
trainable = "lora"
steps = 3
batch_size = 2
learning_rate = 2e-3
[lora]
rank = 4
[validation]
max_rows = 2
max_tokens = 4
"""
AUTOCOMPRESSOR = """
method = "autocompressor"
[model]
name = "smollm2"
[compression]
length_policy = "fixed"
max_vectors = 4
[data]
source = "text"
path = "../shared/data/text/standard-ebooks.jsonl"
[data.text]
row_tokens = 128
segment_tokens = [64, 64]
segment_lengths = "fixed"
segments_per_window = 2
[train]
trainable = "lora"
steps = 3
batch_size = 2
learning_rate = 2e-3
[lora]
rank = 4
[validation]
max_rows = 2
"""


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    needs("transformers")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def test_every_stage_equals_transformers(smollm2: Path) -> None:
    """Inputs with padding and a cache; the first, a middle and the last layer."""
    needs("transformers")
    report = run_parity(str(smollm2), reference="transformers", inputs="I1,I2,I8")
    assert report.is_ok, report.summary()


def test_greedy_text_equals_transformers(smollm2: Path, reference: Any) -> None:
    decoder, tokenizer = Decoder.from_pretrained(smollm2), load_tokenizer(smollm2)
    config = laconic.GenerationConfig(max_tokens=NEW_TOKENS)
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        theirs = reference.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
        ours = laconic.generate(decoder, tokenizer, [prompt], config=config)[0]
        assert ours.text == tokenizer.decode(theirs), prompt


def test_long_prompts_equal_transformers(smollm2: Path, shared: Path, reference: Any) -> None:
    """A text of 7,900 tokens, read in two halves with a cache: the next token after 4,000 and after all of it."""
    text = (shared / "data/text/tinyshakespeare.txt").read_text(encoding="utf-8")[: 5 * LONG]
    decoder, ids = Decoder.from_pretrained(smollm2), torch.tensor([load_tokenizer(smollm2).encode(text)[:LONG]])
    assert ids.shape[1] == LONG
    with torch.inference_mode():
        theirs = reference(ids, logits_to_keep=torch.tensor([HALF - 1, LONG - 1]), use_cache=False).logits
        first = decoder(decoder.embed(ids[:, :HALF]))
        second = decoder(decoder.embed(ids[:, HALF:]), cache=first.cache)
        ours = decoder.logits(torch.cat([first.hidden_states[:, -1:], second.hidden_states[:, -1:]], 1))
    assert error(ours[:, 0], theirs[:, 0]) < FLOAT32
    assert error(ours[:, 1], theirs[:, 1]) < FLOAT32


@pytest.mark.parametrize("recipe", [KAVA, AUTOCOMPRESSOR], ids=["kava", "autocompressor"])
def test_trained_adapter_reloads_in_transformers_and_peft(
    recipe: str, smollm2: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three updates: the exported folder, and the adapter on the published model, have laconic's logits."""
    needs("peft")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = sandbox(tmp_path, wants_shared=True)
    (folder / "recipe.toml").write_text(recipe, encoding="utf-8")
    for command in ("laconic train recipe.toml --out run", "laconic export run --out exported"):
        process = run_command(command, folder)
        assert process.returncode == 0, process.stderr
    ids = torch.tensor([load_tokenizer(smollm2).encode("Natalia sold 48 clips in April, and half as many in May.")])
    with torch.inference_mode():
        ours, base = (
            decoder.logits(decoder(decoder.embed(ids)).hidden_states)
            for decoder in map(Decoder.from_pretrained, (folder / "exported", smollm2))
        )
        assert error(ours, base) > 100 * FLOAT32  # the adapter has learned
        exported = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32).eval()
        assert error(ours, exported(ids).logits) < FLOAT32
        published = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
        with_adapter = PeftModel.from_pretrained(published, folder / "run/steps/step-000003").eval()
        assert error(ours, with_adapter(ids).logits) < FLOAT32
