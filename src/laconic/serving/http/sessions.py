"""Routes of sessions: create, learn, fork, reset, read or replace the state, delete."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from fastapi import APIRouter, Request, Response

from laconic.errors import translate_os_errors
from laconic.experiment.text_models.read_into_state import ReadDocument
from laconic.nested.state import FastWeightState
from laconic.serving.http.schemas import EmptyRequest, LearnRequest
from laconic.serving.http.services import ServicesDependency, StrictRoute, get_deadline, run_while_connected, save_body
from laconic.serving.http.worker import run_in_thread

router = APIRouter(prefix="/v1/sessions", route_class=StrictRoute)


@router.post("")
async def create_session(services: ServicesDependency, body: EmptyRequest | None = None) -> dict[str, Any]:
    return services.sessions.create().to_card()


@router.get("")
async def list_sessions(services: ServicesDependency) -> dict[str, Any]:
    return {"object": "list", "data": [session.to_card() for session in services.sessions.sessions.values()]}


@router.get("/{id}")
async def read_session(id: str, services: ServicesDependency) -> dict[str, Any]:
    return services.sessions.get(id).to_card()


@router.post("/{id}/learn")
async def learn(id: str, body: LearnRequest, request: Request, services: ServicesDependency) -> dict[str, Any]:
    """Read a text into the fast weights of a session. Until that is done, completions see the state before it."""
    model = services.sessions.model

    with services.sessions.write(id) as session:
        state = session.state
        name = f"text {len(session.documents) + 1}"

        def read(check: Callable[[], None]) -> tuple[FastWeightState | None, ReadDocument]:
            job = model.start_reading(state)
            for _ in job.run([[model.token_stream(name, [body.text], is_new=state is None)]]):
                check()
            return job.done, job.documents[0][0]

        job = services.worker.run(read, get_deadline(request))
        session.state, document = await run_while_connected(request, job)
        session.documents = (*session.documents, document)
        return session.to_card()


@router.post("/{id}/fork")
async def fork(id: str, services: ServicesDependency, body: EmptyRequest | None = None) -> dict[str, Any]:
    """Create a session that continues from the state of another one."""
    return services.sessions.create(services.sessions.get(id)).to_card()


@router.post("/{id}/reset")
async def reset(id: str, services: ServicesDependency, body: EmptyRequest | None = None) -> dict[str, Any]:
    """Forget everything that a session has learned."""
    with services.sessions.write(id) as session:
        session.state, session.documents = None, ()
        return session.to_card()


@router.get("/{id}/state")
async def read_state(id: str, services: ServicesDependency) -> Response:
    session = services.sessions.get(id)
    content = await run_in_thread(services.sessions.save, session.state, session.documents)
    return Response(content, media_type="application/octet-stream")


@router.put("/{id}/state")
async def upload_state(id: str, request: Request, services: ServicesDependency) -> dict[str, Any]:
    """Replace the fast weights of a session with those in a file that `GET …/state` or `laconic compress` wrote.

    Other requests may change the session while the file is uploaded.
    """
    sessions = services.sessions
    sessions.get(id)  # before the upload, an unknown id is refused
    with translate_os_errors(Path(gettempdir())), TemporaryDirectory(prefix="laconic-state-") as folder:
        path = Path(folder) / "state.safetensors"
        await save_body(request, path)
        with sessions.write(id) as session:
            session.state, session.documents = await run_in_thread(sessions.load, path)
            return session.to_card()


@router.delete("/{id}")
async def delete_session(id: str, services: ServicesDependency) -> dict[str, Any]:
    services.sessions.delete(id)
    return {"id": id, "object": "session", "deleted": True}
