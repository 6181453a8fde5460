"""Small PNGs of what simulate.py found: idle time, staleness, bias, and how they hang on trainer time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from bias import QUANTILES
from matplotlib.axes import Axes

Result = dict[str, Any]

COLOURS = {
    "synchronous": "#888888",
    "wait-all": "#b59f3b",
    "drop-stale": "#c44e52",
    "turnfold-0": "#cfe0f3",
    "turnfold-1": "#9cc3e6",
    "turnfold-2": "#5b9bd5",
    "turnfold-4": "#1f5fa8",
    "turnfold-1-held": "#b5dfb5",
    "turnfold-2-held": "#4caf50",
    "turnfold-4-held": "#1b7a2f",
}
MEDIAN_S = 60.0


def save_plots(results: list[Result], folder: Path) -> None:
    """Write stragglers-*.png; with one trainer time the bars, with several the curves over them."""
    folder.mkdir(parents=True, exist_ok=True)
    if len({found["train_s"] for found in results}) > 1:
        _save(folder / "stragglers-trainer-time.png", results, _over_trainer_time, 3.4)
        return
    _save(folder / "stragglers-idle.png", results, _idle_and_throughput, 3.2)
    _save(folder / "stragglers-staleness.png", results, _staleness, 3.2)
    _save(folder / "stragglers-bias.png", results, _trained_by_length, 3.4)


def _save(
    path: Path, results: list[Result], draw: Callable[[Axes, list[Result]], None], height: float
) -> None:
    """One panel for each distribution."""
    distributions = sorted({found["distribution"] for found in results})
    figure, axes = plt.subplots(
        1, len(distributions), figsize=(5.2 * len(distributions), height), squeeze=False
    )
    for axis, distribution in zip(axes[0], distributions, strict=True):
        draw(axis, [found for found in results if found["distribution"] == distribution])
        axis.set_title(distribution, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _idle_and_throughput(axis: Axes, results: list[Result]) -> None:
    names = [found["policy"] for found in results]
    shares = [100 * found["trainer_idle_share"] for found in results]
    bars = axis.barh(names, shares, color=[COLOURS[name] for name in names])
    axis.bar_label(
        bars,
        [
            f" {share:.1f} %, {found.get('throughput_over_synchronous', 1.0):.2f}x"
            for share, found in zip(shares, results, strict=True)
        ],
        fontsize=8,
    )
    axis.axvline(5.0, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlim(0, 100)
    axis.invert_yaxis()
    axis.set_xlabel("trainer idle, % of the time; throughput over synchronous", fontsize=8)


def _staleness(axis: Axes, results: list[Result]) -> None:
    names = [found["policy"] for found in results]
    left = [0.0] * len(results)
    for lag in range(max(found["max_staleness"] for found in results) + 1):
        shares = [100 * found["staleness"].get(str(lag), 0.0) for found in results]
        axis.barh(names, shares, left=left, color=plt.cm.viridis(1 - lag / 4), label=str(lag))
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("trained rollouts by staleness, %", fontsize=8)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _trained_by_length(axis: Axes, results: list[Result]) -> None:
    labels = [f"{100 * quantile:g}" for quantile in QUANTILES[1:]]
    for found in results:
        if found["policy"] in ("turnfold-0", "turnfold-1-held"):
            continue  # under other curves
        shares = [100 * share for share in found["bias"]["trained_share_by_length"]]
        name = found["policy"]
        axis.plot(labels, shares, marker=".", label=name, color=COLOURS[name])
    axis.set_ylim(0, 102)
    axis.set_xlabel("length of the rollout, up to this percentile", fontsize=8)
    axis.set_ylabel("trained, % of dispatched", fontsize=8)
    axis.legend(fontsize=7, loc="lower left")


def _over_trainer_time(axis: Axes, results: list[Result]) -> None:
    for name in dict.fromkeys(found["policy"] for found in results):
        points = [
            (found["train_s"] / MEDIAN_S, 100 * found["trainer_idle_share"])
            for found in results
            if found["policy"] == name
        ]
        is_fair = all(_is_fair(found) for found in results if found["policy"] == name)
        axis.plot(
            *zip(*points, strict=True),
            marker="." if is_fair else "x",
            linestyle="-" if is_fair else ":",
            label=name if is_fair else f"{name} (biased at short times)",
            color=COLOURS[name],
        )
    axis.axhline(5.0, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlabel("trainer time for a batch, in medians of a rollout", fontsize=8)
    axis.set_ylabel("trainer idle, %", fontsize=8)
    axis.legend(fontsize=7)


def _is_fair(found: Result) -> bool:
    return bool(found["bias"]["ks_p"] > 0.01)
