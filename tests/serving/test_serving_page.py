"""docs/serving.md names every field that completions take, ignore or refuse."""

import re

from laconic.serving.http.schemas import (
    IGNORED_FIELDS,
    UNSUPPORTED_PARAMETERS,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
)
from tests.conftest import REPO


def test_serving_page_names_every_field() -> None:
    page = (REPO / "docs/serving.md").read_text(encoding="utf-8")
    names = {name for model in (ChatRequest, CompletionRequest, StreamOptions) for name in model.model_fields}
    named = {word for span in re.findall(r"`([\w.]+)`", page) for word in span.split(".")}
    assert sorted((names | UNSUPPORTED_PARAMETERS.keys() | set(IGNORED_FIELDS)) - named) == []
