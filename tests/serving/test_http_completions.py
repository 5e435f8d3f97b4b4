"""POST /v1/completions and /v1/chat/completions give what `laconic.generate` gives, in OpenAI's format."""

import json
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import laconic
from laconic.errors import InputError
from laconic.experiment.text_models.chat_session import ChatSession
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.prompts import build_generation_config, prepare_text
from laconic.serving.http.schemas import CompletionRequest
from tests.serving.conftest import NAME, ServeWith

pytestmark = pytest.mark.usefixtures("unchecked")
PROMPT = "Once upon"
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0}


def post(client: TestClient, route: str, **body: Any) -> dict[str, Any]:
    response = client.post(route, json=GREEDY | body)
    assert response.status_code == 200, response.text
    return response.json()


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    return post(client, "/v1/completions", **body)


def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    return post(client, "/v1/chat/completions", **body)


def stream(client: TestClient, route: str, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which has to end with [DONE]."""
    response = client.post(route, json=GREEDY | body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def count_tokens(client: TestClient, **body: Any) -> int:
    return chat(client, max_tokens=1, **body)["usage"]["prompt_tokens"]


def generate(model: LanguageModel, text: str, **options: Any) -> str:
    return model.generate(text, GenerationConfig(eos_token_ids=(), **options))[0].text


def test_completion_is_that_of_generate(client: TestClient, chat_model: LanguageModel) -> None:
    answer = complete(client, prompt=PROMPT, max_tokens=7)
    assert answer["choices"] == [
        {"text": generate(chat_model, PROMPT, max_tokens=7), "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}


def test_completion_takes_every_form_of_prompt(client: TestClient, chat_model: LanguageModel) -> None:
    ids = chat_model.tokenizer.encode(PROMPT)
    one = complete(client, prompt=PROMPT, max_tokens=4)["choices"][0]["text"]
    assert complete(client, prompt=ids, max_tokens=4)["choices"][0]["text"] == one
    for prompts in ([PROMPT, "The"], [ids, chat_model.tokenizer.encode("The")]):
        texts = [choice["text"] for choice in complete(client, prompt=prompts, max_tokens=4)["choices"]]
        assert texts == [one, complete(client, prompt="The", max_tokens=4)["choices"][0]["text"]]


def test_completion_samples_n_choices_with_their_seeds(client: TestClient, chat_model: LanguageModel) -> None:
    answer = complete(client, prompt=[PROMPT, "The"], n=2, max_tokens=5, temperature=1, top_p=0.9, seed=3)
    expected = [
        generate(chat_model, text, max_tokens=5, temperature=1, top_p=0.9, seed=seed)
        for text in (PROMPT, "The")
        for seed in (3, 4)
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == 9 + 3
    without_seed = {
        complete(client, prompt=PROMPT, max_tokens=8, temperature=1)["choices"][0]["text"] for _ in range(4)
    }
    assert len(without_seed) > 1


def test_completion_ends_before_a_stop_string(client: TestClient, chat_model: LanguageModel) -> None:
    whole = generate(chat_model, PROMPT, max_tokens=12)
    stop = whole[3:5]
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "stop": ["never", stop], "logprobs": 0}
    choice = complete(client, **body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    tokens = choice["logprobs"]["tokens"]
    data = b"".join(bytes.fromhex(token[-2:]) if token.startswith("bytes:") else token.encode() for token in tokens)
    assert data.decode(errors="replace") == choice["text"], "the tokens of the stop string are left out"
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream(client, "/v1/completions", **body)]
    assert [token for part in parts if part for token in part["tokens"]] == tokens
    chat_body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "logprobs": True}
    whole = chat(client, **chat_body)["choices"][0]["message"]["content"]
    choice = chat(client, **chat_body, stop=whole[2:4])["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(whole[2:4])]
    tokens = choice["logprobs"]["content"]
    data = bytes(byte for token in tokens for byte in token["bytes"])
    assert data.decode(errors="replace") == choice["message"]["content"]
    parts = [
        chunk["choices"][0]["logprobs"]
        for chunk in stream(client, "/v1/chat/completions", **chat_body, stop=whole[2:4])
    ]
    assert [token["token"] for part in parts if part for token in part["content"]] == [t["token"] for t in tokens]


def test_completion_scores_the_prompt(client: TestClient, chat_model: LanguageModel) -> None:
    """Echo with logprobs, which lm-eval reads, gives the log softmax of one pass over the prompt."""
    answer = complete(client, prompt=PROMPT, max_tokens=1, echo=True, logprobs=2)
    scores, ids = answer["choices"][0]["logprobs"], torch.tensor([chat_model.tokenizer.encode(PROMPT)])
    with torch.no_grad():
        decoder = chat_model.decoder
        expected = decoder.logits(decoder(decoder.embed(ids)).hidden_states).log_softmax(-1)[0]
    for position, token in enumerate(ids[0, 1:].tolist()):
        assert scores["token_logprobs"][position + 1] == pytest.approx(float(expected[position, token]), abs=1e-5)
        best = expected[position].max()
        assert max(scores["top_logprobs"][position + 1].values()) == pytest.approx(float(best), abs=1e-5)
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert len(scores["tokens"]) == 10
    assert scores["tokens"][:9] == list(PROMPT)
    assert scores["text_offset"][:10] == list(range(10))
    assert answer["choices"][0]["text"].startswith(PROMPT)


def test_completion_of_no_tokens_is_the_prompt(client: TestClient) -> None:
    answer = complete(client, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["choices"][0]["logprobs"]["tokens"] == list(PROMPT)
    assert answer["usage"]["completion_tokens"] == 0


def test_completion_names_parts_of_characters_by_their_bytes(client: TestClient) -> None:
    scores = complete(client, prompt="né", max_tokens=1, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert scores["tokens"][:3] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert scores["text_offset"][:4] == [0, 1, 1, 2]


@pytest.mark.parametrize("options", [{}, {"n": 2, "seed": 1, "temperature": 1}, {"logprobs": 1, "echo": True}])
def test_completion_stream_adds_up_to_the_answer(client: TestClient, options: dict[str, Any]) -> None:
    body = {"prompt": [PROMPT, "A"], "max_tokens": 6, **options}
    whole = complete(client, **body)
    chunks = stream(client, "/v1/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                pieces = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
                if name == "token_logprobs":  # rows of other batches add up in another order
                    pieces, values = ([value or 0.0 for value in row] for row in (pieces, values))
                    assert pieces == pytest.approx(values, abs=1e-5)
                elif name != "top_logprobs":
                    assert pieces == values, name


def test_chat_is_that_of_a_chat_session(client: TestClient, chat_model: LanguageModel) -> None:
    session = ChatSession(chat_model.decoder, chat_model.tokenizer, system="Be brief.")
    reply = session.reply("Hi", GenerationConfig(max_tokens=6)).text
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
    ]
    answer = chat(client, messages=messages, max_completion_tokens=6)
    message = {"role": "assistant", "content": reply, "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert answer["object"] == "chat.completion"


def test_chat_role_developer_is_system_for_a_template_that_does_not_know_it(
    client: TestClient, serve_with: ServeWith
) -> None:
    """OpenAI's newer clients send developer; a model was trained on the roles of its template."""
    question = {"role": "user", "content": "Hi"}
    answers = [
        chat(client, messages=[{"role": role, "content": "Be brief."}, question], max_tokens=6)
        for role in ("developer", "system")
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    template = "{% for m in messages %}{{ 'D' * 40 if m.role == 'developer' else m.content }}{% endfor %}"
    server = serve_with("chat_template.jinja", template)
    answer = chat(server, messages=[{"role": "developer", "content": "Be brief."}, question], max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 42, "a template that knows the role gets it"


def test_chat_stream_adds_up_to_the_answer(client: TestClient) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
    whole = chat(client, **body)
    chunks = stream(client, "/v1/chat/completions", **body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]


def test_chat_reports_log_probabilities(client: TestClient) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = chat(client, messages=messages, max_tokens=3, logprobs=True, top_logprobs=2)
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 3
    for token in tokens:
        assert token["logprob"] == token["top_logprobs"][0]["logprob"]  # greedy
        assert len(token["top_logprobs"]) == 2
        assert token["bytes"] == token["top_logprobs"][0]["bytes"]
    plain = chat(client, messages=messages, max_tokens=3, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in plain] == [[], [], []]


def test_chat_generates_as_much_as_fits(client: TestClient) -> None:
    for length in ({"max_tokens": 4000}, {"max_tokens": -1}, {}):  # llama.cpp's clients send -1
        answer = chat(client, messages=[{"role": "user", "content": "a" * 470}], **length)
        assert answer["usage"]["total_tokens"] == 512
        assert answer["choices"][0]["finish_reason"] == "length"
    assert complete(client, prompt="a" * 500, max_tokens=-1)["usage"]["total_tokens"] == 512


def test_chat_samples_as_the_model_publishes(chat_model: LanguageModel, serve_with: ServeWith) -> None:
    client = serve_with("generation_config.json", '{"temperature": 0.7, "top_p": 0.8}')
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 5}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text == generate(chat_model, PROMPT, max_tokens=8, temperature=0.7, top_p=0.8, seed=5)
    assert complete(client, **body)["choices"][0]["text"] == generate(chat_model, PROMPT, max_tokens=8, top_p=0.8)


def test_invalid_sampling_of_the_model_ends_the_start(serve_with: ServeWith) -> None:
    with pytest.raises(InputError, match=r"generation_config\.json: temperature=-1"):
        serve_with("generation_config.json", '{"temperature": -1}')


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"min_p": 0.97}, {"repetition_penalty": 3.0}, {"temperature": 0, "repetition_penalty": 9}]
)
def test_completion_and_chat_take_the_sampling_of_vllm(
    options: dict[str, Any], client: TestClient, chat_model: LanguageModel
) -> None:
    options = {"max_tokens": 24, "seed": 5, "temperature": 1.5} | options
    text = generate(chat_model, PROMPT, **options)
    plain = {"max_tokens": 24, "seed": 5, "temperature": options["temperature"]}
    assert text != generate(chat_model, PROMPT, **plain)
    assert complete(client, prompt=PROMPT, **plain, top_k=-1)["choices"][0]["text"] == generate(
        chat_model, PROMPT, **plain
    )
    assert complete(client, prompt=PROMPT, **options)["choices"][0]["text"] == text
    messages = [{"role": "user", "content": PROMPT}]
    reply = chat(client, messages=messages, **options)["choices"][0]["message"]["content"]
    session = ChatSession(chat_model.decoder, chat_model.tokenizer)
    assert reply == session.reply(PROMPT, GenerationConfig(**options)).text


