"""Hostile files, names, templates and requests, and what commands tell the network and their logs (S1 to S8)."""

import json
import random
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import quote

from benchmarks.probes.inputs import MODEL, PROMPT, forget_record
from benchmarks.probes.peers import TRACEBACK, load_pretrained, read_pickle, render_template
from benchmarks.probes.promises import (
    Check,
    Promise,
    close_network,
    command,
    copy,
    expect,
    limit_costs,
)
from benchmarks.probes.servers import ForkedServer
from benchmarks.probes.works import EVALUATED, build_works
from tests.data.test_tokenizer import HOSTILE_TEMPLATES
from tests.trust.fuzz import build_targets, try_input
from tests.trust.hostile import CASES, canary
from tests.trust.hostile_names import draw_name
from tests.trust.test_fuzz import NAMES as FUZZED

NUM_NAMES, NUM_SECRETS, NUM_FUZZED = 500, 12, 50
REFUSALS = (66, 77)


def build_pickles(base: Path) -> Promise:
    """S1: pickles in the place of every file that a command reads."""
    lines: dict[str, tuple[object, ...]] = {
        "memory": ("generate", MODEL, *PROMPT, "--memory", "file.safetensors"),
        "adapter": ("export", MODEL, "--out", "out", "--adapter", "adapter"),
        "llama2.c": ("import", "file.bin", "--out", "out"),
        "GGUF": ("generate", "file.gguf", "Once"),
        "rows": ("data", "check", "file.jsonl"),
        "recipe": ("train", "file.toml"),
    }

    def setup(folder: Path) -> None:
        copy(base / MODEL)(folder)
        (folder / "adapter").mkdir()
        names = ("file.safetensors", "file.bin", "file.gguf", "file.jsonl", "file.toml", "adapter/adapter_model.bin")
        for name in names:
            (folder / name).write_bytes(b"\x80\x02" + canary(folder))

    codes = (2, *REFUSALS, 76)
    checks = {name: expect(command(*line), *codes, setup=setup, prepare=limit_costs) for name, line in lines.items()}
    return Promise("S1 pickles", checks, "torch.load", {"file": expect(read_pickle, TRACEBACK, setup=setup)})


def build_hostile(base: Path) -> Promise:
    """S2: hostile folders of weights, in at most 512 MB and a minute."""

    def check_all(action: Callable[[], int], *codes: int) -> dict[str, Check]:
        return {
            name: expect(action, *codes, setup=copy(base / MODEL, forget_record, spoil), prepare=limit_costs)
            for name, (spoil, _) in CASES.items()
        }

    ours = check_all(command("generate", MODEL, *PROMPT), *REFUSALS, 71)  # 71: cannot map a file of 4 TB
    return Promise("S2 hostile weights", ours, "from_pretrained", check_all(load_pretrained, TRACEBACK))


def build_names(base: Path) -> Promise:
    """S3: names that lead out of the folder, in an index of weights and in requests of a server."""

    def ask(folder: Path) -> str:
        (folder.parent / "secret").write_text("the secret outside")
        with ForkedServer(folder) as server:
            for number in range(NUM_NAMES):
                name = quote(draw_name(number), safe="")
                for method in ("GET", "PUT", "DELETE"):
                    status, body = server.request(method, f"/v1/memories/{name}/content", b"x")
                    if not 400 <= status < 500 or b"the secret" in body:
                        return f"{method} {name}: {status}"
        left = {path.name for path in folder.parent.iterdir()} - {"secret", "inside"}
        return "" if all(name.startswith("inside.") for name in left) else f"wrote {left}"

    def index(name: str) -> Callable[[Path], object]:
        def spoil(folder: Path) -> None:
            (folder / "model.safetensors").rename(folder.parent.parent / "secret")
            weights = {"weight_map": {"model.embed_tokens.weight": name}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(weights))

        return spoil

    shards = {
        f"shard {number}: {name!r}": expect(
            command("generate", MODEL, *PROMPT), *REFUSALS, setup=copy(base / MODEL, forget_record, index(name))
        )
        for number, name in enumerate(map(draw_name, range(NUM_NAMES)))
    }
    return Promise("S3 names of files and memories", {"1,500 requests": ask} | shards)


