"""Sessions: the fast weights of a model that learns, by id. They live as long as the server."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from laconic.errors import CorruptArtifactError
from laconic.experiment.text_models.nested_model import NestedTextModel, load_read_documents
from laconic.experiment.text_models.read_into_state import ReadDocument
from laconic.nested.state import FastWeightState, map_tensors
from laconic.serving.http.api_error import ApiError
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.memory_store import hide_path


@dataclass
class Session:
    """One session. Its state is immutable, so that a reader keeps the state from before a write."""

    id: str
    state: FastWeightState | None = None  # after all texts; None before the first
    documents: tuple[ReadDocument, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    is_writing: bool = False  # whether a request is changing the session

    def to_card(self) -> dict[str, Any]:
        """Return the session as JSON of the API, with the number of tokens that it has read."""
        tokens = 0 if self.state is None else int(self.state.position.sum())
        return {"id": self.id, "object": "session", "created": self.created, "tokens": tokens}


class SessionStore:
    """Sessions by id; only the server's event loop may call its methods, except `save` and `load`."""

    def __init__(self, served: ApiModel) -> None:
        self.served = served
        self.sessions = dict[str, Session]()

    @property
    def model(self) -> NestedTextModel:
        """The model that learns. Raises ApiError (400) for other models."""
        if not isinstance(self.served.model, NestedTextModel):
            raise ApiError(400, f"{self.served.name} does not learn; see laconic serve --learn", "session")
        return self.served.model

    def create(self, source: Session | None = None) -> Session:
        """Create a session that has learned nothing, or what another one has. Raises ApiError (400) at the limit."""
        _ = self.model  # refuses models that do not learn
        if len(self.sessions) >= self.served.options.max_sessions:
            message = f"the server has {len(self.sessions)} sessions, its limit; delete one first"
            raise ApiError(400, message, code="too_many_sessions")
        session = Session(f"ses_{secrets.token_hex(12)}")
        if source is not None:
            session.state, session.documents = source.state, source.documents
        self.sessions[session.id] = session
        return session

    def get(self, id: str) -> Session:
        """Return a session. Raises ApiError: 404 if it does not exist, 400 if the model does not learn."""
        _ = self.model  # refuses models that do not learn
        if id not in self.sessions:
            message = f"session {id[:80]!r} does not exist; POST /v1/sessions creates one"
            raise ApiError(404, message, "session", "not_found")
        return self.sessions[id]

    @contextmanager
    def write(self, id: str) -> Iterator[Session]:
        """Hold a session for writing. Raises ApiError: 409 if another request does, 404 if there is no session."""
        session = self.get(id)
        if session.is_writing:
            message = f"session {id} is being changed by another request; wait for it"
            raise ApiError(409, message, "session", "session_busy")
        session.is_writing = True
        try:
            yield session
        finally:
            session.is_writing = False

    def delete(self, id: str) -> None:
        """Delete a session. Raises ApiError: 404 if it does not exist, 409 if a request writes it."""
        with self.write(id):
            del self.sessions[id]

    def save(self, state: FastWeightState | None, documents: tuple[ReadDocument, ...]) -> bytes:
        """Return the file of a state, which `laconic generate --memory` reads."""
        model = self.model
        with TemporaryDirectory(prefix="laconic-state-") as folder:
            path = Path(folder) / "state.safetensors"
            model.save(model.model.initial_state(1) if state is None else state, path, [documents])
            return path.read_bytes()

    def load(self, path: Path) -> tuple[FastWeightState | None, tuple[ReadDocument, ...]]:
        """Return the state in a file, None if it has read nothing, and its texts."""
        try:
            state = self.model.load_memory(path)
            documents = load_read_documents(path)
        except CorruptArtifactError as error:
            raise ApiError(400, hide_path(str(error), path, "the file"), "state") from None
        rows = len(state.position)
        if rows != 1:
            raise ApiError(400, f"the file holds the states of {rows:,} texts; a session has one", "state")
        if not state.position.any():
            return None, ()
        # copies, since loaded tensors hold open their file, which is deleted after the request
        return map_tensors(state, torch.clone), tuple(documents[0] if documents else ())
