"""Loading and saving checkpoints: round trips to the bit, parity with transformers, refusals."""

import contextlib
import json
import logging
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import BusyError, InputError, LaconicError, NonFiniteError, UnsafeFileError, UsageError
from laconic.models.checkpoints import weights
from laconic.models.checkpoints.checkpoint_files import plan_shards, resolve_tensors
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.decoder import Decoder
from laconic.storage import atomic, safetensors_header
from tests import tolerances
from tests.conftest import REPO, missing, needs
from tests.models.fixtures import read_logits

FAMILIES = tuple(WEIGHT_NAMES)
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


def save_tiny(folder: Path, family: str = "llama", **changes: object) -> Path:
    Decoder(DecoderConfig.tiny(family, **changes), seed=4).save_pretrained(folder)
    return folder


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Return a copy of every tensor of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {
        n: t.clone()
        for f in files
        for n, t in atomic.open_tensors(f, safetensors_header.read_safetensors_header(f).tensors).items()
    }


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_tensors(folder)
    edit(tensors)
    (folder / WHOLE).unlink()
    from safetensors.torch import save_file  # laconic's own function refuses NaN

    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WHOLE, {"format": "pt"})
    return folder


def bit_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


# --- there and back


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_round_trip_is_bit_equal(tmp_path: Path, family: str, dtype: torch.dtype, tie: bool) -> None:
    first = Decoder(DecoderConfig.tiny(family, tie_word_embeddings=tie), seed=4)
    first.save_pretrained(tmp_path / "a", dtype=dtype)
    second = Decoder.from_pretrained(tmp_path / "a", dtype)
    second.save_pretrained(tmp_path / "b", max_shard_bytes=2e4)
    third = Decoder.from_pretrained(tmp_path / "b", dtype)
    assert len(list((tmp_path / "b").glob("model-*-of-*.safetensors"))) > 3
    assert bit_equal(load_tensors(tmp_path / "a"), load_tensors(tmp_path / "b"))
    assert bit_equal(second.state_dict(), third.state_dict())
    assert bit_equal(second.state_dict(), {n: t.to(dtype) for n, t in first.state_dict().items()})
    assert second.fingerprint == third.fingerprint
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()
    assert second.config == third.config == replace(first.config, dtype=dtype)


def test_save_pretrained_reproduces_a_published_checkpoint(shared: Path, tmp_path: Path) -> None:
    folder = shared / "models" / "stories260k"
    Decoder.from_pretrained(folder).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / WHOLE).read_bytes() == (folder / WHOLE).read_bytes()
    config, saved = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out"))
    assert saved == config
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
        assert (tmp_path / "out" / name).stat().st_mode & 0o200  # the source is read-only, the copy is not
    assert not (tmp_path / "out" / "README.md").exists()


