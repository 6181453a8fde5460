"""What a check found, and how findings are judged. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

State = Literal["ok", "warning", "failure"]

MIN_FREE_BYTES = 5 * 1024**3
"""Below this much disk, weights and log segments soon find no room."""


class Check(msgspec.Struct, frozen=True):
    """One line of the report."""

    name: str
    state: State
    detail: str
    advice: str = ""
    """What to do; empty when all is well."""


def topics_check(differences: Mapping[str, Sequence[str]]) -> Check:
    """From `topic_differences`: missing topics are a failure, other settings a warning."""
    missing = [topic for topic, found in differences.items() if "does not exist" in found]
    if missing:
        detail = f"missing: {', '.join(missing)}"
        return Check("topics", "failure", detail, "run `turnfold topics create`")
    lines = [f"{topic}: {what}" for topic, found in differences.items() for what in found]
    if lines:
        advice = "see `turnfold topics check`; smaller limits refuse long turns"
        return Check("topics", "warning", "; ".join(lines), advice)
    return Check("topics", "ok", f"{len(differences)} topics as they should be")


def model_check(path: str, files: Collection[str]) -> Check:
    """From the names of the files in a model directory."""
    needed = ["config.json", "tokenizer.json"]
    missing = [name for name in needed if name not in files]
    if not any(name.endswith(".safetensors") for name in files):
        missing.append("*.safetensors")
    has_template = "chat_template.jinja" in files or "tokenizer_config.json" in files
    if not has_template:
        missing.append("chat_template.jinja or tokenizer_config.json")
    if missing:
        advice = "give a complete Hugging Face model directory, or make `turnfold tiny-model`"
        return Check("model", "failure", f"{path} lacks {', '.join(missing)}", advice)
    return Check("model", "ok", path)


def disk_check(path: str, num_free_bytes: int) -> Check:
    free = f"{num_free_bytes / 1024**3:.1f} GiB free at {path}"
    if num_free_bytes < MIN_FREE_BYTES:
        return Check("disk", "warning", free, "free some space, or put the data elsewhere")
    return Check("disk", "ok", free)


def healer_check(behind: Mapping[int, int | None]) -> Check:
    """From the events of each partition that the healer has yet to process; None: it never ran."""
    if all(number is None for number in behind.values()):
        return Check("healer", "warning", "has not written anything yet", "run `turnfold healer`")
    late = {p: n for p, n in behind.items() if n}
    if late:
        detail = ", ".join(f"partition {p}: {n} events to go" for p, n in late.items())
        return Check("healer", "warning", detail, "wait, or check that the healer runs")
    return Check("healer", "ok", "all events processed")


def packages_check(missing: Collection[str]) -> Check:
    """From the packages of the `train` extra that are not installed."""
    if missing:
        detail = f"not installed: {', '.join(sorted(missing))}"
        advice = "pip install 'turnfold[train]' where a trainer or an embedded engine runs"
        return Check("train extra", "warning", detail, advice)
    return Check("train extra", "ok", "torch and verl are installed")
