"""/v1/memories: write, upload, list, name in requests, delete; what survives a restart; memories of other models."""

import shutil
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

import laconic
from laconic.compression.kv.config import KVCompressionConfig
from laconic.compression.kv.memory import KVMemory
from laconic.data.tokenizer import Tokenizer, build_byte_tokenizer
from laconic.experiment.text_models.chat_session import ChatPrefix, ChatSession
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.experiment.text_models.kv_compressor import MARK, compress_text, split_template
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from laconic.serving.http.api_error import ApiError
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.memories import read_chunks
from laconic.serving.http.memory_store import MemoryStore
from laconic.serving.http.prompts import prepare_text
from tests.runs import train_tiny_run
from tests.serving.conftest import StartServer
from tests.serving.interleaving import check_no_leaks

pytestmark = pytest.mark.usefixtures("unchecked")
TEXT = "The meeting has been moved to Thursday at noon, in the red room."
COLOURS = (("Monday", "red"), ("Friday", "green"), ("Sunday", "blue"))
CONFIG = GenerationConfig(max_tokens=6, eos_token_ids=())


def create(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/memories", json={"text": TEXT, "method": "snapkv"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def complete(client: TestClient, *memory: str, prompt: str = "When?", **body: Any) -> str:
    options: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "memory": list(memory)}
    response = client.post("/v1/completions", json=options | body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def compress(model: LanguageModel, text: str = TEXT, chat: bool = False) -> KVMemory:
    return compress_text(
        model.decoder, model.tokenizer, text, KVCompressionConfig("snapkv", keep=0.5), chat=chat
    ).memory


def generate_after(model: LanguageModel, memory: KVMemory, prompt: str = "When?") -> str:
    ids = model.tokenizer.encode(prompt, add_special_tokens=False)
    state = memory.to_cache()
    return laconic.generate(model.decoder, model.tokenizer, input_ids=[ids], state=state, config=CONFIG)[0].text


def error_of(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def test_memory_of_a_text_continues_as_generate_does(client: TestClient, chat_model: LanguageModel) -> None:
    memory = create(client, keep=0.5, name="letter")
    expected = compress(chat_model)
    assert memory["name"] == "letter"
    assert (memory["kind"], memory["method"], memory["tokens"]) == ("kv", "snapkv", len(TEXT))
    assert memory["slots"] == pytest.approx(float(expected.num_slots[0]), abs=0.1)
    assert complete(client, memory["id"]) == generate_after(chat_model, expected)
    other = create(client, keep=0.5, text="Another text, which is a bit longer than the first one.")
    both = KVMemory.concat_documents(
        chat_model.decoder.config,
        expected,
        compress(chat_model, "Another text, which is a bit longer than the first one."),
    )
    assert complete(client, memory["id"], other["id"]) == generate_after(chat_model, both)


def test_memory_is_named_by_its_id_or_a_unique_name(client: TestClient) -> None:
    first = create(client, keep=0.5, name="contract")
    assert complete(client, "contract") == complete(client, first["id"])
    second = create(client, keep=0.5, name="contract", text="Another text, which is a bit longer than the first one.")
    response = client.post("/v1/completions", json={"prompt": "When?", "memory": ["contract"]})
    message = f"2 memories have the name 'contract'; give the id of one: {first['id']}, {second['id']}"
    assert error_of(response) == (409, message)
    content = client.get(f"/v1/memories/{second['id']}/content").content
    assert client.put("/v1/memories/contract", content=content).status_code == 200
    assert complete(client, "contract") == complete(client, second["id"]) != complete(client, first["id"])
    for id in ("contract", first["id"]):
        assert client.delete(f"/v1/memories/{id}").status_code == 200
    assert complete(client, "contract") == complete(client, second["id"])
    assert client.get("/v1/memories/contract").json() == second
    assert client.get("/v1/memories/contract/content").content == content
    third = create(client, keep=0.5, name="contract")
    assert error_of(client.delete("/v1/memories/contract"))[0] == 409
    assert client.delete(f"/v1/memories/{third['id']}").status_code == 200
    assert client.delete("/v1/memories/contract").json()["id"] == second["id"]
    assert error_of(client.delete("/v1/memories/contract"))[0] == 404
    second = create(client, keep=0.5)
    taken = client.post("/v1/memories", json={"text": TEXT, "keep": 0.5, "name": second["id"]})
    assert (taken.status_code, taken.json()["error"]["param"]) == (409, "name")


def test_memory_of_a_chat_opens_the_conversation(client: TestClient, chat_model: LanguageModel) -> None:
    memory = create(client, keep=0.5, chat=True)
    expected = compress(chat_model, chat=True)
    opening = split_template(chat_model.tokenizer, MARK)[0]
    prefix = ChatPrefix(expected.to_cache(), int(expected.num_tokens[0]), opening)
    session = ChatSession(chat_model.decoder, chat_model.tokenizer, prefix=prefix)
    reply = session.reply("When?", GenerationConfig(max_tokens=6)).text
    body = {"messages": [{"role": "user", "content": "When?"}], "max_tokens": 6, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body | {"memory": [memory["id"]]}).json()
    assert answer["choices"][0]["message"]["content"] == reply
    assert complete(client, memory["id"]) == reply
    messages = [{"role": "system", "content": "Be brief."}, *body["messages"]]
    response = client.post("/v1/chat/completions", json=body | {"memory": [memory["id"]], "messages": messages})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "remove the system message" in error["message"]
    assert "--" not in error["message"], "clients have no flags"


def test_limit_of_prompts_does_not_count_the_text_of_a_memory(
    chat_model: LanguageModel, start_server: StartServer
) -> None:
    server = start_server(chat_model, max_prompt_tokens=20)
    memory = create(server, keep=0.5)
    assert memory["tokens"] > 20
    assert complete(server, memory["id"])
    body = {"prompt": "a" * 21, "memory": [memory["id"]], "max_tokens": 1}
    message = error_of(server.post("/v1/completions", json=body))[1]
    assert message == (
        "prompt: 21 tokens, but this model's maximum context length is 512 tokens, and a prompt may have at most 20 "
        "(context_length_exceeded); shorten it"
    )


def test_completion_after_a_memory_of_a_chat_ends_with_the_turn(chat_model: LanguageModel) -> None:
    """The tokenizer's eos ends it too, as in chat completions and in `LanguageModel.generate`."""
    old, config = chat_model.tokenizer, chat_model.decoder.config
    end = old.backend.id_to_token(65)
    tokenizer = Tokenizer(old.backend, {"eos_token": str(end)}, old.chat_template, old.fingerprint)
    served = ApiModel("m", LanguageModel(chat_model.decoder, tokenizer))
    memory = compress(chat_model, chat=True)
    opening = split_template(tokenizer, MARK)[0]
    prefix = ChatPrefix(memory.to_cache(), int(memory.num_tokens[0]), opening)
    prompt = prepare_text(served, "When?", prefix)
    assert prompt.config.eos_token_ids == (*config.eos_token_ids, 65)


def test_memories_survive_a_restart(
    chat_model: LanguageModel, start_server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start_server(chat_model, memory_folder=tmp_path)
    memory = create(first, keep=0.5)
    text = complete(first, memory["id"])
    (tmp_path / ".tmp-0123").write_bytes(b"what a killed server leaves behind")
    (tmp_path / "damaged.safetensors").write_bytes(b"not a memory")
    (tmp_path / "folder.safetensors").mkdir()
    shutil.copy(tmp_path / f"{memory['id']}.safetensors", tmp_path / "no id.safetensors")
    second = start_server(chat_model, memory_folder=tmp_path)
    assert second.get("/v1/memories").json() == {"object": "list", "data": [memory]}
    log = capsys.readouterr().err
    assert all(f"{tmp_path / name}.safetensors is left out: " in log for name in ("damaged", "folder", "no id"))
    assert second.get(f"/v1/memories/{memory['id']}").json() == memory
    assert complete(second, memory["id"]) == text
    assert not (tmp_path / ".tmp-0123").exists()
    assert second.delete(f"/v1/memories/{memory['id']}").json()["deleted"]
    assert error_of(second.get(f"/v1/memories/{memory['id']}"))[0] == 404
    assert not (tmp_path / f"{memory['id']}.safetensors").exists()


def test_memories_outlive_their_folder(
    chat_model: LanguageModel, start_server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "memories"
    folder.mkdir()
    server = start_server(chat_model, memory_folder=folder)
    first = create(server, keep=0.5)
    content = server.get(f"/v1/memories/{first['id']}/content").content
    shutil.rmtree(folder)
    response = server.get(f"/v1/memories/{first['id']}/content")
    assert error_of(response) == (404, f"memory {first['id']} has been deleted")
    second = create(server, keep=0.5)["id"]
    assert complete(server, second)
    shutil.rmtree(folder)
    body = {"prompt": "When?", "memory": second}
    assert error_of(server.post("/v1/completions", json=body)) == (404, f"memory {second} has been deleted")
    assert server.put("/v1/memories/letter", content=content).status_code == 200
    shutil.rmtree(folder)
    folder.write_text("a file in its place")
    for response in (
        server.post("/v1/memories", json={"text": TEXT, "method": "window"}),
        server.put("/v1/memories/other", content=content),
    ):
        assert response.json()["error"]["code"] == "disk_error"
        assert response.status_code == 503
        assert str(tmp_path) not in response.text
    assert str(folder) in capsys.readouterr().err


def test_memory_files_go_in_and_out(client: TestClient, chat_model: LanguageModel, tmp_path: Path) -> None:
    compress(chat_model).save(tmp_path / "one.safetensors")
    content = (tmp_path / "one.safetensors").read_bytes()
    memory = client.put("/v1/memories/letter", content=content).json()
    assert (memory["id"], memory["bytes"]) == ("letter", len(content))
    assert client.get("/v1/memories/letter/content").content == content
    text = complete(client, "letter")
    assert text == generate_after(chat_model, compress(chat_model))
    other = compress(chat_model, "The meeting has been moved to Friday, in the green room below.")
    other.save(tmp_path / "two.safetensors")
    assert client.put("/v1/memories/letter", content=(tmp_path / "two.safetensors").read_bytes()).status_code == 200
    assert complete(client, "letter") == generate_after(chat_model, other)
    assert client.delete("/v1/memories/letter").status_code == 200


def test_memory_of_another_model_is_a_conflict(
    client: TestClient, chat_model: LanguageModel, start_server: StartServer, tmp_path: Path
) -> None:
    config = laconic.DecoderConfig.tiny("llama", vocab_size=257, max_position_embeddings=512)
    other = LanguageModel(laconic.Decoder(config, seed=2), build_byte_tokenizer())
    compress(other).save(tmp_path / "foreign.safetensors")
    response = client.put("/v1/memories/foreign", content=(tmp_path / "foreign.safetensors").read_bytes())
    assert error_of(response)[0] == 409
    assert "another model" in error_of(response)[1]
    assert client.get("/v1/memories/foreign").status_code == 404
    server = start_server(chat_model, memory_folder=tmp_path)
    assert [memory["is_readable"] for memory in server.get("/v1/memories").json()["data"]] == [False]
    response = server.post("/v1/completions", json={"prompt": "a", "memory": ["foreign"]})
    assert error_of(response)[0] == 409
    assert response.headers["x-should-retry"] == "false"
    with pytest.raises(laconic.LaconicError, match="was written for weights"):
        start_server(chat_model, memory_files={"letter": tmp_path / "foreign.safetensors"})


def test_memories_of_the_command_line_stay(
    chat_model: LanguageModel, start_server: StartServer, tmp_path: Path
) -> None:
    compress(chat_model).save(tmp_path / "one.safetensors")
    server = start_server(chat_model, memory_files={"letter": tmp_path / "one.safetensors"})
    assert complete(server, "letter") == generate_after(chat_model, compress(chat_model))
    assert server.delete("/v1/memories/letter").status_code == 409
    assert server.put("/v1/memories/letter", content=b"x").status_code == 409
    assert (tmp_path / "one.safetensors").exists()


def test_memory_file_that_is_overwritten_does_not_change_what_was_loaded(
    chat_model: LanguageModel, start_server: StartServer, tmp_path: Path
) -> None:
    file = tmp_path / "one.safetensors"
    compress(chat_model).save(file)
    compress(chat_model, "A second letter.").save(tmp_path / "two")
    server = start_server(chat_model, memory_files={"letter": file, "second": tmp_path / "two"})
    before = complete(server, "letter")
    file.write_bytes(bytes(file.stat().st_size))  # in place, as cp and rsync --inplace do
    assert complete(server, "letter") == before
    compress(chat_model, "Another letter.").save(tmp_path / "two")
    message = error_of(server.post("/v1/completions", json={"prompt": "a", "memory": "second"}))
    assert message == (409, "memory: the file of second was replaced by another; upload it, or restart the server")


def test_memory_that_is_deleted_while_it_is_sent_stays_readable(client: TestClient) -> None:
    id = create(client, keep=0.5)["id"]
    content, store = client.get(f"/v1/memories/{id}/content").content, cast(Any, client.app).state.services.memories
    entry = store.find(id)
    file, size = store.open(entry)
    assert client.delete(f"/v1/memories/{id}").status_code == 200
    assert (b"".join(read_chunks(file)), size) == (content, len(content))
    with pytest.raises(ApiError, match="has been deleted") as error:
        store.open(entry)
    assert error.value.status_code == 404


def test_memory_that_is_uploaded_or_deleted_while_it_is_loaded(
    client: TestClient, chat_model: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    id = create(client, keep=0.5)["id"]
    store = cast(Any, client.app).state.services.memories
    load, other = store.load, compress(chat_model, "A second letter.")

    def delete_and_load(paths: list[Path]) -> Any:
        paths[0].unlink()
        return load(paths)

    gone = create(client, keep=0.25)["id"]
    with monkeypatch.context() as patch:
        patch.setattr(store, "load", delete_and_load)
        response = client.post("/v1/completions", json={"prompt": "a", "memory": gone})
    assert error_of(response) == (404, f"memory {gone} has been deleted")

    def upload_and_load(paths: list[Path]) -> Any:
        other.save(tmp_path / "new.safetensors")
        store.add(tmp_path / "new.safetensors", id)
        return load(paths)

    monkeypatch.setattr(store, "load", upload_and_load)
    assert complete(client, id) == generate_after(chat_model, other)


def test_a_memory_of_a_chat_is_not_joined(client: TestClient) -> None:
    ids = [create(client, keep=0.5)["id"], create(client, keep=0.5, chat=True)["id"]]
    status, message = error_of(client.post("/v1/completions", json={"prompt": "a", "memory": ids}))
    assert (status, message.partition(" with")[0]) == (400, f"memory: {ids[1]} cannot be joined")


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"method": "magic"}, "method", "use one of 'kvzip'"),
        ({"keep": 2.0}, "keep", "at most 1"),
        ({"keep": 0.5, "slots": 3}, "keep", "give only one of them"),
        ({"text": ""}, "text", "text: empty; give text"),
        ({"text": " \n"}, "text", "text: empty; give text"),
        ({"text": "a", "vectors": 3}, "vectors", "unknown parameter"),
    ],
)
def test_memory_names_what_is_wrong(client: TestClient, body: dict[str, Any], param: str | None, text: str) -> None:
    response = client.post("/v1/memories", json={"text": TEXT} | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert text in response.json()["error"]["message"]


def test_memory_store_has_a_limit_and_refuses_damage(
    chat_model: LanguageModel, start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(chat_model, max_memories=1, max_memory_bytes=100_000)
    memory = create(server, keep=0.5)
    assert "delete one first" in error_of(server.post("/v1/memories", json={"text": TEXT}))[1]
    content = bytearray(server.get(f"/v1/memories/{memory['id']}/content").content)
    content[-1] ^= 1
    status, message = error_of(server.put(f"/v1/memories/{memory['id']}", content=bytes(content)))
    assert status == 400
    assert f"{memory['id']} is damaged" in message
    assert "/" not in message
    assert complete(server, memory["id"]), "the old memory is still there"
    assert server.put(f"/v1/memories/{memory['id']}", content=b"x" * 100_001).status_code == 413
    assert server.put("/v1/memories/a.b", content=b"x").status_code == 400
    assert server.delete(f"/v1/memories/{memory['id']}").status_code == 200
    create(server, keep=0.5)


def test_simultaneous_uploads_stay_within_the_limit(
    chat_model: LanguageModel, start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread adds a memory, another one that has passed the first check cannot add a second."""
    server = start_server(chat_model, memory_folder=tmp_path, max_memories=1)
    store = cast(Any, server.app).state.services.memories
    for name in ("one", "two"):
        compress(chat_model).save(tmp_path / name)
    errors = list[ApiError]()

    def add_second() -> None:
        try:
            store.add(tmp_path / "two", "two")
        except ApiError as error:
            errors.append(error)

    thread = threading.Thread(target=add_second)

    def check_space(id: str | None = None) -> None:
        MemoryStore.check_space(store, id)
        if id == "one":
            thread.start()
            thread.join(0.2)

    monkeypatch.setattr(store, "check_space", check_space)
    store.add(tmp_path / "one", "one")
    thread.join()
    assert [card.id for card in store.list()] == ["one"]
    assert [error.code for error in errors] == ["too_many_memories"]


def test_deleted_memory_leaves_nothing_behind(
    chat_model: LanguageModel, start_server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """S8: neither the folder nor the caches nor the log have anything of a memory that was deleted or replaced."""
    secret = "zanzibar"
    server = start_server(chat_model, memory_folder=tmp_path)
    store = cast(Any, server.app).state.services.memories
    id = create(server, keep=0.5, text=f"{secret} {TEXT}", name=secret)["id"]
    content = server.get(f"/v1/memories/{id}/content").content
    complete(server, id, prompt=f"{secret}?")
    other = create(server, keep=0.5)["id"]
    complete(server, id, other)
    assert len(store.prefixes) == 2
    for body in ({"prompt": secret, "memory": [secret * 9]}, {"prompt": secret, secret: 1}, {"prompt": {secret: 1}}):
        assert server.post("/v1/completions", json=body).status_code >= 400
    assert server.put(f"/v1/memories/{secret}!", content=secret.encode()).status_code == 400
    replacement = server.get(f"/v1/memories/{other}/content").content
    assert server.put(f"/v1/memories/{id}", content=replacement).status_code == 200
    assert not store.prefixes, "those of the memory that was replaced are gone"
    assert server.put(f"/v1/memories/{id}", content=content).status_code == 200
    complete(server, id)
    assert server.delete(f"/v1/memories/{id}").status_code == 200
    assert not store.prefixes
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in left] == [f"{other}.safetensors"]
    assert secret.encode() in content, "the file had the name"
    assert secret.encode() not in left[0].read_bytes()
    assert secret not in server.get("/metrics").text + server.get("/v1/memories").text
    assert secret not in capsys.readouterr().err


def test_memories_of_an_autocompressor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: StartServer
) -> None:
    monkeypatch.chdir(tmp_path)
    compressor = cast(TextCompressor, laconic.load(train_tiny_run("autocompressor", tmp_path)))
    server = start_server(compressor)
    response = server.post("/v1/memories", json={"text": TEXT})
    memory = response.json()
    expected = compressor.compress([TEXT])
    assert (memory["kind"], memory["slots"]) == ("summary", float(expected.num_vectors[0]))
    text = compressor.generate(["When?"], memory=expected, config=GenerationConfig(max_tokens=6))[0].text
    assert complete(server, memory["id"]) == text
    twice = compressor.generate(
        ["When?"],
        memory=laconic.SummaryMemory.concat_segments(expected, expected),
        config=GenerationConfig(max_tokens=6),
    )
    assert complete(server, memory["id"], memory["id"]) == twice[0].text
    assert complete(server) == compressor.generate(["When?"], config=GenerationConfig(max_tokens=6))[0].text
    response = server.post("/v1/memories", json={"text": TEXT, "method": "kvzip"})
    assert error_of(response) == (400, "method: tiny is trained to compress; remove method")


@pytest.mark.medium
@pytest.mark.parametrize("num_requests", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_memories_do_not_leak_between_requests(client: TestClient, num_requests: int) -> None:
    texts = [f"{word} was the day of the meeting, and the room was {colour}. " for word, colour in COLOURS]
    ids = [create(client, text=text, keep=0.5, method="window")["id"] for text in texts]
    names: list[dict[str, Any]] = [{}, *({"memory": [id]} for id in ids), {"memory": ids[:2]}, {"memory": ids[::-1]}]
    check_no_leaks(client, names, num_requests)
