"""Fuzzed files for every parser: each ends well, or with one line and a documented exit code."""

import copy
import json
import random
import shutil
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
import torch
from safetensors import safe_open
from starlette.testclient import TestClient

import laconic
from laconic.compression.kv.memory import KVMemory
from laconic.compression.memory import SummaryMemory
from laconic.config.data import DataConfig
from laconic.config.load import load_recipe
from laconic.data.reasoning.read_examples import read_examples
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import LaconicError
from laconic.evaluation.results_store import EvalItem, EvalJob, EvalMetadata, run_resumable
from laconic.evaluation.suites import build_report
from laconic.experiment.lora import lora
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.gguf.convert import convert_gguf
from laconic.nested.hope.model import HopeAttention
from laconic.nested.state import FastWeightState
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.app import build_app
from laconic.storage import atomic
from laconic.storage.manifest import MANIFEST_FILE, ManifestWriter
from laconic.training import checkpoint
from laconic.training.ranks import Ranks
from laconic.verification.golden import BUNDLE_DIR, load_bundle
from tests.compression.test_kv_memory import make_metadata
from tests.compression.test_memory import make_memory
from tests.config.test_load import KAVA
from tests.evaluation.pages import check_page
from tests.models.gguf_files import random_decoder, write_gguf

LISTED = ("rows.", "recipe.")  # their errors have a line for each problem
DOCUMENTED_CODES = (1, 2, 65, 66, 71, 73, 74, 76, 77)
MAX_SECONDS = 10.0
FORBIDDEN_EVENTS = (
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "socket.getaddrinfo",
)  # fmt: skip
EVENTS: list[str] = []  # those that a parser caused
sys.addaudithook(lambda event, _: EVENTS.append(event) if event in FORBIDDEN_EVENTS else None)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 2.5, 1e308, float("nan"), float("inf"), 10**9, 2**31, 2**63, 10**30, "", "x", "\x1b[2J",
    "\u202etxt", "../../x", "(a*)*b", "x" * 3000, [], [None], [[1]], [-1, 10**9], {}, {"a": 1}, {"type": "Sequence"},
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A parser: the file that is spoiled, how, and what reads it."""

    file: str
    spoil: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], object]


def spoil_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flip, cut, repeat, insert or overwrite some bytes."""
    content = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, length = draw.randrange(max(1, len(content))), draw.choice((1, 4, 8, 64))
        kind = draw.randrange(5)
        if kind == 0 and content:
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del content[at : at + length]
        elif kind == 2:
            content[at:at] = content[at : at + length] * draw.choice((1, 50))
        elif kind == 3:
            content[at:at] = draw.randbytes(length)
        else:
            content[at : at + length] = draw.choice((b"\0", b"\xff", b"[", b'"', b"9")) * length
    return bytes(content)


def list_places(tree: Any) -> list[tuple[Any, Any]]:
    """Return container and key of every value in a JSON tree."""
    places: list[tuple[Any, Any]] = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        places += [(tree, key), *list_places(value)]
    return places


