"""Settings that every process of turnfold shares."""

from __future__ import annotations

from typing import Literal

from turnfold.schemas.topics import Topics
from turnfold.schemas.wire import Wire


class ServiceSettings(Wire, frozen=True, kw_only=True):
    """Base of each service's settings; see `turnfold.schemas.settings.load`."""

    bootstrap: str = "127.0.0.1:9092"
    """Kafka bootstrap servers, host:port, comma separated."""
    namespace: str = "turnfold"
    """Prefix of all topics."""
    health_port: int | None = None
    """Port of /healthz, /readyz and /metrics on host 0.0.0.0; none when unset."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_format: Literal["text", "json"] = "text"
    """text for people, json for programs: one object a line."""

    @property
    def topics(self) -> Topics:
        return Topics(namespace=self.namespace)
