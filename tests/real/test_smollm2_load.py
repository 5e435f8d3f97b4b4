"""`laconic.load` and `laconic inspect` on SmolLM2, plain and with a KaVa adapter of one update."""

from pathlib import Path

import pytest
import torch

import laconic
from laconic import console
from tests.conftest import RunCli, needs, shared_dir

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("unchecked")]
QUESTION = "Tom has 3 boxes with 4 apples each and eats 2. How many apples are left?"
CHAIN = ("<<3*4=12>>", "<<12-2=10>>")
RECIPE = """method = "kava"
[model]
name = "{model}"
[latents]
num_latents = 6
jacobi_iterations = 2
[data]
source = "catalog"
name = "gsm8k-aug-subset"
valid = "gsm8k-aug:valid"
data_dir = "{data}"
max_train_rows = 16
format = "pccot"
[train]
trainable = "lora"
steps = 1
batch_size = 2
[lora]
rank = 4
"""


@pytest.fixture(scope="module")
def recipe(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "kava.toml"
    path.write_text(RECIPE.format(model=smollm2, data=shared_dir() / "data"))
    return path


def test_load_continues_as_transformers(smollm2: Path) -> None:
    needs("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = "The capital of France is"
    model = laconic.load(smollm2, dtype="float32")
    assert isinstance(model, laconic.LanguageModel)
    ours = model.generate(prompt, laconic.GenerationConfig(max_tokens=12))[0]
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    theirs = reference.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert ours.token_ids == theirs.tolist()


def test_load_and_inspect_a_run(recipe: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "LOG_INTERVAL", 0)
    monkeypatch.setattr(console, "FIRST_LINE_AFTER", 0)
    needs("peft")
    assert run_cli("train", recipe, "--out", "kava").code == 0
    assert "hidden_size" not in Path("kava/recipe.toml").read_text()
    model = laconic.load("kava")
    assert isinstance(model, laconic.Reasoner)
    answer = model.generate(QUESTION, laconic.GenerationConfig(max_tokens=8))[0]
    assert run_cli("generate", "kava", QUESTION, "--max-tokens", 8).out == f"{answer.text}\n"
    thoughts = model.think(QUESTION)
    assert thoughts.latents.shape == (6, 576)
    assert thoughts.passes == answer.passes._replace(answer=0)

    code, out, err = run_cli("inspect", "kava", QUESTION, "--chain", *CHAIN)
    assert code == 0
    assert "mean is that of the first 16 validation questions" in out
    assert "kava thinking about 16 other questions for mean: 2 of " in err
    assert "s left" in err
    assert err.endswith("wrote inspect.html\n")
    assert Path("inspect.html").read_text(encoding="utf-8").endswith("</html>")
