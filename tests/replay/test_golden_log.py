"""Logs of earlier versions fold for ever, into the rows written out beside them."""

import json
from pathlib import Path
from typing import Any

import pytest

from turnfold.healer.recorded import decode_event
from turnfold.log.records import Record
from turnfold.replay.compare import named
from turnfold.replay.logfile import LogReader
from turnfold.replay.rebuild import Rebuild
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, Decision
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.events import TurnCompleted
from turnfold.schemas.policies import PolicyEvent
from turnfold.schemas.tasks import Task
from turnfold.schemas.trajectories import Trajectory

LOGS = Path(__file__).parent.parent / "logs"
VERSIONS = sorted(path.stem for path in LOGS.glob("*.tflog"))


def records(version: str) -> list[Record]:
    with (LOGS / f"{version}.tflog").open("rb") as file:
        return list(LogReader(file, version))


def events(version: str) -> list[Record]:
    return [record for record in records(version) if record.topic == "turnfold.events"]


def expected(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((LOGS / f"{version}.json").read_text())
    return found


def folded(log: list[Record]) -> tuple[Rebuild, list[Trajectory]]:
    rebuild = Rebuild()
    trajectories = [t for record in log for t in rebuild.feed(record)]
    revisions = rebuild.revisions()
    return rebuild, trajectories + [t for r in log if (t := revisions.feed(r))]


def readable(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as the expected file writes it."""
    names = ("status", "reward", "rewards", "group_id", "num_turns", "num_failed_turns")
    return {
        **{name: getattr(trajectory, name) for name in (*names, "num_healed")},
        "rows": [
            {
                "session_id": row.session_id,
                "token_ids": row.token_ids.tolist(),
                "loss_mask": row.loss_mask.tolist(),
                "logprobs": row.logprobs.tolist(),
                "policy_versions": [
                    [s.policy_version, s.start, s.end] for s in row.policy_versions
                ],
            }
            for row in trajectory.rows
        ],
        "masked": dict(trajectory.ledger.masked),
        "dropped": dict(trajectory.ledger.dropped),
        "marks": list(trajectory.marks),
    }


def test_there_is_a_log_of_the_first_version() -> None:
    assert "v1" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_log_folds_into_the_rows_written_out(version: str) -> None:
    _, trajectories = folded(events(version))
    found = {
        named((t.rollout_id, t.revision)).removeprefix("rollout "): readable(t)
        for t in trajectories
    }
    assert found == expected(version)["trajectories"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_log_gives_the_dead_letters_written_out(version: str) -> None:
    rebuild, _ = folded(events(version))
    wanted = expected(version)
    found = {str(record): reason for record, reason in rebuild.rejected}
    assert found.keys() == wanted["dead_letters"].keys()
    for place, reason in wanted["dead_letters"].items():
        assert reason in found[place]
    assert rebuild.ignored == wanted["ignored"]
    assert rebuild.open_rollouts == wanted["open"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_log_with_every_record_doubled_gives_the_same_bytes(version: str) -> None:
    log = events(version)
    _, once = folded(log)
    _, twice = folded([record for record in log for _ in range(2)])
    assert [codec.encode(t) for t in twice] == [codec.encode(t) for t in once]


def test_the_first_log_holds_every_kind_of_message() -> None:
    by_topic = {record.topic: record.value or b"" for record in records("v1")}
    assert codec.decode(Task, by_topic["turnfold.tasks"]).payload == {"city": "Ulm"}
    assert codec.decode(Trajectory, by_topic["turnfold.trajectories"]).rollout_id == "other"
    letter = codec.decode(DeadLetter, by_topic["turnfold.dead-letters"])
    assert (letter.offset, letter.value) == (3, b"\xc1")
    values = [r.value or b"" for r in records("v1") if r.topic == "turnfold.batches"]
    decisions: list[Decision] = [codec.decode(Decision, value) for value in values]
    assert isinstance(decisions[0], BatchCut)
    assert decisions[0].groups[0].left_out[0].reason == "aborted:agent_error"
    values = [r.value or b"" for r in records("v1") if r.topic == "turnfold.policies"]
    policies: list[PolicyEvent] = [codec.decode(PolicyEvent, value) for value in values]
    assert [p.policy_version for p in policies] == [1, 1]


def test_the_first_log_keeps_what_a_gateway_records_beside_the_tokens() -> None:
    found = [decode_event(record) for record in events("v1") if record.key == b"healed"]
    first, second, _ = (event for event in found if isinstance(event, TurnCompleted))
    assert first.reply is not None
    assert first.reply.tool_calls[0].arguments == {"city": "Ulm", "days": 2}
    assert first.tools is not None
    assert first.tools[0]["function"]["name"] == "weather"
    assert first.pinned == (("cch=36ee5;", "cch=00000;"),)
    assert second.divergence is not None
    assert second.divergence.cause == "tool_arguments_reordered"
