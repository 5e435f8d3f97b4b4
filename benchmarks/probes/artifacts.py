"""Every kind of file that laconic writes, with a command that reads it."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.probes.damage import Artifact
from benchmarks.probes.kills import describe
from benchmarks.probes.peers import TRACEBACK, merge_with_peft, read_gguf_with_transformers
from benchmarks.probes.processes import Ending, ForkedCommand, Moment, run_command_line, run_forked, run_until
from benchmarks.probes.servers import ForkedServer, write_contents
from benchmarks.probes.works import (
    FINISHED,
    LORA,
    STEPS,
    Work,
    build_works,
    check,
    hash_files,
    newest_step,
    snapshot_run,
)

STOP_STEP = 4
UNREADABLE = 66
FOREIGN = ("adapter, by export", "adapter, by peft", "GGUF file, by generate", "GGUF file, by transformers")
QUESTION = "3 + 4 ="


def stop_training(base: Path, folder: Path, seed: int) -> Path:
    """Train a run in `folder` and stop it by SIGTERM after about half of its steps."""
    folder.mkdir(parents=True)
    train = partial(run_command_line, "train", base / "kava.toml", "--out", "run", f"seed={seed}")
    command = ForkedCommand(train, folder)
    while not (folder / f"run/steps/step-{STOP_STEP:06d}").exists() and not command.has_ended():
        command.wait_for_write(command.child.last + 1)
    command.send_signal(signal.SIGTERM)
    ending = command.wait()
    assert STOP_STEP <= newest_step(folder) < STEPS, f"not stopped by the signal: {describe(ending)}"
    return folder


def interrupt(work: Work, folder: Path) -> Path:
    """Kill a command in the middle of its writes, so that it leaves its saved progress."""
    work.prepare_folder(folder)
    num_writes = run_forked(work.run, folder).num_writes
    for number in range(num_writes // 2, num_writes):
        run_until(work.run, work.prepare_folder(folder), Moment(number, 0.0))
        if 1 < work.measure_progress(folder) < FINISHED:
            return folder
    raise AssertionError(f"{work.name} saves no progress")


def run_line(folder: Path, *arguments: object) -> Path:
    """Run a command line in a new folder, or one that exists, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    check(run_forked(partial(run_command_line, *arguments), folder))
    return folder


def build_runs(base: Path) -> list[Artifact]:
    """Steps of a run and its other files, read by `laconic train` and `laconic generate`."""
    source, other = stop_training(base, base / "stopped", 0), stop_training(base, base / "stopped-1", 1)
    train = partial(run_command_line, "train", base / "kava.toml", "--out", "run")
    newest = f"run/steps/step-{newest_step(source):06d}/*"
    files = ("run/recipe.toml", "run/env.json", "run/latest", "run/metrics.jsonl", "run/validations.json")
    return [
        Artifact("step, by train", source, (newest,), train, lambda folder, _: snapshot_run(folder), other),
        Artifact("step, by generate", source, (newest,), generate("run"), read_generations, other),
        Artifact("other files of a run, by train", source, files, train, lambda folder, _: snapshot_run(folder)),
    ]


def generate(model: Path | str, *flags: object, prompt: str = QUESTION) -> Callable[[], int]:
    """Return `laconic generate` on a model."""
    return partial(run_command_line, "generate", model, prompt, "--max-tokens", 12, "--format", "json", *flags)


def read_generations(folder: Path, ending: Ending) -> object:
    """Return texts and log probabilities, if there are any, without times."""
    return json.loads(ending.out)["generations"]


def build_memories(base: Path) -> list[Artifact]:
    """Files of `laconic compress`; the others are of runs with another seed, or of rounded weights."""
    runs, folders = base / "runs", base / "files"
    for method in ("autocompressor", "hope"):
        run_line(base, "train", base / f"{method}.toml", "--out", f"runs/{method}-1", "seed=1")
    rounded = run_line(base, "export", "stories260k", "--out", "rounded", "--dtype", "bfloat16") / "rounded"
    models = {
        "summary vectors": (runs / "autocompressor", runs / "autocompressor-1"),
        "keys and values": ("stories260k", rounded),
        "fast weights": (runs / "hope", runs / "hope-1"),
    }
    artifacts = list[Artifact]()
    for name, (model, second) in models.items():
        source, other = folders / name, folders / f"{name} other"
        run_line(source, "compress", model, base / "book.txt", "--out", "m.safetensors")
        run_line(other, "compress", second, base / "book.txt", "--out", "m.safetensors")
        read = generate(model, "--memory", "m.safetensors", "--logprobs", prompt="A book")
        artifacts.append(Artifact(f"memory ({name})", source, ("*.safetensors",), read, read_generations, other))
    fit = ("--out", "m.safetensors", "--fit", "1", "--equal-heads")
    run_line(folders / "fit", "compress", "stories260k", base / "book.txt", *fit)
    cartridge = run_line(folders / "cartridge", "export", folders / "fit/m.safetensors", "--out", "cartridge")
    read = generate("stories260k", "--memory", "cartridge", "--logprobs", prompt="A book")
    artifacts.append(Artifact("cartridge for peft", cartridge, ("cartridge/*",), read, read_generations))
    content, _ = write_contents("stories260k", folders / "contents")
    served = folders / "served"
    (served / "memories").mkdir(parents=True)
    (served / "memories/a.safetensors").write_bytes(content)
    return [*artifacts, Artifact("memory folder of serve", served, ("memories/*",), ask_server)]


