"""Prometheus metrics of the server."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from laconic.serving.engine import EngineStats

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class ServerMetrics:
    """Counters and histograms of one server, and gauges that ask the engine."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "laconic_requests", "HTTP requests by route and status", ("route", "status"), registry=registry
        )
        self.prompt_tokens = Counter("laconic_prompt_tokens", "Prompt tokens of finished sequences", registry=registry)
        self.cached_tokens = Counter(
            "laconic_cached_prompt_tokens", "Prompt tokens taken from the prefix cache", registry=registry
        )
        self.generated_tokens = Counter("laconic_generated_tokens", "Generated tokens", registry=registry)
        self.latent_passes = Counter("laconic_latent_passes", "Decoder passes that compute latents", registry=registry)
        self.time_to_first_token = Histogram(
            "laconic_time_to_first_token_seconds",
            "Time from a request to the first token of a sequence",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "laconic_inter_token_seconds",
            "Time between two tokens of a sequence",
            buckets=INTER_TOKEN_BUCKETS,
            registry=registry,
        )
        gauges: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
            "laconic_batch_size": ("Sequences that are decoded together", lambda now: now.num_running),
            "laconic_queue_length": ("Sequences that wait", lambda now: now.num_waiting),
            "laconic_kv_cache_bytes": ("Bytes of the KV caches in use", lambda now: now.kv_bytes),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=registry).set_function(lambda read=read: read(stats()))

    def render(self) -> bytes:
        return generate_latest(self.registry)
