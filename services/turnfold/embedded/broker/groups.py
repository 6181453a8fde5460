"""The classic consumer-group protocol: who is a member, which generation it is, who has which partitions.

A group is EMPTY, or it goes round this circle:

    PREPARING    a rebalance has begun; members are expected to join anew until all have, or time is up
    COMPLETING   the members of the new generation are fixed; its leader is working out the assignment
    STABLE       everybody has an assignment

Members live in memory only: after a restart of the broker they are told UNKNOWN_MEMBER_ID and join again.
Time is handed in, and waiting is a future that the caller awaits, so that nothing here sleeps.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from turnfold.embedded.broker.errors import ErrorCode

INITIAL_DELAY_S = 0.1
"""A new group waits this long for more members, so that starting several makes one rebalance."""


class GroupState(Enum):
    """States of a group, with the names that DescribeGroups shows."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


class JoinRequest(NamedTuple):
    """What a client says of itself when it joins. `member_id` is empty the first time."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_s: float
    rebalance_timeout_s: float
    protocol_type: str
    protocols: list[tuple[str, bytes]]
    """Names of the assignors it can use, best first, each with its metadata (its subscription)."""


class JoinedMember(NamedTuple):
    """A member as its leader gets to see it."""

    member_id: str
    instance_id: str | None
    metadata: bytes


class JoinAnswer(NamedTuple):
    """The outcome of joining. `members` is filled for the leader only."""

    error: ErrorCode
    member_id: str
    generation: int = -1
    protocol: str = ""
    leader_id: str = ""
    members: tuple[JoinedMember, ...] = ()


class SyncAnswer(NamedTuple):
    """The outcome of asking for one's assignment."""

    error: ErrorCode
    assignment: bytes = b""


@dataclass
class Member:
    """One member. `joining` and `syncing` are set while its client waits for an answer."""

    member_id: str
    request: JoinRequest
    last_seen: float
    assignment: bytes = b""
    joining: "asyncio.Future[JoinAnswer] | None" = None
    syncing: "asyncio.Future[SyncAnswer] | None" = None

    @property
    def instance_id(self) -> str | None:
        return self.request.instance_id

    def metadata(self, protocol: str) -> bytes:
        return dict(self.request.protocols).get(protocol, b"")

    def is_silent(self, now: float) -> bool:
        """Whether its session is over. A client that waits for us need not send heartbeats."""
        is_waiting = self.joining is not None or self.syncing is not None
        return not is_waiting and now - self.last_seen > self.request.session_timeout_s

    def answer_join(self, answer: JoinAnswer) -> None:
        if self.joining is not None and not self.joining.done():
            self.joining.set_result(answer)
        self.joining = None

    def answer_sync(self, answer: SyncAnswer) -> None:
        if self.syncing is not None and not self.syncing.done():
            self.syncing.set_result(answer)
        self.syncing = None


@dataclass
class Group:
    """One group. During PREPARING it completes when all have joined, but not before `not_before`;
    at `give_up_at` whoever has not joined is dropped."""

    group_id: str
    state: GroupState = GroupState.EMPTY
    generation: int = 0
    protocol_type: str = ""
    protocol: str = ""
    leader_id: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    not_before: float = 0.0
    give_up_at: float = 0.0

    def member_of_instance(self, instance_id: str | None) -> Member | None:
        """The static member with this instance id."""
        if instance_id is None:
            return None
        found = (m for m in self.members.values() if m.instance_id == instance_id)
        return next(found, None)

    def common_protocols(self) -> set[str]:
        """Assignors that every member can use."""
        names = [{name for name, _ in m.request.protocols} for m in self.members.values()]
        return set.intersection(*names) if names else set()


