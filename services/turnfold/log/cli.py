"""Options that the commands of all services share; see `ServiceSettings`."""

from __future__ import annotations

from typing import Annotated

import typer

Bootstrap = Annotated[str | None, typer.Option(help="Kafka bootstrap servers, host:port.")]
Namespace = Annotated[str | None, typer.Option(help="Prefix of all topics.")]
HealthPort = Annotated[
    int | None, typer.Option(help="Port of /healthz, /readyz and /metrics; none without.")
]
LogLevel = Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")]