def test_log_probabilities_leave_out_the_token_that_ends_the_text(
    chat_model: LanguageModel, serve_with: ServeWith
) -> None:
    generation = chat_model.generate(PROMPT, GenerationConfig(eos_token_ids=(), max_tokens=8))[0]
    end = next(i for i in range(2, 8) if generation.token_ids[i] not in generation.token_ids[:i])
    client = serve_with("generation_config.json", json.dumps({"eos_token_id": generation.token_ids[end]}))
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "logprobs": 0}
    answer = complete(client, **body)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", end + 1)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == end
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream(client, "/v1/completions", **body)]
    tokens = [token for part in parts if part for token in part["tokens"]]
    assert tokens == answer["choices"][0]["logprobs"]["tokens"]


def test_completion_min_tokens_puts_the_end_off(chat_model: LanguageModel, serve_with: ServeWith) -> None:
    first = chat_model.generate(PROMPT, GenerationConfig(max_tokens=1))[0].token_ids[0]
    client = serve_with("generation_config.json", json.dumps({"eos_token_id": first}))
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6}
    assert complete(client, **body)["choices"][0]["text"] == ""
    assert complete(client, **body, min_tokens=6)["usage"]["completion_tokens"] == 6
    refused = client.post("/v1/completions", json=body | {"min_tokens": 7})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


