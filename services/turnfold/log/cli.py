"""What the commands of all services share: the options of `ServiceSettings`, and their start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import asyncio

    from turnfold.log.service import Health
    from turnfold.log.settings import ServiceSettings

Bootstrap = Annotated[str | None, typer.Option(help="Kafka bootstrap servers, host:port.")]
Namespace = Annotated[str | None, typer.Option(help="Prefix of all topics.")]
HealthPort = Annotated[
    int | None, typer.Option(help="Port of /healthz, /readyz and /metrics; none without.")
]
LogLevel = Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")]


def serve(
    name: str,
    settings: ServiceSettings,
    body: Callable[[Health, asyncio.Event], Awaitable[None]],
) -> None:
    """Run a service until it ends or is told to; see `turnfold.log.service.run_service`."""
    from turnfold.log.service import run_service

    run_service(name, body, settings)