@contextlib.contextmanager
def warnings_logged_by(name: str) -> Iterator[list[str]]:
    """Return a list that collects what a logger says at level WARNING or above."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(name).removeHandler(handler)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_we_save(tmp_path: Path, family: str, tie: bool) -> None:
    needs("transformers")
    import transformers

    decoder = Decoder(DecoderConfig.tiny(family, tie_word_embeddings=tie), seed=4).eval()
    decoder.save_pretrained(tmp_path / "out", max_shard_bytes=5e4)
    with warnings.catch_warnings(), warnings_logged_by("transformers") as messages:
        warnings.simplefilter("error")
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    theirs, info = loaded
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert messages == []
    ids = torch.randint(0, 97, (2, 20))
    with torch.no_grad():
        assert tolerances.error(read_logits(decoder, ids), theirs.eval()(ids).logits) <= tolerances.FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_we_load_what_transformers_saves(tmp_path: Path, family: str) -> None:
    needs("transformers")
    import transformers

    save_tiny(tmp_path / "a", family)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "a")
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "b", max_shard_size="50KB")
    ours = Decoder.from_pretrained(tmp_path / "b", torch.float32)
    ids = torch.randint(0, 97, (2, 20))
    with torch.no_grad():
        assert tolerances.error(read_logits(ours, ids), theirs(ids).logits) <= tolerances.FLOAT32
    ours.save_pretrained(tmp_path / "c")
    assert bit_equal(load_tensors(tmp_path / "b"), load_tensors(tmp_path / "c"))


def test_mapped_weights_can_be_trained_without_changing_the_file(tmp_path: Path) -> None:
    before = (save_tiny(tmp_path / "a") / WHOLE).read_bytes()
    decoder = Decoder.from_pretrained(tmp_path / "a", torch.float32)
    assert all(p.requires_grad for p in decoder.parameters())
    with torch.no_grad():
        for p in decoder.parameters():
            p.add_(1.0)
    assert (tmp_path / "a" / WHOLE).read_bytes() == before
    assert Decoder.from_pretrained(tmp_path / "a").fingerprint != decoder.fingerprint


def test_save_pretrained_over_the_loaded_folder(tmp_path: Path) -> None:
    decoder = Decoder.from_pretrained(save_tiny(tmp_path / "a"), torch.float32)
    with pytest.raises(BusyError, match="not empty"):
        decoder.save_pretrained(tmp_path / "a")
    decoder.save_pretrained(tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "a")
    assert bit_equal(Decoder.from_pretrained(tmp_path / "a", torch.float32).state_dict(), decoder.state_dict())


# --- names


def test_load_lists_all_mismatches_in_one_error(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a")

    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[UP], tensors["model.norm.weight"]
        tensors["model.layers.1.mlp.up_proj.bias"] = torch.ones(64)
        tensors["lm_head.weight"] = torch.ones(100, 48)
        tensors[DOWN] = tensors[DOWN].to(torch.int32)

    with pytest.raises(InputError) as caught:
        Decoder.from_pretrained(edit_tensors(tmp_path / "a", edit))
    message = str(caught.value)
    ruled_out = "1 tensor that config.json rules out (model.layers.1.mlp.up_proj.bias)"
    for part in (UP, "model.norm.weight", ruled_out, "lm_head.weight [100, 48]", DOWN):
        assert part in message


@pytest.mark.parametrize("family", FAMILIES)
def test_load_requires_every_tensor(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path / "a", family, tie_word_embeddings=False, num_hidden_layers=1)
    for name in load_tensors(tmp_path / "a"):
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        with pytest.raises(InputError) as caught:
            Decoder.from_pretrained(edit_tensors(tmp_path / "b", lambda t, name=name: t.pop(name)))
        hint = "; a checkpoint without a language-model head continues no text" if name == "lm_head.weight" else ""
        assert str(caught.value).startswith(f"1 tensor missing ({name}){hint}")
        assert hint or str(caught.value).endswith(")")
        shutil.rmtree(tmp_path / "b")


def test_allow_missing_initialises_absent_tensors_and_warns_of_them(tmp_path: Path) -> None:
    edit_tensors(
        save_tiny(tmp_path / "a", tie_word_embeddings=False),
        lambda t: [t.pop("lm_head.weight"), t.pop("model.norm.weight")],
    )
    with pytest.raises(InputError, match=r"^1 tensor missing \(model.norm.weight\)$"):
        Decoder.from_pretrained(tmp_path / "a", allow_missing=("lm_head.weight",))
    with pytest.raises(InputError, match=r"allow_missing: the model has no tensor model\.nrom\.weight"):
        Decoder.from_pretrained(tmp_path / "a", allow_missing=("model.nrom.weight",))
    with pytest.warns(UserWarning, match=r"^model\.norm\.weight, lm_head\.weight: not in the checkpoint"):
        decoder = Decoder.from_pretrained(tmp_path / "a", allow_missing=("lm_head.weight", "model.norm.weight", UP))
    state = decoder.state_dict()
    assert 0.01 < state["lm_head.weight"].std() < 0.03
    assert bool((state["model.norm.weight"] == 1).all())
    assert torch.equal(state[UP], load_tensors(tmp_path / "a")[UP].to(state[UP].dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_load_base_model_without_prefix(tmp_path: Path, family: str) -> None:
    whole = Decoder.from_pretrained(save_tiny(tmp_path / "a", family, tie_word_embeddings=True))
    parts = WEIGHT_NAMES[family].base_prefix.split(".")
    for i in range(len(parts)):
        base = ".".join(parts[: i + 1]) + "."
        shutil.copytree(tmp_path / "a", tmp_path / f"b{i}")
        edit_tensors(
            tmp_path / f"b{i}", lambda t, base=base: replaced(t, {n.removeprefix(base): x for n, x in t.items()})
        )
        bare = Decoder.from_pretrained(tmp_path / f"b{i}")
        assert bit_equal(bare.state_dict(), whole.state_dict())
        assert bare.fingerprint == whole.fingerprint


def replaced(tensors: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    tensors.clear()
    tensors.update(new)


# --- dropped, tied


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_load_ignores_causal_masks(tmp_path: Path, prefix: str, dtype: torch.dtype) -> None:
    whole = Decoder.from_pretrained(save_tiny(tmp_path / "a", "gpt2"))

    def edit(tensors: dict[str, Tensor]) -> None:
        for l in range(2):
            tensors[f"transformer.h.{l}.attn.bias"] = torch.ones(128, 128).tril().view(1, 1, 128, 128).to(dtype)
            tensors[f"transformer.h.{l}.attn.masked_bias"] = torch.tensor(-1e4)
        replaced(tensors, {n.replace("transformer.", prefix): t for n, t in tensors.items()})

    assert bit_equal(Decoder.from_pretrained(edit_tensors(tmp_path / "a", edit)).state_dict(), whole.state_dict())


CAUSAL = torch.ones(8, 8).tril()


@pytest.mark.parametrize(
    ("family", "layer", "tensor"),
    [
        *(("gpt2", "transformer.h", x) for x in (torch.ones(8, 8), CAUSAL.mT, torch.ones(8), CAUSAL.expand(2, 8, 8))),
        ("llama", "model.layers", CAUSAL),
    ],
)
def test_load_warns_of_tensors_named_like_causal_masks(tmp_path: Path, family: str, layer: str, tensor: Tensor) -> None:
    name = f"{layer}.0.attn.bias"
    with pytest.warns(UserWarning, match=rf"1 tensor ignored .*\(first {name}\)$"):
        Decoder.from_pretrained(edit_tensors(save_tiny(tmp_path / "a", family), lambda t: t.update({name: tensor})))


@pytest.mark.parametrize("family", FAMILIES)
def test_load_ignores_an_equal_tied_head_and_uses_another(tmp_path: Path, family: str) -> None:
    whole = Decoder.from_pretrained(save_tiny(tmp_path / "a", family, tie_word_embeddings=True))
    words = f"{WEIGHT_NAMES[family].token_embedding}.weight"
    edit_tensors(tmp_path / "a", lambda t: t.update({"lm_head.weight": t[words].clone()}))
    decoder = Decoder.from_pretrained(tmp_path / "a")
    assert bit_equal(decoder.state_dict(), whole.state_dict())
    assert "lm_head.weight" not in decoder.state_dict()
    edit_tensors(tmp_path / "a", lambda t: t["lm_head.weight"][3, 4].add_(0.5))
    with pytest.warns(UserWarning, match="tie_word_embeddings is ignored: lm_head.weight differs"):
        decoder = Decoder.from_pretrained(tmp_path / "a")
    assert not decoder.config.tie_word_embeddings
    state = decoder.state_dict()
    assert [tuple(place) for place in (state["lm_head.weight"] != state[words]).nonzero().tolist()] == [(3, 4)]
    decoder.save_pretrained(tmp_path / "b")
    assert bit_equal(Decoder.from_pretrained(tmp_path / "b").state_dict(), state)


# --- files


def test_load_refuses_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config.json"):
        Decoder.from_pretrained(tmp_path)
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(InputError, match=r"is a run of laconic train; open it with laconic.load"):
        Decoder.from_pretrained(tmp_path)
    (save_tiny(tmp_path / "a") / WHOLE).unlink()
    with pytest.raises(InputError, match=r"no model.safetensors and no index"):
        Decoder.from_pretrained(tmp_path / "a")


def test_load_refuses_pickled_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a")
    (tmp_path / "a" / WHOLE).rename(tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(UnsafeFileError, match=r"pytorch_model.bin is a pickle"):
        Decoder.from_pretrained(tmp_path / "a")
    save_tiny(tmp_path / "b")
    (tmp_path / "b" / "pytorch_model.bin").write_bytes(b"\x80\4")
    Decoder.from_pretrained(tmp_path / "b")  # beside the weights it is left alone


def save_sharded(folder: Path, max_shard_bytes: float = 5e4) -> Path:
    Decoder(DecoderConfig.tiny("llama"), seed=4).save_pretrained(folder, max_shard_bytes=max_shard_bytes)
    return folder


def test_load_refuses_truncated_and_extended_shards(tmp_path: Path) -> None:
    save_sharded(tmp_path / "a")
    for shard in tmp_path.glob("a/model-*.safetensors"):
        content = shard.read_bytes()
        for invalid in (content[:-10], content + b"\0"):
            shard.write_bytes(invalid)
            with pytest.raises(InputError, match=shard.name):
                Decoder.from_pretrained(tmp_path / "a")
        shard.write_bytes(content)
    Decoder.from_pretrained(tmp_path / "a")


def test_load_refuses_shards_that_do_not_fit_the_index(tmp_path: Path) -> None:
    folder = save_sharded(tmp_path / "a")
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    name = next(iter(safetensors_header.read_safetensors_header(second).tensors))
    shutil.copy(first, second)
    with pytest.raises(InputError, match=rf"{first.name} and in {second.name}"):
        Decoder.from_pretrained(folder)
    second.unlink()
    with pytest.raises(InputError, match=rf"{second.name}, which the index names for {name}, is not in the folder"):
        Decoder.from_pretrained(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(InputError, match="weight_map"):
        Decoder.from_pretrained(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_load_refuses_nan_and_infinity(tmp_path: Path, family: str, dtype: torch.dtype | None) -> None:
    save_tiny(tmp_path / "a", family)
    name = DOWN if family == "llama" else "transformer.h.1.mlp.c_fc.weight"

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name][5, 17] = float("nan")
        tensors[name][40, 3] = float("inf")

    with pytest.raises(NonFiniteError, match=rf"^{tmp_path}/a: {name}: 2 values not finite, first at \[5, 17\]"):
        Decoder.from_pretrained(edit_tensors(tmp_path / "a", edit), dtype)


def test_load_refuses_overflow_of_the_dtype(tmp_path: Path) -> None:
    edit_tensors(save_tiny(tmp_path / "a"), lambda t: t["model.norm.weight"].fill_(-1e6))
    Decoder.from_pretrained(tmp_path / "a", torch.bfloat16)
    message = rf"^{tmp_path}/a: model\.norm\.weight: 1e\+06 overflows in float16, .* 65504; load the model in float32$"
    with pytest.raises(NonFiniteError, match=message):
        Decoder.from_pretrained(tmp_path / "a", torch.float16)


@pytest.mark.parametrize("shard", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_load_names_pointers_of_git_lfs(tmp_path: Path, shard: str) -> None:
    folder = save_tiny(tmp_path / "a")
    (folder / "model.safetensors").unlink()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    (folder / shard).write_text(pointer)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(InputError, match=rf"^{folder / shard} holds a pointer of git-lfs.*; run git lfs pull"):
        Decoder.from_pretrained(folder)
    (folder / shard).write_text("another text")
    with pytest.raises(InputError, match="begins with the text 'another '"):
        Decoder.from_pretrained(folder)


# --- types


def test_load_default_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Decoder(DecoderConfig.tiny("llama")).save_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    Decoder(DecoderConfig.tiny("llama")).save_pretrained(tmp_path / "h", dtype=torch.float16)
    for amx, avx, kind in ((0, 0, torch.float32), (1, 0, torch.bfloat16), (0, 1, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: bool(amx))
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: bool(avx))
        assert {p.dtype for p in Decoder.from_pretrained(tmp_path / "a").parameters()} == {kind}
        assert {p.dtype for p in Decoder.from_pretrained(tmp_path / "h").parameters()} == {torch.float32}
    config, stored = resolve_tensors(tmp_path / "a", DecoderConfig.from_folder(tmp_path / "a"))
    with torch.device("meta"):
        matched, _ = weights.match_tensors(Decoder(config, seed=None), tmp_path / "a", config, (), stored)
    assert weights.default_dtype(matched, config, torch.device("cuda")) == torch.bfloat16


@pytest.mark.cuda
def test_load_on_a_gpu(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a", "gpt2")
    decoder = Decoder.from_pretrained(tmp_path / "a", device="cuda")
    assert {p.device.type for p in decoder.parameters()} == {"cuda"}
    assert {p.dtype for p in decoder.parameters()} == {torch.float32}
    assert decoder.fingerprint == weights.weights_fingerprint(weights.checkpoint_tensors(decoder, decoder.config))
    decoder.save_pretrained(tmp_path / "b")
    assert bit_equal(load_tensors(tmp_path / "a"), load_tensors(tmp_path / "b"))


MEASURE = """
import sys
from pathlib import Path
import torch
from laconic.models.decoder import Decoder

