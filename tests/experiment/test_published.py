"""Published AutoCompressors: transformers' weights with summary tokens, against the same passes in transformers."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import laconic
from laconic.cli.main import main
from laconic.compression.memory import SummaryMemory
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import InputError, UnsafeFileError
from laconic.experiment.load_autocompressor import SUMMARY_EMBEDDING, is_published_compressor
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.generation.config import GenerationConfig
from tests import tolerances
from tests.conftest import needs
from tests.models.fixtures import assert_close

KAPPA, D, SEGMENT = 3, 32, 20
TEXT, PROMPT = "Three may keep a secret, if two of them are dead; so on.", "Who may?"
SIZES = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": D, "bos_token_id": 2, "eos_token_id": 2},
    "llama": {"intermediate_size": 64},
}


@pytest.fixture(scope="module", params=["opt", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an untrained model of transformers in the format of AutoCompressors; row 1 of OPT's positions is zero."""
    needs("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    path, tokenizer = tmp_path_factory.mktemp("published") / request.param, build_byte_tokenizer()
    sizes = {"vocab_size": tokenizer.vocab_size, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"max_position_embeddings": 128, "summary_length": KAPPA, "accumulate_summary": True}
    config = AutoConfig.for_model(request.param, **sizes, **more, **SIZES[request.param])
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
        if request.param == "opt":
            model.model.decoder.embed_positions.weight[1] = 0.0
    model.save_pretrained(path)
    tokenizer.save(path)
    tensors = load_file(path / "model.safetensors")
    tensors[SUMMARY_EMBEDDING] = torch.randn(KAPPA, D, generator=generator) * 0.3
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    edit_config(path, architectures=["AutoCompressorModel"], segment_gradient_checkpointing=True)
    return path


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


class ReferenceModel:
    """The same weights in transformers; the passes of the paper with `inputs_embeds` and `position_ids`."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokens, self.zero = load_file(folder / "model.safetensors")[SUMMARY_EMBEDDING], folder.name == "opt"

    @torch.no_grad()
    def hidden_states(self, memory: Tensor, ids: list[int], tokens: Tensor) -> Tensor:
        """Return the states after the final norm at the text and at the summary tokens that follow it."""
        embeddings, m, K = self.model.get_input_embeddings()(torch.tensor(ids)), len(memory), len(tokens)
        positions = [-1] * m + [*range(len(ids))] + [-1] * K if self.zero else [*range(m + len(ids) + K)]
        inputs_embeds, mask = (
            torch.cat([memory, embeddings, tokens])[None],
            torch.ones(1, len(positions), dtype=torch.long),
        )
        inner = self.model.model.decoder if self.zero else self.model.model
        output = inner(
            inputs_embeds=inputs_embeds, attention_mask=mask, position_ids=torch.tensor([positions]), use_cache=False
        )
        return output.last_hidden_state[0, m:]

    def compress(self, ids: list[int], accumulate: bool) -> Tensor:
        """Return the vectors of all segments of a text, or of the last."""
        memory = torch.zeros(0, D)
        for start in range(0, len(ids), SEGMENT):
            new = self.hidden_states(memory, ids[start : start + SEGMENT], self.tokens)[-KAPPA:]
            memory = torch.cat([memory, new]) if accumulate else new
        return memory

    def generate(self, memory: Tensor, ids: list[int], n: int) -> list[int]:
        """Decode n ids greedily."""
        for _ in range(n):
            state = self.hidden_states(memory, ids, self.tokens[:0])[-1]
            ids = [*ids, int(self.model.lm_head(state).argmax())]
        return ids[-n:]


@pytest.mark.parametrize("accumulate", [True, False])
def test_published_model_equals_transformers(folder: Path, accumulate: bool, tmp_path: Path) -> None:
    path = tmp_path / folder.name
    shutil.copytree(folder, path)
    edit_config(path, accumulate_summary=accumulate)
    compressor, reference = laconic.load(path), ReferenceModel(folder)
    ids, prompt_ids = (compressor.tokenizer.encode(text, add_special_tokens=False) for text in (TEXT, PROMPT))
    memory, expected = compressor.compress([TEXT], segment_tokens=SEGMENT), reference.compress(ids, accumulate)
    assert memory.num_vectors.tolist() == [len(expected)]
    assert_close(memory.vectors[0], expected, tolerances.FLOAT32)
    assert compressor.generate([PROMPT], memory=memory, config=GenerationConfig(max_tokens=6))[
        0
    ].token_ids == reference.generate(expected, prompt_ids, 6)
    assert compressor.segment_tokens == (128 if folder.name == "opt" else 64)
    assert compressor.metadata.positions == ("zero" if folder.name == "opt" else "contiguous")
    assert compressor.method.config.memory_policy == ("accumulate" if accumulate else "replace")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a command and returns its exit code and output."""

    def call(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["laconic", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), capsys.readouterr().out

    return call


def test_compress_and_generate_commands(folder: Path, tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    out = tmp_path / "book.safetensors"
    assert run("compress", folder, tmp_path / "book.txt", "--out", out, "--segment-tokens", 20)[0] == 0
    assert SummaryMemory.load(out).vectors_per_segment.tolist() == [[3, 3, 3]]
    options = ("--max-tokens", 3, "--format", "json")
    compressor = laconic.load(folder)
    assert isinstance(compressor, TextCompressor)
    for memory, arguments in ((compressor.compress([TEXT], segment_tokens=20), ("--memory", out)), (None, ())):
        code, output = run("generate", folder, PROMPT, *arguments, *options)
        assert code == 0
        expected = compressor.generate([PROMPT], memory=memory, config=GenerationConfig(max_tokens=3))[0]
        assert json.loads(output)["generations"][0]["ids"] == expected.token_ids
    assert run("generate", folder, PROMPT, "--with-cot")[0] == 2


def test_load_invalid_published_model(folder: Path, tmp_path: Path) -> None:
    path, tensors = tmp_path / "model", load_file(folder / "model.safetensors")
    shutil.copytree(folder, path)

    def save(tokens: Tensor | None) -> None:
        rest = {name: tensor for name, tensor in tensors.items() if name != SUMMARY_EMBEDDING}
        save_file(rest if tokens is None else rest | {SUMMARY_EMBEDDING: tokens}, path / "model.safetensors")

    edit_config(path, accumulate_summary=None)
    with pytest.raises(InputError, match="has no accumulate_summary"):
        laconic.load(path)
    edit_config(path, accumulate_summary=True)
    save(tensors[SUMMARY_EMBEDDING][:2])
    with pytest.raises(InputError, match=r"embed_summary.weight \[2, 32\], but config.json says \[3, 32\]"):
        laconic.load(path)
    save(None)
    with pytest.raises(InputError, match=r"has no tensor embed_summary.weight"):
        laconic.load(path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UnsafeFileError, match=r"pytorch_model.bin is a pickle"):
        laconic.load(path)
    edit_config(path, summary_length=0)  # as in the authors' models with full attention
    assert not is_published_compressor(path)


@pytest.mark.parametrize("folder", ["opt"], indirect=True)
def test_position_of_padding_is_not_used(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "odd")
    tensors = load_file(folder / "model.safetensors")
    before = laconic.load(folder).compress([TEXT]).vectors
    tensors["model.decoder.embed_positions.weight"][1] = 1.0
    save_file(tensors, tmp_path / "odd" / "model.safetensors")
    assert torch.equal(before, laconic.load(tmp_path / "odd").compress([TEXT]).vectors)
