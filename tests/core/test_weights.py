"""Loading and saving: strict, dropped, joined; bits there and back; transformers reads the same."""

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import BusyError, InputError, LaconicError, NonFiniteError, UnsafeFileError, UsageError
from laconic.models import weights
from laconic.models.checkpoint_files import plan_shards
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.decoder import Decoder
from laconic.storage import atomic
from tests import tolerances
from tests.conftest import REPO, missing, needs

FAMILIES = tuple(WEIGHT_NAMES)
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


def made(folder: Path, family: str = "llama", **changes: object) -> Path:
    Decoder(DecoderConfig.tiny(family, **changes), seed=4).save_pretrained(folder)
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, copied."""
    files = sorted(folder.glob("*.safetensors"))
    return {
        n: t.clone()
        for f in files
        for n, t in atomic.open_tensors(f, atomic.read_safetensors_header(f).tensors).items()
    }


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = stored(folder)
    edit(tensors)
    (folder / WHOLE).unlink()
    from safetensors.torch import save_file  # ours refuses NaN

    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WHOLE, {"format": "pt"})
    return folder


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


# --- there and back


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_load_save_load_is_bit_equal(tmp_path: Path, family: str, dtype: torch.dtype, tie: bool) -> None:
    first = Decoder(DecoderConfig.tiny(family, tie_word_embeddings=tie), seed=4)
    first.save_pretrained(tmp_path / "a", dtype=dtype)
    second = Decoder.from_pretrained(tmp_path / "a", dtype)
    second.save_pretrained(tmp_path / "b", max_shard_bytes=2e4)
    third = Decoder.from_pretrained(tmp_path / "b", dtype)
    assert len(list((tmp_path / "b").glob("model-*-of-*.safetensors"))) > 3
    assert same(stored(tmp_path / "a"), stored(tmp_path / "b"))
    assert same(second.state_dict(), third.state_dict())
    assert same(second.state_dict(), {n: t.to(dtype) for n, t in first.state_dict().items()})
    assert second.fingerprint == third.fingerprint
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()
    assert second.config == third.config == replace(first.config, dtype=dtype)


def test_the_story_model_keeps_its_bytes(shared: Path, tmp_path: Path) -> None:
    folder = shared / "models" / "stories260k"
    Decoder.from_pretrained(folder).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / WHOLE).read_bytes() == (folder / WHOLE).read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
        assert (tmp_path / "out" / name).stat().st_mode & 0o200  # the source is read-only, the copy is not
    assert not (tmp_path / "out" / "README.md").exists()


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_we_write(
    tmp_path: Path, family: str, tie: bool, caplog: pytest.LogCaptureFixture
) -> None:
    needs("transformers")
    import transformers

    decoder = Decoder(DecoderConfig.tiny(family, tie_word_embeddings=tie), seed=4).eval()
    decoder.save_pretrained(tmp_path / "out", max_shard_bytes=5e4)
    caplog.clear()
    transformers.logging.enable_propagation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    ids = torch.randint(0, 97, (2, 20))
    with torch.no_grad():
        ours = decoder.logits(decoder(decoder.embed(ids)).hidden)
        assert tolerances.error(ours, theirs.eval()(ids).logits) <= tolerances.FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_we_read_what_transformers_writes(tmp_path: Path, family: str) -> None:
    needs("transformers")
    import transformers

    made(tmp_path / "a", family)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "a")
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "b", max_shard_size="50KB")
    ours = Decoder.from_pretrained(tmp_path / "b", torch.float32)
    ids = torch.randint(0, 97, (2, 20))
    with torch.no_grad():
        logits = ours.logits(ours(ours.embed(ids)).hidden)
        assert tolerances.error(logits, theirs(ids).logits) <= tolerances.FLOAT32
    ours.save_pretrained(tmp_path / "c")
    assert same(stored(tmp_path / "b"), stored(tmp_path / "c"))


def test_gpt2_maps_lie_turned_on_disk(tmp_path: Path) -> None:
    decoder = Decoder(DecoderConfig.tiny("gpt2"), seed=4)
    decoder.save_pretrained(tmp_path / "out")
    disk = stored(tmp_path / "out")
    for name, rows in {"attn.c_attn": 48, "attn.c_proj": 48, "mlp.c_fc": 48, "mlp.c_proj": 64}.items():
        full = f"transformer.h.1.{name}.weight"
        assert disk[full].shape[0] == rows
        assert torch.equal(disk[full].t(), decoder.state_dict()[full])
    again = Decoder.from_pretrained(tmp_path / "out")
    assert all(p.is_contiguous() for p in again.parameters())


def test_weights_are_mapped_and_may_be_trained(tmp_path: Path) -> None:
    before = (made(tmp_path / "a") / WHOLE).read_bytes()
    decoder = Decoder.from_pretrained(tmp_path / "a", torch.float32)
    assert all(p.requires_grad for p in decoder.parameters())
    with torch.no_grad():
        for p in decoder.parameters():
            p.add_(1.0)
    assert (tmp_path / "a" / WHOLE).read_bytes() == before
    assert Decoder.from_pretrained(tmp_path / "a").fingerprint != decoder.fingerprint


def test_what_is_saved_may_be_the_maps_of_what_was_loaded(tmp_path: Path) -> None:
    decoder = Decoder.from_pretrained(made(tmp_path / "a"), torch.float32)
    with pytest.raises(BusyError, match=r"/a exists and is not empty$"):
        decoder.save_pretrained(tmp_path / "a")
    decoder.save_pretrained(tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "a")
    assert same(Decoder.from_pretrained(tmp_path / "a", torch.float32).state_dict(), decoder.state_dict())


# --- names


def test_three_kinds_in_one_message(tmp_path: Path) -> None:
    made(tmp_path / "a")

    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[UP], tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.ones(2)
        tensors["lm_head.weight"] = torch.ones(100, 48)
        tensors[DOWN] = tensors[DOWN].to(torch.int32)

    with pytest.raises(InputError) as caught:
        Decoder.from_pretrained(change(tmp_path / "a", edit))
    assert str(caught.value) == (
        f"2 tensors missing ({UP}, model.norm.weight), 1 unexpected (model.extra.weight), "
        "1 of wrong shape: lm_head.weight [100, 48], config says [97, 48], "
        f"1 of no float type: {DOWN} torch.int32"
    )


def test_ten_of_each_and_a_count(tmp_path: Path) -> None:
    made(tmp_path / "a")
    with pytest.raises(InputError) as caught:
        Decoder.from_pretrained(
            change(tmp_path / "a", lambda t: t.update({f"x{i:02}": torch.ones(1) for i in range(12)}))
        )
    assert str(caught.value) == f"12 tensors unexpected ({', '.join(f'x{i:02}' for i in range(10))}, …)"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_asked_for(tmp_path: Path, family: str) -> None:
    made(tmp_path / "a", family, tie_word_embeddings=False)
    for name in stored(tmp_path / "a"):
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        with pytest.raises(InputError) as caught:
            Decoder.from_pretrained(change(tmp_path / "b", lambda t, name=name: t.pop(name)))
        assert str(caught.value) == f"1 tensor missing ({name})"
        shutil.rmtree(tmp_path / "b")


def test_missing_and_allowed(tmp_path: Path) -> None:
    change(
        made(tmp_path / "a", tie_word_embeddings=False), lambda t: [t.pop("lm_head.weight"), t.pop("model.norm.weight")]
    )
    with pytest.raises(InputError, match=r"^1 tensor missing \(model.norm.weight\)$"):
        Decoder.from_pretrained(tmp_path / "a", allow_missing=("lm_head.weight",))
    with pytest.warns(UserWarning, match="2 tensors were not in the checkpoint"):
        decoder = Decoder.from_pretrained(tmp_path / "a", allow_missing=("lm_head.weight", "model.norm.weight", UP))
    assert 0.01 < decoder.state_dict()["lm_head.weight"].std() < 0.03
    assert bool((decoder.state_dict()["model.norm.weight"] == 1).all())
    assert torch.equal(decoder.state_dict()[UP], stored(tmp_path / "a")[UP].to(decoder.state_dict()[UP].dtype))


def test_the_report_names_what_was_missing(tmp_path: Path) -> None:
    change(made(tmp_path / "a"), lambda t: t.pop("model.norm.weight"))
    config = DecoderConfig.from_folder(tmp_path / "a")
    with torch.device("meta"):
        module = Decoder(config, seed=None)
    report = weights.load_weights(module, tmp_path / "a", config, allow_missing=("model.norm.weight", UP))
    assert report.missing == ("model.norm.weight",)
    assert report.fingerprint == weights.weights_fingerprint(stored(tmp_path / "a").items())
    assert not any(p.is_meta for p in module.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_lacks_the_prefix(tmp_path: Path, family: str) -> None:
    whole = Decoder.from_pretrained(made(tmp_path / "a", family, tie_word_embeddings=True))
    parts = WEIGHT_NAMES[family].base_prefix.split(".")
    for i in range(len(parts)):
        base = ".".join(parts[: i + 1]) + "."
        shutil.copytree(tmp_path / "a", tmp_path / f"b{i}")
        change(tmp_path / f"b{i}", lambda t, base=base: replaced(t, {n.removeprefix(base): x for n, x in t.items()}))
        bare = Decoder.from_pretrained(tmp_path / f"b{i}")
        assert same(bare.state_dict(), whole.state_dict())
        assert bare.fingerprint == whole.fingerprint


def replaced(tensors: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    tensors.clear()
    tensors.update(new)


def test_a_base_model_that_is_not_tied_has_no_head(tmp_path: Path) -> None:
    made(tmp_path / "a", tie_word_embeddings=False)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors.pop("lm_head.weight")
        replaced(tensors, {n.removeprefix("model."): t for n, t in tensors.items()})

    with pytest.raises(InputError, match=r"^1 tensor missing \(lm_head.weight\)$"):
        Decoder.from_pretrained(change(tmp_path / "a", edit))


# --- dropped, tied


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_causal_triangles_are_dropped(tmp_path: Path, prefix: str, dtype: torch.dtype) -> None:
    whole = Decoder.from_pretrained(made(tmp_path / "a", "gpt2"))

    def edit(tensors: dict[str, Tensor]) -> None:
        for l in range(2):
            tensors[f"transformer.h.{l}.attn.bias"] = torch.ones(128, 128).tril().view(1, 1, 128, 128).to(dtype)
            tensors[f"transformer.h.{l}.attn.masked_bias"] = torch.tensor(-1e4)
        replaced(tensors, {n.replace("transformer.", prefix): t for n, t in tensors.items()})

    assert same(Decoder.from_pretrained(change(tmp_path / "a", edit)).state_dict(), whole.state_dict())


@pytest.mark.parametrize(
    "odd",
    [torch.ones(8, 8), torch.ones(8, 8).triu(), torch.ones(8), torch.ones(8, 8).tril(1), torch.ones(2, 8, 8).tril()],
)
def test_no_triangle_is_unexpected(tmp_path: Path, odd: Tensor) -> None:
    made(tmp_path / "a", "gpt2")
    name = "transformer.h.0.attn.bias"
    with pytest.raises(InputError, match=r"^1 tensor unexpected \(transformer.h.0.attn.bias\)$"):
        Decoder.from_pretrained(change(tmp_path / "a", lambda t: t.update({name: odd})))


def test_the_same_names_elsewhere_are_unexpected(tmp_path: Path) -> None:
    made(tmp_path / "a")
    name = "model.layers.0.attn.bias"
    with pytest.raises(InputError, match=r"^1 tensor unexpected \(model.layers.0.attn.bias\)$"):
        Decoder.from_pretrained(change(tmp_path / "a", lambda t: t.update({name: torch.ones(4, 4).tril()})))


def test_rope_tables_are_dropped(tmp_path: Path) -> None:
    made(tmp_path / "a")
    extra = {f"model.layers.{l}.self_attn.rotary_emb.inv_freq": torch.ones(8) for l in range(2)}
    Decoder.from_pretrained(change(tmp_path / "a", lambda t: t.update(extra)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_on_disk(tmp_path: Path, family: str) -> None:
    whole = Decoder.from_pretrained(made(tmp_path / "a", family, tie_word_embeddings=True))
    words = f"{WEIGHT_NAMES[family].token_embedding}.weight"
    change(tmp_path / "a", lambda t: t.update({"lm_head.weight": t[words].clone()}))
    decoder = Decoder.from_pretrained(tmp_path / "a")
    assert same(decoder.state_dict(), whole.state_dict())
    assert "lm_head.weight" not in decoder.state_dict()
    change(tmp_path / "a", lambda t: t["lm_head.weight"][3, 4].add_(1e-3))
    with pytest.raises(InputError) as caught:
        Decoder.from_pretrained(tmp_path / "a")
    assert str(caught.value) == (
        f"tie_word_embeddings is true but lm_head.weight differs from {words}; set it to false"
    )


# --- files


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^no config.json in "):
        Decoder.from_pretrained(tmp_path)
    (made(tmp_path / "a") / WHOLE).unlink()
    with pytest.raises(InputError) as caught:
        Decoder.from_pretrained(tmp_path / "a")
    assert str(caught.value) == (
        f"{tmp_path / 'a'} has config.json but no model.safetensors and no index; was the download cut?"
    )


def test_only_a_pickle(tmp_path: Path) -> None:
    made(tmp_path / "a")
    (tmp_path / "a" / WHOLE).rename(tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(UnsafeFileError) as caught:
        Decoder.from_pretrained(tmp_path / "a")
    assert str(caught.value) == (
        "pytorch_model.bin is a pickle and can run code; not opened. "
        "Save it as safetensors with transformers' save_pretrained in an environment you trust"
    )
    made(tmp_path / "b")
    (tmp_path / "b" / "pytorch_model.bin").write_bytes(b"\x80\4")
    Decoder.from_pretrained(tmp_path / "b")  # beside the weights it is left alone


def sharded(folder: Path) -> Path:
    Decoder(DecoderConfig.tiny("llama"), seed=4).save_pretrained(folder, max_shard_bytes=5e4)
    return folder


def test_missing_shard(tmp_path: Path) -> None:
    shard = sorted(sharded(tmp_path / "a").glob("model-*"))[1]
    names = list(atomic.read_safetensors_header(shard).tensors)
    shard.unlink()
    with pytest.raises(InputError) as caught:
        Decoder.from_pretrained(tmp_path / "a")
    index = json.loads((tmp_path / "a" / INDEX).read_text())["weight_map"]
    first = next(name for name in index if index[name] == shard.name)
    assert (
        str(caught.value) == f"{shard.name} is named by the index and not there ({len(names)} tensors, first {first})"
    )


def test_cut_and_extended_shards(tmp_path: Path) -> None:
    sharded(tmp_path / "a")
    for shard in tmp_path.glob("a/model-*.safetensors"):
        content = shard.read_bytes()
        n = len(content) - 8 - int.from_bytes(content[:8], "little")
        for odd, size in ((content[:-10], n - 10), (content + b"\0", n + 1)):
            shard.write_bytes(odd)
            with pytest.raises(InputError) as caught:
                Decoder.from_pretrained(tmp_path / "a")
            said = f"{shard.name}: header promises {n:,} bytes of data, file has {size:,}; fetch it again"
            assert str(caught.value) == said
        shard.write_bytes(content)
    Decoder.from_pretrained(tmp_path / "a")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    first, second, *_ = sorted(sharded(tmp_path / "a").glob("model-*.safetensors"))
    shutil.copy(first, second)
    with pytest.raises(InputError, match=rf" lies in {first.name} and in {second.name}; fetch them again$"):
        Decoder.from_pretrained(tmp_path / "a")


def test_an_index_that_is_none(tmp_path: Path) -> None:
    (sharded(tmp_path / "a") / INDEX).write_text("{}")
    with pytest.raises(InputError, match="weight_map is no table of tensor names and file names"):
        Decoder.from_pretrained(tmp_path / "a")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_numbers_that_are_none(tmp_path: Path, family: str, dtype: torch.dtype | None) -> None:
    made(tmp_path / "a", family)
    name = DOWN if family == "llama" else "transformer.h.1.mlp.c_fc.weight"

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name][5, 17] = float("nan")
        tensors[name][40, 3] = float("inf")

    with pytest.raises(NonFiniteError) as caught:
        Decoder.from_pretrained(change(tmp_path / "a", edit), dtype)
    assert str(caught.value) == f"{name}: 2 values not finite, first at [5, 17]"
    assert caught.value.exit_code == 65


def test_a_type_too_small_for_the_numbers(tmp_path: Path) -> None:
    change(made(tmp_path / "a"), lambda t: t["model.norm.weight"].fill_(1e6))
    Decoder.from_pretrained(tmp_path / "a", torch.bfloat16)
    with pytest.raises(NonFiniteError, match=r"^model.norm.weight: 48 values not finite, first at \[0\]$"):
        Decoder.from_pretrained(tmp_path / "a", torch.float16)


# --- types


def test_default_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Decoder(DecoderConfig.tiny("llama")).save_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    Decoder(DecoderConfig.tiny("llama")).save_pretrained(tmp_path / "h", dtype=torch.float16)
    for amx, avx, kind in ((0, 0, torch.float32), (1, 0, torch.bfloat16), (0, 1, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: bool(amx))
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: bool(avx))
        assert {p.dtype for p in Decoder.from_pretrained(tmp_path / "a").parameters()} == {kind}
        assert {p.dtype for p in Decoder.from_pretrained(tmp_path / "h").parameters()} == {torch.float32}
    config = DecoderConfig.from_folder(tmp_path / "a")
    with torch.device("meta"):
        found, _ = weights.match_tensors(Decoder(config, seed=None), tmp_path / "a", config, ())
    assert weights.default_dtype(found, config, torch.device("cuda")) == torch.bfloat16


def test_a_cast_is_that_of_torch(tmp_path: Path) -> None:
    for family in ("llama", "gpt2"):
        whole = Decoder.from_pretrained(made(tmp_path / family, family), torch.float32).state_dict()
        for kind in (torch.bfloat16, torch.float16, torch.float64):
            cast = Decoder.from_pretrained(tmp_path / family, kind)
            assert same(cast.state_dict(), {n: t.to(kind) for n, t in whole.items()})
            assert cast.config.dtype == kind


@pytest.mark.cuda
def test_on_a_device(tmp_path: Path) -> None:
    made(tmp_path / "a", "gpt2")
    decoder = Decoder.from_pretrained(tmp_path / "a", device="cuda")
    assert {p.device.type for p in decoder.parameters()} == {"cuda"}
    assert {p.dtype for p in decoder.parameters()} == {torch.float32}
    assert decoder.fingerprint == weights.weights_fingerprint(weights.checkpoint_tensors(decoder, decoder.config))
    decoder.save_pretrained(tmp_path / "b")
    assert same(stored(tmp_path / "a"), stored(tmp_path / "b"))


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


def test_peak_memory_is_that_of_the_weights(tmp_path: Path) -> None:
    """Mapped as it is, turned and in shards, turned and cast."""
    if not Path("/proc/self/clear_refs").exists():
        missing("needs Linux's account of memory in /proc/self")
    made(tmp_path / "warm")
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


def test_index_and_shards(tmp_path: Path) -> None:
    sharded(tmp_path / "a")
    tensors = stored(tmp_path / "a")
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    total = sum(t.numel() for t in tensors.values())
    assert index["metadata"] == {"total_size": 4 * total, "total_parameters": total}
    files = {f.name: atomic.read_safetensors_header(f) for f in sorted((tmp_path / "a").glob("model-*.safetensors"))}
    assert index["weight_map"] == {name: file for file, header in files.items() for name in header.tensors}
    assert all(header.metadata == {"format": "pt"} for header in files.values())
    assert list(files) == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert all(sum(e.end - e.start for e in header.tensors.values()) <= 50_000 for header in files.values())
    made(tmp_path / "b")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["config.json", WHOLE]


def test_split() -> None:
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1}
    assert plan_shards(sizes, 1e2) == {WHOLE: ["a", "b", "c", "d"]}
    assert list(plan_shards(sizes, 8.0).values()) == [["a", "b"], ["c"], ["d"]]
    assert list(plan_shards(sizes, 1e1).values()) == [["a", "b"], ["c", "d"]]


def test_companions_are_copied_and_links_out_are_not(tmp_path: Path) -> None:
    made(tmp_path / "a")
    for name in ("generation_config.json", "vocab.json", "special_tokens_map.json"):
        (tmp_path / "a" / name).write_text("{}")
    (tmp_path / "a" / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "a" / "notes.txt").write_text("no")
    (tmp_path / "a" / "model.py").write_text("no")
    decoder = Decoder.from_pretrained(tmp_path / "a")
    decoder.save_pretrained(tmp_path / "b")
    asked = {"generation_config.json", "vocab.json", "special_tokens_map.json", "merges.txt", "chat_template.jinja"}
    assert {p.name for p in (tmp_path / "b").iterdir()} == asked | {"config.json", WHOLE}
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "a" / "tokenizer.json").symlink_to("../secret")
    with pytest.raises(
        UnsafeFileError, match=r"tokenizer\.json leads out of its folder, to .*/secret; not opened. Put a copy there"
    ):
        decoder.save_pretrained(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_only_what_changed_is_changed_in_the_configuration(tmp_path: Path) -> None:
    file = json.loads((made(tmp_path / "a") / "config.json").read_text())
    file.pop("dtype", None)
    file |= {"torch_dtype": "float32", "rope_scaling": None, "my_note": [1e-05, "é"], "transformers_version": "4.0"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(file))
    decoder = Decoder.from_pretrained(tmp_path / "a", torch.float32)
    decoder.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == file
    decoder.resize_vocabulary(3).save_pretrained(tmp_path / "c", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == file | {
        "vocab_size": 100,
        "torch_dtype": "bfloat16",
    }
    Decoder.from_pretrained(tmp_path / "c")


def test_an_adapter_is_merged_first(tmp_path: Path) -> None:
    decoder = Decoder(DecoderConfig.tiny("llama"))
    decoder.get_submodule("model.layers.0.self_attn.q_proj").lora_A = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"q_proj\.lora_A\.weight is of an adapter; merge it first$"):
        decoder.save_pretrained(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_is_not_finite_is_saved(tmp_path: Path) -> None:
    decoder = Decoder(DecoderConfig.tiny("gpt2"))
    with torch.no_grad():
        decoder.get_parameter("transformer.h.0.mlp.c_fc.weight")[2, 1] = float("nan")
    with pytest.raises(
        NonFiniteError, match=r"^transformer.h.0.mlp.c_fc.weight: 1 value not finite, first at \[1, 2\]$"
    ):
        decoder.save_pretrained(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# --- fingerprint


def test_fingerprint() -> None:
    x, y = torch.randn(50, 60), torch.randn(7).bfloat16()
    print_ = weights.weights_fingerprint([("x", x), ("y", y)])
    assert print_ == weights.weights_fingerprint([("y", y.float()), ("x", x)])
    assert len(print_) == 64
    others = [
        [("x", x)],
        [("x", x), ("z", y)],
        [("x", x.view(60, 50)), ("y", y)],
        [("x", x + torch.zeros(50, 60).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(1.0))), ("y", y)],
        [("x", x), ("y", -y)],
    ]
    assert len({print_, *(weights.weights_fingerprint(other) for other in others)}) == 6
    assert weights.weights_fingerprint([("x", x.t().contiguous().t()), ("y", y)]) == print_
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


def test_a_snapshot_of_the_hub_loads(tmp_path: Path) -> None:
    whole = sharded(tmp_path / "a")
    (whole / "tokenizer.json").write_text("{}")
    folder = snapshot(tmp_path, whole)
    decoder = Decoder.from_pretrained(folder)
    assert same(decoder.state_dict(), Decoder.from_pretrained(whole).state_dict())
    decoder.save_pretrained(tmp_path / "b")
    assert (tmp_path / "b" / "tokenizer.json").is_file()
    assert not (tmp_path / "b" / "tokenizer.json").is_symlink()


def test_a_snapshot_leads_to_its_own_blobs_only(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, made(tmp_path / "a"))
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


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[object, ...]] = []

    def download(name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, revision))
        found = set(
            huggingface_hub.utils.filter_repo_objects(
                REPOSITORY, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        assert found == {"config.json", WHOLE, "tokenizer.json", "merges.txt", "generation_config.json"}
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert weights.find_checkpoint("org/name-1.0", "abc") == tmp_path
    assert weights.find_checkpoint("gpt2") == tmp_path
    assert asked == [("org/name-1.0", "abc"), ("gpt2", None)]
    assert weights.find_checkpoint(tmp_path) == tmp_path
    (tmp_path / "file").write_text("")
    for odd in (tmp_path / "file", tmp_path / "none", "a/b/c", "../x", "./x", ".x", "a b", "x/../y"):
        with pytest.raises(
            InputError, match=r"is no folder and no name on the hub; give the folder that holds config.json"
        ):
            weights.find_checkpoint(odd)
    assert len(asked) == 2


REPOSITORY = [
    "config.json", "generation_config.json", WHOLE, "tokenizer.json", "merges.txt", "README.md", "modeling_x.py",
    "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "onnx/config.json", "x.gguf",
]  # fmt: skip


def test_the_hub_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"^org/name: no such folder here, and from the hub: .+$"):
        weights.find_checkpoint("org/name")