def memory(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) * 1024

Decoder.from_pretrained(sys.argv[1])
for folder in map(Path, sys.argv[2:]):
    before = memory("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    decoder = Decoder.from_pretrained(folder, torch.float32)
    held = sum(p.nbytes for p in decoder.parameters())
    print((memory("VmHWM") - before) / max(held, sum(f.stat().st_size for f in folder.glob("*.safetensors"))))
    del decoder
"""


@pytest.mark.medium
def test_load_peak_memory_equals_the_weights(tmp_path: Path) -> None:
    """Mapped as it is, turned and in shards, turned and cast."""
    if not Path("/proc/self/clear_refs").exists():
        missing("needs Linux's account of memory in /proc/self")
    save_tiny(tmp_path / "warm")
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 4000}
    folders: list[str] = []
    for family, kind, shard in (("llama", "float32", 5e9), ("gpt2", "float32", 4e7), ("gpt2", "bfloat16", 5e9)):
        config = DecoderConfig.tiny(family, **sizes, num_hidden_layers=8, intermediate_size=1536)
        folders.append(str(tmp_path / f"{family}-{kind}"))
        Decoder(config).save_pretrained(folders[-1], dtype=getattr(torch, kind), max_shard_bytes=shard)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "warm"), *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO)
    ratios = [float(line) for line in done.stdout.split()]
    assert len(ratios) == 3
    assert all(0.9 < ratio <= 1.15 for ratio in ratios), ratios


# --- saving


def test_save_writes_shards_and_index(tmp_path: Path) -> None:
    save_sharded(tmp_path / "a")
    tensors = load_tensors(tmp_path / "a")
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    total = sum(t.numel() for t in tensors.values())
    assert index["metadata"] == {"total_size": 4 * total, "total_parameters": total}
    shards = sorted((tmp_path / "a").glob("model-*.safetensors"))
    files = {shard.name: safetensors_header.read_safetensors_header(shard) for shard in shards}
    assert index["weight_map"] == {name: file for file, header in files.items() for name in header.tensors}
    assert all(header.metadata == {"format": "pt"} for header in files.values())
    assert list(files) == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert all(sum(e.end - e.start for e in header.tensors.values()) <= 50_000 for header in files.values())
    save_tiny(tmp_path / "b")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["config.json", WHOLE]


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan")])
def test_save_refuses_shards_of_no_bytes(tmp_path: Path, size: float) -> None:
    with pytest.raises(UsageError, match="max_shard_bytes"):
        save_sharded(tmp_path / "a", size)
    assert list(tmp_path.iterdir()) == []


def test_plan_shards() -> None:
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1}
    assert plan_shards(sizes, 1e2) == {WHOLE: ["a", "b", "c", "d"]}
    assert list(plan_shards(sizes, 8.0).values()) == [["a", "b"], ["c"], ["d"]]
    assert list(plan_shards(sizes, 1e1).values()) == [["a", "b"], ["c", "d"]]


def test_save_copies_tokenizer_files_but_no_links_out_of_the_folder(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a")
    for name in ("generation_config.json", "vocab.json", "special_tokens_map.json"):
        (tmp_path / "a" / name).write_text("{}")
    (tmp_path / "a" / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "a" / "additional_chat_templates").mkdir()
    (tmp_path / "a" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (tmp_path / "a" / "notes.txt").write_text("no")
    (tmp_path / "a" / "model.py").write_text("no")
    (tmp_path / "a" / "added_tokens.json").mkdir()
    decoder = Decoder.from_pretrained(tmp_path / "a")
    decoder.save_pretrained(tmp_path / "b")
    expected = {"generation_config.json", "vocab.json", "special_tokens_map.json", "merges.txt", "chat_template.jinja"}
    expected |= {"config.json", WHOLE, "additional_chat_templates", "tool_use.jinja"}
    assert {p.name for p in (tmp_path / "b").rglob("*")} == expected
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "a" / "tokenizer.json").symlink_to("../secret")
    with pytest.raises(UnsafeFileError, match=r"tokenizer.json leads out of its folder"):
        decoder.save_pretrained(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_save_refuses_an_unmerged_adapter(tmp_path: Path) -> None:
    decoder = Decoder(DecoderConfig.tiny("llama"))
    decoder.get_submodule("model.layers.0.self_attn.q_proj").lora_A = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="merge it first"):
        decoder.save_pretrained(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_save_refuses_nan(tmp_path: Path) -> None:
    decoder = Decoder(DecoderConfig.tiny("gpt2"))
    with torch.no_grad():
        decoder.get_parameter("transformer.h.0.mlp.c_fc.weight")[2, 1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"c_fc\.weight.*\[1, 2\]"):
        decoder.save_pretrained(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# --- fingerprint


def test_weights_fingerprint_depends_on_names_shapes_and_values() -> None:
    x, y = torch.randn(50, 60), torch.randn(7).bfloat16()
    fingerprint = weights.weights_fingerprint([("x", x), ("y", y)])
    assert fingerprint == weights.weights_fingerprint([("y", y.float()), ("x", x)])
    assert len(fingerprint) == 64
    others = [
        [("x", x)],
        [("x", x), ("z", y)],
        [("x", x.view(60, 50)), ("y", y)],
        [("x", x + torch.zeros(50, 60).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(1.0))), ("y", y)],
        [("x", x), ("y", -y)],
    ]
    assert len({fingerprint, *(weights.weights_fingerprint(other) for other in others)}) == 6
    assert weights.weights_fingerprint([("x", x.t().contiguous().t()), ("y", y)]) == fingerprint
    assert weights.weights_fingerprint([("s", torch.tensor(2.0)), ("e", torch.ones(0, 3))])


# --- the hub


def snapshot(root: Path, files: Path) -> Path:
    """The folder of a model as the hub's cache lays it out: links into blobs."""
    repo = root / "hub" / "models--org--name"
    commit = repo / "snapshots" / ("c" * 40)
    commit.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for n, file in enumerate(sorted(files.iterdir())):
        shutil.copy(file, repo / "blobs" / f"{n:040}")
        (commit / file.name).symlink_to(f"../../blobs/{n:040}")
    return commit


def test_load_a_snapshot_and_folders_of_links_to_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    whole = save_sharded(tmp_path / "a")
    (whole / "tokenizer.json").write_text("{}")
    hub, links, links_to_links = snapshot(tmp_path, whole), tmp_path / "links", tmp_path / "links_to_links"
    for folder, source in ((links, whole), (links_to_links, hub)):
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).symlink_to(file)
    for folder in (hub, links_to_links, links):
        decoder, saved = Decoder.from_pretrained(folder), tmp_path / f"{folder.name}_saved"
        assert bit_equal(decoder.state_dict(), Decoder.from_pretrained(whole).state_dict())
        decoder.save_pretrained(saved)
        assert (saved / "tokenizer.json").read_text() == "{}"
        assert not (saved / "tokenizer.json").is_symlink()
    (tmp_path / "secret").write_text("secret")
    (links / "x").mkdir()
    (links / "x" / "vocab.json").symlink_to(tmp_path / "secret")
    (links / "vocab.json").symlink_to("x/vocab.json")
    with pytest.raises(UnsafeFileError, match=r"vocab.json leads out of its folder"):
        decoder.save_pretrained(tmp_path / "c")