def build_network(base: Path) -> Promise:
    """S4: commands on local files ask the network nothing, and a server without a key stays on this machine."""
    silent = lambda _, ending: ending.err[:200] * ("NETWORK" in ending.err)  # noqa: E731
    checks = {
        work.name: expect(work.run, 0, setup=work.setup, check=silent, prepare=close_network)
        for work in build_works(base).values()
    }
    for line in (
        ("report", base / EVALUATED, "--out", "report.html"),
        ("inspect", base / "runs/kava"),
        ("data", "list"),
        ("data", "check", base / "prompts.jsonl"),
        ("recipes",),
        ("version",),
    ):
        name = " ".join(map(str, line[:2]))
        checks[name] = expect(command(*line), 0, 2, 66, check=silent, prepare=close_network)
    for host in ("0.0.0.0", "::", "10.0.0.1"):
        checks[f"serve --host {host}"] = expect(command("serve", "stories260k", "--host", host, "--port", 0), 77)
    return Promise("S4 network", checks)


def build_parsers() -> Promise:
    """S5: fuzzed files of every kind, and requests."""

    def fuzz(name: str) -> int:
        place = Path("parsers")
        place.mkdir()
        with ExitStack() as stack:
            target = build_targets(place, stack)[name]
            rngs = (random.Random(f"{name} {number}") for number in range(NUM_FUZZED))
            outcomes = [try_input(target, place, Path("place"), rng) for rng in rngs]
        print([outcome.result for outcome in outcomes if outcome.is_broken], file=sys.stderr)
        return sum(outcome.is_broken for outcome in outcomes)

    checks = {name: expect(partial(fuzz, name), 0) for name in FUZZED}
    return Promise(f"S5 parsers, each with {NUM_FUZZED} fuzzed files", checks)


def build_templates(base: Path) -> Promise:
    """S6: hostile chat templates."""

    setups = {
        text[:60]: copy(base / MODEL, lambda folder, text=text: (folder / "chat_template.jinja").write_text(text))
        for text in HOSTILE_TEMPLATES
    }
    line = command("generate", MODEL, *PROMPT, "--chat")
    return Promise(
        "S6 hostile chat templates",
        {name: expect(line, *REFUSALS, setup=setup, prepare=limit_costs) for name, setup in setups.items()},
        "apply_chat_template",
        {name: expect(render_template, TRACEBACK, setup=setup, prepare=limit_costs) for name, setup in setups.items()},
    )


def build_privacy() -> Promise:
    """S8: a deleted memory leaves no copy, and the server's log has no text of a request."""

    def forget(folder: Path) -> str:
        secret = secrets.token_hex(8)
        with ForkedServer(folder) as server:

            def send(verb: str, path: str, **body: object) -> tuple[int, bytes]:
                return server.request(verb, path, json.dumps(body).encode() if body else None)

            card = send(
                "POST", "/v1/memories", text=f"{secret} is a word. " * 9, name=secret, method="window", keep=0.5
            )
            id = json.loads(card[1])["id"]
            (file,) = (folder / "memories").glob("*.safetensors")
            if secret.encode() not in (content := file.read_bytes()):
                return "the memory lacks its name"
            codes = [
                send("POST", "/v1/completions", prompt=secret, memory=[id], max_tokens=1)[0],
                send("POST", "/v1/completions", prompt=secret, memory=[secret * 2], max_tokens=1)[0],
                send("POST", "/v1/completions", prompt=secret, **{secret: 1})[0],
                send("PUT", f"/v1/memories/{secret}!", text=secret)[0],
                send("DELETE", f"/v1/memories/{id}")[0],
            ]
            if codes != [200, 404, 400, 400, 200]:
                return f"answered {codes}"
            server.stop(signal.SIGTERM)
            log = "".join(path.read_text() for path in server.command.logs)
        left = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file()) + log.encode()
        return "a copy is left" * (secret.encode() in left or content[-64:] in left)

    return Promise("S8 deleted memories, logs", {f"memory {number}": forget for number in range(NUM_SECRETS)})


def build_promises(base: Path) -> list[Promise]:
    """Return all of this file."""
    builders = (build_pickles, build_hostile, build_names, build_network)
    return [*(build(base) for build in builders), build_parsers(), build_templates(base), build_privacy()]
