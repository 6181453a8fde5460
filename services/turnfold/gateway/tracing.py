"""OpenTelemetry spans from a model call to its event in the log.

    model_call                  one for each request of an agent; continues the agent's own trace
      plan_prompt               history matched, template rendered, tokens healed
      sample                    the wait for the engine and the reading of its reply
        engine.generate         one request to an engine, which gets the trace in `traceparent`
      log.append                the wait for the log

Without an endpoint in the environment spans cost next to nothing and go nowhere. No span holds text
of a conversation or a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from turnfold.schemas.errors import UserError

tracer = trace.get_tracer("turnfold.gateway")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class TracingUnavailable(UserError):
    """An endpoint is set and the packages that send spans are not installed."""


@contextmanager
def exported_spans(environment: Mapping[str, str]) -> Iterator[None]:
    """Send spans by OTLP while inside, if the environment names an endpoint.

    Raises TracingUnavailable. OTEL_* variables mean what OpenTelemetry says they mean.
    """
    if not any(environment.get(name) for name in ENDPOINTS):
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingUnavailable(
            f"{' or '.join(ENDPOINTS)} is set and {error.name} is not installed: "
            "pip install 'turnfold[tracing]'"
        ) from error
    name = environment.get("OTEL_SERVICE_NAME", "turnfold-gateway")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


def trace_headers() -> dict[str, str]:
    """Headers that let whom we call continue the current trace; none when nobody follows it."""
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers


@contextmanager
def call_span(protocol: str, request_id: str, headers: Mapping[str, str]) -> Iterator[Span]:
    """The span of one request of an agent, in the trace that its headers speak of.

    It is not the current span: a streamed answer ends in another task than it began in.
    """
    span = tracer.start_span(
        "model_call",
        context=propagate.extract(headers),
        kind=SpanKind.SERVER,
        attributes={"turnfold.protocol": protocol, "turnfold.request_id": request_id},
    )
    try:
        yield span
    except Exception as error:
        _fail(span, error)
        raise
    finally:
        span.end()


def within(span: Span) -> AbstractContextManager[Span]:
    """Make it the current span: what begins inside is its child."""
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


@contextmanager
def step_span(name: str, **attributes: AttributeValue) -> Iterator[Span]:
    """The span of one step of the current one."""
    span = tracer.start_span(
        name, attributes={f"turnfold.{key}": value for key, value in attributes.items()}
    )
    if not span.is_recording():
        yield span  # and the current one stays so: whoever continues the trace continues that
        return
    with within(span):
        try:
            yield span
        except Exception as error:
            _fail(span, error)
            raise
        finally:
            span.end()


def _fail(span: Span, error: Exception) -> None:
    # Not its text: that may quote messages of the agent.
    span.set_status(Status(StatusCode.ERROR, type(error).__name__))
