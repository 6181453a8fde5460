"""The requests of consumer groups: membership, and descriptions for administrators."""

from typing import Any

from turnfold.embedded.broker.broker import Broker
from turnfold.embedded.broker.errors import ErrorCode
from turnfold.embedded.broker.groups import Group, GroupState, JoinAnswer, JoinRequest
from turnfold.embedded.broker.protocol import Request


async def join_group(broker: Broker, request: Request) -> dict[str, Any]:
    body = request.body
    if not body["group"]:
        return _joined(JoinAnswer(ErrorCode.INVALID_GROUP_ID, body["member_id"]))
    if body["session_timeout"] <= 0:
        return _joined(JoinAnswer(ErrorCode.INVALID_SESSION_TIMEOUT, body["member_id"]))
    join = JoinRequest(
        member_id=body["member_id"] or "",
        instance_id=body.get("group_instance_id"),
        client_id=request.client_id,
        client_host=request.client_host,
        session_timeout_s=body["session_timeout"] / 1000,
        # Version 0 has one timeout for both.
        rebalance_timeout_s=body.get("rebalance_timeout", body["session_timeout"]) / 1000,
        protocol_type=body["protocol_type"],
        protocols=[
            (protocol["protocol_name"], protocol["protocol_metadata"])
            for protocol in body["group_protocols"]
        ],
    )
    return _joined(await broker.groups.join(body["group"], join))


async def sync_group(broker: Broker, request: Request) -> dict[str, Any]:
    body = request.body
    assignments = {
        assignment["member_id"]: assignment["member_metadata"]
        for assignment in body["group_assignment"]
    }
    answer = await broker.groups.sync(
        body["group"], body["generation_id"], body["member_id"], assignments
    )
    return {"error_code": answer.error, "member_assignment": answer.assignment}


async def heartbeat(broker: Broker, request: Request) -> dict[str, Any]:
    body = request.body
    error = broker.groups.heartbeat(body["group"], body["generation_id"], body["member_id"])
    return {"error_code": error}


async def leave_group(broker: Broker, request: Request) -> dict[str, Any]:
    body = request.body
    return {"error_code": broker.groups.leave(body["group"], body["member_id"])}


async def list_groups(broker: Broker, request: Request) -> dict[str, Any]:
    """Groups with members, and groups that only have offsets."""
    types = dict.fromkeys(broker.store.groups_with_offsets(), "consumer")
    types.update({g.group_id: g.protocol_type for g in broker.groups.groups.values()})
    return {
        "error_code": ErrorCode.NONE,
        "groups": [
            {"group": group_id, "protocol_type": protocol_type}
            for group_id, protocol_type in types.items()
        ],
    }


async def describe_groups(broker: Broker, request: Request) -> dict[str, Any]:
    return {"groups": [_describe(broker, group_id) for group_id in request.body["groups"]]}


async def delete_groups(broker: Broker, request: Request) -> dict[str, Any]:
    """Forget groups and their offsets; a group with members is not deleted."""
    results = []
    for group_id in request.body["groups_names"]:
        error = ErrorCode.GROUP_ID_NOT_FOUND
        if _is_known(broker, group_id):
            error = broker.groups.delete(group_id)
        if error is ErrorCode.NONE:
            broker.store.delete_group_offsets(group_id)
        results.append({"group_id": group_id, "error_code": error})
    return {"results": results}


def _joined(answer: JoinAnswer) -> dict[str, Any]:
    return {
        "error_code": answer.error,
        "generation_id": answer.generation,
        "group_protocol": answer.protocol,
        "leader_id": answer.leader_id,
        "member_id": answer.member_id,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "member_metadata": member.metadata,
            }
            for member in answer.members
        ],
    }


def _is_known(broker: Broker, group_id: str) -> bool:
    return group_id in broker.groups.groups or group_id in broker.store.groups_with_offsets()


def _describe(broker: Broker, group_id: str) -> dict[str, Any]:
    """A group that is not there is "Dead", one that only has offsets is "Empty"."""
    group = broker.groups.groups.get(group_id)
    if group is None:
        state = GroupState.EMPTY.value if _is_known(broker, group_id) else "Dead"
        group = Group(group_id)
    else:
        state = group.state.value
    protocol = group.protocol if group.state is GroupState.STABLE else ""
    return {
        "error_code": ErrorCode.NONE,
        "group": group_id,
        "state": state,
        "protocol_type": group.protocol_type,
        "protocol": protocol,
        "members": [
            {
                "member_id": member.member_id,
                "client_id": member.request.client_id,
                "client_host": member.request.client_host,
                "member_metadata": member.metadata(protocol),
                "member_assignment": member.assignment,
            }
            for member in group.members.values()
        ],
    }
