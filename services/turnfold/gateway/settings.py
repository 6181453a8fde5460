"""Settings of the gateway."""

from __future__ import annotations

from turnfold.gateway.backends.engine import EngineKind
from turnfold.gateway.constraints import UnenforcedPolicy
from turnfold.log.settings import ServiceSettings
from turnfold.schemas.events import HistoryMode, NonlinearPolicy, RewritePolicy
from turnfold.schemas.settings import Secret


class Settings(ServiceSettings, frozen=True, kw_only=True):
    """Settings of the gateway; see `turnfold.schemas.settings.load`."""

    model: str = ""
    """Directory with tokenizer.json and the chat template of the model that the engines serve."""
    model_name: str = ""
    """Name in /v1/models; the directory's name when unset."""
    engines: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Base URLs of the inference engines, all serving the same model."""
    engine_kind: EngineKind = "vllm"
    """vllm or sglang: which server the engines are; the embedded engine speaks as vLLM does."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8080
    """Port to listen on; 0 takes a free one."""
    public_url: str = ""
    """URL under which agents reach the gateway; taken from each request when unset."""
    control_key: Secret = ""
    """Key of the control API, which starts and scores rollouts."""
    key_secret: Secret = ""
    """Secret that signs session keys; the same on all gateways of one log."""
    key_ttl_s: int = 86_400
    """Seconds that a session key is good for, beyond the rollout's own time limit."""
    history_mode: HistoryMode = "linear"
    """Mode of rollouts that do not name one."""
    nonlinear: NonlinearPolicy = "reset"
    """Policy of rollouts that do not name one."""
    rewrites: RewritePolicy = "keep"
    """What linear mode does where the template takes earlier text back: keep the saved tokens, or
    follow the template in a new segment; for rollouts that do not say."""
    reply_format: str = ""
    """How the model writes reasoning and tool calls: qwen, qwen_coder, llama, mistral, deepseek,
    glm, gpt_oss, minimax, reasoning or plain; found from the chat template when unset."""
    pinned_patterns: tuple[str, ...] = (r"\bcch=([0-9a-zA-Z]+);",)
    """What changes in system text from call to call and means nothing, one group around it."""
    unenforced: UnenforcedPolicy = "refuse"
    """What to do with a request to constrain the output: `refuse` it by name, or `ignore` that
    part, sample freely and say so."""
    engine_timeout_s: float = 600.0
    """Longest wait for one reply of an engine."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Largest request body."""
    calls_per_minute: int = 0
    """Calls that one session may make within a minute; 0 is no limit."""
    calls_at_once: int = 64
    """Calls of one session that may wait for an answer at a time; 0 is no limit."""
    tls_certificate: str = ""
    """PEM file with the certificate chain; with it the gateway speaks HTTPS."""
    tls_key: str = ""
    """PEM file with the private key of the certificate; needed when it is not in the same file."""
    max_rollouts: int = 2000
    """Rollouts held in memory; others are read back from the log when they call."""
    stream_keepalive_s: float = 10.0
    """Silence in a streamed response after which a comment is sent."""
    drain_s: float = 20.0
    """Time that running requests get when the gateway stops."""


DEV_SECRET = "turnfold-dev"
"""Control key and signing secret under `--dev`: known to everybody, for one machine only."""
