"""Requests that would constrain the output: refused, or sampled freely and said to be."""

import re
from typing import Any

import pytest
from prometheus_client import REGISTRY

PATHS = {"chat": "chat/completions", "responses": "responses", "anthropic": "messages"}
FUNCTION = {"name": "lookup", "parameters": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": "code of door 5?"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "responses": {
        "input": "code of door 5?",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "lookup"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
    },
    "anthropic": {
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "code of door 5?"}],
        "tools": [{"name": "lookup", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
}
FIELDS = {
    "chat": ("tool_choice", "parallel_tool_calls"),
    "responses": ("tool_choice", "parallel_tool_calls", "text.format"),
    "anthropic": ("tool_choice.disable_parallel_tool_use", "tool_choice.type"),
}


async def post(stack: Any, rollout: Any, name: str, **more: Any) -> Any:
    url = f"{rollout.base_url}/{PATHS[name]}"
    return await stack.http.post(url, headers=rollout.headers, json={**BODIES[name], **more})


def counted(field: str) -> float:
    name = "turnfold_gateway_unenforced_constraints_total"
    return REGISTRY.get_sample_value(name, {"field": field}) or 0.0


@pytest.mark.parametrize("name", PATHS)
async def test_a_constraint_is_refused_by_name(gateway: Any, name: str) -> None:
    rollout = await gateway.start_rollout()
    response = await post(gateway, rollout, name)
    assert response.status_code == 400
    assert FIELDS[name][0] in response.json()["error"]["message"]
    assert "x-turnfold-unenforced" not in response.headers
    assert not gateway.engine.requests


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", PATHS)
async def test_a_constraint_that_is_ignored_is_on_the_turn_in_a_header_and_counted(
    stack: Any, name: str, is_streamed: bool
) -> None:
    before = {field: counted(field) for field in FIELDS[name]}
    await stack.start_gateway(unenforced="ignore")
    rollout = await stack.start_rollout()
    stack.engine.script(stack.says("it is 2"))
    response = await post(stack, rollout, name, stream=is_streamed)
    assert response.status_code == 200
    said = re.findall(r'"(?:content|delta|text)":"([^"]*)"', response.text)
    assert "it is 2" in "".join(said)
    assert response.headers["x-turnfold-unenforced"] == ", ".join(FIELDS[name])
    (turn,) = await stack.turns(rollout.rollout_id)
    assert turn.unenforced == FIELDS[name]
    assert {field: counted(field) - before[field] for field in before} == dict.fromkeys(before, 1.0)


async def test_a_request_without_constraints_says_nothing_of_them(stack: Any) -> None:
    await stack.start_gateway(unenforced="ignore")
    rollout = await stack.start_rollout()
    response = await post(
        stack, rollout, "chat", tool_choice="auto", parallel_tool_calls=True, stream=False
    )
    assert "x-turnfold-unenforced" not in response.headers
    (turn,) = await stack.turns(rollout.rollout_id)
    assert turn.unenforced == ()


async def test_a_prompt_is_counted_as_the_call_would_be_taken(stack: Any) -> None:
    await stack.start_gateway()
    lenient = await stack.start_gateway(unenforced="ignore")
    strict_rollout = await stack.start_rollout()
    rollout = await stack.start_rollout(lenient)
    for started, status in ((strict_rollout, 400), (rollout, 200)):
        url = f"{started.base_url}/messages/count_tokens"
        body = {k: v for k, v in BODIES["anthropic"].items() if k != "max_tokens"}
        response = await stack.http.post(url, headers=started.headers, json=body)
        assert response.status_code == status
