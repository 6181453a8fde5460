"""Prometheus metrics of the server, under vLLM's names where vLLM has them."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from turnfold.embedded.inference.engine import Engine


class EngineCollector(Collector):
    """Reads the engine's counts at the moment of a scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        engine, counts = self._engine, self._engine.counts
        yield _gauge(
            "vllm:num_requests_running", "Requests that are generating.", engine.num_running
        )
        yield _gauge("vllm:num_requests_waiting", "Requests that wait.", engine.num_waiting)
        yield _gauge("turnfold_engine_paused", "1 while paused.", int(engine.is_paused))
        yield _counter("vllm:prompt_tokens", "Prompt tokens.", counts.prompt_tokens)
        yield _counter("vllm:generation_tokens", "Sampled tokens.", counts.generated_tokens)
        yield _counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up.", counts.prompt_tokens
        )
        yield _counter("vllm:prefix_cache_hits", "Prompt tokens reused.", counts.cached_tokens)
        yield _counter("turnfold_weight_updates", "Weight swaps.", counts.weight_updates)
        yield self._finished()

    def _finished(self) -> Metric:
        counts = self._engine.counts
        family = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=["finished_reason"]
        )
        family.add_metric(["stop"], counts.finished_stop)
        family.add_metric(["length"], counts.finished_length)
        family.add_metric(["abort"], counts.finished_abort)
        return family


def exposition(engine: Engine) -> bytes:
    """The body of GET /metrics."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return generate_latest(registry)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=value)