def spoil_tree(tree: Any, draw: random.Random) -> Any:
    """Replace, delete, rename or swap some values."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 2, 4))):
        places = list_places(tree)
        if not places:
            return tree
        parent, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[draw.choice(("x", "", "\x1b[2J", *parent))] = parent.pop(key)
        elif kind == 2:
            other, name = draw.choice(places)
            parent[key] = copy.deepcopy(other[name])
        else:
            parent[key] = copy.deepcopy(draw.choice(VALUES))
    return tree


def spoil_json(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.25:
        return spoil_bytes(data, draw)
    return json.dumps(spoil_tree(json.loads(data), draw)).encode()


def spoil_lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    n = draw.randrange(len(lines))
    lines[n] = spoil_json(lines[n], draw) + b"\n"
    return b"".join(lines)


def spoil_toml(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        return spoil_bytes(data, draw)
    try:
        return tomli_w.dumps(spoil_tree(tomllib.loads(data.decode()), draw)).encode()
    except (TypeError, ValueError):  # a value that TOML does not have
        return spoil_bytes(data, draw)


def spoil_parquet(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.6:
        return spoil_bytes(data, draw)
    column = [draw.choice(("a", "\x1b[2J", None, "4")) for _ in range(3)]
    names = draw.sample(["question", "steps", "answer", "cot", "\u202e"], 3)
    columns: list[Any] = [column, [[1.5], [], None], draw.choice(([1, 2, 3], [b"\xff"] * 3, [{"a": 1}] * 3, column))]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(dict(zip(names, columns, strict=True))), sink)
    return sink.getvalue().to_pybytes()


def spoil_artifact(data: bytes, draw: random.Random, place: Path) -> bytes:
    """Change the metadata or tensors of a file of ours, and seal it again with the right digest."""
    if draw.random() < 0.2:
        return spoil_bytes(data, draw)
    (place / "whole").write_bytes(data)
    with safe_open(place / "whole", framework="pt") as file:
        metadata = json.loads(file.metadata()["laconic"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if draw.random() < 0.5:
        name = draw.choice(sorted(tensors))
        x = tensors[name]
        changes = (
            x[..., :-1] if x.ndim else x,
            x.flatten(),
            x[None],
            x.float(),
            x.long(),
            x * 0 - 1,
            x[:0] if x.ndim else x,
        )
        tensors[name] = draw.choice(changes).contiguous()
        if draw.random() < 0.2:
            tensors[draw.choice(("x", *tensors))] = tensors.pop(name)
    else:
        metadata = spoil_tree(metadata, draw)
    kind = metadata.pop("kind", "") if isinstance(metadata, dict) else ""
    try:
        atomic.save_artifact(place / "spoiled", tensors, str(kind), metadata)
    except (LaconicError, TypeError, ValueError):  # not a file that could be written
        return spoil_bytes(data, draw)
    return (place / "spoiled").read_bytes()


def read_rows(path: Path) -> object:
    return read_examples(path, DataConfig(path=path.name))


def write_evaluation(folder: Path) -> Path:
    """Write the committed evaluation of a run that answered three questions, and return its folder."""
    metrics = {
        "cache_positions": [12, 20], "gold": "4", "is_correct": True, "output": "4", "prediction": "4",
        "passes": {"answer": 2, "latent": 1, "latent_setup": 1, "prompt": 0}, "question": "2 + 2 =",
    }  # fmt: skip
    metadata = EvalMetadata("reasoning", "valid", "run", variant={"protocol": "last digit"}, key={"data": "d"})
    figures = {
        "accuracy": 1.0, "bytes_per_position": 128, "cache_positions": {"begin": 12.0, "bytes": 2560.0, "end": 20.0},
        "interval": [0.4, 1.0], "majority_baseline": {"answer": "4", "share": 1.0}, "protocol": "last digit",
        "passes": {"answer": 2.0, "latent": 1.0, "latent_setup": 1.0, "prompt": 0.0, "total": 4.0}, "questions": 3,
        "unanswered": 0,
    }  # fmt: skip
    job = EvalJob(
        metadata, 3, lambda units: [[EvalItem(str(n), {"": metrics})] for n in units], summarize=lambda items: figures
    )
    run_resumable(job, folder)
    return folder / metadata.folder_name


def read_report(path: Path) -> object:
    """Seal an evaluation again with the right hashes, and write the report of its run."""
    run = path.parent / "run"
    files = {entry.name: entry.read_bytes() for entry in path.parent.iterdir() if entry.name != MANIFEST_FILE}
    writer = ManifestWriter(run / "evaluations" / "reasoning")
    writer.folder.mkdir(parents=True)
    for name, content in files.items():
        (writer.folder / name).write_bytes(content)
    writer.finish("evaluation", 0, {})
    (run / "recipe.toml").write_text(KAVA)
    return check_page(build_report([str(run)]))


def write_step(folder: Path) -> torch.optim.Optimizer:
    """Write all of a training step but the model, and return its optimizer."""
    folder.mkdir()
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones(2)
    optimizer.step()
    scaler, states = torch.amp.GradScaler("cpu"), [KVCache.empty(DecoderConfig.tiny("llama"), 1)]
    checkpoint.save_training_state(
        ManifestWriter(folder), optimizer, scaler, states, checkpoint.Progress(step=1), Ranks()
    )
    return optimizer


def build_targets(base: Path, stack: ExitStack) -> dict[str, Target]:
    """Write a valid file of every kind under `base` and return the parsers; the server ends with the stack."""
    tokenizer = build_byte_tokenizer()
    decoder = Decoder(DecoderConfig.tiny("llama", vocab_size=257)).eval()
    model_folder = base / "model"
    laconic.LanguageModel(decoder, tokenizer).save(model_folder)
    config_json = base / "tokenizer_config.json"
    tokens = {"eos_token": "<eos>", "added_tokens_decoder": {"256": {"content": "<eos>", "special": True}}}
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config_json.write_text(json.dumps(tokens | {"chat_template": template, "model_max_length": 10**30}))
    from peft import LoraConfig

    adapted = Decoder(DecoderConfig.tiny("llama", vocab_size=257))
    lora.save_adapter(lora.add_adapter(adapted, LoraConfig(r=2, target_modules=["q_proj"])), base / "adapter")
    (base / "recipe.toml").write_text(KAVA)
    row = {"question": "1 + 1 = ?", "steps": ["1 + 1 = 2"], "answer": "2"}
    (base / "rows.jsonl").write_text((json.dumps(row) + "\n") * 3)
    pq.write_table(pa.Table.from_pylist([row] * 3), base / "rows.parquet")
    make_memory([[2, 0, 3], [1, 2, 0]], with_metadata=True).save(base / "memory.safetensors")
    cache = decoder(decoder.embed(torch.tensor([[1, 5, 9, 2]]))).cache
    KVMemory.from_cache(cache, metadata=make_metadata(decoder)).save(base / "kv.safetensors")
    nested = HopeAttention.from_decoder(Decoder(DecoderConfig.tiny("llama", vocab_size=257)), chunk_sizes=(4, 8))
    nested.save_state(
        cast(FastWeightState, nested.read_tokens(torch.arange(11)[None]).cache), base / "state.safetensors"
    )
    write_gguf(base / "model.gguf", random_decoder("llama"))
    shutil.copy(laconic_checkpoint("stories260K.bin"), base / "stories.bin")
    shutil.copytree(BUNDLE_DIR / "tiny-llama", base / "bundle")
    evaluation = write_evaluation(base / "evaluations").relative_to(base)
    optimizer = write_step(base / "step")
    (base / "request.json").write_text(json.dumps(REQUEST))
    app = build_app(ApiModel("m", laconic.load(model_folder)))
    client = stack.enter_context(TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False))

    def sealed(data: bytes, draw: random.Random) -> bytes:
        return spoil_artifact(data, draw, base)

    def load_model(path: Path) -> object:
        model: Any = laconic.load(path.parent)
        return model.generate(["a b"], laconic.GenerationConfig(max_tokens=1))

    def read_bundle(path: Path) -> object:
        return [case.input.build_case() for case in load_bundle(path.parent).metadata.cases]

    def send(path: Path) -> object:
        answer = client.post("/v1/completions", content=path.read_bytes(), headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, answer.text
        return answer

    def load_kv(path: Path) -> object:
        return decoder(decoder.embed(torch.tensor([[1]])), KVMemory.load(path).to_cache())

    def load_step(path: Path) -> object:
        scaler = torch.amp.GradScaler("cpu")
        return checkpoint.load_training_state(path.parent, optimizer, scaler, {"KVCache": KVCache}, Ranks())

    def load_state(path: Path) -> object:
        return nested.read_tokens(torch.tensor([[1, 2]]), nested.load_state(path))

    return {
        "config.json": Target("model/config.json", spoil_json, load_model),
        "tokenizer.json": Target("model/tokenizer.json", spoil_json, load_model),
        "tokenizer_config.json": Target("model/tokenizer_config.json", spoil_json, load_model),
        "weights": Target("model/model.safetensors", spoil_weights, load_model),
        "adapter_config.json": Target(
            "adapter/adapter_config.json",
            spoil_json,
            lambda path: lora.load_adapter(copy.deepcopy(decoder), path.parent),
        ),
        "recipe": Target("recipe.toml", spoil_toml, load_recipe),
        "rows": Target("rows.jsonl", spoil_lines, read_rows),
        "Parquet": Target("rows.parquet", spoil_parquet, read_rows),
        "memory": Target("memory.safetensors", sealed, SummaryMemory.load),
        "KV memory": Target("kv.safetensors", sealed, load_kv),
        "state": Target("state.safetensors", sealed, load_state),
        "golden bundle": Target("bundle/golden.json", spoil_json, read_bundle),
        **{
            name: Target(f"step/{name}", spoil_json, load_step)
            for name in ("progress.json", "optimizer.json", f"{checkpoint.carried_states_name(0)}.json")
        },
        "report: records": Target(f"{evaluation}/records.jsonl", spoil_lines, read_report),
        "report: result": Target(f"{evaluation}/result.json", spoil_json, read_report),
        "GGUF": Target("model.gguf", spoil_bytes, lambda path: convert_gguf(path, path.parent / "converted")),
        "llama2.c": Target("stories.bin", lambda d, r: spoil_bytes(d[:64], r) + d[64:], Decoder.from_llama2c),
        "requests": Target("request.json", spoil_json, send),
    }


REQUEST: dict[str, Any] = {
    "model": "m", "prompt": "a", "max_tokens": 1, "temperature": 0.5, "stop": ["x"], "seed": 1, "logprobs": 1, "n": 1,
    "stream": False, "echo": False, "top_p": 0.9,
}  # fmt: skip


def laconic_checkpoint(name: str) -> Path:
    from tests.conftest import shared_dir

    return shared_dir() / "models" / "stories260k" / name


def spoil_weights(data: bytes, draw: random.Random) -> bytes:
    """Change the header of a safetensors file, or bytes anywhere."""
    n = int.from_bytes(data[:8], "little")
    if draw.random() < 0.3:
        return spoil_bytes(data, draw)
    header = spoil_json(data[8 : 8 + n], draw)
    return len(header).to_bytes(8, "little") + header + data[8 + n :]


@dataclass
class Outcome:
    """What became of one input: "ok", a documented code, or a broken promise; and the CPU seconds it took."""

    result: str
    seconds: float
    is_broken: bool = False


def try_input(target: Target, base: Path, place: Path, draw: random.Random) -> Outcome:
    """Spoil a copy of a target's file beside its neighbours, and read it."""
    source = base / target.file
    folder = place / "input"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    shutil.copytree(source.parent, folder) if source.parent != base else folder.mkdir()
    path = folder / source.name
    path.write_bytes(target.spoil(source.read_bytes(), draw))
    start, is_broken = time.process_time(), False
    EVENTS.clear()
    try:
        target.read(path)
        result = "ok"
    except LaconicError as error:
        is_line = target.file.startswith(LISTED) or "\n" not in str(error)
        is_broken = error.exit_code not in DOCUMENTED_CODES or not is_line or len(str(error)) > 5000
        result = str(error.exit_code) if not is_broken else f"{error.exit_code}: {error}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        result, is_broken = f"{type(error).__name__}: {error}"[:300], True
    if is_broken and {entry.name for entry in place.iterdir()} == {"input"}:
        shutil.copy(path, base / f"broken-{source.name}")
    if {entry.name for entry in place.iterdir()} != {"input"}:
        result, is_broken = "wrote outside of its folder", True
    seconds = time.process_time() - start
    if EVENTS or seconds > MAX_SECONDS:
        result, is_broken = f"{result}, {seconds:.1f} s, {', '.join(EVENTS)}", True
    return Outcome(result, seconds, is_broken)
