"""What a worker is told, besides the RunConfig."""

from __future__ import annotations

from turnfold.log.settings import ServiceSettings
from turnfold.schemas.settings import Secret


class Settings(ServiceSettings, frozen=True, kw_only=True):
    """Settings of `turnfold worker`."""

    agent: str = ""
    """The agent: `module:function` or `path/to/file.py:function`."""
    command: str = ""
    """The agent as a command instead, run once a rollout; may name {task fields}, {name} and {env}."""
    setup_command: str = ""
    """Run before the command under the set-up deadline; its failure is the environment's."""
    cleanup_command: str = ""
    """Run after the command, whatever happened, such as `docker rm -f {name}`."""
    control_key: Secret
    """Key of the gateway's control API."""
    gateway_url: str = "http://127.0.0.1:8080"
    """Where the gateway listens, without /v1."""
    concurrency: int = 16
    """Rollouts that run at a time, over all groups."""
    gateway_patience_s: float = 60.0
    """How long a call of the control API is repeated while the gateway is away."""
    grace_s: float = 10.0
    """Time that running rollouts get when the worker stops."""
    setup_timeout_s: float | None = None
    """Longest set-up of an agent's world; as long as the agent may run when unset."""
    agent_grace_s: float = 10.0
    """Time that an agent gets to end when it is told to, before it is killed."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency: expected at least 1, got {self.concurrency}")
        if bool(self.agent) == bool(self.command):
            raise ValueError(
                "expected an agent or a command: --agent my_agent.py:run for an async function, "
                '--command "python my_agent.py" for any program'
                + (f", got both {self.agent!r} and {self.command!r}" if self.agent else "")
            )
        if self.agent and (self.setup_command or self.cleanup_command):
            raise ValueError(
                "setup_command and cleanup_command go with a command; an async function uses "
                "`async with rollout.set_up():` and `finally:`"
            )
        for name in ("grace_s", "agent_grace_s", "gateway_patience_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if self.setup_timeout_s is not None and self.setup_timeout_s <= 0:
            raise ValueError(f"setup_timeout_s: expected more than 0, got {self.setup_timeout_s}")
