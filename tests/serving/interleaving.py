"""Concurrent requests over memories, sessions and prompts; each answer has to be that of the request alone."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.testclient import TestClient

TEXT = "The red dog saw a bird in the old house by the sea and sang of rain until it was noon"
MAX_RETRIES = 1000


def build_body(choose: random.Random, names: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a random completion request on one of the memories or sessions, or on none."""
    prompt = " ".join(choose.choices(TEXT.split(), k=choose.randint(1, 12)))
    sampling = {"temperature": choose.choice([0, 0.8]), "seed": choose.randrange(100), "top_p": choose.choice([1, 0.9])}
    return {"prompt": prompt, "max_tokens": choose.randint(1, 6), **sampling, **choose.choice(names)}


def post(client: TestClient, body: dict[str, Any]) -> str:
    """Return the text of a completion; repeat a request while the queue is full."""
    for _ in range(MAX_RETRIES):
        response = client.post("/v1/completions", json=body)
        if response.status_code != 429:
            break
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def check_no_leaks(client: TestClient, names: list[dict[str, Any]], num_requests: int, num_threads: int = 12) -> None:
    """Send requests alone, then all of them from many threads, and compare.

    Args:
        client: Client of the server.
        names: Memories or sessions to choose from, as parameters of a request.
        num_requests: Number of requests.
        num_threads: Number of threads, each of which has one request at a time.
    """
    choose = random.Random(0)
    bodies = [build_body(choose, names) for _ in range(num_requests)]
    alone = [post(client, body) for body in bodies]
    assert len(set(alone)) > num_requests // 10
    order = list(range(num_requests))
    choose.shuffle(order)
    with ThreadPoolExecutor(num_threads) as pool:
        together = dict(zip(order, pool.map(lambda i: post(client, bodies[i]), order), strict=True))
    different = [(bodies[i], alone[i], together[i]) for i in order if alone[i] != together[i]]
    assert not different, different[:3]
