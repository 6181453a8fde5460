"""Messages on the wire: round trips, damaged bytes, and bytes of older and newer versions."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, Decision, GroupDropped, GroupRef, LeftOut, Positions
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.events import Divergence, Event, RolloutStarted, TurnCompleted
from turnfold.schemas.messages import ChatMessage, ToolCall
from turnfold.schemas.policies import PolicyEvent, PolicyPublished, PolicyServed
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import (
    aborted,
    finished,
    revised,
    row,
    started,
    task,
    trajectory,
    turn,
    turn_failed,
)
from turnfold.schemas.trajectories import Trajectory

EVENTS: list[Event] = [
    started("r1", deadline_at=12.5, history_mode="tree", max_turns=3),
    turn(
        "r1",
        "t0",
        prompt=[1, 2],
        output=[3, 4_000_000_000],
        logprobs=[-0.5, -1e-9],
        new_messages=(ChatMessage(role="user", content="Größe 🌍 \x00"),),
        reply=ChatMessage(
            role="assistant",
            tool_calls=(ToolCall(name="f", arguments={"b": 1, "a": [None, {"c": 2.5}]}, id="c1"),),
        ),
        tools=({"type": "function", "function": {"name": "f"}},),
        divergence=Divergence(cause="whitespace", message_index=1),
        stop_reason=151645,
        pinned=(("a", "b"),),
    ),
    turn("r1", "t1", prompt=[1, 2, 3], output=[], parent="t0", shared_len=2, stop_reason="x"),
    turn_failed("r1", "t2", message="timeout"),
    finished("r1", reward=-0.25, rewards={"a": 1.0}, info={"k": "v"}, is_truncated=True),
    aborted("r1", reason="deadline"),
    revised("r1", reward=0.5),
]
POSITIONS = Positions(tasks={0: 3}, trajectories={0: 7, 3: 2})
MESSAGES: list[tuple[Any, msgspec.Struct]] = [
    *((Event, event) for event in EVENTS),
    (Trajectory, trajectory("r1", rows=[row([1, 2, 3], [0, 1, 1])], marks=("gap:t3",))),
    (Task, task("g1", payload={"question": "1 + 1", "numbers": [1, 2]}, split="eval")),
    (
        Decision,
        BatchCut(
            run_id="run",
            index=1,
            groups=(
                GroupRef(
                    group_id="g",
                    dispatch_index=0,
                    rollouts=(),
                    left_out=(LeftOut(rollout_id="r", reason="no_rows"),),
                ),
            ),
            positions=POSITIONS,
            at=1.0,
            config_digest="c",
        ),
    ),
    (
        Decision,
        GroupDropped(
            run_id="run",
            group_id="g",
            dispatch_index=0,
            reason="stale",
            positions=POSITIONS,
            at=1.0,
            config_digest="c",
        ),
    ),
    (PolicyEvent, PolicyPublished(run_id="run", policy_version=0, weights_uri="/w")),
    (PolicyEvent, PolicyServed(run_id="run", policy_version=2, engines=("a", "b"))),
    (
        DeadLetter,
        DeadLetter(
            topic="t", partition=1, offset=2, reason="no", value=b"\x00\xff", headers=(("h", b"v"),)
        ),
    ),
]


@pytest.mark.parametrize(("kind", "message"), MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_comes_back_equal_from_msgpack_and_from_json(
    kind: Any, message: msgspec.Struct
) -> None:
    assert codec.decode(kind, codec.encode(message)) == message
    assert codec.decode(kind, codec.encode_json(message), codec.JSON) == message


def test_json_has_plain_integer_lists_and_a_type() -> None:
    shown = json.loads(codec.encode_json(turn("r1", "t0", prompt=[1, 2], output=[3])))
    assert shown["type"] == "turn_completed"
    assert shown["prompt_tail"] == [1, 2]
    assert shown["logprobs"] == [-0.5]


def test_the_content_type_decides_and_may_carry_parameters() -> None:
    data = codec.encode_json(finished("r1"))
    assert codec.decode(Event, data, "application/json; charset=utf-8") == finished("r1")
    with pytest.raises(codec.CodecError, match="in msgpack"):
        codec.decode(Event, data)


def test_equal_messages_have_equal_bytes_and_digests() -> None:
    assert codec.digest(trajectory("r1")) == codec.digest(trajectory("r1"))
    assert codec.digest(trajectory("r1")) != codec.digest(trajectory("r1", reward=0.5))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"type":"rollout_finished","rollout_id":"r","event_id":"e"}', "missing required field"),
        (
            '{"type":"rollout_ended","rollout_id":"r","event_id":"e"}',
            "Invalid value 'rollout_ended'",
        ),
        ('{"rollout_id":"r","event_id":"e","reward":1}', "type"),
        ('{"type":"rollout_finished","rollout_id":"r","event_id":"e","reward":"1"}', "reward"),
        ('{"type":"rollout_finished","rollout_id":"r","event_id":"e","reward":NaN}', "malformed"),
        ("[]", "array"),
        ("", "truncated"),
    ],
)
def test_json_that_is_no_event_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(codec.CodecError, match=said):
        codec.decode(Event, text.encode(), codec.JSON)


@pytest.mark.parametrize("ids", ["[-1]", "[4294967296]", "[1.5]", '["1"]', "[true]", '"AQAAAA=="'])
def test_token_ids_that_are_not_uint32_are_refused(ids: str) -> None:
    text = (
        '{"type":"turn_completed","rollout_id":"r","event_id":"e","session_id":"s","turn_id":"t",'
        f'"prompt_tail":{ids},"output_ids":[],"logprobs":[],"num_prompt_tokens":1}}'
    )
    with pytest.raises(codec.CodecError, match="JSON"):
        codec.decode(Event, text.encode(), codec.JSON)


def test_packed_bytes_of_a_broken_length_are_refused() -> None:
    fields = msgspec.msgpack.decode(codec.encode(turn("r1", "t0", prompt=[1], output=[2])))
    fields["output_ids"] = b"\x01\x00\x00"
    with pytest.raises(codec.CodecError, match="expected a multiple of 4 bytes, got 3"):
        codec.decode(Event, msgspec.msgpack.encode(fields))


@settings(deadline=None)
@given(st.sampled_from(EVENTS), st.data())
def test_damaged_bytes_never_raise_anything_but_a_codec_error(
    event: Event, data: st.DataObject
) -> None:
    whole = codec.encode(event)
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(
        st.sampled_from(
            [whole[:place], whole[:place] + b"\xc1" + whole[place + 1 :], whole + b"\x00"]
        )
    )
    try:
        codec.decode(Event, damaged)
    except codec.CodecError:
        return


@settings(deadline=None)
@given(st.binary(max_size=64), st.sampled_from([None, codec.JSON]))
def test_random_bytes_never_raise_anything_but_a_codec_error(
    data: bytes, content_type: str | None
) -> None:
    try:
        codec.decode(Event, data, content_type)
    except codec.CodecError:
        return


def test_bytes_of_an_older_version_get_the_defaults_of_newer_fields() -> None:
    fields = msgspec.msgpack.decode(codec.encode(turn("r1", "t0", prompt=[1], output=[2])))
    required = (
        *("type", "rollout_id", "event_id", "session_id", "turn_id"),
        *("prompt_tail", "output_ids", "logprobs", "num_prompt_tokens"),
    )
    oldest = {name: value for name, value in fields.items() if name in required}
    event = codec.decode(Event, msgspec.msgpack.encode(oldest))
    assert isinstance(event, TurnCompleted)
    assert (event.policy_versions, event.continuity, event.temperature) == ((), "first", 1.0)


def test_bytes_of_a_newer_version_are_read_without_what_is_unknown() -> None:
    fields = msgspec.msgpack.decode(codec.encode(started("r1")))
    newer = {**fields, "field_of_tomorrow": {"a": [1, 2]}}
    event = codec.decode(Event, msgspec.msgpack.encode(newer))
    assert event == started("r1")


def test_every_field_that_is_not_part_of_the_first_version_has_a_default() -> None:
    # The required fields of the first version; another required field would orphan old logs.
    required = {
        "RolloutStarted": {"rollout_id", "event_id", "group_id"},
        "TurnCompleted": {
            *("rollout_id", "event_id", "session_id", "turn_id"),
            *("prompt_tail", "output_ids", "logprobs", "num_prompt_tokens"),
        },
        "TurnFailed": {"rollout_id", "event_id", "session_id", "reason"},
        "RolloutFinished": {"rollout_id", "event_id", "reward"},
        "RolloutAborted": {"rollout_id", "event_id", "reason"},
        "RewardRevised": {"rollout_id", "event_id", "reward"},
    }
    found = {
        kind.__name__: {f.name for f in msgspec.structs.fields(kind) if f.required}
        for kind in Event.__args__
    }
    assert found == required


def test_a_turn_of_100k_tokens_takes_no_more_than_its_ids_and_logprobs() -> None:
    rng = np.random.default_rng(7)
    event = turn("r1", "t0", prompt=[1], output=[2])
    event = msgspec.structs.replace(
        event,
        output_ids=type(event.output_ids).of(rng.integers(0, 151_936, 100_000)),
        logprobs=type(event.logprobs).of(-rng.random(100_000)),
    )
    size = len(codec.encode(event))
    assert 800_000 < size <= 810_000
    assert codec.decode(Event, codec.encode(event)) == event


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        started("r1").group_id = "other"  # type: ignore[misc]
    assert isinstance(hash(started("r1").rollout_id), int)
    assert RolloutStarted(rollout_id="r", event_id="e", group_id="g").split == "train"
