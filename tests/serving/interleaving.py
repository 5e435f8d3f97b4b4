"""Concurrent requests over memories, sessions and prompts; each answer has to be that of the request alone."""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.testclient import TestClient

TEXT = "The red dog saw a bird in the old house by the sea and sang of rain until it was noon"
MAX_RETRIES = 3000
SHARE_OF_LEARNING = 0.25


def build_body(choose: random.Random, names: list[dict[str, Any]], texts: Sequence[str]) -> dict[str, Any]:
    """Return a random completion request on one of the memories or sessions, or on none.

    A request with the key "learn" is to be sent to a fork of the session that has learned this text.
    """
    prompt = " ".join(choose.choices(TEXT.split(), k=choose.randint(1, 12)))
    sampling = {"temperature": choose.choice([0, 0.8]), "seed": choose.randrange(100), "top_p": choose.choice([1, 0.9])}
    body = {"prompt": prompt, "max_tokens": choose.randint(1, 6), **sampling, **choose.choice(names)}
    return body | {"learn": choose.choice(texts)} if texts and choose.random() < SHARE_OF_LEARNING else body


def post(client: TestClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request; repeat it while the queue is full."""
    for _ in range(MAX_RETRIES):
        response = client.post(f"/v1/{route}", json=body)
        if response.status_code != 429:
            break
        time.sleep(0.01)
    assert response.status_code == 200, response.text
    return response.json()


def complete(client: TestClient, body: dict[str, Any]) -> str:
    """Return the text of a completion."""
    if "learn" not in body:
        return post(client, "completions", body)["choices"][0]["text"]
    source = body.get("session")
    session = post(client, f"sessions/{source}/fork" if source else "sessions", {})["id"]
    post(client, f"sessions/{session}/learn", {"text": body["learn"]})
    prompt = {name: value for name, value in body.items() if name != "learn"}
    text = complete(client, prompt | {"session": session})
    assert client.delete(f"/v1/sessions/{session}").status_code == 200
    return text


def check_no_leaks(
    client: TestClient, names: list[dict[str, Any]], num_requests: int, texts: Sequence[str] = (), num_threads: int = 12
) -> None:
    """Send requests alone, then all of them from many threads, and compare.

    Args:
        client: Client of the server.
        names: Memories or sessions to choose from, as parameters of a request.
        num_requests: Number of requests.
        texts: What sessions learn while others are read; none for models that do not learn.
        num_threads: Number of threads, each of which has one request at a time.
    """
    choose = random.Random(0)
    bodies = [build_body(choose, names, texts) for _ in range(num_requests)]
    alone = [complete(client, body) for body in bodies]
    assert len(set(alone)) > num_requests // 10
    order = list(range(num_requests))
    choose.shuffle(order)
    with ThreadPoolExecutor(num_threads) as pool:
        together = dict(zip(order, pool.map(lambda i: complete(client, bodies[i]), order), strict=True))
    different = [(bodies[i], alone[i], together[i]) for i in order if alone[i] != together[i]]
    assert not different, different[:3]