class GroupCoordinator:
    """All groups. `clock` gives seconds that only go up; call `tick` several times a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.groups: dict[str, Group] = {}
        self._clock = clock

    async def join(self, group_id: str, request: JoinRequest) -> JoinAnswer:
        """Join or rejoin, and wait until the new generation is complete."""
        group = self.groups.setdefault(group_id, Group(group_id))
        refusal = self._refusal(group, request)
        if refusal is not ErrorCode.NONE:
            return JoinAnswer(refusal, request.member_id)
        replaced = None if request.member_id else group.member_of_instance(request.instance_id)
        if replaced is not None:
            return await self._replace_static(group, replaced, request)
        member = group.members.get(request.member_id)
        if member is None:
            return await self._wait_to_join(group, self._add_member(group, request))
        is_unchanged = member.request.protocols == request.protocols
        member.request = request
        member.last_seen = self._clock()
        is_leader = member.member_id == group.leader_id
        if group.state is GroupState.STABLE and is_unchanged and not is_leader:
            return self._current_generation(group, member)
        if group.state is GroupState.COMPLETING and is_unchanged:
            return self._current_generation(group, member)
        return await self._wait_to_join(group, member)

    async def sync(
        self, group_id: str, generation: int, member_id: str, assignments: Mapping[str, bytes]
    ) -> SyncAnswer:
        """The member's assignment; the leader brings everybody's, the others wait for it."""
        error = self.check_member(group_id, generation, member_id)
        if error is not ErrorCode.NONE:
            return SyncAnswer(error)
        group = self.groups[group_id]
        member = group.members[member_id]
        if group.state is GroupState.STABLE:
            return SyncAnswer(ErrorCode.NONE, member.assignment)
        if group.state is not GroupState.COMPLETING:
            return SyncAnswer(ErrorCode.REBALANCE_IN_PROGRESS)
        if member_id == group.leader_id:
            self._assign(group, assignments)
            return SyncAnswer(ErrorCode.NONE, member.assignment)
        syncing: asyncio.Future[SyncAnswer] = asyncio.get_running_loop().create_future()
        member.syncing = syncing
        try:
            return await syncing
        finally:
            if member.syncing is syncing:
                member.syncing = None

    def heartbeat(self, group_id: str, generation: int, member_id: str) -> ErrorCode:
        """Keeps the session alive; REBALANCE_IN_PROGRESS asks the member to join again."""
        error = self.check_member(group_id, generation, member_id)
        if error is ErrorCode.NONE and self.groups[group_id].state is GroupState.PREPARING:
            return ErrorCode.REBALANCE_IN_PROGRESS
        return error

    def leave(self, group_id: str, member_id: str) -> ErrorCode:
        group = self.groups.get(group_id)
        if group is None or member_id not in group.members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        self._drop(group, [member_id])
        return ErrorCode.NONE

    def check_member(self, group_id: str, generation: int, member_id: str) -> ErrorCode:
        """Whether this is a member of the current generation. It counts as a sign of life."""
        group = self.groups.get(group_id)
        if group is None or member_id not in group.members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        group.members[member_id].last_seen = self._clock()
        return ErrorCode.NONE if generation == group.generation else ErrorCode.ILLEGAL_GENERATION

    def check_commit(self, group_id: str, generation: int, member_id: str) -> ErrorCode:
        """Whether this client may commit offsets: a member, or anybody while the group has no members."""
        is_outsider = generation < 0 and not member_id
        if not is_outsider:
            return self.check_member(group_id, generation, member_id)
        group = self.groups.get(group_id)
        return ErrorCode.UNKNOWN_MEMBER_ID if group and group.members else ErrorCode.NONE

    def delete(self, group_id: str) -> ErrorCode:
        group = self.groups.get(group_id)
        if group is not None and group.members:
            return ErrorCode.NON_EMPTY_GROUP
        self.groups.pop(group_id, None)
        return ErrorCode.NONE

    def tick(self) -> None:
        """Drop members whose session is over, and complete or give up rebalances that are due."""
        now = self._clock()
        for group in list(self.groups.values()):
            silent = [m.member_id for m in group.members.values() if m.is_silent(now)]
            if silent:
                self._drop(group, silent)
            if group.state is GroupState.PREPARING and now >= group.give_up_at:
                late = [m.member_id for m in group.members.values() if m.joining is None]
                self._drop(group, late)
            self._complete_if_ready(group)

    # Joining

    def _refusal(self, group: Group, request: JoinRequest) -> ErrorCode:
        """Why this client cannot join, or NONE."""
        holder = group.member_of_instance(request.instance_id)
        if request.member_id and request.member_id not in group.members:
            is_fenced = holder is not None
            return ErrorCode.FENCED_INSTANCE_ID if is_fenced else ErrorCode.UNKNOWN_MEMBER_ID
        if request.member_id and holder is not None and holder.member_id != request.member_id:
            return ErrorCode.FENCED_INSTANCE_ID
        others = [
            m
            for m in group.members.values()
            if m.member_id != request.member_id and m is not holder
        ]
        names = {name for name, _ in request.protocols}
        for other in others:
            names &= {name for name, _ in other.request.protocols}
        has_other_type = bool(others) and group.protocol_type != request.protocol_type
        if has_other_type or not names:
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return ErrorCode.NONE

    def _add_member(self, group: Group, request: JoinRequest) -> Member:
        prefix = request.instance_id or request.client_id or "member"
        member = Member(f"{prefix}-{uuid.uuid4()}", request, self._clock())
        group.members[member.member_id] = member
        group.protocol_type = request.protocol_type
        return member

    async def _replace_static(self, group: Group, old: Member, request: JoinRequest) -> JoinAnswer:
        """A static member came back as a new process: it takes over the id, assignment and leadership."""
        old.answer_join(JoinAnswer(ErrorCode.FENCED_INSTANCE_ID, old.member_id))
        old.answer_sync(SyncAnswer(ErrorCode.FENCED_INSTANCE_ID))
        del group.members[old.member_id]
        member = self._add_member(group, request)
        member.assignment = old.assignment
        old_leader_id = group.leader_id
        if old_leader_id == old.member_id:
            group.leader_id = member.member_id
        if group.state is GroupState.STABLE and old.request.protocols == request.protocols:
            # Nobody else need notice. Naming the old leader keeps the new process from assigning anew.
            return self._current_generation(group, member)._replace(leader_id=old_leader_id)
        return await self._wait_to_join(group, member)

    async def _wait_to_join(self, group: Group, member: Member) -> JoinAnswer:
        # A client that asks twice gets an answer to the first request as well.
        member.answer_join(JoinAnswer(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))
        is_newcomer = not member.request.member_id
        joining: asyncio.Future[JoinAnswer] = asyncio.get_running_loop().create_future()
        member.joining = joining
        if group.state is not GroupState.PREPARING:
            self._begin_rebalance(group)
        self._extend_deadline(group)
        self._complete_if_ready(group)
        try:
            return await joining
        except asyncio.CancelledError:
            self._forget_waiting(group, member, joining, is_newcomer=is_newcomer)
            raise

    def _forget_waiting(
        self,
        group: Group,
        member: Member,
        joining: "asyncio.Future[JoinAnswer]",
        *,
        is_newcomer: bool,
    ) -> None:
        """The connection broke before the answer. A newcomer never learnt its id and cannot come back."""
        if member.joining is joining:
            member.joining = None
        if is_newcomer and group.members.get(member.member_id) is member:
            self._drop(group, [member.member_id])

    # Rebalancing

    def _begin_rebalance(self, group: Group) -> None:
        now = self._clock()
        is_first = group.state is GroupState.EMPTY
        group.state = GroupState.PREPARING
        group.not_before = now + INITIAL_DELAY_S if is_first else now
        group.give_up_at = now
        self._extend_deadline(group)
        for member in group.members.values():
            member.answer_sync(SyncAnswer(ErrorCode.REBALANCE_IN_PROGRESS))

    def _extend_deadline(self, group: Group) -> None:
        longest = max((m.request.rebalance_timeout_s for m in group.members.values()), default=0.0)
        group.give_up_at = max(group.give_up_at, group.not_before + longest)

    def _complete_if_ready(self, group: Group) -> None:
        """Start the new generation if every member has joined and the initial delay is over."""
        if group.state is not GroupState.PREPARING or self._clock() < group.not_before:
            return
        if any(member.joining is None for member in group.members.values()):
            return
        group.generation += 1
        if not group.members:
            group.state = GroupState.EMPTY
            group.leader_id = group.protocol = ""
            return
        if group.leader_id not in group.members:
            group.leader_id = next(iter(group.members))
        common = group.common_protocols()
        leader = group.members[group.leader_id]
        group.protocol = next(name for name, _ in leader.request.protocols if name in common)
        group.state = GroupState.COMPLETING
        for member in group.members.values():
            member.last_seen = self._clock()
            member.answer_join(self._current_generation(group, member))

    def _current_generation(self, group: Group, member: Member) -> JoinAnswer:
        """The answer that tells `member` of the generation as it is."""
        members: tuple[JoinedMember, ...] = ()
        if member.member_id == group.leader_id and group.state is GroupState.COMPLETING:
            members = tuple(
                JoinedMember(m.member_id, m.instance_id, m.metadata(group.protocol))
                for m in group.members.values()
            )
        return JoinAnswer(
            ErrorCode.NONE,
            member.member_id,
            group.generation,
            group.protocol,
            group.leader_id,
            members,
        )

    def _assign(self, group: Group, assignments: Mapping[str, bytes]) -> None:
        group.state = GroupState.STABLE
        for member in group.members.values():
            member.assignment = assignments.get(member.member_id, b"")
            member.last_seen = self._clock()
            member.answer_sync(SyncAnswer(ErrorCode.NONE, member.assignment))

    def _drop(self, group: Group, member_ids: list[str]) -> None:
        """Remove members; the others rebalance."""
        for member_id in member_ids:
            member = group.members.pop(member_id)
            member.answer_join(JoinAnswer(ErrorCode.UNKNOWN_MEMBER_ID, member_id))
            member.answer_sync(SyncAnswer(ErrorCode.UNKNOWN_MEMBER_ID))
        if not member_ids:
            return
        if group.state in (GroupState.STABLE, GroupState.COMPLETING):
            self._begin_rebalance(group)
        self._complete_if_ready(group)
