"""The consumer-group protocol, with a clock that the test moves."""

import asyncio
from typing import Any

import pytest

from turnfold.embedded.broker.errors import ErrorCode
from turnfold.embedded.broker.groups import (
    INITIAL_DELAY_S,
    GroupCoordinator,
    GroupState,
    JoinAnswer,
    JoinRequest,
)

SESSION_S = 10.0
REBALANCE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Harness:
    """A coordinator with one group, "g"."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.groups = GroupCoordinator(self.clock)

    def state(self) -> GroupState:
        return self.groups.groups["g"].state

    async def start_join(self, member_id: str = "", **changes: Any) -> "asyncio.Task[JoinAnswer]":
        """Send a join request, and let it get as far as it can."""
        request = JoinRequest(
            member_id=member_id,
            instance_id=None,
            client_id="client",
            client_host="host",
            session_timeout_s=SESSION_S,
            rebalance_timeout_s=REBALANCE_S,
            protocol_type="consumer",
            protocols=[("range", b"topics")],
        )._replace(**changes)
        task = asyncio.create_task(self.groups.join("g", request))
        await settle()
        return task

    async def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.groups.tick()
        await settle()

    async def stable_group(self, size: int, **changes: Any) -> list[JoinAnswer]:
        """Members of a group that has its assignment; the first is the leader."""
        joining = [await self.start_join(**changes) for _ in range(size)]
        await self.pass_time(INITIAL_DELAY_S)
        answers = [await task for task in joining]
        answers.sort(key=lambda answer: answer.member_id != answer.leader_id)
        await self.assign(answers)
        return answers

    async def assign(self, answers: list[JoinAnswer]) -> None:
        assignments = {a.member_id: f"part {n}".encode() for n, a in enumerate(answers)}
        leader, *followers = answers
        waiting = [
            asyncio.create_task(self.groups.sync("g", a.generation, a.member_id, {}))
            for a in followers
        ]
        await settle()
        await self.groups.sync("g", leader.generation, leader.member_id, assignments)
        for task in waiting:
            assert (await task).error is ErrorCode.NONE


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def harness() -> Harness:
    return Harness()


async def test_members_that_start_together_make_one_generation(harness: Harness) -> None:
    joining = [await harness.start_join() for _ in range(3)]
    assert not any(task.done() for task in joining)

    await harness.pass_time(INITIAL_DELAY_S)

    answers = [await task for task in joining]
    assert {a.generation for a in answers} == {1}
    assert {a.protocol for a in answers} == {"range"}
    leaders = [a for a in answers if a.member_id == a.leader_id]
    assert [len(a.members) for a in leaders] == [3]
    assert all(a.members == () for a in answers if a not in leaders)
    assert harness.state() is GroupState.COMPLETING


async def test_followers_get_what_the_leader_assigned(harness: Harness) -> None:
    leader, follower = await harness.stable_group(2)

    answer = await harness.groups.sync("g", 1, follower.member_id, {})

    assert answer.assignment == b"part 1"
    assert harness.groups.heartbeat("g", 1, leader.member_id) is ErrorCode.NONE


async def test_a_newcomer_makes_the_others_join_again(harness: Harness) -> None:
    leader, follower = await harness.stable_group(2)

    newcomer = await harness.start_join()

    assert harness.state() is GroupState.PREPARING
    for member in (leader, follower):
        error = harness.groups.heartbeat("g", 1, member.member_id)
        assert error is ErrorCode.REBALANCE_IN_PROGRESS
    again = [await harness.start_join(m.member_id) for m in (leader, follower)]
    assert {(await task).generation for task in [newcomer, *again]} == {2}


async def test_a_silent_member_is_dropped_when_its_session_is_over(harness: Harness) -> None:
    leader, follower = await harness.stable_group(2)
    await harness.pass_time(SESSION_S - 1)
    harness.groups.heartbeat("g", 1, follower.member_id)
    assert harness.state() is GroupState.STABLE

    await harness.pass_time(2)

    assert harness.state() is GroupState.PREPARING
    assert harness.groups.heartbeat("g", 1, leader.member_id) is ErrorCode.UNKNOWN_MEMBER_ID
    rejoined = await (await harness.start_join(follower.member_id))
    assert (rejoined.generation, rejoined.leader_id) == (2, follower.member_id)


async def test_a_member_that_does_not_rejoin_in_time_is_left_behind(harness: Harness) -> None:
    leader, follower = await harness.stable_group(2)
    newcomer = await harness.start_join()
    rejoining = await harness.start_join(leader.member_id)
    for _ in range(int(REBALANCE_S / 5)):
        assert not newcomer.done()
        # It lives, but is busy with what it was assigned.
        harness.groups.heartbeat("g", 1, follower.member_id)
        await harness.pass_time(5)

    assert (await newcomer).generation == (await rejoining).generation == 2
    assert harness.groups.heartbeat("g", 1, follower.member_id) is ErrorCode.UNKNOWN_MEMBER_ID


async def test_leaving_hands_the_partitions_over_at_once(harness: Harness) -> None:
    leader, follower = await harness.stable_group(2)

    assert harness.groups.leave("g", leader.member_id) is ErrorCode.NONE

    rejoined = await (await harness.start_join(follower.member_id))
    assert (rejoined.generation, len(rejoined.members)) == (2, 1)
    assert harness.groups.leave("g", leader.member_id) is ErrorCode.UNKNOWN_MEMBER_ID


async def test_a_group_that_everybody_left_is_empty_and_can_be_deleted(harness: Harness) -> None:
    (only,) = await harness.stable_group(1)
    assert harness.groups.delete("g") is ErrorCode.NON_EMPTY_GROUP

    harness.groups.leave("g", only.member_id)

    assert harness.state() is GroupState.EMPTY
    assert harness.groups.delete("g") is ErrorCode.NONE
    assert harness.groups.groups == {}


async def test_a_follower_that_joins_again_unchanged_disturbs_nobody(harness: Harness) -> None:
    _, follower = await harness.stable_group(2)

    answer = await (await harness.start_join(follower.member_id))

    assert (answer.generation, harness.state()) == (1, GroupState.STABLE)


async def test_a_changed_subscription_starts_a_rebalance(harness: Harness) -> None:
    _, follower = await harness.stable_group(2)

    await harness.start_join(follower.member_id, protocols=[("range", b"other topics")])

    assert harness.state() is GroupState.PREPARING


async def test_a_follower_waiting_for_a_dead_leader_is_told_to_join_again(
    harness: Harness,
) -> None:
    joining = [await harness.start_join() for _ in range(2)]
    await harness.pass_time(INITIAL_DELAY_S)
    answers = [await task for task in joining]
    (follower,) = [a for a in answers if a.member_id != a.leader_id]
    waiting = asyncio.create_task(harness.groups.sync("g", 1, follower.member_id, {}))
    await settle()

    await harness.pass_time(SESSION_S + 1)

    assert (await waiting).error is ErrorCode.REBALANCE_IN_PROGRESS


async def test_a_newcomer_whose_connection_breaks_is_forgotten(harness: Harness) -> None:
    leader, follower = await harness.stable_group(2)
    newcomer = await harness.start_join()

    newcomer.cancel()
    await settle()

    again = [await harness.start_join(m.member_id) for m in (leader, follower)]
    assert [(await task).generation for task in again] == [2, 2]


async def test_a_member_that_asks_twice_to_join_is_answered_twice(harness: Harness) -> None:
    leader, follower = await harness.stable_group(2)
    await harness.start_join()
    first = await harness.start_join(follower.member_id)

    second = await harness.start_join(follower.member_id)

    assert (await first).error is ErrorCode.REBALANCE_IN_PROGRESS
    await harness.start_join(leader.member_id)
    assert (await second).generation == 2


async def test_a_returning_static_member_takes_its_place_and_fences_its_old_self(
    harness: Harness,
) -> None:
    (old,) = await harness.stable_group(1, instance_id="i")

    new = await (await harness.start_join(instance_id="i"))

    assert (new.generation, harness.state()) == (1, GroupState.STABLE)
    # It is the leader, but must not assign anew.
    assert (new.leader_id, new.members) == (old.member_id, ())
    assert (await harness.groups.sync("g", 1, new.member_id, {})).assignment == b"part 0"
    assert harness.groups.heartbeat("g", 1, old.member_id) is ErrorCode.UNKNOWN_MEMBER_ID
    fenced = await (await harness.start_join(old.member_id, instance_id="i"))
    assert fenced.error is ErrorCode.FENCED_INSTANCE_ID


async def test_members_without_a_common_assignor_cannot_be_in_one_group(harness: Harness) -> None:
    await harness.stable_group(1)

    for change in ({"protocols": [("sticky", b"")]}, {"protocol_type": "connect"}):
        answer = await (await harness.start_join(**change))
        assert answer.error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert harness.state() is GroupState.STABLE


async def test_the_leaders_favourite_of_the_common_assignors_is_used(harness: Harness) -> None:
    first = await harness.start_join(protocols=[("sticky", b""), ("range", b""), ("even", b"")])
    await harness.start_join(protocols=[("even", b""), ("range", b"")])

    await harness.pass_time(INITIAL_DELAY_S)

    assert (await first).protocol == "range"


async def test_only_members_commit_while_there_are_any(harness: Harness) -> None:
    assert harness.groups.check_commit("g", -1, "") is ErrorCode.NONE
    (member,) = await harness.stable_group(1)

    assert harness.groups.check_commit("g", -1, "") is ErrorCode.UNKNOWN_MEMBER_ID
    assert harness.groups.check_commit("g", 1, member.member_id) is ErrorCode.NONE
    assert harness.groups.check_commit("g", 0, member.member_id) is ErrorCode.ILLEGAL_GENERATION
