"""The settings of a topic: their defaults, and which values are accepted.

Kafka's own names. Those that change nothing on a single node are accepted and shown, so that the same
topic definitions work here and in production; a name or value that Kafka would refuse is refused.
"""

from collections.abc import Mapping

from turnfold.embedded.broker.errors import ErrorCode, Refused

DEFAULTS: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "file.delete.delay.ms": "60000",
    "flush.messages": "9223372036854775807",
    "flush.ms": "9223372036854775807",
    "index.interval.bytes": "4096",
    "max.compaction.lag.ms": "9223372036854775807",
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "9223372036854775807",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "67108864",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}

_TEXT_CHOICES: Mapping[str, frozenset[str]] = {
    "cleanup.policy": frozenset({"delete", "compact"}),
    "compression.type": frozenset({"producer"}),
    "message.timestamp.type": frozenset({"CreateTime"}),
    "preallocate": frozenset({"true", "false"}),
    "unclean.leader.election.enable": frozenset({"true", "false"}),
}
_MAY_BE_MINUS_ONE = frozenset({"retention.ms", "retention.bytes"})


class TopicConfig:
    """The settings of one topic: its own where given, else the defaults."""

    def __init__(self, own: Mapping[str, str]) -> None:
        """Raises Refused (INVALID_CONFIG) for an unknown name or an unusable value."""
        for name, value in own.items():
            _check(name, value)
        self.own = dict(own)

    def __getitem__(self, name: str) -> str:
        return self.own.get(name, DEFAULTS[name])

    def number(self, name: str) -> int:
        return int(self[name])

    def limit(self, name: str) -> int | None:
        """A number of which -1 means "no limit"."""
        number = self.number(name)
        return number if number >= 0 else None

    @property
    def is_compacted(self) -> bool:
        return "compact" in self._policies

    @property
    def is_expiring(self) -> bool:
        return "delete" in self._policies

    @property
    def dirty_ratio(self) -> float:
        return float(self["min.cleanable.dirty.ratio"])

    @property
    def _policies(self) -> list[str]:
        return self["cleanup.policy"].split(",")


def _check(name: str, value: str) -> None:
    if name not in DEFAULTS:
        raise Refused(ErrorCode.INVALID_CONFIG, f"Unknown topic config name: {name}")
    if name in _TEXT_CHOICES:
        choices = _TEXT_CHOICES[name]
        given = value.replace(" ", "").split(",") if name == "cleanup.policy" else [value]
        if not set(given) <= choices:
            raise Refused(
                ErrorCode.INVALID_CONFIG,
                f"{name}: expected {' or '.join(sorted(choices))}, got {value!r} "
                "(the development broker knows no others)",
            )
        return
    _check_number(name, value)


def _check_number(name: str, value: str) -> None:
    kind: type[int] | type[float] = float if name == "min.cleanable.dirty.ratio" else int
    lowest = -1 if name in _MAY_BE_MINUS_ONE else 0
    try:
        number = kind(value)
    except (TypeError, ValueError):
        number = lowest - 1
    if number < lowest:
        raise Refused(
            ErrorCode.INVALID_CONFIG,
            f"{name}: expected a number of at least {lowest}, got {value!r}",
        )
