"""The same probes for a Trainer of transformers and for torch.save, as their documentation shows how to use them."""

import hashlib
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.probes.damage import Artifact
from benchmarks.probes.processes import ForkedCommand, run_forked
from benchmarks.probes.works import STEPS, Work, check

CHECKPOINT_FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
TRAINER_STOP = 4
OVERWRITES = 40  # of one file by torch.save
WEIGHTS = "model.pt"
ARTIFACT_NAMES = ("Trainer's checkpoint", "file of torch.save")


def warm_up_trainer() -> None:
    """Import what a Trainer imports."""
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401


def train_with_trainer(**options: Any) -> int:
    """Train a tiny Llama with a Trainer that saves every step, resuming from the last checkpoint if there is one."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = torch.arange(64 * 16).remainder(61).reshape(64, 16)
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
    settings: dict[str, Any] = {
        "output_dir": "out", "max_steps": STEPS, "save_steps": 1, "save_total_limit": 2,
        "per_device_train_batch_size": 8, "learning_rate": 1e-3, "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "logging_steps": STEPS,
    }  # fmt: skip
    arguments = TrainingArguments(**settings | options)
    last = get_last_checkpoint("out") if Path("out").is_dir() else None
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train(resume_from_checkpoint=last)
    return 0


def snapshot_trainer(folder: Path) -> dict[str, str]:
    """Return the hash of the weights after the last step."""
    file = folder / f"out/checkpoint-{STEPS}/model.safetensors"
    return {"weights": hashlib.sha256(file.read_bytes()).hexdigest()}


def newest_checkpoint(folder: Path) -> int:
    """Return the number of the newest checkpoint with all of its files."""
    folders = (folder / "out").glob("checkpoint-*")
    numbers = [int(p.name.split("-")[1]) for p in folders if all((p / name).exists() for name in CHECKPOINT_FILES)]
    return max(numbers, default=0)


TRACEBACK = 70  # exit code of `Child` for any exception that is not laconic's
TRAINER = Work(
    "Trainer (transformers)", train_with_trainer, snapshot_trainer, newest_checkpoint, exit_codes=(TRACEBACK,)
)


def build_weights(number: int) -> dict[str, Tensor]:
    """Return tensors of one megabyte that hold a number."""
    return {"a": torch.full((512, 512), float(number)), "number": torch.tensor(number)}


def overwrite_with_torch() -> int:
    """Save ever larger numbers to the same file; begin after the number that it holds."""
    first = int(torch.load(WEIGHTS, weights_only=True)["number"]) + 1 if Path(WEIGHTS).exists() else 0
    for number in range(first, OVERWRITES):
        torch.save(build_weights(number), WEIGHTS)
    return 0


def snapshot_torch(folder: Path) -> dict[str, Any]:
    """Return the values in the file."""
    tensors = torch.load(folder / WEIGHTS, weights_only=True)
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


TORCH = Work("torch.save to one file", overwrite_with_torch, snapshot_torch, lambda folder: 0, exit_codes=(TRACEBACK,))


def stop_trainer(folder: Path) -> Path:
    """Kill a Trainer after about half of its steps, between two saves."""
    folder.mkdir(parents=True)
    command = ForkedCommand(train_with_trainer, folder)
    while newest_checkpoint(folder) < TRAINER_STOP:
        time.sleep(0.001)
    command.send_signal(signal.SIGKILL)
    command.wait()
    newest = newest_checkpoint(folder)
    for path in (folder / "out").glob("checkpoint-*"):  # what it was writing when it was killed
        if int(path.name.split("-")[1]) > newest:
            shutil.rmtree(path)
    return folder


def read_torch() -> int:
    """Load the file as torch recommends."""
    print(snapshot_torch(Path()))
    return 0


def read_pickle() -> int:
    """Load a file with torch.load."""
    torch.load("file.bin")
    return 0


def save_nan() -> int:
    """Save a tensor that holds NaN."""
    torch.save({"a": torch.tensor([torch.nan])}, "a.pt")
    return 0


def load_pretrained() -> int:
    """Load the model as transformers' documentation does."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained("model")
    return 0


def load_rows() -> int:
    """Load the rows as the documentation of datasets does."""
    import datasets

    datasets.load_dataset("json", data_files="rows.jsonl", cache_dir="cache", split="train")
    return 0


def render_template() -> int:
    """Render a chat template, and wait for ever if the text is longer than a megabyte."""
    from transformers import AutoTokenizer

    message = [{"role": "user", "content": "Hi"}]
    text = AutoTokenizer.from_pretrained("model").apply_chat_template(message, tokenize=False)
    if len(text) > 1_000_000:
        signal.pause()
    return 0


def merge_with_peft() -> int:
    """Merge an adapter into a model as the documentation of peft does."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("model"), "adapter")
    model.merge_and_unload().save_pretrained("out")
    return 0


def read_gguf_with_transformers() -> int:
    """Load a GGUF file with transformers and print the hashes of the weights."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(".", gguf_file="file.gguf")
    print({name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in model.named_parameters()})
    return 0


def build_peer_artifacts(base: Path) -> dict[str, Artifact]:
    """A Trainer's newest checkpoint, and a file of torch.save; a traceback counts as a refusal."""
    source = stop_trainer(base / "trainer")
    newest = f"out/checkpoint-{newest_checkpoint(source)}/*"
    saved = base / "torch"
    saved.mkdir()
    check(run_forked(overwrite_with_torch, saved))
    trainer = Artifact(
        ARTIFACT_NAMES[0],
        source,
        (newest,),
        train_with_trainer,
        lambda folder, _: snapshot_trainer(folder),
        refusals=(TRACEBACK,),
    )
    file = Artifact(ARTIFACT_NAMES[1], saved, (WEIGHTS,), read_torch, refusals=(TRACEBACK,))
    return dict(zip(ARTIFACT_NAMES, (trainer, file), strict=True))


def is_installed() -> bool:
    """Return whether transformers and accelerate, which a Trainer needs, can be imported."""
    try:
        warm_up_trainer()
        import accelerate  # noqa: F401
    except ImportError:
        return False
    return True


PEERS = {work.name: work for work in (TRAINER, TORCH)}
