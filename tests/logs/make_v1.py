"""Writes tests/logs/v1.tflog, the golden log of the first version of the messages.

    python tests/logs/make_v1.py

It was run once. The file must fold for ever, so it is never written again: a later version of the
messages gets a log of its own beside it. What the rollouts are and what they must give is written
out in v1.json.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from turnfold.log.records import Record
from turnfold.replay.logfile import Header, write_log
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, GroupDropped, GroupRef, LeftOut, Positions
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.events import Divergence, Event, Sampling, VersionSpan
from turnfold.schemas.messages import ChatMessage, ToolCall
from turnfold.schemas.policies import PolicyPublished, PolicyServed
from turnfold.schemas.testing import RolloutScript, aborted, task, trajectory, turn

T0 = 1_790_000_000.0


class Log:
    """Records with offsets, as a broker would have given them."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._next: Counter[tuple[str, int]] = Counter()

    def add(
        self,
        topic: str,
        key: str,
        value: bytes,
        partition: int = 0,
        content_type: str = codec.MSGPACK,
    ) -> None:
        place = (f"turnfold.{topic}", partition)
        self.records.append(
            Record(
                topic=place[0],
                partition=partition,
                offset=self._next[place],
                key=key.encode(),
                value=value,
                timestamp=T0 + len(self.records),
                headers=(("content-type", content_type.encode()),),
            )
        )
        self._next[place] += 1

    def event(self, event: Event, partition: int = 0, is_json: bool = False) -> None:
        encode, kind = (codec.encode_json, codec.JSON) if is_json else (codec.encode, codec.MSGPACK)
        self.add("events", event.rollout_id, encode(event), partition, kind)

    def message(self, topic: str, key: str, message: msgspec.Struct) -> None:
        self.add(topic, key, codec.encode(message))


def healed() -> RolloutScript:
    """Three clean turns with all that a gateway records, one failed call in between."""
    script = RolloutScript(
        "healed",
        group_id="run-000000",
        run_id="run",
        task_id="task-7",
        index=0,
        dispatch_index=0,
        deadline_at=T0 + 3600,
        model="policy",
        sampling=Sampling(temperature=0.7, max_tokens=16),
        max_turns=8,
        max_context_tokens=4096,
        at=T0,
    )
    weather = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    call = ToolCall(name="weather", arguments={"city": "Ulm", "days": 2}, id="call-1")
    script.turn(
        "t0",
        [1, 2, 3],
        [10, 11],
        logprobs=[-0.125, -0.25],
        new_messages=(
            ChatMessage(role="system", content="Be brief."),
            ChatMessage(role="user", content="Wie wird das Wetter in Ulm?"),
        ),
        reply=ChatMessage(role="assistant", reasoning="look it up", tool_calls=(call,)),
        tools=(weather,),
        protocol="openai_chat",
        model="policy",
        request_digest="6f" * 32,
        idempotency_key="k-1",
        temperature=0.7,
        max_tokens=16,
        engine_s=0.25,
        pinned=(("cch=36ee5;", "cch=00000;"),),
        at=T0 + 1,
    )
    script.fail("t1-failed", reason="engine_unavailable", message="connection refused")
    script.turn(
        "t1",
        [1, 2, 3, 10, 11, 4, 5],
        [12, 13, 14],
        parent="t0",
        logprobs=[-0.5, -1.0, -2.0],
        shared_messages=3,
        new_messages=(ChatMessage(role="tool", content="sunny", tool_call_id="call-1"),),
        continuity="healed",
        divergence=Divergence(cause="tool_arguments_reordered", message_index=2, token_index=4),
        policy_versions=(
            VersionSpan(policy_version=0, start=0, end=1),
            VersionSpan(policy_version=1, start=1, end=3),
        ),
    )
    script.turn(
        "t2", [1, 2, 3, 10, 11, 4, 5, 12, 13, 14, 6], [15], parent="t1", continuity="extended"
    )
    script.finish(0.75, rewards={"answer": 0.5, "format": 0.25}, info={"grader": "exact"})
    return script


def drifted() -> RolloutScript:
    """Tree mode: the second prompt leaves the first inside its output."""
    script = RolloutScript(
        "drifted", group_id="run-000000", run_id="run", index=1, history_mode="tree"
    )
    script.turn("t0", [1, 2], [9, 9], policy_version=3)
    script.turn("t1", [1, 2, 9, 8], [7], parent="t0", continuity="reset", policy_version=3)
    script.finish(0.0)
    return script


def forked() -> RolloutScript:
    """Parallel calls from one parent."""
    script = RolloutScript("forked", group_id="run-000000", run_id="run", index=2)
    script.turn("t0", [1], [2])
    script.turn("t1", [1, 2, 30], [40], parent="t0", continuity="extended")
    script.turn("t2", [1, 2, 31], [41], parent="t0", continuity="forked")
    script.finish(1.0, is_truncated=True)
    return script


