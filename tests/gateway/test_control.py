"""Rollouts started, scored, aborted and looked at over HTTP, as an agent in any language would."""

from typing import Any

import pytest

from turnfold.schemas.events import RewardRevised, RolloutAborted, RolloutFinished, RolloutStarted

CONTROL = {"authorization": "Bearer control"}


async def post(stack: Any, path: str, headers: dict[str, str], body: Any = None) -> Any:
    return await stack.http.post(f"{stack.urls[0]}/v1{path}", headers=headers, json=body or {})


async def test_starting_needs_the_control_key(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    for headers in ({}, {"authorization": "Bearer wrong"}, rollout.headers):
        response = await post(gateway, "/rollouts", headers, {"group_id": "g"})
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"


async def test_starting_publishes_what_was_asked(gateway: Any) -> None:
    body = {
        "group_id": "g", "rollout_id": "g-03", "run_id": "run", "task_id": "t", "index": 3,
        "attempt": 1, "split": "eval", "history_mode": "tree", "nonlinear": "error",
        "rewrites": "follow",
        "timeout_s": 60, "model": "m", "sampling": {"temperature": 0.5, "max_tokens": 7},
        "max_turns": 4, "max_context_tokens": 900, "dispatch_index": 8,
    }  # fmt: skip
    response = await post(gateway, "/rollouts", CONTROL, body)
    assert response.json()["rollout_id"] == "g-03"
    assert response.json()["session_id"] == "main"
    assert response.json()["base_url"].endswith("/v1")
    (started,) = await gateway.events("g-03")
    assert isinstance(started, RolloutStarted)
    assert started.event_id == "g-03:started"
    for name in set(body) - {"timeout_s", "sampling"}:
        assert getattr(started, name) == body[name]
    assert (started.sampling.temperature, started.sampling.max_tokens) == (0.5, 7)
    assert started.deadline_at == started.at + 60


async def test_starting_twice_is_one_rollout_unless_it_differs(gateway: Any) -> None:
    body = {"group_id": "g", "rollout_id": "twice"}
    for _ in range(2):
        assert (await post(gateway, "/rollouts", CONTROL, body)).status_code == 200
    assert len(await gateway.events("twice")) == 1
    other = await post(gateway, "/rollouts", CONTROL, {**body, "group_id": "h"})
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "rollout_exists"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"group_id": ""}, "group_id"),
        ({"group_id": "g", "rollout_id": "a/b"}, "rollout_id"),
        ({"group_id": "g", "index": "x"}, "index"),
        ({"group_id": "g", "split": "test"}, "split"),
        ({"group_id": "g", "max_turns": 0}, "max_turns"),
        ({"group_id": "g", "timeout_s": -1}, "timeout_s"),
        ({"group_id": "g", "temperture": 1}, None),
        ({"group_id": "g", "sampling": {"top_p": 0.5}}, "sampling"),
        ({"group_id": "g", "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ],
)
async def test_a_start_that_makes_no_sense_is_refused(
    gateway: Any, body: dict[str, Any], param: str | None
) -> None:
    response = await post(gateway, "/rollouts", CONTROL, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_finishing_twice_with_one_reward_is_one_event(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    path = f"/rollouts/{rollout.rollout_id}/finish"
    answers = [
        (await post(gateway, path, headers, {"reward": 0.5})).json()
        for headers in (rollout.headers, CONTROL)
    ]
    assert answers == [{"rollout_id": rollout.rollout_id, "status": "finished", "reward": 0.5}] * 2
    other = await post(gateway, path, CONTROL, {"reward": 0.7})
    assert other.status_code == 409
    assert f"/v1/rollouts/{rollout.rollout_id}/reward" in other.json()["error"]["message"]
    aborted = await post(gateway, f"/rollouts/{rollout.rollout_id}/abort", CONTROL, {"reason": "x"})
    assert aborted.status_code == 409
    finishes = [
        e for e in await gateway.events(rollout.rollout_id) if isinstance(e, RolloutFinished)
    ]
    assert len(finishes) == 1


async def test_turns_are_rewarded_by_their_own_ids_or_by_those_of_their_responses(
    gateway: Any,
) -> None:
    rollout = await gateway.start_rollout()
    body = {"reward": 1, "turn_rewards": {"chatcmpl-5f": 0.5, "msg_6a": 1, "7b": -1}}
    await post(gateway, f"/rollouts/{rollout.rollout_id}/finish", CONTROL, body)
    last = (await gateway.events(rollout.rollout_id))[-1]
    assert last.turn_rewards == {"5f": 0.5, "6a": 1.0, "7b": -1.0}


@pytest.mark.parametrize("reward", ['"0.5"', "NaN", "null", "[1]", "1e999"])
async def test_a_reward_is_a_finite_number(gateway: Any, reward: str) -> None:
    rollout = await gateway.start_rollout()
    response = await gateway.http.post(
        f"{rollout.base_url}/rollouts/current/finish",
        headers=rollout.headers,
        content=f'{{"reward": {reward}}}',
    )
    assert response.status_code == 400
    assert len(await gateway.events(rollout.rollout_id)) == 1


async def test_a_revised_reward_supersedes(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    path = f"/rollouts/{rollout.rollout_id}"
    early = await post(gateway, f"{path}/reward", CONTROL, {"reward": 1})
    assert early.json()["error"]["code"] == "rollout_not_finished"
    await post(gateway, f"{path}/finish", CONTROL, {"reward": 0})
    revised = await post(gateway, f"{path}/reward", CONTROL, {"reward": 1, "reason": "judge"})
    assert revised.json()["reward"] == 1
    last = (await gateway.events(rollout.rollout_id))[-1]
    assert isinstance(last, RewardRevised)
    assert (last.reward, last.reason) == (1.0, "judge")
    own = await post(gateway, "/rollouts/current/reward", rollout.headers, {"reward": 1})
    assert own.status_code == 403


async def test_an_aborted_rollout_has_no_reward(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    body = {"reason": "agent_error", "message": "boom"}
    for _ in range(2):
        response = await post(gateway, "/rollouts/current/abort", rollout.headers, body)
        assert response.json() == {
            "rollout_id": rollout.rollout_id,
            "status": "aborted",
            "reward": None,
        }
    aborts = [e for e in await gateway.events(rollout.rollout_id) if isinstance(e, RolloutAborted)]
    assert [(a.reason, a.message) for a in aborts] == [("agent_error", "boom")]


async def test_a_key_opens_its_own_rollout_only(gateway: Any) -> None:
    mine, other = await gateway.start_rollout(), await gateway.start_rollout()
    for path in ("finish", "abort", "sessions"):
        body = {"reward": 1} if path == "finish" else {"reason": "x"} if path == "abort" else {}
        response = await post(gateway, f"/rollouts/{other.rollout_id}/{path}", mine.headers, body)
        assert response.status_code == 403, path
    url = f"{gateway.urls[0]}/v1/rollouts/{other.rollout_id}"
    assert (await gateway.http.get(url, headers=mine.headers)).status_code == 403
    assert (await gateway.http.get(url)).status_code == 401


async def test_a_rollout_can_be_looked_at(gateway: Any) -> None:
    rollout = await gateway.start_rollout(task_id="t")
    for text in ("a", "b"):
        await rollout.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}]
        )
    url = f"{gateway.urls[0]}/v1/rollouts/{rollout.rollout_id}"
    for headers in (CONTROL, rollout.headers):
        assert (await gateway.http.get(url, headers=headers)).json() == {
            "rollout_id": rollout.rollout_id,
            "status": "open",
            "reward": None,
            "group_id": "g",
            "task_id": "t",
            "history_mode": "linear",
            "num_turns": 2,
            "num_output_tokens": 2,
            "continuity": {"first": 2},
            "sessions": {"main": 2},
            "failures": {},
        }


async def test_the_control_key_finds_a_rollout_that_another_gateway_started(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    other = await gateway.start_gateway()
    response = await gateway.http.post(
        f"{other}/v1/rollouts/{rollout.rollout_id}/finish", headers=CONTROL, json={"reward": 1}
    )
    assert response.json()["status"] == "finished"
    missing = await gateway.http.get(f"{other}/v1/rollouts/never", headers=CONTROL)
    assert missing.status_code == 404


async def test_models_health_and_metrics_are_served(gateway: Any) -> None:
    url = gateway.urls[0]
    model = (await gateway.http.get(f"{url}/v1/models")).json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("tiny", 100_000)
    assert (await gateway.http.get(f"{url}/healthz")).status_code == 200
    assert (await gateway.http.get(f"{url}/readyz")).status_code == 200
    assert "turnfold_gateway_turns_total" in (await gateway.http.get(f"{url}/metrics")).text
