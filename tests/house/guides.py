"""Run a guide as a reader would: write the files that it names, run its commands and programs from top to bottom."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPO
from tests.house import warm
from tests.house.source import blocks, sandbox, settings

CHAPTER = REPO / "src/laconic/evaluation/compression/falling_star.txt"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def copy_stand_in(folder: Path) -> None:
    """Write the packaged story model with a longer context and a chat template, in place of SmolLM2."""
    shutil.copytree(REPO / "src/laconic/checkpoints/stories260k", folder)
    for name, changes in (
        ("config.json", {"max_position_embeddings": 8192}),
        ("tokenizer_config.json", {"model_max_length": 8192, "chat_template": CHAT_TEMPLATE}),
    ):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | changes), encoding="utf-8")


def run_guide(page: Path, tmp_path: Path, *, text_bytes: int) -> None:
    """Run every block of a guide in a folder of its own.

    Args:
        page: the guide.
        tmp_path: an empty folder.
        text_bytes: how much of the chapter stands in the texts that the guide expects.
    """
    inside = sandbox(tmp_path, wants_shared=False)
    text = CHAPTER.read_bytes()[:text_bytes]
    for name, part in (
        ("book.txt", text),
        ("part1.txt", text[: text_bytes // 3]),
        ("part2.txt", text[text_bytes // 3 :]),
    ):
        (inside / name).write_bytes(part)
    port = free_port()
    changes = {"8000": str(port), "laconic serve smollm2": f"laconic serve smollm2 --port {port}"}
    servers: list[subprocess.Popen[str]] = []
    try:
        for start, block in blocks(page, "python", "toml", "console"):
            for old, new in changes.items():
                block = block.replace(old, new)
            run_block(f"{page.name}:{start}", block, inside, servers)
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
    assert [server.wait(60) for server in servers] == [0] * len(servers)


def run_block(place: str, block: str, inside: Path, servers: list[subprocess.Popen[str]]) -> None:
    """Write the file that a block's first line names, or run its commands or its program."""
    if match := re.match(r"# (\w+\.\w+)\n", block):
        (inside / match[1]).write_text(block, encoding="utf-8")
        return
    if "$ " not in block[:2]:
        program = inside.parent / "program.py"
        program.write_text(block, encoding="utf-8")
        check(place, warm.python(str(program), inside))
        return
    for command in console_commands(block):
        if command.startswith("laconic serve"):
            servers.append(start_server(command, inside))
        elif command.startswith("laconic "):
            check(f"{place}: {command}", warm.laconic(command, inside))
        else:
            check(f"{place}: {command}", run_shell(command, inside))


def console_commands(block: str) -> Iterator[str]:
    """Yield the commands of a console block; one goes on over lines until its quotes are closed."""
    command = ""
    for line in block.split("\n"):
        if command:
            command += f"\n{line}"
        elif line.startswith("$ "):
            command = line[2:]
        if command and not command.endswith("\\") and command.count("'") % 2 == 0:
            yield command.replace("\\\n", " ")
            command = ""


def run_shell(command: str, inside: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that is not laconic's; a request that fails is an error."""
    command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
    command = re.sub(r"^curl -s ", "curl -s --fail-with-body --max-time 120 ", command)
    return subprocess.run(
        ["bash", "-c", command],
        cwd=inside,
        env=os.environ | settings(inside),
        capture_output=True,
        text=True,
        check=False,
    )


def start_server(command: str, inside: Path) -> subprocess.Popen[str]:
    """Start a server and wait until it listens."""
    log = inside.parent / "server.log"
    arguments = [sys.executable, "-m", *shlex.split(command)]
    with log.open("w") as stream:
        process = subprocess.Popen(arguments, cwd=inside, env=os.environ | settings(inside), stderr=stream, text=True)
    with log.open() as lines:
        while "; Ctrl-C ends" not in (line := lines.readline()):
            assert line or process.poll() is None, log.read_text()
    return process


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def check(place: str, done: subprocess.CompletedProcess[str]) -> None:
    """Fail with the output of a command that ended with an error."""
    assert done.returncode == 0, f"{place}\nexit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
