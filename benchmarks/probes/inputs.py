"""Bad numbers, rows, tokenizers, weights, keys and names, given to the command line (R4b to R14)."""

import json
import random
import shutil
import signal
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.probes.artifacts import run_line
from benchmarks.probes.kills import Reference
from benchmarks.probes.peers import TRACEBACK, load_pretrained, load_rows, save_nan, train_with_trainer
from benchmarks.probes.processes import Ending, run_forked
from benchmarks.probes.promises import Check, Promise, command, copy, expect, limit_memory, together, write
from benchmarks.probes.works import BUSY, LORA, RECIPES, Work, build_works, check
from laconic.config.recipe_keys import known_keys, leaf_keys
from tests.config.test_load import make_typo
from tests.data.test_strict_jsonl import BAD, row
from tests.training.toy_runs import read_metrics

CRASHES = (128 + signal.SIGSEGV, 128 + signal.SIGABRT)
MODEL, PROMPT = "model", ("Once", "--max-tokens", 1)
ROWS = RECIPES["kava"].replace('"digits"\nhidden', '"bytes"\nhidden').partition("[data]")[0]
ROWS += '[data]\npath = "rows.jsonl"\nchain_steps = "all"\n[train]\nsteps = 2\nbatch_size = 2\n'
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
TEXTS = (
    "наука", "שלום עולם", "𝛼𝛽 🜚 👩‍👩‍👧", "e\u0301 combining", "中文，。", "a\u200db", "\u00a0space", "ﷺ", "ß ſ", "İı",
)  # fmt: skip


def edit_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Return a change of a JSON file in a folder."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        change(content)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Return a change of the weights in a folder."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})

    return edit


def forget_record(folder: Path) -> None:
    """Delete the hashes of an export, so that a folder is like those of other programs."""
    (folder / "laconic/export.json").unlink()


def build_nonfinite(base: Path) -> Promise:
    """R6: updates that overflow, and weights with NaN."""
    overflow = ("train.learning_rate=1e30", "train.max_grad_norm=1e30")

    def check_run(folder: Path, ending: Ending) -> str:
        files = list((folder / "run/steps").rglob("*.safetensors"))
        floats = [x for file in files for x in load_file(file).values() if x.is_floating_point()]
        if not all(bool(x.isfinite().all()) for x in floats):
            return "a saved tensor is not finite"
        (incident,) = (folder / "run/incidents").iterdir()
        again = run_forked(command("train", "--replay", incident), folder)
        return "" if again.code == 0 else f"--replay ended with {again.code}: {again.err[-200:]}"

    checks = {
        f"{name} in {precision}": expect(
            command("train", base / f"{name}.toml", "--out", "run", *overflow, f"train.precision={precision}"),
            65,
            check=check_run,
        )
        for name in RECIPES
        for precision in ("float32", "bfloat16")
    }
    spoil = edit_weights(lambda tensors: next(iter(tensors.values())).view(-1)[:50].fill_(torch.nan))
    setup = together(copy(base / MODEL, forget_record, spoil), write("book.txt", b"A book about nothing. " * 9))
    for verb, *flags in (("export", "--out", "out"), ("compress", "book.txt", "--out", "out")):
        checks[f"{verb} of weights with NaN"] = expect(
            command(verb, MODEL, *flags),
            65,
            setup=setup,
            check=lambda folder, _: "wrote an output" * (folder / "out").exists(),
        )

    trainer = partial(train_with_trainer, learning_rate=1e30, max_grad_norm=1e30)
    others = {"overflow": expect(trainer, TRACEBACK), "NaN": expect(save_nan, TRACEBACK)}
    return Promise("R6 NaN and infinity", checks, "Trainer, torch.save", others)


def build_memory(base: Path) -> Promise:
    """R7: less memory than a command needs."""

    def check_memory(work: Work, megabytes: int) -> Check:
        def compare(folder: Path, ending: Ending) -> str:
            again = run_forked(work.run, folder)
            if again.code not in (0, BUSY) or work.take_snapshot(folder) != references[work.name].snapshot:
                return f"after {ending.code}, repeated with enough memory, it ended otherwise: {again.err[-200:]}"
            return "" if ending.code in (0, 71) else f"{ending.code} in native code; repeated, it ends as always"

        prepare = partial(limit_memory, megabytes * 2**20)
        return expect(work.run, 0, 71, *CRASHES, setup=work.setup, check=compare, prepare=prepare)

    works = build_works(base)
    references = {name: Reference(work, base / "enough") for name, work in works.items()}
    checks = {f"{name} in {n} MB": check_memory(work, n) for name, work in works.items() for n in (4, 32, 64, 128)}
    return Promise("R7 little memory", checks)


