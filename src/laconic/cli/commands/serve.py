"""`laconic serve`: an OpenAI-compatible HTTP server for a checkpoint or a run."""

import math
import os
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from laconic.cli.arguments import OptionalFloat, OptionalInt, OptionalPath, OptionalStr, refuse_flags
from laconic.cli.files import check_memories, check_model
from laconic.cli.model_flags import ModelFlags, import_with_status
from laconic.errors import UsageError
from laconic.serving.listener import bind_socket

if TYPE_CHECKING:
    from laconic.experiment.load_model import LoadedModel

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\sA-Z]+")


@dataclass(frozen=True)
class ServeCommand(ModelFlags):
    """Serve a model over HTTP, with the API of OpenAI: chat completions, completions, models; memories and sessions.

    Ctrl-C or SIGTERM ends the server once the running requests are answered, or after --shutdown-seconds.

    Example: laconic serve smollm2

    Example: laconic serve runs/kava --port 8080 --memory-dir memories
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """model (folder in Hugging Face layout, .gguf, hub name, or smollm2), or a run of laconic train"""
    host: str = "127.0.0.1"
    """address to listen on; any other than loopback needs --api-key"""
    port: int = 8000
    """port; 0 chooses a free one"""
    api_key: OptionalStr = None
    """key that requests must send (default: the variable LACONIC_API_KEY, which other users cannot see)"""
    served_model_name: OptionalStr = None
    """name of the model in requests (default: the last part of its path, or its name on the hub)"""
    allowed_origin: UseAppendAction[tuple[str, ...]] = ()
    """origin whose web pages may send requests (CORS), such as https://app.example; *: every origin"""
    log_requests: bool = False
    """log a line for each request: id, client, method, path, status, seconds"""
    memory: UseAppendAction[tuple[str, ...]] = ()
    """NAME=FILE: memory written by laconic compress, which requests name as memory: ["NAME"]"""
    memory_dir: OptionalPath = None
    """folder that keeps the memories of requests (default: they are lost at the end)"""
    learn: bool = False
    """plain model: let its MLPs learn the texts of sessions, without training; each session then has weights of its
    own, as many bytes as the MLPs have"""
    inner_lr: OptionalFloat = None
    """with --learn: learning rate of the MLPs (default: 0.1, from which on almost every step is clipped)"""
    jacobi_tolerance: OptionalFloat = None
    """for runs of pccot and kava: end the Jacobi iterations of a question once the latents' relative change is below
    this (default: 0, run all)"""
    max_batch_size: int = 16
    """sequences that are decoded together"""
    max_queue: int = 64
    """largest number of waiting sequences, and of sequences in one request; further requests get status 429"""
    max_prompt_tokens: OptionalInt = None
    """largest number of tokens in a prompt, else status 400 (default: the model's context)"""
    max_generated_tokens: OptionalInt = None
    """largest number of tokens that a request gets, even if its max_tokens is larger (default: what fits into the
    context)"""
    max_seconds: float = 600.0
    """time limit of a request: generation then ends with finish_reason "length", anything else with status 408"""
    shutdown_seconds: float = 30.0
    """seconds that running requests have to finish after Ctrl-C or SIGTERM"""
    max_body_bytes: int = 8 * 2**20
    """maximum bytes of a JSON body; a larger one gets status 413"""
    max_memory_bytes: int = 512 * 2**20
    """maximum bytes of an uploaded memory or state; a larger one gets status 413"""
    prefix_cache_bytes: int = 2**30
    """bytes of keys and values of earlier prompts and answers, from which prompts that begin in the same way continue
    without reading that part again; 0 turns it off"""
    max_memories: int = 256
    """maximum number of stored memories; one more gets status 400"""
    max_sessions: int = 64
    """maximum number of sessions of a model that learns; one more gets status 400"""

    @property
    def limits(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name.startswith("max_")}

    def run(self) -> int:
        key = os.environ.get("LACONIC_API_KEY") or None if self.api_key is None else self.api_key
        if key is not None and not key.strip():
            raise UsageError("--api-key is empty; give a key, or remove --api-key")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port {self.port}: must be 0 to 65535")
        for name, value in self.limits.items():
            if value is not None and not value > 0:
                raise UsageError(f"--{name.replace('_', '-')} {value:g}: give a number above 0")
        if self.prefix_cache_bytes < 0:
            raise UsageError(f"--prefix-cache-bytes {self.prefix_cache_bytes}: give 0 or more")
        if not 0 <= self.shutdown_seconds < math.inf:
            raise UsageError(f"--shutdown-seconds {self.shutdown_seconds:g}: give 0 or more")
        for origin in self.allowed_origin:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise UsageError(f"--allowed-origin {origin}: expected scheme://host[:port] in lower case, or *")
        memory_files = dict(map(parse_memory, self.memory))
        check_memories(memory_files.values())
        if self.learn:
            refuse_flags(self, ("quantize", "jacobi_tolerance", "memory"), "not available with --learn")
        else:
            refuse_flags(self, ("inner_lr",), "needs --learn")
        check_model(self.model)
        with bind_socket(self.host, self.port, key) as listener:
            import_with_status(f"loading {self.model}", "laconic.serving.http.server")
            self.serve(listener, key, memory_files)
        return 0

    def serve(self, listener: socket.socket, api_key: str | None, memory_files: dict[str, Path]) -> None:
        from laconic.serving.http.api_model import choose_model_name
        from laconic.serving.http.limits import ServerOptions
        from laconic.serving.http.server import serve

        def load() -> "LoadedModel":
            if self.learn:
                from laconic.cli.nested import load_model

                return load_model(self, None)
            loaded = self.load_model(self.model)
            return loaded if self.jacobi_tolerance is None else set_tolerance(loaded, self.jacobi_tolerance)

        options = ServerOptions(
            api_key=api_key,
            allowed_origins=self.allowed_origin,
            log_requests=self.log_requests,
            shutdown_seconds=self.shutdown_seconds,
            memory_folder=self.memory_dir,
            memory_files=memory_files,
            prefix_cache_bytes=self.prefix_cache_bytes,
            **self.limits,
        )
        serve(self.served_model_name or choose_model_name(self.model), load, options, listener)


def set_tolerance(model: "LoadedModel", tolerance: float) -> "LoadedModel":
    """Return a run with a tolerance of its Jacobi iterations; raise `UsageError` (2) for a model without them."""
    import laconic

    if not isinstance(model, laconic.Reasoner):
        raise UsageError(f"--jacobi-tolerance {tolerance}: this model has no Jacobi iterations; remove it")
    return replace(model, jacobi_tolerance=tolerance)


def parse_memory(text: str) -> tuple[str, Path]:
    name, equals, file = text.partition("=")
    if not equals or not file:
        raise UsageError(f"--memory {text}: expected NAME=FILE")
    return name, Path(file)
