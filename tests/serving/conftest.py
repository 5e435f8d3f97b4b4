"""Servers on tiny models in this process, without sockets."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

import laconic
from laconic.experiment.load_model import LoadedModel
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.app import build_app
from laconic.serving.http.limits import ServerOptions
from tests.cli.conftest import TEMPLATE

StartServer = Callable[..., TestClient]
ServeWith = Callable[[str, str], TestClient]
BASE_URL = "http://127.0.0.1"
NAME = "tiny"


def start_client(stack: ExitStack, model: LoadedModel, **options: Any) -> TestClient:
    """Start a server on a model and return a client of it."""
    app = build_app(ApiModel(NAME, model, ServerOptions(**options)))
    return stack.enter_context(TestClient(app, base_url=BASE_URL, raise_server_exceptions=False))


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Return a function that starts a server on a loaded model; all end with the test."""
    with ExitStack() as stack:
        yield lambda model, **options: start_client(stack, model, **options)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama on bytes with 512 positions and a chat template."""
    from laconic.data.tokenizer import build_byte_tokenizer

    folder = tmp_path_factory.mktemp("serve") / NAME
    config = laconic.DecoderConfig.tiny("llama", vocab_size=257, max_position_embeddings=512, eos_token_ids=())
    laconic.Decoder(config, seed=1).save_pretrained(folder)
    build_byte_tokenizer().save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE + "{{ note }}")  # a variable of `chat_template_kwargs`
    return folder


@pytest.fixture(scope="session")
def chat_model(chat_folder: Path) -> LanguageModel:
    """The loaded chat model."""
    return cast(LanguageModel, laconic.load(chat_folder))


@pytest.fixture
def serve_with(chat_folder: Path, tmp_path: Path, start_server: StartServer) -> ServeWith:
    """Return a function that serves the chat model with another file of this name and content."""

    def serve(name: str, content: str) -> TestClient:
        shutil.copytree(chat_folder, tmp_path / "model")
        (tmp_path / "model" / name).write_text(content)
        return start_server(laconic.load(tmp_path / "model"))

    return serve


@pytest.fixture(scope="module")
def client(chat_model: LanguageModel) -> Iterator[TestClient]:
    """A client of a server on the chat model, for all tests of a file."""
    with ExitStack() as stack:
        yield start_client(stack, chat_model)
