"""The live display and the closing report, as rich renderables; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turnfold.embedded.demo.progress import BatchLine, Progress

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_BATCHES = 12


def sparkline(values: Sequence[float], top: float = 1.0) -> str:
    """One bar a value: 0 is the lowest bar, `top` or more the highest.

    [0.0, 0.5, 1.0] -> ▁▅█
    """
    last = len(_BARS) - 1
    return "".join(_BARS[max(0, min(last, round(value / top * last)))] for value in values)


def live(progress: Progress, states: Mapping[str, str], num_batches: int) -> RenderableType:
    """What the terminal shows while the pipeline runs."""
    return Group(_services(states), _counters(progress, num_batches), _batches(progress))


def _services(states: Mapping[str, str]) -> Text:
    line = Text("services  ", style="dim")
    for name, state in states.items():
        style = {"up": "green", "starting": "yellow", "done": "blue"}.get(state, "bold red")
        line.append(f"{name} ", style=style)
    return line


def _counters(progress: Progress, num_batches: int) -> Text:
    healed = progress.continuity["healed"]
    turns = progress.continuity.total()
    parts = [
        f"batches {max(progress.published, 0)}/{num_batches}",
        f"rollouts {progress.num_finished} done, {len(progress.in_flight)} in flight",
        f"turns {turns} ({healed} healed)",
        f"sampled tokens {progress.num_sampled:,}",
        f"policy served {max(progress.served, 0)}",
    ]
    dropped = [f"{reason} {count}" for reason, count in sorted(progress.dropped.items())]
    if progress.num_aborted or dropped:
        parts.append(f"aborted {progress.num_aborted}, groups dropped {', '.join(dropped) or 0}")
    return Text("   ".join(parts))


def _batches(progress: Progress) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("batch", "reward", "", "staleness", "rows", "steps", "seconds"):
        table.add_column(name, justify="left" if name == "" else "right")
    for _, line in sorted(progress.batches.items())[-_SHOWN_BATCHES:]:
        table.add_row(*_cells(line))
    return table


def _cells(line: BatchLine) -> tuple[str, ...]:
    steps, seconds = line.metrics.get("optimizer_steps"), line.metrics.get("seconds")
    return (
        str(line.index),
        f"{line.mean_reward:.3f}",
        "█" * round(line.mean_reward * 30),
        f"{line.mean_staleness:.2f} (max {line.max_staleness})",
        str(line.num_rows),
        "…" if steps is None else f"{steps:.0f}",
        "…" if seconds is None else f"{seconds:.1f}",
    )
