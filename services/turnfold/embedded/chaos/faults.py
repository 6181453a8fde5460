"""What is done to whom, and when: a function of the seed. Pure but for the generator it is given."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

BROKER = "broker"
SERVICES = (
    BROKER,
    "gateway",
    "healer",
    "assembler",
    "dispatcher",
    "worker",
    "trainer",
    "engine",
)
CLOCKED = SERVICES[:-1]
"""Services that look at the clock."""
BROKER_LINKS = tuple(f"{name} to broker" for name in CLOCKED[1:])
LINKS = (*BROKER_LINKS, "worker to gateway", "gateway to engine")
LOG_TOPICS = ("events", "tasks", "trajectories", "batches")
"""Topics of facts. `policies` is none: its newest record is the state, so an old one that comes
again would be a new one."""

KILL = "kill -9"
PAUSE = "paused"
DISK_FULL = "disk full"
DISK_FILLS = "disk full within a write"
AGAIN = "delivered again"
LATE = "delivered late"
CUT = "network cut"
UNANSWERED = "answers lost"
SLOW = "slow broker"
CLOCK_AHEAD = "clock jumps ahead and back"
CLOCK_BEHIND = "clock jumps back and ahead"
CLOCKS_AHEAD = "all clocks jump ahead"

KINDS = (
    KILL,
    PAUSE,
    DISK_FULL,
    DISK_FILLS,
    AGAIN,
    LATE,
    CUT,
    UNANSWERED,
    SLOW,
    CLOCK_AHEAD,
    CLOCK_BEHIND,
    CLOCKS_AHEAD,
)

_NUM_KILLS = 3
"""A kill is what happens most, so each comes so many times as often as anything else."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One disturbance."""

    kind: str
    target: str = ""
    """Service, link or topic."""
    seconds: float = 0.0
    """How long it lasts."""
    amount: float = 0.0
    """Seconds of a jump, seconds that each piece of a slow network takes, records that come again,
    bytes that the disk still takes."""
    choice: int = 0
    """Decides which records or which file, when one of several is meant."""
    num_turns_after: int = 1
    """Turns that must be answered before the next fault comes."""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.target}" if self.target else self.kind


def every_fault() -> list[Fault]:
    """Each kind on each service, link or topic that it can meet."""
    return [
        *(Fault(kind=KILL, target=service) for service in SERVICES),
        *(Fault(kind=PAUSE, target=service, seconds=1.0) for service in SERVICES),
        *(Fault(kind=DISK_FULL, target=name, seconds=1.0) for name in (BROKER, "trainer")),
        Fault(kind=DISK_FILLS, target=BROKER, seconds=1.0, amount=200),
        *(Fault(kind=AGAIN, target=topic, amount=30) for topic in LOG_TOPICS),
        *(Fault(kind=LATE, target=link, seconds=2.0) for link in LINKS),
        *(Fault(kind=CUT, target=link, seconds=0.5) for link in LINKS),
        *(Fault(kind=UNANSWERED, target=link, seconds=0.5) for link in LINKS),
        Fault(kind=SLOW, seconds=2.0, amount=0.1),
        *(Fault(kind=CLOCK_AHEAD, target=name, seconds=2.0, amount=10) for name in CLOCKED),
        *(Fault(kind=CLOCK_BEHIND, target=name, seconds=2.0, amount=10) for name in CLOCKED),
        Fault(kind=CLOCKS_AHEAD, amount=1800),
    ]


def one_of_each_kind(faults: Sequence[Fault]) -> list[Fault]:
    """Every kill of these, and the first fault of each other kind."""
    kills = [fault for fault in faults if fault.kind == KILL]
    others: dict[str, Fault] = {}
    for fault in faults:
        if fault.kind != KILL:
            others.setdefault(fault.kind, fault)
    return [*kills, *others.values()]


def usual_faults() -> list[Fault]:
    """All of them, a kill three times."""
    every = every_fault()
    return [*every, *[fault for fault in every if fault.kind == KILL] * (_NUM_KILLS - 1)]


def without_broker(faults: Sequence[Fault]) -> list[Fault]:
    """Those that need no broker of our own: nobody kills, stops or fills up somebody else's."""
    return [fault for fault in faults if fault.target != BROKER]


def schedule(seed: int, faults: Sequence[Fault]) -> Iterator[Fault]:
    """These faults again and again without end, each time in another order.

    Order, length and size are decided by the seed.
    """
    generator = random.Random(seed)
    possible = list(faults)
    while True:
        generator.shuffle(possible)
        for fault in possible:
            yield msgspec.structs.replace(
                fault,
                seconds=round(fault.seconds * generator.uniform(0.3, 1.5), 2),
                amount=round(fault.amount * generator.uniform(0.1, 2.0), 2),
                choice=generator.randrange(1 << 30),
                num_turns_after=generator.randint(0, 4),
            )
