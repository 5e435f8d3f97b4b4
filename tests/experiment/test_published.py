"""AutoCompressors as they are published: a folder of transformers' weights with summary tokens, read and written."""

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
from laconic.cli import main as cli
from laconic.compression.memory import SummaryMemory
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import InputError, UnsafeFileError, UsageError
from laconic.experiment.load_autocompressor import SUMMARY_EMBEDDING, is_published
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
    """A model of transformers, untrained, whose folder has what AutoCompressors add; row 1 of OPT's table is zero."""
    needs("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    made, tokenizer = tmp_path_factory.mktemp("published") / request.param, build_byte_tokenizer()
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
    model.save_pretrained(made)
    tokenizer.save(made)
    tensors = load_file(made / "model.safetensors")
    tensors[SUMMARY_EMBEDDING] = torch.randn(KAPPA, D, generator=generator) * 0.3
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    said(made, architectures=["AutoCompressorModel"], segment_gradient_checkpointing=True)
    return made


def said(folder: Path, **changes: Any) -> None:
    """Fields of config.json changed; None takes one out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


class Theirs:
    """The same weights in transformers, and the paper's passes by `inputs_embeds` and `position_ids`."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokens, self.zero = load_file(folder / "model.safetensors")[SUMMARY_EMBEDDING], folder.name == "opt"

    @torch.no_grad()
    def hidden(self, memory: Tensor, ids: list[int], tokens: Tensor) -> Tensor:
        """States after the final norm at the text and at the summary tokens behind it."""
        words, m, K = self.model.get_input_embeddings()(torch.tensor(ids)), len(memory), len(tokens)
        places = [-1] * m + [*range(len(ids))] + [-1] * K if self.zero else [*range(m + len(ids) + K)]
        vectors, live = torch.cat([memory, words, tokens])[None], torch.ones(1, len(places), dtype=torch.long)
        inner = self.model.model.decoder if self.zero else self.model.model
        seen = inner(inputs_embeds=vectors, attention_mask=live, position_ids=torch.tensor([places]), use_cache=False)
        return seen.last_hidden_state[0, m:]

    def memory(self, ids: list[int], grows: bool) -> Tensor:
        """Vectors of the segments of a text, all or the last ones."""
        held = torch.zeros(0, D)
        for start in range(0, len(ids), SEGMENT):
            new = self.hidden(held, ids[start : start + SEGMENT], self.tokens)[-KAPPA:]
            held = torch.cat([held, new]) if grows else new
        return held

    def continued(self, memory: Tensor, ids: list[int], n: int) -> list[int]:
        """Greedily."""
        for _ in range(n):
            state = self.hidden(memory, ids, self.tokens[:0])[-1]
            ids = [*ids, int(self.model.lm_head(state).argmax())]
        return ids[-n:]


@pytest.mark.parametrize("grows", [True, False])
def test_it_writes_and_reads_as_a_loop_over_transformers(folder: Path, grows: bool, tmp_path: Path) -> None:
    place = tmp_path / folder.name
    shutil.copytree(folder, place)
    said(place, accumulate_summary=grows)
    reader, theirs = laconic.load_text_model(place), Theirs(folder)
    ids, asked = (reader.tokenizer.encode(text, add_special_tokens=False) for text in (TEXT, PROMPT))
    memory, expected = reader.compress([TEXT], segment_tokens=SEGMENT), theirs.memory(ids, grows)
    assert memory.num_vectors.tolist() == [len(expected)]
    assert_close(memory.vectors[0], expected, tolerances.FLOAT32)
    assert reader.generate([PROMPT], memory, config=GenerationConfig(max_tokens=6))[0].token_ids == theirs.continued(
        expected, asked, 6
    )
    assert reader.segment_tokens == (128 if folder.name == "opt" else 64)
    assert reader.metadata.positions == ("zero" if folder.name == "opt" else "contiguous")
    assert reader.method.config.memory_policy == ("accumulate" if grows else "replace")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """A command: code and output."""

    def call(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["laconic", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), capsys.readouterr().out

    return call


def test_a_text_is_compressed_and_asked_about_by_commands(
    folder: Path, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    out = tmp_path / "book.safetensors"
    assert run("compress", folder, tmp_path / "book.txt", "--out", out, "--segment-tokens", 20)[0] == 0
    assert SummaryMemory.load(out).vectors_per_segment.tolist() == [[3, 3, 3]]
    asked = ("--max-tokens", 3, "--format", "json")
    reader = laconic.load_text_model(folder)
    for memory, words in ((reader.compress([TEXT], segment_tokens=20), ("--memory", out)), (None, ())):
        code, said = run("generate", folder, PROMPT, *words, *asked)
        assert code == 0
        expected = reader.generate([PROMPT], memory, config=GenerationConfig(max_tokens=3))[0]
        assert json.loads(said)["generations"][0]["ids"] == expected.token_ids
    assert run("generate", folder, PROMPT, "--with-cot")[0] == 2


def test_what_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    made, tensors = tmp_path / "made", load_file(folder / "model.safetensors")
    shutil.copytree(folder, made)

    def stored(tokens: Tensor | None) -> None:
        rest = {name: tensor for name, tensor in tensors.items() if name != SUMMARY_EMBEDDING}
        save_file(rest if tokens is None else rest | {SUMMARY_EMBEDDING: tokens}, made / "model.safetensors")

    with pytest.raises(UsageError, match="is no run but a checkpoint, which has no steps; leave it out"):
        laconic.load_text_model(made, step=3)
    said(made, accumulate_summary=None)
    with pytest.raises(InputError, match="has no accumulate_summary; write it there: true, or false for RMT"):
        laconic.load_text_model(made)
    said(made, accumulate_summary=True)
    stored(tensors[SUMMARY_EMBEDDING][:2])
    with pytest.raises(
        InputError, match=r"embed_summary.weight \[2, 32\], config.json says \[3, 32\]; take the two from one place"
    ):
        laconic.load_text_model(made)
    stored(None)
    with pytest.raises(
        InputError,
        match=r"has no tensor embed_summary.weight, of which config.json says that it has 3 rows; the classes of "
        "transformers leave it out, so convert the published file tensor by tensor",
    ):
        laconic.load_text_model(made)
    (made / "model.safetensors").rename(made / "pytorch_model.bin")
    with pytest.raises(
        UnsafeFileError, match=r"pytorch_model.bin is a pickle and can run code; not opened. In an environment"
    ):
        laconic.load_text_model(made)
    said(made, summary_length=0)  # as the authors' models of full attention have it
    assert not is_published(made)
    with pytest.raises(InputError, match=r"has no recipe.toml; give the folder of a run"):
        laconic.load_text_model(made)


@pytest.mark.parametrize("folder", ["opt"], indirect=True)
def test_a_row_of_padding_that_is_not_zero_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "odd")
    tensors = load_file(folder / "model.safetensors")
    before = laconic.load_text_model(folder).compress([TEXT]).vectors
    tensors["model.decoder.embed_positions.weight"][1] = 1.0
    save_file(tensors, tmp_path / "odd" / "model.safetensors")
    with pytest.warns(UserWarning, match=r"row 1 of model.decoder.embed_positions is not zero; memory has no position"):
        after = laconic.load_text_model(tmp_path / "odd").compress([TEXT]).vectors
    assert torch.equal(before, after)
