"""What is done to whom, and when: a function of the seed. Pure but for the generator it is given."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

SERVICES = (
    "broker",
    "gateway",
    "healer",
    "assembler",
    "dispatcher",
    "worker",
    "trainer",
    "engine",
)

KILL, PAUSE, FULL_DISK, REDELIVER = "kill -9", "paused", "disk full", "events delivered again"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One disturbance."""

    kind: str
    service: str = ""
    seconds: float = 0.0
    """How long it lasts."""
    num_events: int = 0
    """Events that are appended to the log a second time."""
    num_turns_after: int = 1
    """Turns that must be answered before the next fault comes."""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.service}" if self.service else self.kind


def every_kind() -> list[Fault]:
    """Each kind once on each service that it can meet."""
    kills = [Fault(kind=KILL, service=service) for service in SERVICES]
    pauses = [Fault(kind=PAUSE, service=service, seconds=1.0) for service in SERVICES]
    full = Fault(kind=FULL_DISK, service="broker", seconds=1.0)
    return [*kills, *pauses, full, Fault(kind=REDELIVER, num_events=50)]


def schedule(seed: int, kinds: Sequence[Fault] | None = None) -> Iterator[Fault]:
    """Faults without end, each kind as often as the others, in an order that the seed decides."""
    generator = random.Random(seed)
    possible = list(kinds or every_kind())
    while True:
        generator.shuffle(possible)
        for fault in possible:
            yield msgspec.structs.replace(
                fault,
                seconds=round(fault.seconds * generator.uniform(0.3, 1.5), 2),
                num_events=round(fault.num_events * generator.uniform(0.1, 1.5)),
                num_turns_after=generator.randint(0, 6),
            )
