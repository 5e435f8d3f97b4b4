"""The FastAPI application of the server: routes, error handlers, middleware, and the engine's life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
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
from laconic.serving.http.limits import Deadlines
from laconic.serving.http.memory_store import MemoryStore
from laconic.serving.http.metrics import ServerMetrics
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
    return Response(services.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def read_version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/v1/models")
@router.get("/v1/models/")
async def list_models(services: ServicesDependency) -> dict[str, Any]:
    return {"object": "list", "data": [describe_model(services)]}


@router.get("/v1/models/{name:path}")
async def read_model(name: str, services: ServicesDependency) -> dict[str, Any]:
    services.check_model(name)
    return describe_model(services)


def describe_model(services: Services) -> dict[str, Any]:
    card = {"id": services.served.name, "object": "model", "created": services.created, "owned_by": "laconic"}
    return card | {"max_model_len": services.served.context_size}


def build_app(served: ApiModel) -> FastAPI:
    """Build the application, whose engine runs between start-up and shutdown; the errors are those of `MemoryStore`."""
    _ = served.published_sampling  # read now: an error in it is not the client's, and its message has a path
    options = served.options
    engine = Engine(
        served.model,
        max_batch_size=options.max_batch_size,
        max_queue=options.max_queue,
        prefix_cache_bytes=options.prefix_cache_bytes,
    )
    metrics = ServerMetrics(engine.stats)
    worker = Worker()
    folder = options.memory_folder
    temporary = nullcontext()
    if folder is None:
        temporary = TemporaryDirectory(prefix="laconic-memories-")
        folder = Path(temporary.name)
    store = MemoryStore(served, engine.served.decoder, folder)

    @asynccontextmanager
    async def run_engine(app: FastAPI) -> AsyncIterator[None]:
        with temporary:
            engine.start()
            yield
            worker.close()
            engine.close()

    app = FastAPI(
        title="laconic", lifespan=run_engine, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.services = Services(served, engine, store, SessionStore(served), metrics, worker)
    deadlines = app.state.deadlines = Deadlines(options.max_seconds)
    routers = (router, completions.router, memories.router, sessions.router, tokenization.router)
    install_error_handlers(app, [route for r in routers for route in r.routes if isinstance(route, APIRoute)])
    app.add_middleware(RequestGuard, options=options, deadlines=deadlines, metrics=metrics)  # pyright: ignore
    if options.allowed_origins:
        app.add_middleware(  # around the guard, because browsers send no key with a preflight request
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
            allow_private_network=True,  # public pages that ask a server on this machine
        )
    for routes in routers:
        app.include_router(routes)
    return app
