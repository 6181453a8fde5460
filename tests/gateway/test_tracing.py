"""Spans of a model call, as an OpenTelemetry exporter gets them."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from turnfold.gateway import tracing
from turnfold.gateway.backends import replicas
from turnfold.gateway.testing import Reply

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What is exported; the process-wide provider is left as it is."""
    provider, found = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(tracing, "tracer", provider.get_tracer("test"))
    yield found
    provider.shutdown()


async def call(gateway: Any, **body: Any) -> Any:
    rollout = await gateway.start_rollout()
    return await gateway.http.post(
        f"{rollout.base_url}/chat/completions",
        headers={**rollout.headers, "traceparent": TRACEPARENT},
        json={"model": "m", "messages": [{"role": "user", "content": "my secret"}], **body},
    )


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_steps_of_a_call_are_spans_of_the_trace_of_the_agent(
    gateway: Any, exporter: InMemorySpanExporter, stream: bool
) -> None:
    gateway.engine.script(gateway.says("hello"))
    assert (await call(gateway, stream=stream)).status_code == 200
    spans = by_name(exporter)
    assert set(spans) == {"model_call", "plan_prompt", "sample", "engine.generate", "log.append"}
    assert {trace.format_trace_id(span.context.trace_id) for span in spans.values()} == {TRACE_ID}
    parents = {
        "plan_prompt": "model_call",
        "sample": "model_call",
        "log.append": "model_call",
        "engine.generate": "sample",
    }
    for name, parent in parents.items():
        assert spans[name].parent is not None
        assert spans[name].parent.span_id == spans[parent].context.span_id
    assert spans["plan_prompt"].attributes["turnfold.continuity"] == "first"


async def test_a_failed_step_says_so_without_any_text_of_the_conversation(
    gateway: Any, exporter: InMemorySpanExporter
) -> None:
    gateway.engine.script(Reply(ids=[], status=500), Reply(ids=[], status=500))
    assert (await call(gateway)).status_code == 503
    spans = by_name(exporter)
    assert spans["model_call"].status.status_code is StatusCode.ERROR
    assert spans["engine.generate"].status.status_code is StatusCode.ERROR
    assert "secret" not in "".join(span.to_json() for span in spans.values())


def test_an_endpoint_without_the_exporter_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    with (
        pytest.raises(tracing.TracingUnavailable, match=r"turnfold\[tracing\]"),
        tracing.exported_spans(environment),
    ):
        pass


def test_the_engine_gets_no_header_when_nobody_follows_the_trace() -> None:
    assert replicas.trace_headers() == {}