def retried() -> RolloutScript:
    """The client asked again and went on with the second answer."""
    script = RolloutScript("retried", group_id="run-000000", run_id="run", index=3)
    script.turn("t0", [1, 2], [3], finish_reason="length", stop_reason="limit")
    script.turn("t0-again", [1, 2], [4, 5], stop_reason=13)
    script.turn("t1", [1, 2, 4, 5, 6], [7], parent="t0-again")
    script.finish(1.0)
    return script


def delegated() -> RolloutScript:
    """A sub-agent with a session of its own."""
    script = RolloutScript("delegated", group_id="run-000001", run_id="run", index=0, attempt=1)
    script.turn("m0", [1, 2], [3], session_id="main")
    script.turn("s0", [50, 51], [52], session_id="sub")
    script.turn("s1", [50, 51, 52, 53], [54], session_id="sub", parent="s0")
    script.turn("m1", [1, 2, 3, 54], [4], session_id="main", parent="m0")
    script.finish(0.5)
    return script


def records() -> list[Record]:
    log = Log()
    for script in (healed(), drifted(), forked()):
        for event in script.events:
            log.event(event)
    for event in retried().events:
        log.event(event)
        log.event(event)  # delivered twice
    for event in delegated().events:
        log.event(event, partition=1)

    given_up = RolloutScript("given-up", group_id="run-000001", run_id="run", index=1)
    given_up.turn("t0", [1, 2], [3, 4])
    given_up.abort("agent_error", message="KeyError: 'city'")
    for event in given_up.events:
        log.event(event, partition=1)
    log.event(turn("given-up", "t1", prompt=[1, 2], output=[3]), partition=1)  # late
    log.event(aborted("given-up", reason="deadline", event_id="given-up:deadline"), partition=1)

    foreign = RolloutScript("foreign", group_id="elsewhere", split="eval")
    foreign.turn("t0", [1, 2], [3, 4], policy_version=None, protocol="homegrown")
    foreign.turn("t1", [1, 2, 3, 4, 5], [6], policy_version=None)
    foreign.turn("t2", [7, 8], [9], policy_version=None)
    foreign.finish(1.0)
    for event in foreign.events:
        log.event(event, partition=1, is_json=True)

    damaged = RolloutScript("damaged", group_id="run-000001", run_id="run", index=2)
    damaged.turn("t0", [1, 2], [3])
    damaged.turn("t1", [1, 2, 3, 4], [5, 6], parent="t0", logprobs=[-0.5, float("-inf")])
    damaged.turn("t2", [1, 2, 3, 4, 5, 6, 7], [8], parent="t1")
    damaged.turn("t3", [1, 2, 3, 4, 5, 6, 7, 8, 9], [10], parent="t2", num_prompt_tokens=99)
    damaged.turn("t4", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12], parent="t3")
    for event in damaged.events:
        log.event(event)
    log.add("events", "damaged", b"\xc1 this is no event")
    damaged.finish(1.0)
    log.event(damaged.events[-1])

    verdict = RolloutScript("revised", group_id="run-000001", run_id="run", index=3)
    verdict.turn("t0", [1], [2])
    verdict.finish(0.0)
    verdict.revise(1.0, reason="the grader was wrong", rewards={"answer": 1.0})
    for event in verdict.events:
        log.event(event, partition=1)

    running = RolloutScript("running", group_id="run-000001", run_id="run", index=3)
    running.turn("t0", [1], [2])
    for event in running.events:
        log.event(event)

    log.message(
        "tasks", "run-000000", task("run-000000", n=4, payload={"city": "Ulm"}, run_id="run")
    )
    log.message("trajectories", "run-000000", trajectory("other", group_id="run-000000"))
    seen = Positions(tasks={0: 1}, trajectories={0: 1})
    left_out = (LeftOut(rollout_id="given-up", reason="aborted:agent_error"),)
    group = GroupRef(group_id="g", dispatch_index=0, rollouts=(), left_out=left_out)
    log.message(
        "batches",
        "run",
        BatchCut(run_id="run", index=1, groups=(group,), positions=seen, at=T0, config_digest="c"),
    )
    log.message(
        "batches",
        "run",
        GroupDropped(
            run_id="run",
            group_id="h",
            dispatch_index=1,
            reason="stale",
            positions=seen,
            at=T0,
            config_digest="c",
        ),
    )
    published = PolicyPublished(
        run_id="run", policy_version=1, weights_uri="/weights/1", metrics={"loss": 0.5}
    )
    log.message("policies", "run", published)
    served = PolicyServed(run_id="run", policy_version=1, engines=("http://engine:8000",))
    log.message("policies", "run/served", served)
    letter = DeadLetter(
        topic="turnfold.events", partition=0, offset=3, reason="no event", value=b"\xc1"
    )
    log.message("dead-letters", "turnfold.events/0@3", letter)
    return log.records


def main() -> None:
    path = Path(__file__).with_name("v1.tflog")
    found = records()
    topics = {record.topic: 1 for record in found} | {"turnfold.events": 2}
    with path.open("xb") as file:
        write_log(file, Header(namespace="turnfold", topics=topics), found)


if __name__ == "__main__":
    main()
