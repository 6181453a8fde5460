"""How a disturbed run went, for people and as JSON. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec


class Report(msgspec.Struct, kw_only=True):
    """How a disturbed run went."""

    seed: int
    broker: str = "embedded"
    """`embedded`, or the address of the one that was given."""
    seconds: float = 0.0
    """From the first fault to the verdict."""
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    """By kind and target."""
    num_rollouts: int = 0
    num_ended: Counter[str] = msgspec.field(default_factory=Counter)
    """Trajectories by status, those that were aborted with their reason."""
    num_turns: int = 0
    """Answers that an agent got."""
    num_rewards: int = 0
    """Rewards that were confirmed to an agent."""
    num_redelivered: int = 0
    """Records that were appended to the log a second time."""
    num_resampled: int = 0
    """Requests that the log holds more than one answer to."""
    num_dead_letters: int = 0
    num_batches: int = 0
    num_steps: int = 0
    num_dropped: Counter[str] = msgspec.field(default_factory=Counter)
    """Groups by reason."""
    num_starts: Counter[str] = msgspec.field(default_factory=Counter)
    """Starts of each process, the first one included."""
    problems: dict[str, list[str]] = {}
    """What does not hold, by claim; an empty list is a claim that holds."""
    replay: str = ""
    """The verdict of the replay."""

    @property
    def num_faults(self) -> int:
        return self.faults.total()

    @property
    def failed(self) -> dict[str, list[str]]:
        """The claims that do not hold."""
        return {claim: wrong for claim, wrong in self.problems.items() if wrong}

    def lines(self) -> list[str]:
        """The report for people, as Markdown."""
        return [
            f"seed {self.seed}, broker {self.broker}: {self.num_faults:,} faults in "
            f"{self.seconds:.0f} s; {self.num_rollouts:,} rollouts ({_counts(self.num_ended)}), "
            f"{self.num_turns:,} acknowledged turns, {self.num_rewards:,} acknowledged rewards, "
            f"{self.num_redelivered:,} records delivered again, {self.num_resampled} requests "
            f"answered twice, {self.num_dead_letters} dead letters, {self.num_batches} batches, "
            f"{self.num_steps} optimizer steps, groups dropped: {_counts(self.num_dropped)}",
            "",
            *self._table(),
            "",
            *(
                f"- {claim}: {'yes' if not wrong else f'NO, {len(wrong)}, such as {wrong[0]}'}"
                for claim, wrong in self.problems.items()
            ),
            f"- replay: {self.replay}",
        ]

    def _table(self) -> list[str]:
        """One line a kind of fault, with its targets."""
        kinds: dict[str, Counter[str]] = {}
        for name, number in sorted(self.faults.items()):
            kind, _, target = name.partition(": ")
            kinds.setdefault(kind, Counter())[target] += number
        return [
            "| fault | survived | of these |",
            "|---|---:|---|",
            *(
                f"| {kind} | {targets.total()} | {_counts(targets) if any(targets) else ''} |"
                for kind, targets in kinds.items()
            ),
            f"| all | {self.num_faults} | |",
        ]


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in sorted(counts.items())) or "none"