def ask_server() -> int:
    """Start a server on the folder of memories, ask it about one, and print the answer and its messages."""
    request = json.dumps({"prompt": "A day", "memory": ["a"], "max_tokens": 12, "logprobs": 1}).encode()
    with ForkedServer(Path.cwd()) as server:
        status, body = server.request("POST", "/v1/completions", request) if server.port else (0, b"")
        code = server.stop(signal.SIGTERM)
        print(server.command.logs[1].read_text(), file=sys.stderr)
    if status == 200:
        print(json.loads(body)["choices"])
    return code if status in (0, 200) else UNREADABLE


def build_foreign(base: Path) -> dict[str, Artifact]:
    """Files of other programs, which have no checksums: adapters of peft, and GGUF files."""
    import torch

    from tests.models.gguf_files import random_decoder, write_gguf

    sources = [run_line(base / f"adapters/{seed}", "export", "stories260k", "--out", "model") for seed in range(2)]
    for seed, source in enumerate(sources):
        (source / "books.jsonl").write_bytes((base / "books.jsonl").read_bytes())
        (source / "lora.toml").write_text(LORA)
        run_line(source, "train", "lora.toml", "--out", "run", f"seed={seed}")
        (source / "adapter").mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(next((source / "run/steps").glob(f"*/{name}")), source / "adapter")
        shutil.rmtree(source / "run")
    merge = partial(run_command_line, "export", "model", "--adapter", "adapter", "--out", "out")
    merged = lambda folder, _: hash_files(folder, "out/model.safetensors")  # noqa: E731
    files = [base / f"files/gguf {number}" for number in range(2)]
    for number, folder in enumerate(files):
        folder.mkdir()
        decoder = random_decoder("llama")
        with torch.no_grad():
            next(decoder.parameters()).add_(number)
        write_gguf(folder / "file.gguf", decoder, {})

    def read_gguf() -> int:
        os.environ["LACONIC_CACHE"] = str(Path.cwd() / "cache")
        return generate("file.gguf", "--logprobs", prompt="the")()

    adapter, gguf = partial(Artifact, other=sources[1]), partial(Artifact, other=files[1])
    artifacts = (
        adapter(FOREIGN[0], sources[0], ("adapter/*",), merge, merged),
        adapter(FOREIGN[1], sources[0], ("adapter/*",), merge_with_peft, merged, refusals=(TRACEBACK,)),
        gguf(FOREIGN[2], files[0], ("*.gguf",), read_gguf, read_generations),
        gguf(FOREIGN[3], files[0], ("*.gguf",), read_gguf_with_transformers, refusals=(TRACEBACK,)),
    )
    return {artifact.name: artifact for artifact in artifacts}


def build_progress(base: Path, works: dict[str, Work]) -> list[Artifact]:
    """Saved progress of interrupted commands, which the same commands continue from."""
    artifacts = list[Artifact]()
    for name, pattern in (
        ("compress to summary vectors", "out.safetensors.part"),
        ("compress to fast weights", "out.safetensors.part"),
        ("evaluate kava", "run/evaluations/.partial-*/*"),
        ("generate --output", "answers.jsonl.part"),
    ):
        work, source = works[name], interrupt(works[name], base / f"interrupted {name}")
        snapshot = work.take_snapshot
        artifacts.append(
            Artifact(f"progress of {name}", source, (pattern,), work.run, lambda folder, _, take=snapshot: take(folder))
        )
    return artifacts


def build_results(base: Path, works: dict[str, Work]) -> list[Artifact]:
    """Stored evaluations and exported models."""
    work, source = works["evaluate kava"], base / "evaluated"
    check(run_forked(work.run, work.prepare_folder(source)))
    other = base / "evaluated-1"
    other.mkdir()
    shutil.copytree(base / "stopped-1/run", other / "run")
    run_line(other, "evaluate", "run", "--tasks", "valid")
    report = partial(run_command_line, "report", "run", "--out", "report.html")
    exported = run_line(base / "files/exported", "export", base / "runs/kava", "--out", "exported")
    second = run_line(base / "files/exported-1", "export", base / "runs/cot", "--out", "exported")
    continue_text = generate("model", "--logprobs", prompt="Once")
    files = ("exported/*", "exported/laconic/*")
    model = run_line(base / "files/model", "export", "stories260k", "--out", "model")
    return [
        Artifact(
            "evaluation, by report", source, ("run/evaluations/*/*",), report,
            lambda folder, _: hash_files(folder, "report.html"), other,
        ),
        Artifact("exported run", exported, files, generate("exported"), read_generations, second),
        Artifact("exported model", model, ("model/*",), continue_text, read_generations),
    ]  # fmt: skip


def build_artifacts(base: Path) -> dict[str, Artifact]:
    """Write every kind of file and return them by their names."""
    works = build_works(base)
    artifacts = [*build_runs(base), *build_memories(base), *build_progress(base, works), *build_results(base, works)]
    return {artifact.name: artifact for artifact in artifacts}
