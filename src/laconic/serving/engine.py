"""Continuous batching: requests join and leave between decode steps, and long prompts are read in chunks.

One thread runs the model. Every step reads one id of each decoding row and a chunk of the prompts, whose length is
limited so that the decoding rows do not wait too long. Latents are read like a prompt, once per Jacobi iteration.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from laconic.errors import LaconicError
from laconic.serving.requests import EngineRequest
from laconic.serving.scheduler import ChunkSizer, share_positions
from laconic.serving.sequence import OnEvent, RunningSequence
from laconic.serving.served_model import ServableModel, ServedModel

StepInput = tuple[RunningSequence, Tensor]  # ids [n] or embeddings [n, D] that a sequence reads in a step


class QueueFullError(LaconicError):
    """The engine's queue is full."""


class EngineClosedError(LaconicError):
    """The engine has been closed."""


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine; `kv_bytes` are those of the keys and values, or fast weights, of all running requests."""

    num_running: int = 0
    num_waiting: int = 0
    kv_bytes: int = 0


class Engine:
    """Generate for many requests at a time with one model.

    Rows do not depend on one another: each request gets the tokens that it would get alone.

    The model's weights are never written, so other threads may read texts with it. A step reads at most
    `prefill_chunk_size` prompt positions, and no more than the running requests can wait for. Prompts that begin as an
    earlier sequence take its keys and values from a cache of at most `prefix_cache_bytes`.
    """

    def __init__(
        self,
        model: ServableModel,
        *,
        max_batch_size: int = 16,
        max_queue: int = 64,
        prefill_chunk_size: int = 512,
        prefix_cache_bytes: int = 0,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_queue = max_queue
        self.served = ServedModel(model, prefix_cache_bytes)
        self.chunk_sizer = ChunkSizer(prefill_chunk_size)
        self.changed = threading.Condition()  # guards what follows
        self.waiting = deque[RunningSequence]()
        self.cancelled = set[int]()
        self.is_closed = False
        self.ids = count(1)
        self.num_steps = 0
        self.running: list[RunningSequence] = []  # changed by the engine's thread alone
        self.thread = threading.Thread(target=self.run, name="laconic-engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def submit(self, request: EngineRequest, on_event: OnEvent) -> int:
        """Queue a request, and return its id, for `cancel`. Raises QueueFullError, and EngineClosedError after `close`.

        The engine's thread calls `on_event` with each event; it must return quickly, and if it raises, the request is
        dropped.
        """
        sequence = RunningSequence(next(self.ids), request, on_event)
        with self.changed:
            if self.is_closed:
                raise EngineClosedError("the engine accepts no more requests; start another")
            if len(self.running) + len(self.waiting) >= self.max_batch_size + self.max_queue:
                raise QueueFullError(f"{len(self.waiting)} sequences are waiting; try again later")
            self.waiting.append(sequence)
            self.changed.notify_all()
        return sequence.id

    def cancel(self, id: int) -> None:
        """End a request before the next step with a `FinishEvent`; unknown and finished ids are ignored."""
        with self.changed:
            self.cancelled.add(id)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        if self.thread.is_alive():
            self.thread.join()

    def stats(self) -> EngineStats:
        with self.changed:
            num_bytes = sum(s.row.num_bytes for s in self.running if s.row is not None)
            return EngineStats(len(self.running), len(self.waiting), num_bytes)

    def run(self) -> None:
        """Serve requests until the engine is closed; the body of its thread."""
        while not self.is_closed:
            with self.changed:
                self.changed.wait_for(lambda: self.running or self.waiting or self.cancelled or self.is_closed)
            try:
                self.run_once()
            except Exception as error:  # no request may wait for a thread that has ended
                for sequence in self.running:
                    if not sequence.has_ended:
                        sequence.fail(error)
                self.drop_ended()
        with self.changed:
            self.cancelled.update(s.id for s in (*self.running, *self.waiting))
            self.take_changes()

    @torch.inference_mode()
    def run_once(self) -> bool:
        """Let requests join and leave, and make one step; return whether there was anything to do."""
        with self.changed:
            has_work = bool(self.running or self.waiting or self.cancelled)
            arrivals = self.take_changes()
        for sequence in arrivals:
            with sequence.fail_on_error():
                self.served.start(sequence)
        self.drop_ended()
        if self.running:
            self.step()
        return has_work

    def take_changes(self) -> list[RunningSequence]:
        """Remove cancelled requests and return those that begin to run; the caller holds the lock."""
        for sequence in (*self.running, *self.waiting):
            if sequence.id in self.cancelled:
                sequence.finish("cancelled")
        self.cancelled.clear()
        self.waiting = deque(s for s in self.waiting if not s.has_ended)
        self.drop_ended()
        arrivals = self.choose_arrivals()
        ids = {s.id for s in arrivals}
        self.waiting = deque(s for s in self.waiting if s.id not in ids)
        self.running += arrivals
        return arrivals

    def choose_arrivals(self) -> list[RunningSequence]:
        """Return the waiting sequences that begin to run; one whose prompt is being read waits for the prefix cache."""
        arrivals = list[RunningSequence]()
        cache = self.served.prefix_cache
        reading = {s.prompt_hash for s in self.running if s.next_id is None and s.is_shareable}
        for sequence in self.waiting:
            if len(self.running) + len(arrivals) == self.max_batch_size:
                break
            ids = sequence.shared_ids
            if cache.can_hold(ids):
                if sequence.prompt_hash in reading:
                    continue
                if cache.find(ids)[1] < len(ids):
                    reading.add(sequence.prompt_hash)
            arrivals.append(sequence)
        return arrivals

    def drop_ended(self) -> None:
        """Remove the sequences that have ended, and wake those who wait for a change."""
        for sequence in self.running:
            if sequence.has_ended:
                self.served.keep_prefix(sequence)
        with self.changed:
            self.running = [s for s in self.running if not s.has_ended]
            self.changed.notify_all()

    def step(self) -> None:
        """Read the last ids of decoding rows and chunks of prompts in one pass; choose the next ids."""
        start = time.perf_counter()
        decoding = [s for s in self.running if s.next_id is not None]
        prefilling = [s for s in self.running if s.next_id is None]
        ids = torch.tensor([s.next_id for s in decoding], dtype=torch.long, device=self.served.decoder.device).split(1)
        step_inputs = list(zip(decoding, ids, strict=False))
        shares = share_positions([s.num_unread_prompt for s in prefilling], self.chunk_sizer.choose(len(decoding)))
        shares = [s.num_unread_prompt if s.is_read_at_once else n for s, n in zip(prefilling, shares, strict=True)]
        step_inputs += [(s, s.take_prompt(n)) for s, n in zip(prefilling, shares, strict=True) if n]
        outputs = [x for x in map(self.take_output, step_inputs, self.forward(step_inputs)) if x is not None]
        if outputs:
            logits = self.served.executor.logits(torch.cat([hidden for _, hidden in outputs]))
            for (sequence, _), row_logits in zip(outputs, logits.split(1), strict=True):
                with sequence.fail_on_error():
                    sequence.choose_next(row_logits)
        num_positions = sum(len(inputs) for _, inputs in step_inputs[len(decoding) :])
        self.chunk_sizer.record(time.perf_counter() - start, len(decoding), num_positions)
        self.num_steps += 1
        self.drop_ended()

    def forward(self, step_inputs: Sequence[StepInput]) -> Sequence[Tensor | Exception]:
        """Run the model; every row gets an error that cannot be attributed to one row."""
        try:
            rows: list[Any] = [(s.row, inputs) for s, inputs in step_inputs]
            return self.served.executor.forward(rows)
        except Exception as error:  # out of memory, for example: the engine goes on with other requests
            self.served.prefix_cache.entries.clear()
            return [error] * len(step_inputs)

    def take_output(self, step_input: StepInput, hidden: Tensor | Exception) -> tuple[RunningSequence, Tensor] | None:
        """Take the hidden states that a sequence gets; return the last one [1, D] if an id is to be chosen from it."""
        sequence, inputs = step_input
        with sequence.fail_on_error():
            if isinstance(hidden, Exception):
                raise hidden
            if sequence.next_id is None:
                if sequence.request.with_prompt_logprobs:
                    sequence.score_prompt(len(inputs), hidden, self.served.executor.logits)
                if sequence.thinking is not None:
                    sequence.continue_thinking(hidden)
                if sequence.num_unread_prompt:
                    return None
                sequence.end_prompt()
                self.served.keep_prefix(sequence)
            return sequence, hidden[-1:]
        return None
