"""What drifted in a log, why, and what it cost."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from turnfold.log.records import Record
from turnfold.replay.drift.cli import drift
from turnfold.replay.drift.report import Client, Cost, Drift, total_cost
from turnfold.replay.logfile import Header, write_log
from turnfold.schemas import codec
from turnfold.schemas.events import Divergence, Event
from turnfold.schemas.testing import RolloutScript

app = typer.Typer()
app.command("drift")(drift)


def records(*events: Event) -> list[Record]:
    return [
        Record(
            topic="turnfold.events",
            partition=0,
            offset=offset,
            key=event.rollout_id.encode(),
            value=codec.encode(event),
            timestamp=0.0,
        )
        for offset, event in enumerate(events)
    ]


def collected(*events: Event) -> Drift:
    found = Drift()
    for record in records(*events):
        found.add(record)
    return found


def drifted(cause: str, continuity: str = "healed", message: int = -1, **fields: Any) -> Any:
    return {
        "continuity": continuity,
        "divergence": Divergence(cause=cause, message_index=message),
        **fields,
    }


OPENAI: dict[str, Any] = {"protocol": "openai_chat", "model": "m"}


def example() -> list[Event]:
    """Rollout a heals twice; b drifts and is reset, then retries, which is no drift."""
    a = RolloutScript("a", model="m")
    a.turn("t0", [1, 2], [3, 4], protocol="openai_chat")
    a.turn("t1", [1, 2, 3, 4, 5], [6], parent="t0", **OPENAI, **drifted("retokenized"))
    a.turn("t2", [1, 2, 3, 4, 5, 6, 7], [8], parent="t1", **OPENAI, **drifted("whitespace"))
    a.finish()
    b = RolloutScript("b")
    b.turn("t0", [1, 2], [3, 4], protocol="anthropic_messages", model="m")
    b.turn(
        "t1",
        [1, 9, 3, 4, 5],
        [6],
        parent="t0",
        protocol="anthropic_messages",
        model="m",
        **drifted("system_changed", "reset", 0),
    )
    b.turn(
        "t2",
        [1, 9, 3, 4, 5],
        [7],
        parent="t1",
        protocol="anthropic_messages",
        model="m",
        continuity="forked",
    )
    return [*a.events, *b.events]


def test_turns_are_counted_by_protocol_and_model() -> None:
    first, second = collected(*example()).clients()
    assert first.client == Client("anthropic_messages", "m")
    assert first.continuities == {"first": 1, "reset": 1, "forked": 1}
    assert second.client == Client("openai_chat", "m")
    assert (second.num_turns, second.continuities) == (3, {"first": 1, "healed": 2})


def test_clients_of_one_protocol_are_told_apart_by_harness() -> None:
    a = RolloutScript("a", model="m")
    a.turn("t0", [1, 2], [3, 4], **OPENAI, harness="AsyncOpenAI/Python")
    a.turn("t1", [1, 2, 3, 4, 5], [6], parent="t0", **OPENAI, harness="curl")
    found = collected(*a.events).clients()
    assert [(entry.client.harness, entry.num_turns) for entry in found] == [
        ("AsyncOpenAI/Python", 1),
        ("curl", 1),
    ]


def test_healed_turns_save_the_tokens_of_their_parent_and_a_reset_repeats_them() -> None:
    found = collected(*example())
    assert dict(found.causes()) == {
        "system_changed": Cost(num_broken=1, repeated_tokens=4),
        "whitespace": Cost(num_healed=1, saved_tokens=6),
        "retokenized": Cost(num_healed=1, saved_tokens=4),
    }
    assert found.causes()[0][0] == "system_changed"
    total = total_cost(cost for _, cost in found.causes())
    assert (total.num_healed, total.saved_tokens, total.num_broken) == (2, 10, 1)


def test_redelivered_turn_is_counted_once() -> None:
    events = example()
    doubled = [event for event in events for _ in range(2)]
    # Not the last one: the copy of an end would close what is closed.
    assert collected(*doubled).causes() == collected(*events).causes()


def test_fork_that_drifted_inside_a_turn_costs_what_it_left() -> None:
    tree = RolloutScript("a")
    tree.turn("t0", [1, 2], [3, 4, 5])
    tree.turn("t1", [1, 2, 3, 9], [6], parent="t0", **drifted("retokenized", "forked"))
    tree.turn("t2", [1, 2], [7], parent="t1", **drifted("compaction", "forked"))
    assert dict(collected(*tree.events).causes()) == {
        "retokenized": Cost(num_broken=1, repeated_tokens=4),
        "compaction": Cost(num_broken=1, repeated_tokens=2),
    }


def test_edit_that_continues_an_earlier_turn_costs_the_row_it_left() -> None:
    rollout = RolloutScript("a")
    rollout.turn("t0", [1], [2])
    rollout.turn("t1", [1, 2, 3, 4], [5], parent="t0")
    rollout.turn("t2", [1, 2, 9, 9], [5], parent="t0", **drifted("content_edited", "forked", 2))
    rollout.turn("t3", [1, 2, 8, 8], [5], parent="t0", **drifted("retokenized", "forked"))
    assert dict(collected(*rollout.events).causes()) == {
        "content_edited": Cost(num_broken=1, repeated_tokens=4),
        "retokenized": Cost(num_healed=1, saved_tokens=2),
    }


def test_reset_without_parent_is_held_against_the_latest_turn_of_its_session() -> None:
    rollout = RolloutScript("a")
    rollout.turn("t0", [1, 2], [3], session_id="main")
    rollout.turn("t1", [5, 6, 7, 8, 9], [3], session_id="other")
    rollout.turn("t2", [4, 4, 4, 4, 4], [3], session_id="main", continuity="reset")
    assert collected(*rollout.events).causes() == [
        ("unexplained", Cost(num_broken=1, repeated_tokens=3))
    ]


def test_worst_sessions_come_first_and_say_where_it_began() -> None:
    events = []
    for name, length in (("small", 3), ("large", 30)):
        rollout = RolloutScript(name)
        rollout.turn("t0", list(range(length)), [99])
        other = [7, *range(1, length), 99, 5]
        rollout.turn("t1", other, [1], parent="t0", **drifted("content_edited", "reset", 2))
        events += rollout.events
    found = collected(*events)
    assert [o.rollout_id for o in found.offenders(10)] == ["large", "small"]
    [worst] = found.offenders(1)
    assert (worst.first_turn_id, worst.first_message_index) == ("t1", 2)
    assert worst.causes == {"content_edited": 1}


def test_record_that_is_no_event_is_passed_over() -> None:
    found = Drift()
    found.add(
        Record(
            topic="turnfold.events", partition=0, offset=0, key=b"r", value=b"\xff", timestamp=0.0
        )
    )
    assert found.num_turns == 0


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.tflog"
    with path.open("wb") as file:
        write_log(
            file,
            Header(namespace="turnfold", topics={"turnfold.events": 1}),
            records(*example()),
        )
    return path


def test_command_shows_tables_and_a_sum(log: Path) -> None:
    result = CliRunner().invoke(app, ["--file", str(log)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    client = [
        "?",
        "openai_chat",
        "m",
        "3",
        "1",
        "0",
        "2",
        "0",
        "0",
        "0",
        "66.7",
        "%",
        "10",
        "0",
        "0",
    ]
    assert client in lines
    assert ["system_changed", "0", "0", "1", "4"] in lines
    assert ["b", "main", "1", "4", "system_changed", "1", "turn", "t1,", "message", "0"] in lines
    assert "6 turns: 2 healed" in result.output


def test_command_looks_at_chosen_rollouts_only(log: Path) -> None:
    result = CliRunner().invoke(app, ["--file", str(log), "--rollout", "a", "--json"])
    report = json.loads(result.stdout)
    assert report["turns"] == 3
    assert [cause["cause"] for cause in report["causes"]] == ["whitespace", "retokenized"]
    assert report["worst_sessions"] == []
    assert report["clients"][0]["cost"]["saved_tokens"] == 10