def build_rows() -> Promise:
    """R8: malformed rows."""
    checks, peer_checks = dict[str, Check](), dict[str, Check]()
    for name, (data, place, _) in BAD.items():
        setup = together(write("rows.jsonl", data), write("rows.toml", ROWS.encode()))
        words = f"rows.jsonl:{place}" if place else "rows.jsonl"
        checks[f"data check, {name}"] = expect(command("data", "check", "rows.jsonl"), 66, setup=setup, words=words)
        checks[f"train, {name}"] = expect(command("train", "rows.toml"), 66, setup=setup, words=words)
        peer_checks[name] = expect(load_rows, TRACEBACK, setup=setup)
    return Promise("R8 malformed rows", checks, "datasets", peer_checks)


def build_few(base: Path) -> Promise:
    """R9: too few rows, and too long ones."""
    good = row(question="1 and 2?")
    files = {
        "one row": good,
        "all too long": row(question="a" * 3000) * 4,
        "an answer too long": row(answer="5" * 3000) * 4,
        "a chain too long": row(steps=["<<2+2=4>>" * 400]) * 4,
    }
    checks = {
        f"{name}, {policy}": expect(
            command("train", "rows.toml", "--out", "run", "data.max_tokens=64", f"data.on_too_long={policy}"),
            66,
            setup=together(write("rows.jsonl", data), write("rows.toml", ROWS.encode())),
        )
        for name, data in files.items()
        for policy in ("error", "drop", "truncate_question")
        if (name, policy) != ("all too long", "truncate_question")  # then they fit
    }
    for method in ("autocompressor", "hope"):
        for name, text in {"no text": b"", "one short text": b'{"text": "a"}\n'}.items():
            checks[f"{method}, {name}"] = expect(
                command("train", "m.toml"),
                66,
                setup=together(write("books.jsonl", text), write("m.toml", (base / f"{method}.toml").read_bytes())),
            )
    return Promise("R9 too few or too long rows", checks)


def build_tokenizers(base: Path) -> Promise:
    """R10: another tokenizer or chat template than that of a step or a memory."""
    source = base / "bound"
    source.mkdir()

    def renew(change: Callable[[Path], object]) -> Callable[[Path], None]:
        def setup(folder: Path) -> None:
            shutil.rmtree(source / MODEL, ignore_errors=True)
            copy(base / MODEL, forget_record)(source)
            (source / MODEL / "chat_template.jinja").write_text(TEMPLATE)
            change(source / MODEL)
            if (source / "run").exists():
                copy(source / "run")(folder)

        return setup

    renew(lambda model: None)(source)
    (source / "lora.toml").write_text(LORA)
    (source / "books.jsonl").write_bytes((base / "books.jsonl").read_bytes())
    run_line(source, "train", "lora.toml", "--out", "run")
    for name, *flags in (("plain",), ("chat", "--chat")):
        run_line(source, "compress", MODEL, base / "book.txt", "--out", f"{name}.safetensors", *flags)

    def swap(tree: Any) -> None:
        vocabulary = tree["model"]["vocab"]
        one, other = list(vocabulary)[400:402]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    changes: Mapping[str, Callable[[Any], object]] = {
        "two ids exchanged": swap,
        "one merge less": lambda tree: tree["model"]["merges"].pop(),
        "merges in another order": lambda tree: tree["model"]["merges"].reverse(),
        "another normalizer": lambda tree: tree.update(normalizer={"type": "NFC"}),
        "another pre-tokenizer": lambda tree: tree.update(pre_tokenizer={"type": "Digits", "individual_digits": True}),
        "no beginning of sequence": lambda tree: tree.update(post_processor=None),
        "another special token": lambda tree: tree["added_tokens"].append(
            tree["added_tokens"][2] | {"id": 511, "content": "x"}
        ),
        "another decoder": lambda tree: tree.update(decoder={"type": "ByteFallback"}),
    }
    read = ("generate", source / MODEL, *PROMPT, "--memory")
    lines = {
        "train": ("train", source / "lora.toml", "--out", "run", "train.steps=3"),
        "generate --memory": (*read, source / "plain.safetensors"),
    }
    checks = {
        f"{verb}, {name}": expect(command(*line), 76, setup=renew(edit_json("tokenizer.json", change)))
        for name, change in changes.items()
        for verb, line in lines.items()
    }
    template = renew(lambda model: (model / "chat_template.jinja").write_text("{{ messages[0].content }}"))
    checks["another chat template"] = expect(command(*read, source / "chat.safetensors"), 76, setup=template)
    return Promise("R10 another tokenizer or chat template", checks)