def test_load_refuses_snapshot_links_out_of_its_blobs(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, save_tiny(tmp_path / "a"))
    repo = folder.parent.parent
    (tmp_path / "hub" / "models--org--other" / "blobs").mkdir(parents=True)
    for place in ("refs", "../models--org--other/blobs", "../..", "blobs/deeper"):
        (repo / place).mkdir(exist_ok=True)
        shutil.copy(tmp_path / "a" / WHOLE, repo / place / "x")
        (folder / WHOLE).unlink()
        (folder / WHOLE).symlink_to(f"../../{place}/x")
        with pytest.raises(UnsafeFileError, match="leads out of its folder"):
            Decoder.from_pretrained(folder)
    (repo / "blobs").rename(tmp_path / "elsewhere")
    (repo / "blobs").symlink_to(tmp_path / "elsewhere")
    (folder / WHOLE).unlink()
    (folder / WHOLE).symlink_to(f"../../blobs/{1:040}")
    with pytest.raises(LaconicError, match="leads out of its folder"):
        weights.load_weights(nn.Module(), folder, DecoderConfig.tiny("llama"))


def test_find_checkpoint_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    expected: list[tuple[object, ...]] = []

    def download(
        name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str], etag_timeout: int
    ) -> str:
        expected.append((name, revision))
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        matched = set(huggingface_hub.utils.filter_repo_objects(REPOSITORY, **patterns))
        templates = {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
        assert matched == {"config.json", WHOLE, "tokenizer.json", "merges.txt", "generation_config.json", *templates}
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert weights.find_checkpoint("org/name-1.0", "abc") == tmp_path
    assert weights.find_checkpoint("gpt2") == tmp_path
    assert expected == [("org/name-1.0", "abc"), ("gpt2", None)]
    assert weights.find_checkpoint(tmp_path) == tmp_path
    (tmp_path / "file").write_text("")
    for invalid in (tmp_path / "file", tmp_path / "none", "a/b/c", "../x", "./x", ".x", "a b", "x/../y"):
        with pytest.raises(InputError, match="neither a folder nor a name on the hub"):
            weights.find_checkpoint(invalid)
    assert len(expected) == 2


REPOSITORY = [
    "config.json", "generation_config.json", WHOLE, "tokenizer.json", "merges.txt", "README.md", "modeling_x.py",
    "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "onnx/config.json", "x.gguf",
    "onnx/vocab.json", "8bit/model.safetensors", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
]  # fmt: skip


def test_find_checkpoint_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=f"org/name: no such local folder; offline, and not in {tmp_path}"):
        weights.find_checkpoint("org/name")


