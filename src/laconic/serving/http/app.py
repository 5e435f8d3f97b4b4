"""The FastAPI application of the server: routes, error handlers, middleware, and the engine's life."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from laconic import __version__
from laconic.serving.engine import Engine
from laconic.serving.http import completions, memories, sessions, tokenization
from laconic.serving.http.api_error import ApiError, install_error_handlers
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.guard import RequestGuard
from laconic.serving.http.limits import Deadlines, ServerLimits
from laconic.serving.http.memory_store import MemoryStore
from laconic.serving.http.metrics import ServerMetrics
from laconic.serving.http.schemas import ModelCard
from laconic.serving.http.services import Services, ServicesDependency
from laconic.serving.http.session_store import SessionStore
from laconic.serving.http.worker import Worker

router = APIRouter()


@router.get("/health")
async def check_health(services: ServicesDependency) -> dict[str, str]:
    """Answer while the engine runs."""
    if not services.engine.thread.is_alive():
        raise ApiError(503, "the engine has stopped; restart the server")
    return {"status": "ok"}


@router.get("/metrics")
def read_metrics(services: ServicesDependency) -> Response:
    """Return the metrics in Prometheus' format."""
    return Response(services.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def read_version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/v1/models")
async def list_models(services: ServicesDependency) -> dict[str, Any]:
    return {"object": "list", "data": [describe_model(services)]}


@router.get("/v1/models/{name:path}")
async def read_model(name: str, services: ServicesDependency) -> ModelCard:
    """Return the served model by its name."""
    services.check_model(name)
    return describe_model(services)


def describe_model(services: Services) -> ModelCard:
    return ModelCard(id=services.served.name, created=services.created, max_model_len=services.served.context_size)


def build_app(
    served: ApiModel,
    *,
    limits: ServerLimits | None = None,
    api_key: str | None = None,
    allowed_origins: Sequence[str] = (),
    log_requests: bool = False,
    memory_folder: Path | None = None,
    memory_files: Mapping[str, Path] | None = None,
) -> FastAPI:
    """Build the application. Its engine runs between start-up and shutdown.

    Args:
        served: The model.
        limits: Limits of requests.
        api_key: Key that requests must have.
        allowed_origins: Origins whose web pages may send requests; "*": all.
        log_requests: Whether to log a line for each request.
        memory_folder: Folder of the memories; by default they are lost when the server ends.
        memory_files: Memory files that requests may name, by name.

    Raises:
        CorruptArtifactError: If a memory file is damaged or belongs to another model.
        InputError: If generation_config.json has an invalid sampling option.
        UsageError: If a name of a memory file is invalid, or the model reads no memories.

    Examples:
        >>> import laconic
        >>> from laconic.serving.http.api_model import ApiModel
        >>> from laconic.serving.http.app import build_app
        >>> app = build_app(ApiModel("stories", laconic.load("stories260k")))
        >>> app.title
        'laconic'
    """
    _ = served.published_sampling  # read now: an error in it is not the client's, and its message has a path
    limits = limits or ServerLimits()
    engine = Engine(served.model, max_batch_size=limits.max_batch_size, max_queue=limits.max_queue)
    metrics, worker = ServerMetrics(engine.stats), Worker()
    temporary = TemporaryDirectory(prefix="laconic-memories-") if memory_folder is None else None
    folder = Path(temporary.name) if temporary is not None else memory_folder
    assert folder is not None
    store = MemoryStore(served, engine.served.decoder, folder, limits.max_memories, memory_files or {})

    @asynccontextmanager
    async def run_engine(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        worker.close()
        engine.close()
        if temporary is not None:
            temporary.cleanup()

    app = FastAPI(
        title="laconic", lifespan=run_engine, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.services = Services(
        served, engine, limits, store, SessionStore(served, limits.max_sessions), metrics, worker
    )
    deadlines = app.state.deadlines = Deadlines(limits.max_seconds)
    routers = (router, completions.router, memories.router, sessions.router, tokenization.router)
    install_error_handlers(app, [route for r in routers for route in r.routes if isinstance(route, APIRoute)])
    app.add_middleware(  # pyright: ignore
        RequestGuard,
        limits=limits,
        deadlines=deadlines,
        metrics=metrics,
        api_key=api_key,
        allowed_origins=allowed_origins,
        log_requests=log_requests,
    )
    if allowed_origins:
        app.add_middleware(  # around the guard, because browsers send no key with a preflight request
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
            allow_private_network=True,  # public pages that ask a server on this machine
        )
    for routes in routers:
        app.include_router(routes)
    return app