def build_weights(base: Path) -> Promise:
    """R11: weights that lack a tensor or have another one."""
    names = list(load_file(base / MODEL / "model.safetensors"))
    changes = dict[str, Callable[[dict[str, torch.Tensor]], object]]()
    for name in names:
        changes[f"without {name}"] = lambda tensors, name=name: tensors.pop(name)
        changes[f"{name} of another shape"] = lambda tensors, name=name: tensors.update({name: tensors[name][:-1]})
        changes[f"{name} of integers"] = lambda tensors, name=name: tensors.update(
            {name: tensors[name].to(torch.int32)}
        )
    setups = {name: copy(base / MODEL, forget_record, edit_weights(change)) for name, change in changes.items()}
    return Promise(
        "R11 other weights",
        {name: expect(command("generate", MODEL, *PROMPT), 66, setup=setup) for name, setup in setups.items()},
        "from_pretrained",
        {name: expect(load_pretrained, TRACEBACK, setup=setup) for name, setup in setups.items()},
    )


def build_keys(base: Path) -> Promise:
    """R12: recipes with unknown and mistyped keys."""
    rng, checks, known = random.Random(12), dict[str, Check](), known_keys()
    while len(checks) < 200:
        key = rng.choice(leaf_keys())
        typo, name = make_typo(key, rng), rng.choice(list(RECIPES))
        if typo not in known and len(key.rpartition(".")[2]) >= 4:
            checks[typo] = expect(command("train", base / f"{name}.toml", f"{typo}=1"), 2, words="no such key")
    for name, text in RECIPES.items():
        for table, values in tomllib.loads(text).items():
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, int | float):
                    checks[f"{table}.{key} as text"] = expect(
                        command("train", base / f"{name}.toml", f'{table}.{key}="{value}"'), 2, words=f"{table}.{key}"
                    )

    wrong = {"text": {"learning_rate": "1", "max_steps": "4"}, "unknown": {"learning_rte": 1}}
    others = {name: expect(partial(train_with_trainer, **options), TRACEBACK) for name, options in wrong.items()}
    return Promise("R12 unknown and mistyped keys", checks, "Trainer", others)


def build_unicode(base: Path) -> Promise:
    """R14: text of all kinds in prompts, and in names of files and folders."""
    checks = dict[str, Check]()
    for text in TEXTS:

        def compare(folder: Path, ending: Ending, text: str = text) -> str:
            rows = [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]
            return "" if [r["prompt"] for r in rows] == [text] else f"the prompt became {rows}"

        setup = write("in.jsonl", json.dumps({"prompt": text}).encode() + b"\n")
        line = ("generate", "stories260k", "--input", "in.jsonl", "--output", "out.jsonl", "--max-tokens", 1)
        checks[f"prompt {text}"] = expect(command(*line), 0, setup=setup, check=compare)
        name = f"{text}.safetensors"
        flags = ("--out", name, "--slots", 4)
        checks[f"file {text}"] = expect(
            command("compress", "stories260k", f"{text}.txt", *flags),
            0,
            setup=write(f"{text}.txt", b"A book about nothing. " * 9),
            check=lambda folder, _, name=name: check(run_forked(command("inspect", name), folder)) and "",
        )
        checks[f"recipe {text}"] = expect(
            command("train", f"{text}.toml", "--out", f"{text}/run", "train.steps=1"),
            0,
            setup=write(f"{text}.toml", (base / "kava.toml").read_bytes()),
            check=lambda folder, _, text=text: "" if read_metrics(folder / text / "run") else "no metrics",
        )
    for name in ("CON", "nul", "lpt1.x", "a.", "a b", "~", *TEXTS):
        checks[f"run {name}"] = expect(command("train", base / "kava.toml", "--out", name), 2, words="not a valid name")
    return Promise("R14 Unicode in texts and names", checks)


def build_promises(base: Path) -> list[Promise]:
    """Write what the checks need and return all of this file."""
    run_line(base, "export", "stories260k", "--out", MODEL)
    builders = (build_nonfinite, build_memory, build_few, build_tokenizers, build_weights, build_keys, build_unicode)
    promises = [build_rows(), *(build(base) for build in builders)]
    return sorted(promises, key=lambda promise: int(promise.name[1:].split()[0]))
