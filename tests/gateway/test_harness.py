"""Who speaks, by its own account."""

import pytest
from starlette.requests import Request

from turnfold.gateway.http.requests import harness


@pytest.mark.parametrize(
    ("user_agent", "expected"),
    [
        ("AsyncOpenAI/Python 3.57.0", "AsyncOpenAI/Python"),
        ("claude-cli/1.0.3 (external, cli)", "claude-cli"),
        ("curl/8.5.0", "curl"),
        ("my agent", "my"),
        ("", ""),
        ("x" * 500, "x" * 64),
    ],
)
def test_the_harness_is_the_first_product_without_its_version(
    user_agent: str, expected: str
) -> None:
    headers = [(b"user-agent", user_agent.encode())]
    assert harness(Request({"type": "http", "headers": headers})) == expected


def test_a_request_without_a_user_agent_has_no_harness() -> None:
    assert harness(Request({"type": "http", "headers": []})) == ""
