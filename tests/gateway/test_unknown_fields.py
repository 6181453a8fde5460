"""Fields of requests that nobody here knows: told by name, and not as labels of a metric."""

from typing import Any

import msgspec
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from turnfold.gateway.constraints import UNKNOWN_FIELD, counted_field
from turnfold.gateway.protocols import anthropic_messages, openai_chat, openai_responses
from turnfold.gateway.protocols.protocol import ModelProtocol
from turnfold.gateway.refusals import Refusal

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO},
    "responses": {"input": "hello"},
    "anthropic": {"messages": HELLO, "max_tokens": 9},
}
PROTOCOLS: dict[str, ModelProtocol] = {
    "chat": openai_chat,
    "responses": openai_responses,
    "anthropic": anthropic_messages,
}
PATHS = {"chat": "chat/completions", "responses": "responses", "anthropic": "messages"}
PUBLISHED = [
    ("chat", completion_create_params.CompletionCreateParamsStreaming),
    ("responses", response_create_params.ResponseCreateParamsStreaming),
    ("anthropic", message_create_params.MessageCreateParamsStreaming),
    ("anthropic", beta_message_create_params.MessageCreateParamsStreaming),
]


def unknown(name: str, **fields: Any) -> list[str]:
    body = msgspec.json.encode(BODIES[name] | fields)
    return [
        constraint.field
        for constraint in PROTOCOLS[name].read_call(body).constraints
        if constraint.code == "unknown_parameter"
    ]


@pytest.mark.parametrize(("name", "params"), PUBLISHED)
def test_every_field_of_the_published_api_is_known(name: str, params: Any) -> None:
    """Whatever is done about it; a value of a wrong type is enough to see that."""
    for field in params.__annotations__:
        try:
            found = unknown(name, **{field: {"type": "x"}})
        except Refusal:
            continue
        assert found == [], field


@pytest.mark.parametrize("name", BODIES)
def test_an_unknown_field_is_told_by_name(name: str) -> None:
    assert unknown(name, frobnicate=1, temperature=0.5, more={}) == ["frobnicate", "more"]


@pytest.mark.parametrize("name", BODIES)
def test_an_unknown_field_that_is_null_asks_for_nothing(name: str) -> None:
    assert unknown(name, frobnicate=None) == []


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_field_is_named_beside_an_unknown_one(name: str) -> None:
    with pytest.raises(Refusal, match="temperature") as caught:
        unknown(name, frobnicate=1, temperature="hot")
    assert caught.value.param == "temperature"


def test_names_that_no_header_takes_are_not_repeated() -> None:
    assert unknown("chat", **{"a\r\nx-evil": 1, "ü": 1, "a" * 65: 1}) == [UNKNOWN_FIELD] * 3
    assert len(unknown("chat", **{f"f{i}": 1 for i in range(100)})) == 16


def test_unknown_fields_do_not_change_the_length_of_a_prompt() -> None:
    body = msgspec.json.encode(BODIES["anthropic"] | {"frobnicate": 1})
    assert anthropic_messages.read_count(body).constraints == ()


def test_unknown_fields_are_counted_as_one() -> None:
    assert counted_field("frobnicate") == UNKNOWN_FIELD
    assert counted_field("tool_choice") == "tool_choice"


@pytest.mark.parametrize("name", BODIES)
async def test_an_unknown_field_is_refused(gateway: Any, name: str) -> None:
    rollout = await gateway.start_rollout()
    url = f"{rollout.base_url}/{PATHS[name]}"
    body = BODIES[name] | {"frobnicate": 1}
    response = await gateway.http.post(url, headers=rollout.headers, json=body)
    assert response.status_code == 400
    assert "frobnicate" in response.json()["error"]["message"]
    assert not gateway.engine.requests


@pytest.mark.parametrize("name", BODIES)
async def test_an_unknown_field_is_told_where_constraints_are_ignored(
    stack: Any, name: str
) -> None:
    await stack.start_gateway(unenforced="ignore")
    rollout = await stack.start_rollout()
    url = f"{rollout.base_url}/{PATHS[name]}"
    body = BODIES[name] | {"frobnicate": 1}
    response = await stack.http.post(url, headers=rollout.headers, json=body)
    assert response.status_code == 200
    assert response.headers["x-turnfold-unenforced"] == "frobnicate"
    (turn,) = await stack.turns(rollout.rollout_id)
    assert turn.unenforced == ("frobnicate",)