def test_min_tokens_and_ignore_eos_put_ends_off(client: TestClient, chat_model: LanguageModel) -> None:
    """Stop strings in the text of the first `min_tokens` tokens do not count, as in vLLM."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    text = complete(client, **body)["choices"][0]["text"]
    assert len(set(text)) > 2
    stopped = complete(client, **body, stop=[text[2]])
    assert stopped["usage"]["completion_tokens"] < 8
    assert complete(client, **body, stop=[text[2]], min_tokens=8)["choices"][0]["text"] == text
    first = chat_model.tokenizer.encode(text[0])
    assert complete(client, **body, stop_token_ids=first)["usage"]["completion_tokens"] == 1
    assert complete(client, **body, ignore_eos=True)["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({}, 0), ({"n": 1, "top_p": 1, "top_k": -1, "min_p": 0}, 0), ({"top_p": 0, "n": 2}, 0), ({"n": 2}, 1),
        ({"seed": 3}, 1), ({"top_p": 0.9}, 1), ({"top_k": 5}, 1), ({"min_p": 0.1}, 1), ({"n": 2, "temperature": 0}, 0),
    ],
)  # fmt: skip
def test_requests_that_only_make_sense_with_sampling_are_sampled(
    chat_model: LanguageModel, options: dict[str, Any], temperature: float
) -> None:
    served = ApiModel("tiny", chat_model)
    prompt = prepare_text(served, "a", None)
    body = CompletionRequest(prompt="a", **options)
    assert build_generation_config(served, body, prompt, 4).temperature == temperature


def test_text_parts_are_joined_by_line_ends_without_hints(client: TestClient) -> None:
    parts = [{"type": "text", "text": x, "cache_control": {"type": "ephemeral"}} for x in ("one", "two")]
    message = {"role": "user", "content": parts, "id": "msg_1", "reasoning_content": None}
    counts = [
        count_tokens(client, messages=messages) for messages in ([message], [{"role": "user", "content": "one\ntwo"}])
    ]
    assert counts[0] == counts[1]


def test_tokenize_and_detokenize(client: TestClient, chat_model: LanguageModel) -> None:
    ids = chat_model.tokenizer.encode(PROMPT)
    assert client.post("/tokenize", json={"prompt": PROMPT}).json() == {
        "count": len(ids), "max_model_len": 512, "tokens": ids
    }  # fmt: skip
    messages = [{"role": "user", "content": PROMPT}]
    count = client.post("/tokenize", json={"messages": messages}).json()["count"]
    assert count == chat(client, messages=messages, max_tokens=1)["usage"]["prompt_tokens"]
    neutral = {"continue_final_message": False, "chat_template_kwargs": {}, "return_token_strs": False}
    assert client.post("/tokenize", json={"messages": messages, **neutral}).json()["count"] == count
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": PROMPT}
    body = {"messages": messages, "chat_template_kwargs": {"note": "Be brief."}}
    assert client.post("/tokenize", json=body).json()["count"] == count + 9 == count_tokens(client, **body)
    for route, body in (("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": messages}), ("/detokenize", {})):
        assert client.post(route, json=body).status_code == 400
    assert "prompt: expected a text, not a list" in client.post("/tokenize", json={"prompt": ["a"]}).text
    assert "outside the vocabulary" in client.post("/detokenize", json={"tokens": [300]}).text
    assert "context_length_exceeded" in client.post("/tokenize", json={"prompt": "a" * 10_000}).text
    refused = client.post("/v1/completions", json={"prompt": "a", "stop_token_ids": [300]}).json()["error"]
    assert (refused["param"], "outside the vocabulary" in refused["message"]) == ("stop_token_ids", True)
    assert client.get("/version").json() == {"version": laconic.__version__}


def test_requests_with_neutral_parameters_are_accepted(client: TestClient) -> None:
    neutral = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": None, "tools": None, "tool_choice": "none",
        "response_format": {"type": "text"}, "parallel_tool_calls": True, "store": False, "n": 1, "stop": None,
        "user": "me", "seed": None, "top_p": None, "stream": False, "stream_options": None, "metadata": None,
        "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "prompt_logprobs": None,
    }  # fmt: skip
    messages = [
        {"role": "user", "content": "Hi", "type": "text"},
        {"role": "assistant", "content": "Yo", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "Ok", "name": "me"},
    ]
    chat(client, messages=messages, max_tokens=1, logprobs=False, top_logprobs=0, **neutral)
    options = {"include_usage": True, "include_obfuscation": True, "continuous_usage_stats": True}
    chunks = stream(client, "/v1/completions", prompt="a", max_tokens=3, n=2, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert (counts, counts[-1]) == (sorted(counts), 6), "as in vLLM"
    complete(client, prompt="a", max_tokens=1, best_of=1, suffix=None, top_p=0)


@pytest.mark.parametrize(
    ("body", "status", "param", "text"),
    [
        ({"model": "other"}, 404, "model", "'other' is not served"),
        ({"typical_p": 0.9}, 400, "typical_p", "unknown parameter 'typical_p'"),
        ({"top_k": -2}, 400, "top_k", "top_k: -2 given; give at least -1"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "tools is not supported"),
        ({"temperature": "hot"}, 400, "temperature", "temperature: expected a number, not 'hot'"),
        ({"max_tokens": 1.5}, 400, "max_tokens", "expected an integer, not 1.5"),
        ({"n": 65}, 400, "n", "at most 64"),
        ({"stop": ["a", ""]}, 400, "stop", "stop: expected a text or a list of texts, none of them empty"),
        ({"stop": 3}, 400, "stop", "expected a text or a list of texts"),
        ({"stop": ["a"] * 33}, 400, "stop", "stop: 33 items given; give at most 32"),
        (
            {"stream_options": {"include_usage": 1}},
            400,
            "stream_options",
            "stream_options.include_usage: expected",
        ),
        ({"stream_options": 1}, 400, "stream_options", "stream_options: expected an object, not 1"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "needs logprobs"),
        ({"messages": []}, 400, "messages", "messages: the list is empty; give at least one item"),
        ({"messages": [{"role": "boss", "content": "Hi"}]}, 400, "messages", "or 'tool', not 'boss'"),
        ({"messages": [{"role": "user"}]}, 400, "messages", "messages[0]: missing parameter 'content'"),
        (
            {"messages": [{"role": "user", "content": None}]},
            400,
            "messages",
            "messages[0].content: expected a text",
        ),
        ({"messages": [TOOL_CALL]}, 400, "messages", "messages[0]: tool_calls is not supported"),
        ({"memory": 3}, 400, "memory", "expected the id or name of a memory, or a list of these"),
        ({"memory": "letter"}, 404, "memory", "'letter' does not exist"),
        (
            {"messages": [{"role": "user", "content": "Hi", "name": 3}]},
            400,
            "messages",
            "messages[0].name: expected a",
        ),
        ({"messages": [{"role": "user", "content": "a" * 70_000}]}, 400, "messages", "70,000 characters, but"),
        ({f"k{i}": 1 for i in range(101)}, 400, None, "an object has 102 fields; send at most 100"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "type 'image_url'"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, 400, "messages", "a prompt may have at most 511"),
        ({"session": "ses_1"}, 400, "session", "see laconic serve --learn"),
        ({"prompt": "a", "n": 65}, 400, "n", "n: 65 sequences in one request; give at most 64"),
        ({"prompt": 1}, 400, "prompt", "a text, a list of texts"),
        ({"prompt": []}, 400, "prompt", "a text, a list of texts"),
        ({"prompt": ["a"] * 1025}, 400, "prompt", "prompt: 1,025 items given; give at most 1,024"),
        ({"prompt": ["a", 1]}, 400, "prompt", "a text, a list of texts"),
        ({"prompt": ""}, 400, "prompt", "prompt: empty"),
        ({"prompt": [300]}, 400, "prompt", "id 300 is outside the vocabulary of 257 ids"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "0 needs echo"),
        ({"prompt": ["a"] * 65}, 400, "prompt", "65 sequences in one request; give at most 64"),
    ],
)
def test_requests_name_what_is_wrong(
    client: TestClient, body: dict[str, Any], status: int, param: str, text: str
) -> None:
    is_chat = "prompt" not in body
    messages = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {}
    response = client.post(f"/v1/{'chat/' if is_chat else ''}completions", json=messages | body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert text in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
