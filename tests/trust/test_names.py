"""S3: 500 drawn names lead out of no folder, and requests that name them read and change nothing outside."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

import laconic
from laconic.errors import UnsafeFileError, UsageError
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.storage.file_names import resolve_inside
from laconic.storage.run_dir import check_name
from tests.serving.conftest import start_client
from tests.trust.hostile_names import draw_name
from tests.trust.limits import LIMITS

pytestmark = pytest.mark.usefixtures("unchecked")
NAMES = [draw_name(number) for number in range(LIMITS["names"])]
SECRET = "the secret outside"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    return tmp_path / "root"


def test_file_names_lead_out_of_no_folder(root: Path) -> None:
    refused = 0
    for name in (*NAMES, *(f"link/{name}" for name in NAMES)):
        try:
            assert resolve_inside(root, name).is_relative_to(root), repr(name)
        except UnsafeFileError:
            refused += 1
    assert refused > len(NAMES)


def test_run_names_lead_out_of_no_folder(root: Path) -> None:
    for name in NAMES:
        with suppress(UsageError):
            assert (root / check_name(name)).resolve().parent == root, repr(name)


@pytest.mark.medium
@pytest.mark.parametrize("names", [NAMES[::20], pytest.param(NAMES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_ids_in_requests_lead_out_of_no_folder(root: Path, names: Sequence[str]) -> None:
    with ExitStack() as stack:
        client = start_client(stack, cast(LanguageModel, laconic.load("stories260k")), memory_folder=root)
        check_requests(root, client, names)


def check_requests(root: Path, server: TestClient, names: Sequence[str]) -> None:
    for name in names:
        for method in ("GET", "PUT", "DELETE"):
            for end in ("", "/content"):
                response = server.request(method, f"/v1/memories/{quote(name, safe='')}{end}", content=b"x")
                assert 400 <= response.status_code < 500 or (method, end) == ("GET", ""), repr(name)
                assert SECRET not in response.text
        body = {"prompt": "a", "max_tokens": 1, "memory": [name]}
        assert server.post("/v1/completions", json=body).status_code == 404, repr(name)
    assert [path.name for path in sorted(root.parent.iterdir())] == ["root", "secret"]
    assert (root.parent / "secret").read_text() == SECRET
    assert {path.name for path in root.iterdir()} <= {"link", "lock", "lock.json"}
