"""What the gateway counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)

TURNS = Counter(
    "turnfold_gateway_turns",
    "Turns acknowledged by the log.",
    ["protocol", "continuity", "finish_reason"],
)
OUTPUT_TOKENS = Counter("turnfold_gateway_output_tokens", "Tokens sampled in recorded turns.")
FAILED_TURNS = Counter("turnfold_gateway_failed_turns", "Calls without a sample.", ["reason"])
REFUSED = Counter("turnfold_gateway_refused_requests", "Error answers.", ["status", "code"])
REPEATED = Counter(
    "turnfold_gateway_repeated_requests", "Client retries that got the recorded answer."
)
MALFORMED_CALLS = Counter(
    "turnfold_gateway_malformed_calls", "Tool calls left in the content as text.", ["reason"]
)
UNENFORCED = Counter(
    "turnfold_gateway_unenforced_constraints",
    "Turns sampled freely though the request would constrain the output, by field.",
    ["field"],
)
DIFFERENCES = Counter(
    "turnfold_gateway_history_differences",
    "Differences between the client's history and the stored one, by cause.",
    ["cause"],
)
RESUMED = Counter(
    "turnfold_gateway_resumed_replies", "Times that a reply went on which an engine had broken off."
)
READ_BACKS = Counter("turnfold_gateway_read_backs", "Rollouts read back from the log.")
ENGINE_SECONDS = Histogram(
    "turnfold_gateway_engine_seconds", "Wait for the engine in a turn.", buckets=_SECONDS
)
OVERHEAD_SECONDS = Histogram(
    "turnfold_gateway_overhead_seconds", "Rest of a turn's time.", buckets=_SECONDS
)
IN_FLIGHT = Gauge("turnfold_gateway_in_flight", "Model calls being answered.")
ROLLOUTS = Gauge("turnfold_gateway_rollouts", "Rollouts held in memory.")
