"""Requests per second and time to the first token of `laconic serve`, `transformers serve` and vLLM on one model.

    python benchmarks/serving.py [--model MODEL] [--clients 1 4 16] [--requests 16] [--vllm .venv-vllm/bin/python]
    python benchmarks/serving.py --turns 6
    python benchmarks/serving.py --runs runs/kava runs/cot --questions questions.txt [--num-tokens 5 30]

The second form measures a chat of one client, whose every request repeats all turns so far. The third compares two
runs in laconic: answers after latent thoughts and answers after a written chain. For runs that are not trained,
--num-tokens fixes the lengths, so that the table shows costs, not answers. A client waits for an answer before it sends
its next question. Every text is sent once to a server. Servers run one after the other, in two rounds.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measure import CORPUS
from laconic.models.checkpoints.weights import find_checkpoint

ROUNDS = 2
NUM_WORDS = 60  # of a book in each prompt
CHAT_WORDS = 600  # of a book in the first message of a chat
START_SECONDS = 300.0
REQUEST_SECONDS = 600.0
Lengths = dict[str, int]  # max_tokens, and min_tokens if the length is fixed
Messages = list[dict[str, str]]


class ServerCommand(NamedTuple):
    """A server: its name in the table, its command with {port}, the model's name in requests (None: ask for it).

    `num_tokens` fixes the length of its answers.
    """

    name: str
    command: Sequence[str]
    model: str | None = None
    num_tokens: int | None = None


class Reply(NamedTuple):
    """Seconds to the first token and to the end of an answer, the number of chunks with text, and the text."""

    first_token: float
    total: float
    chunks: int
    text: str


class Rate(NamedTuple):
    """Requests per second, tokens per second, and median seconds to the first token and to the whole answer."""

    requests: float
    tokens: float
    first_token: float
    answer: float


def list_servers(model: str, vllm: Path) -> list[ServerCommand]:
    """Return the servers that are installed."""
    folder = str(find_checkpoint(model))
    laconic = [sys.executable, "-m", "laconic", "serve", folder, "--port", "{port}"]
    servers = [
        ServerCommand("laconic serve", laconic),
        ServerCommand("laconic serve, int8", [*laconic, "--quantize", "int8"]),
        ServerCommand("laconic serve, no prefix cache", [*laconic, "--prefix-cache-bytes", "0"]),
    ]
    transformers = Path(sys.executable).with_name("transformers")
    if transformers.exists():
        command = [str(transformers), "serve", folder, "--port", "{port}", "--device", "cpu", "--dtype", "float32"]
        servers.append(ServerCommand("transformers serve", command, folder))
        servers.append(ServerCommand("transformers serve, batching", [*command, "--continuous-batching"], folder))
    if vllm.exists():
        start = [str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", "{port}"]
        servers.append(ServerCommand("vLLM", [*start, "--dtype", "float32", "--max-model-len", "2048"]))
    return servers


@contextmanager
def running(server: ServerCommand, log: Path) -> Iterator[str]:
    """Start a server on a free port, wait until it answers, yield its address, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [part.replace("{port}", port) for part in server.command]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            try:
                httpx.get(f"{address}/health", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{server.name} did not start: {log.read_text()[-800:]}") from None
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def ask(client: httpx.Client, address: str, model: str, messages: Messages, lengths: Lengths) -> Reply:
    """Send one chat request."""
    body = {"model": model, "messages": messages, **lengths, "temperature": 0, "stream": True}
    start, first, parts = time.perf_counter(), None, list[str]()
    with client.stream("POST", f"{address}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.read().decode()[:300]}")
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choices = json.loads(line[6:]).get("choices") or [{}]
            if text := choices[0].get("delta", {}).get("content"):
                first = first or time.perf_counter()
                parts.append(text)
    end = time.perf_counter()
    return Reply((first or end) - start, end - start, len(parts), "".join(parts))


def converse(server: ServerCommand, texts: Sequence[str], lengths: Lengths, log: Path) -> list[float]:
    """Send texts as the turns of one chat; return the seconds to the first token of each answer."""
    messages = Messages()
    seconds = list[float]()
    with running(server, log) as address, httpx.Client(timeout=REQUEST_SECONDS) as client:
        model = server.model or httpx.get(f"{address}/v1/models", timeout=30).json()["data"][0]["id"]
        ask(client, address, model, [{"role": "user", "content": "Hi"}], lengths)
        for text in texts:
            messages.append({"role": "user", "content": text})
            reply = ask(client, address, model, messages, lengths)
            messages.append({"role": "assistant", "content": reply.text})
            seconds.append(reply.first_token)
    return seconds


def measure(address: str, model: str, texts: Sequence[str], num_clients: int, lengths: Lengths) -> Rate:
    """Send all texts from `num_clients` clients at a time."""
    waiting, results, errors = list(texts), list[Reply](), list[Exception]()
    lock = threading.Lock()

    def work() -> None:
        with httpx.Client(timeout=REQUEST_SECONDS) as client:
            while True:
                with lock:
                    if not waiting or errors:
                        return
                    text = waiting.pop(0)
                try:
                    result = ask(client, address, model, [{"role": "user", "content": text}], lengths)
                except Exception as error:
                    errors.append(error)
                    return
                with lock:
                    results.append(result)

    start = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    seconds = time.perf_counter() - start
    num_chunks = sum(result.chunks for result in results)
    first_token, total = median(r.first_token for r in results), median(r.total for r in results)
    return Rate(len(results) / seconds, num_chunks / seconds, first_token, total)


def read_prompts(count: int, num_words: int) -> list[str]:
    """Return requests to go on with different passages of books."""
    prompts: list[str] = []
    with (CORPUS / "data" / "text" / "standard-ebooks.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            words = json.loads(line)["text"].split()[100 : 100 + num_words]
            if len(words) == num_words:
                prompts.append("Continue this story.\n\n" + " ".join(words))
            if len(prompts) == count:
                return prompts
    raise ValueError(f"fewer than {count} passages")


def measure_server(server: ServerCommand, options: Any, texts: Sequence[str], log: Path) -> dict[int, Rate]:
    """Measure one server at every number of clients, after a request that is not counted."""
    rates: dict[int, Rate] = {}
    with running(server, log) as address:
        model = server.model or httpx.get(f"{address}/v1/models", timeout=30).json()["data"][0]["id"]
        lengths = {"max_tokens": options.max_tokens}
        if server.num_tokens is not None:
            lengths = {"max_tokens": server.num_tokens, "min_tokens": server.num_tokens}
        unused = cycle(texts)
        measure(address, model, [next(unused)], 1, lengths)
        for num_clients in options.clients:
            count = min(len(texts), max(options.requests, num_clients)) if num_clients > 1 else min(4, len(texts))
            rates[num_clients] = measure(address, model, list(islice(unused, count)), num_clients, lengths)
            print(f"  {server.name}, {num_clients} clients: {rates[num_clients]}", file=sys.stderr, flush=True)
    return rates


def format_table(rates: dict[str, list[dict[int, Rate]]]) -> str:
    """Return a Markdown table of the better of the rounds."""
    lines = ["| server | clients | requests/s | tokens/s | first token, s | answer, s |", "|---|--:|--:|--:|--:|--:|"]
    for name, rounds in rates.items():
        for clients in rounds[0]:
            best = max((one[clients] for one in rounds), key=lambda rate: rate.requests)
            values = f"{best.requests:.2f} | {best.tokens:.1f} | {best.first_token:.2f} | {best.answer:.2f}"
            lines.append(f"| {name} | {clients} | {values} |")
    return "\n".join(lines)


def measure_chats(servers: Sequence[ServerCommand], num_turns: int, max_tokens: int, log: Path) -> None:
    """Print a Markdown table of a chat with each server."""
    texts = [read_prompts(1, CHAT_WORDS)[0], *read_prompts(num_turns, NUM_WORDS)[1:]]
    print("| server |" + "".join(f" turn {i} |" for i in range(1, num_turns + 1)) + "\n|---|" + num_turns * "--:|")
    for server in servers:
        seconds = converse(server, texts, {"max_tokens": max_tokens}, log)
        print(f"| {server.name} |" + "".join(f" {x:.2f} |" for x in seconds), flush=True)


def main() -> None:
    """Measure the servers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--runs", nargs="+")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--num-tokens", type=int, nargs="+", help="lengths of the answers of each run")
    parser.add_argument("--turns", type=int, help="turns of a chat of one client, in place of the table of clients")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", help="names of servers")
    options = parser.parse_args()
    if options.runs:
        texts = options.questions.read_text(encoding="utf-8").splitlines()
        serve = [sys.executable, "-m", "laconic", "serve"]
        lengths = options.num_tokens or [None] * len(options.runs)
        servers = [
            ServerCommand(run, [*serve, run, "--port", "{port}"], num_tokens=length)
            for run, length in zip(options.runs, lengths, strict=True)
        ]
    else:
        texts = read_prompts(1 + sum(max(options.requests, n) for n in options.clients), NUM_WORDS)
        servers = list_servers(options.model, options.vllm)
    servers = [server for server in servers if not options.only or server.name in options.only]
    rates: dict[str, list[dict[int, Rate]]] = {server.name: [] for server in servers}
    with tempfile.TemporaryDirectory() as folder:
        if options.turns:
            measure_chats(servers, options.turns, options.max_tokens, Path(folder) / "server.log")
            return
        for round_number in range(options.rounds):
            print(f"round {round_number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for server in servers:
                try:
                    rates[server.name].append(measure_server(server, options, texts, Path(folder) / "server.log"))
                except RuntimeError as error:
                    print(f"  {server.name}: {error}", file=sys.stderr, flush=True)
    print(format_table({name: rounds for name, rounds in rates.items() if rounds}))


if __name__ == "__main__":
    main()