def test_find_checkpoint_in_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert weights.find_checkpoint("~/model") == tmp_path / "model"
    with pytest.raises(UsageError, match="revision abc: ~/model is local and has no revisions; remove revision"):
        weights.check_revision("~/model", "abc")
    assert weights.find_checkpoint("~/model", "abc") == tmp_path / "model"  # a recipe's revision is that of its weights
    (tmp_path / "model" / "q4.gguf").touch()
    assert weights.find_checkpoint("~/model", with_weights=False) == tmp_path / "model"  # may hold a tokenizer
    with pytest.raises(InputError, match=r"no config.json, but a GGUF file; pass that file: .*model/q4\.gguf"):
        weights.find_checkpoint("~/model")


def test_from_pretrained_refuses_an_unknown_device_or_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "a")
    for device in ("gpu", "cuda:x"):
        with pytest.raises(UsageError, match=f"device {device} is not available"):
            Decoder.from_pretrained(tmp_path / "a", device=device)
    for count, device, message in ((0, "cuda", "no CUDA"), (2, "cuda:2", "it has 2, from cuda:0")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(UsageError, match=message):
            Decoder.from_pretrained(tmp_path / "a", device=torch.device(device))


def test_resolve_device_takes_numbers_of_gpus_but_not_meta() -> None:
    if not torch.cuda.is_available():
        for device in (0, "cuda:0"):
            with pytest.raises(UsageError, match="device cuda:0 is not available to this torch; it has no CUDA"):
                weights.resolve_device(device)
    with pytest.raises(UsageError, match="device meta holds no weights"):
        weights.resolve_device("meta")


def test_resolve_device_map_takes_one_device() -> None:
    resolve = weights.resolve_device_map
    assert resolve("cpu", None) == resolve(None, "cpu") == resolve(None, {"": "cpu"}) == "cpu"
    assert resolve(None, {"model": 1, "lm_head": 1}) == "cuda:1"
    assert resolve(None, "auto") == "auto"
    assert weights.resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for device_map in ("balanced", {"a": 0, "b": "cpu"}, {"": "disk"}, {}):
        with pytest.raises(UsageError, match="a decoder lies on one device"):
            resolve(None, device_map)
    with pytest.raises(UsageError, match="pass one of them"):
        resolve("cpu", "cpu")


def test_from_pretrained_dtype_auto_is_the_stored_one(tmp_path: Path) -> None:
    Decoder(DecoderConfig.tiny("llama")).save_pretrained(tmp_path / "x", dtype=torch.float16)
    decoder = Decoder.from_pretrained(tmp_path / "x", dtype="auto", device_map="cpu")
    assert decoder.config.dtype == torch.float16
    with pytest.raises(UsageError, match="dtype 'int4': give float32"):
        Decoder.from_pretrained(tmp_path / "x", dtype="int4")
