"""What a worker is told, besides the RunConfig."""

from __future__ import annotations

from turnfold.log.settings import ServiceSettings


class Settings(ServiceSettings, frozen=True, kw_only=True):
    """Settings of `turnfold worker`."""

    agent: str
    """The agent: `module:function` or `path/to/file.py:function`."""
    control_key: str
    """Key of the gateway's control API."""
    gateway_url: str = "http://127.0.0.1:8080"
    """Where the gateway listens, without /v1."""
    concurrency: int = 16
    """Rollouts that run at a time, over all groups."""
    gateway_patience_s: float = 60.0
    """How long a call of the control API is repeated while the gateway is away."""
    grace_s: float = 10.0
    """Time that running rollouts get when the worker stops."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency: expected at least 1, got {self.concurrency}")
