"""Answers per second of a latent run and of a chain run in vLLM, at several numbers of clients.

    .venv-vllm/bin/python benchmarks/vllm_latent.py SERVED_LATENT SERVED_CHAIN --questions questions.txt

Both folders come from `laconic export RUN --to vllm`. Each client waits for an answer before it asks the next question.
For runs that are not trained, --latent-tokens and --chain-tokens fix the length of the answers.
"""

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

MAX_TOKENS = 256  # of an answer that ends at eos
FLAGS = {"enforce_eager": True, "enable_chunked_prefill": False, "enable_prefix_caching": False}


class Rate(NamedTuple):
    """Answers per second, seconds per answer (median), and generated tokens per answer (mean)."""

    answers: float
    latency: float
    tokens: float


def start_engine(folder: Path, max_length: int, num_clients: int) -> Any:
    """Start vLLM in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    return LLM(str(folder), dtype="float32", max_model_len=max_length, max_num_seqs=num_clients, **FLAGS)


def measure_rate(llm: Any, questions: list[str], num_clients: int, num_tokens: int | None) -> Rate:
    """Answer all questions with `num_clients` requests in flight, of `num_tokens` each; None: until eos."""
    sampling = llm.get_default_sampling_params()
    sampling.max_tokens = num_tokens or MAX_TOKENS
    sampling.ignore_eos = num_tokens is not None
    tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    waiting = list(enumerate(prompts))
    start_times: dict[str, float] = {}  # by request
    seconds, tokens = [], 0
    begin = time.perf_counter()
    while waiting or start_times:
        while waiting and len(start_times) < num_clients:
            number, ids = waiting.pop(0)
            start_times[str(number)] = time.perf_counter()
            engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
        for output in engine.step():
            if output.finished:
                number = output.request_id.split("-")[0]  # vLLM appends a suffix to our number
                seconds.append(time.perf_counter() - start_times.pop(number))
                tokens += len(output.outputs[0].token_ids)
    return Rate(len(questions) / (time.perf_counter() - begin), median(seconds), tokens / len(questions))


def main() -> None:
    """Measure both folders and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("latent", type=Path, metavar="SERVED_LATENT")
    parser.add_argument("chain", type=Path, metavar="SERVED_CHAIN")
    parser.add_argument("--questions", type=Path, required=True, help="text file with a question per line")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds, of which the fastest counts")
    parser.add_argument("--latent-tokens", type=int, help="length of an answer after latents; default until eos")
    parser.add_argument("--chain-tokens", type=int, help="length of a chain with its answer; default until eos")
    parser.add_argument("--max-length", type=int, default=512, help="context of the engine")
    arguments = parser.parse_args()
    questions = [line for line in arguments.questions.read_text(encoding="utf-8").splitlines() if line]
    print("| run | clients | answers/s | seconds per answer | tokens |\n|---|---|---|---|---|")
    for folder, num_tokens in ((arguments.latent, arguments.latent_tokens), (arguments.chain, arguments.chain_tokens)):
        llm = start_engine(folder, arguments.max_length, max(arguments.clients))
        measure_rate(llm, questions[:2], num_clients=1, num_tokens=2)  # warm up
        for num_clients in arguments.clients:
            rates = [measure_rate(llm, questions, num_clients, num_tokens) for _ in range(arguments.rounds)]
            best = max(rates, key=lambda rate: rate.answers)
            print(
                f"| {folder.name} | {num_clients} | {best.answers:.2f} | {best.latency:.2f} | {best.tokens:.0f} |",
                flush=True,
            )
        llm.llm_engine.engine_core.shutdown()
    print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
