"""Setup of every test run: shape checks, blocked sockets, one thread, seeds, and the path of shared data."""

import contextlib
import gc
import importlib.util
import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import shapes

# Before anything imports laconic: check annotated shapes, on the first calls of each function in each test file, or on
# all calls if slow tests run too.
shapes.install(
    *(
        f"laconic.{name}"
        for name in ("batches", "interfaces", "models", "generation", "latent", "compression", "nested")
    )
)

os.environ["HF_HUB_OFFLINE"] = "1"  # child processes too
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("LACONIC_MODELS", str(Path.home() / ".cache/laconic/models"))
CACHE = tempfile.TemporaryDirectory(prefix="laconic-cache-")  # tests do not see what earlier runs cached
os.environ["LACONIC_CACHE"] = CACHE.name

# Bytecode is kept whatever the environment says: to rewrite asserts anew takes ten seconds, to compile for a child one.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import jaxtyping  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from laconic import console  # noqa: E402
from tests.tiny_recipes import TINY_RECIPE  # noqa: E402

REPO = Path(__file__).resolve().parent.parent
VERIFY = REPO / "tests" / "verification"
LLAMA_VARIANTS = {"mistral", "qwen2"}
CI = bool(os.environ.get("CI"))

settings.register_profile(
    "laconic",
    deadline=None,
    derandomize=CI,
    max_examples=25,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("laconic")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of cores, or one more with tests that wait for child processes, sockets and deadlines."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if "not medium" in config.option.markexpr else cores + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-docs", action="store_true", help="write the tables in docs/ that tests make")


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(20_000, 20, 50)  # the default of 700 objects costs 4% of the time
    torch.set_num_threads(1)
    console.FIRST_LINE_AFTER = 3600.0  # what a command prints must not depend on the speed of the machine
    shapes.CHECK_ALL = "slow or not slow" in config.option.markexpr
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores, and tests of signals send
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background commands
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = os.fstat  # tests of power cuts check the order of calls; nothing needs to reach the disk
    block_sockets()


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_llama_variant(item):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


def is_llama_variant(item: pytest.Item) -> bool:
    """Return whether a test repeats for Mistral or Qwen 2 what it checks for Llama.

    They are Llama with a window and with biases, and tests/verification compares them with transformers.
    """
    callspec = getattr(item, "callspec", None)
    if callspec is None or VERIFY in item.path.parents:
        return False
    return bool(LLAMA_VARIANTS & {value for value in callspec.params.values() if isinstance(value, str)})


def missing(what: str) -> None:
    """Skip a test whose requirements this machine lacks; fail it in CI."""
    if CI:
        pytest.fail(f"{what}; a test that cannot run fails in CI")
    else:
        pytest.skip(what)


def find_shared() -> Path | None:
    """Return the folder of models and data beside the checkout, or LACONIC_DATA; None if there is none."""
    folder = Path(os.environ.get("LACONIC_DATA") or REPO.parent / "shared").resolve()
    return folder if (folder / "models").is_dir() else None


def shared_dir() -> Path:
    """Return the folder of models and data, or call `missing`."""
    folder = find_shared()
    if folder is None:
        missing("needs shared data: ../shared beside the checkout, or LACONIC_DATA")
    assert folder is not None
    return folder


def needs(module: str) -> None:
    """Call `missing` if an optional dependency is not installed."""
    if importlib.util.find_spec(module) is None:
        missing(f"needs {module}: pip install '.[hf]'")


@pytest.fixture
def shared() -> Path:
    return shared_dir()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, for tests marked `real`."""
    from laconic.models.checkpoints.named_models import NAMED_MODELS

    folder = NAMED_MODELS["smollm2"].folder()
    if not (folder / "model.safetensors").is_file():
        missing("needs SmolLM2-135M-Instruct: make model")
    return folder


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # faster than torch.manual_seed, which walks the stack


@pytest.fixture(autouse=True, scope="module")
def enable_shape_checks() -> None:
    """Make the shape checks of a file independent of the files before it."""
    shapes.enable_all()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Turn off shape checks, for files that repeat calls whose shapes other files check."""
    with shape_checks_off():
        yield


@contextlib.contextmanager
def shape_checks_off() -> Iterator[None]:
    """Turn off shape checks within a block."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


class NetworkError(RuntimeError):
    """A test tried to reach the network."""


LOOPBACK = {"open": False}


@pytest.fixture(autouse=True)
def loopback(request: pytest.FixtureRequest) -> Iterator[None]:
    LOOPBACK["open"] = request.node.get_closest_marker("loopback") is not None
    yield
    LOOPBACK["open"] = False


def block_sockets() -> None:
    """connect and name look-ups raise, but of Unix sockets; a test marked `loopback` may use this machine's network."""
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def check(host: Any) -> None:
        here = host in (None, "::1", "localhost") or str(host).startswith("127.")
        if not (str(host).startswith("/") or (LOOPBACK["open"] and here)):
            raise NetworkError(
                f"tests run without network, asked for {host!r}; mark the test loopback if it stays here"
            )

    def host_of(address: Any) -> Any:
        return address[0] if isinstance(address, tuple) else address

    def guarded_connect(self: socket.socket, address: Any) -> None:
        check(host_of(address))
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        check(host_of(address))
        return connect_ex(self, address)

    def guarded_getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
        check(host)
        return getaddrinfo(host, *rest, **named)

    def refused(*rest: Any) -> Any:
        raise NetworkError(f"tests run without network, asked for {rest!r}")

    socket.socket.connect = guarded_connect
    socket.socket.connect_ex = guarded_connect_ex
    socket.getaddrinfo = guarded_getaddrinfo
    for name in ("gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
        setattr(socket, name, refused)


class CliResult(NamedTuple):
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str


RunCli = Callable[..., CliResult]


def call_cli(*args: object) -> int:
    """Run `laconic` with arguments in this process; return the exit code."""
    from laconic.cli.main import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["laconic", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Run `laconic` with arguments, in this process and the current directory."""
    return lambda *args: CliResult(call_cli(*args), *capsys.readouterr())


def check_refused(result: CliResult, code: int, message: str) -> None:
    """Check that a command ended with a code and printed a message."""
    assert result.code == code, result.err
    assert message in result.err


@pytest.fixture
def tiny_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of a tiny KaVa, as tiny.toml in an empty directory, which becomes the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    return tmp_path / "tiny.toml"
