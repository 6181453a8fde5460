"""The worker: outcomes, limits, shutdown, redelivery, kills."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import turnfold
from turnfold.agents import GatewayClient
from turnfold.agents.worker.app import Worker
from turnfold.agents.worker.client import AgentError, load_agent
from turnfold.agents.worker.settings import Settings
from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.schemas import codec
from turnfold.schemas.batches import GroupDropped, Positions
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.events import RolloutAborted, RolloutFinished
from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import task

AgentFile = Callable[[str], str]
Starts = Callable[[str], list[str]]


async def test_every_rollout_of_a_group_is_run_and_scored(
    bench: Any, agent_file: AgentFile
) -> None:
    agent = agent_file("return task['base'] + int(rollout.rollout_id[-2:])")
    async with bench.worker(agent):
        await bench.dispatch(n=3, payload={"base": 10})
        ends = await bench.wait_for_ends(3)
    assert {name: end.reward for name, end in ends.items()} == {
        "g0-00": 10.0,
        "g0-01": 11.0,
        "g0-02": 12.0,
    }


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('boom')", "agent_error"),
        ("raise EnvironmentFailed('the sandbox died')", "environment_error"),
        ("raise TimeoutError('of its own')", "agent_error"),
        ("return 'half'", "invalid_result"),
        ("return None", "invalid_result"),
        ("await asyncio.sleep(3600)", "agent_timeout"),
    ],
)
async def test_a_rollout_that_fails_ends_with_its_reason_and_no_reward(
    bench: Any, agent_file: AgentFile, body: str, reason: str
) -> None:
    async with bench.worker(agent_file(body)):
        await bench.dispatch(n=1, rollout_timeout_s=1.0 if "sleep" in body else None)
        (end,) = (await bench.wait_for_ends(1)).values()
    assert isinstance(end, RolloutAborted)
    assert end.reason == reason


async def test_a_truncated_result_and_a_reward_given_by_the_agent_itself(
    bench: Any, agent_file: AgentFile
) -> None:
    agent = agent_file(
        "if rollout.rollout_id.endswith('00'):\n"
        "    return Result(reward=0.5, is_truncated=True)\n"
        "await rollout.finish(0.25)"
    )
    async with bench.worker(agent):
        await bench.dispatch(n=2)
        ends = await bench.wait_for_ends(2)
    assert (ends["g0-00"].reward, ends["g0-00"].is_truncated) == (0.5, True)
    assert (ends["g0-01"].reward, ends["g0-01"].is_truncated) == (0.25, False)


async def test_one_failing_rollout_leaves_the_others_of_its_group_alone(
    bench: Any, agent_file: AgentFile
) -> None:
    agent = agent_file("assert not rollout.rollout_id.endswith('01')\nreturn 1.0")
    async with bench.worker(agent):
        await bench.dispatch(n=3)
        ends = await bench.wait_for_ends(3)
    assert [type(end) for _, end in sorted(ends.items())] == [
        RolloutFinished,
        RolloutAborted,
        RolloutFinished,
    ]


async def test_a_slow_group_does_not_hold_up_the_next_one(
    bench: Any, agent_file: AgentFile
) -> None:
    agent = agent_file("if task.get('slow'): await asyncio.sleep(3600)\nreturn 1.0")
    async with bench.worker(agent, concurrency=8, grace_s=0.1):
        await bench.dispatch(n=2, payload={"slow": True})
        await bench.dispatch(n=2)
        ends = await bench.wait_for_ends(2)
    assert sorted(ends) == ["g1-00", "g1-01"]


async def test_no_more_rollouts_run_at_a_time_than_allowed_and_no_more_groups_are_taken(
    bench: Any, agent_file: AgentFile, starts: Starts, eventually: Any
) -> None:
    agent = agent_file(
        "while not STARTS.with_suffix('.go').exists(): await asyncio.sleep(0.02)\nreturn 1.0"
    )
    async with bench.worker(agent, concurrency=3):
        for _ in range(4):
            await bench.dispatch(n=2)

        async def is_full() -> bool:
            return len(starts(agent)) == 3 and await bench.committed() == 2

        await eventually(is_full)
        # Two groups are taken, which fill three slots; the others stay in the log for others.
        Path(agent.removesuffix(":run")).with_suffix(".go").touch()
        ends = await bench.wait_for_ends(8)
    assert len(ends) == 8
    assert len(set(starts(agent))) == len(starts(agent)) == 8


async def test_when_it_stops_running_rollouts_may_finish_within_the_grace(
    bench: Any, agent_file: AgentFile, starts: Starts, eventually: Any
) -> None:
    agent = agent_file(
        "while not STARTS.with_suffix('.go').exists(): await asyncio.sleep(0.02)\nreturn 1.0"
    )

    async def has_started() -> bool:
        return len(starts(agent)) == 2

    async with bench.worker(agent, grace_s=30.0) as stop:
        await bench.dispatch(n=2)
        await eventually(has_started)
        stop.set()
        Path(agent.removesuffix(":run")).with_suffix(".go").touch()
    ends = await bench.ends()
    assert [end.reward for end in ends.values()] == [1.0, 1.0]


async def test_after_the_grace_what_still_runs_or_waits_is_given_up_with_a_reason(
    bench: Any, agent_file: AgentFile, starts: Starts, eventually: Any
) -> None:
    agent = agent_file("await asyncio.sleep(3600)")

    async def has_started() -> bool:
        return len(starts(agent)) == 1

    async with bench.worker(agent, concurrency=1, grace_s=0.1):
        await bench.dispatch(n=3)
        await eventually(has_started)
    ends = await bench.ends()
    # The two that never started end too, so that their group need not wait for its deadline.
    assert [end.reason for end in ends.values()] == ["worker_shutdown"] * 3
    assert len(starts(agent)) == 1


async def test_tasks_that_were_sent_before_the_worker_started_are_run(
    bench: Any, agent_file: AgentFile
) -> None:
    await bench.dispatch(n=1)
    async with bench.worker(agent_file("return 1.0")):
        assert len(await bench.wait_for_ends(1)) == 1


async def test_a_group_past_its_deadline_is_not_run(
    bench: Any, agent_file: AgentFile, starts: Starts
) -> None:
    agent = agent_file("return 1.0")
    await bench.dispatch(n=1, dispatched_at=1000.0)
    await bench.dispatch(n=1)
    async with bench.worker(agent):
        await bench.wait_for_ends(1)
    assert starts(agent) == ["g1-00"]
    assert await bench.committed() == 2


async def test_a_task_delivered_twice_is_run_once(
    bench: Any, agent_file: AgentFile, starts: Starts, eventually: Any
) -> None:
    agent = agent_file("return 1.0")
    sent = await bench.dispatch(n=2)
    await bench.producer.send(bench.topics.tasks, key=sent.group_id, message=sent)

    async def both_committed() -> bool:
        return bool(await bench.committed() == 2)

    async with bench.worker(agent):
        await bench.wait_for_ends(2)
        await eventually(both_committed)
    assert len(starts(agent)) == 2


async def test_a_damaged_task_goes_to_the_dead_letters_and_the_next_one_is_run(
    bench: Any, agent_file: AgentFile
) -> None:
    await bench.producer.send_raw(bench.topics.tasks, key=b"g0", value=b"\xffnot a task")
    await bench.producer.send_raw(bench.topics.tasks, key=b"g0", value=b"1")
    await bench.dispatch(n=1)
    async with bench.worker(agent_file("return 1.0")):
        await bench.wait_for_ends(1)
    letters = [
        codec.decode(DeadLetter, record.value)
        for record in await bench.records(bench.topics.dead_letters)
    ]
    assert [letter.value for letter in letters] == [b"\xffnot a task", b"1"]
    assert all("not Task in msgpack" in letter.reason for letter in letters)


async def test_a_task_in_json_is_run_too(bench: Any, agent_file: AgentFile) -> None:
    await bench.producer.send_raw(
        bench.topics.tasks,
        key=b"gj",
        value=codec.encode_json(task("gj", n=1)),
        headers={"content-type": codec.JSON},
    )
    async with bench.worker(agent_file("return 1.0")):
        assert list(await bench.wait_for_ends(1)) == ["gj-00"]


async def test_two_workers_share_the_tasks_and_run_none_twice(
    bench: Any, agent_file: AgentFile, starts: Starts
) -> None:
    agent = agent_file("await asyncio.sleep(0.05)\nreturn 1.0")
    async with bench.worker(agent, concurrency=2), bench.worker(agent, concurrency=2):
        for _ in range(12):
            await bench.dispatch(n=2)
        await bench.wait_for_ends(24)
    assert len(starts(agent)) == len(set(starts(agent))) == 24


@pytest.mark.field_case("miles#2254")
async def test_a_killed_worker_leaves_its_group_and_the_next_worker_takes_the_rest(
    bench: Any, agent_file: AgentFile, starts: Starts, eventually: Any
) -> None:
    agent = agent_file(
        "while not STARTS.with_suffix('.go').exists(): await asyncio.sleep(0.02)\nreturn 1.0"
    )
    process = await start_process(bench, agent)

    async def has_started() -> bool:
        return len(starts(agent)) == 1

    try:
        await bench.dispatch(n=1)
        await eventually(has_started)
    finally:
        process.kill()
        await process.wait()
    Path(agent.removesuffix(":run")).with_suffix(".go").touch()
    await bench.dispatch(n=1)
    async with bench.worker(agent):
        ends = await bench.wait_for_ends(1)
    assert list(ends) == ["g1-00"]
    assert starts(agent) == ["g0-00", "g1-00"]


async def test_a_worker_outlives_a_crash_of_the_broker(
    bench: Any, killable_broker: BrokerProcess, agent_file: AgentFile
) -> None:
    async with bench.worker(agent_file("return 1.0")):
        await bench.dispatch(n=1)
        await bench.wait_for_ends(1)
        killable_broker.kill9()
        killable_broker.start()
        await bench.dispatch(n=1)
        ends = await bench.wait_for_ends(2)
    assert sorted(ends) == ["g0-00", "g1-00"]


async def test_sigterm_ends_the_process_cleanly(
    bench: Any, agent_file: AgentFile, starts: Starts, eventually: Any
) -> None:
    agent = agent_file("await asyncio.sleep(0.2)\nreturn 1.0")
    process = await start_process(bench, agent)

    async def has_started() -> bool:
        return len(starts(agent)) == 1

    await bench.dispatch(n=1)
    await eventually(has_started)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 30) == 0
    assert (await bench.ends())["g0-00"].reward == 1.0


async def start_process(bench: Any, agent: str) -> asyncio.subprocess.Process:
    command = "import typer; from turnfold.agents.cli import worker; typer.run(worker)"
    roots = [str(Path(path).parent) for path in turnfold.__path__]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(roots),
        "TURNFOLD_BOOTSTRAP": bench.gateway_settings.bootstrap,
        "TURNFOLD_NAMESPACE": bench.gateway_settings.namespace,
        "TURNFOLD_GATEWAY_URL": bench.gateway_url,
        "TURNFOLD_CONTROL_KEY": bench.gateway_settings.control_key,
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", command, "--agent", agent, env=env
    )


@pytest.mark.field_case("miles#1717")
async def test_errors_of_agents_are_logged_once_in_full(
    client: GatewayClient, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(task: Any, rollout: Any) -> float:
        raise ZeroDivisionError("first cause")

    worker = Worker(run, client, concurrency=4)

    async def is_idle() -> bool:
        return worker.num_pending == 0

    worker.begin(task("g", n=3))
    await eventually(is_idle)
    with_traceback = [record for record in caplog.records if record.exc_info]
    assert len(with_traceback) == 1
    assert len([r for r in caplog.records if "ZeroDivisionError" in r.message]) == 3


@pytest.mark.field_case("verl#7155")
async def test_rollouts_of_a_decided_group_end_and_those_that_wait_never_start(
    bench: Any, agent_file: AgentFile, starts: Starts, eventually: Any
) -> None:
    agent = agent_file("if task.get('slow'): await asyncio.sleep(3600)\nreturn 1.0")
    async with bench.worker(agent, concurrency=2):
        slow = await bench.dispatch(n=3, payload={"slow": True})

        async def is_full() -> bool:
            return len(starts(agent)) == 2

        await eventually(is_full)
        await bench.decide(dropped(slow.group_id))
        await bench.dispatch(n=2)
        ends = await bench.wait_for_ends(4)
    reasons = {name: getattr(end, "reason", None) for name, end in ends.items()}
    assert reasons == {
        **dict.fromkeys(sorted(starts(agent)[:2]), "group_decided"),
        "g1-00": None,
        "g1-01": None,
    }
    assert len(starts(agent)) == 4  # the third of the slow group was never started


async def test_a_damaged_decision_stops_nobody(
    bench: Any, agent_file: AgentFile, starts: Starts, eventually: Any
) -> None:
    agent = agent_file("await asyncio.sleep(3600)")

    async def has_started() -> bool:
        return len(starts(agent)) == 1

    async with bench.worker(agent):
        sent = await bench.dispatch(n=1)
        await eventually(has_started)
        await bench.producer.send_raw(bench.topics.batches, key=b"x", value=b"\xff")
        await bench.decide(dropped("another group"))
        await bench.decide(dropped(sent.group_id))
        (end,) = (await bench.wait_for_ends(1)).values()
    assert end.reason == "group_decided"


async def test_a_task_without_a_time_limit_gets_that_of_the_run(
    bench: Any, agent_file: AgentFile
) -> None:
    async with bench.worker(agent_file("return 1.0")):
        sent = await bench.dispatch(n=1, rollout_timeout_s=None)
        await bench.wait_for_ends(1)
    (started, _) = (await bench.events())[f"{sent.group_id}-00"]
    assert started.deadline_at == pytest.approx(started.at + RunConfig().rollout_timeout_s)


@pytest.mark.field_case("miles#1717")
async def test_the_first_failures_are_in_the_log_and_in_the_health_text(
    client: GatewayClient, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(task: Any, rollout: Any) -> float:
        raise ModuleNotFoundError("No module named 'gym'")

    worker = Worker(run, client, concurrency=2)

    async def is_idle() -> bool:
        return worker.num_pending == 0

    worker.begin(task("g", n=9))
    assert worker.describe() == "0 of 2 rollouts run, 9 wait"
    await eventually(is_idle)
    assert worker.describe() == (
        "0 of 2 rollouts run; ended: 9 agent_error; the last 9 all ended in agent_error: "
        "ModuleNotFoundError: No module named 'gym'"
    )
    assert [r.levelname for r in caplog.records].count("ERROR") == 1
    assert "No module named 'gym'" in caplog.records[0].message


async def test_an_agent_that_cannot_be_ended_holds_no_slot(
    client: GatewayClient, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    is_over = asyncio.Event()

    async def run(task: Any, rollout: Any) -> float:
        while task.get("stubborn") and not is_over.is_set():
            try:
                await is_over.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    worker = Worker(run, client, concurrency=1)

    async def is_idle() -> bool:
        return worker.num_pending == 0

    worker.begin(task("g0", n=1, payload={"stubborn": True}, rollout_timeout_s=1.0))
    worker.begin(task("g1", n=1))
    await eventually(is_idle)
    is_over.set()
    assert worker.ended == {"timeout": 1, "completed": 1}
    assert "must let asyncio.CancelledError pass" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected an agent or a command"),
        ({"agent": "a.py:run", "command": "true"}, "got both 'a.py:run' and 'true'"),
        ({"agent": "a.py:run", "cleanup_command": "true"}, "go with a command"),
        ({"agent": "a.py:run", "setup_timeout_s": 0.0}, "setup_timeout_s: expected more than 0"),
        ({"agent": "a.py:run", "agent_grace_s": -1.0}, "agent_grace_s: expected 0 or more"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(control_key="k", **options)


def dropped(group_id: str) -> GroupDropped:
    return GroupDropped(
        run_id="default",
        group_id=group_id,
        dispatch_index=0,
        reason="too_few_survivors",
        positions=Positions(tasks={}, trajectories={}),
        at=0.0,
        config_digest="",
    )


def test_an_agent_is_loaded_from_a_module_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my_agent.py"
    path.write_text("async def run(task, rollout):\n    return 1.0\n\ndef plain(): ...\n")
    assert load_agent(f"{path}:run").__name__ == "run"
    assert load_agent("turnfold.embedded.tiny.agent:run").__name__ == "run"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_agent", "expected module:function or path/to/file.py:function"),
        ("/nowhere/agent.py:run", "agent file /nowhere/agent.py does not exist"),
        ("no_such_module_anywhere:run", "cannot be imported"),
        ("turnfold.agents.results:nothing", "has no 'nothing'"),
        ("turnfold.agents.results:as_result", r"expected `async def as_result\(task, rollout\)`"),
        ("turnfold.agents.results:as_result", r'--command "python my_agent\.py"'),
        ("turnfold.embedded.tiny.agent:rum", "has no 'rum'; it has async run"),
        ("turnfold.agents.worker.app:run", r"called with \(task, rollout\) and takes"),
    ],
)
def test_an_agent_that_cannot_be_loaded_is_explained(name: str, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        load_agent(name)


def test_a_mistake_in_the_agents_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("async def run(task, rollout)\n    return 1.0\n")
    with pytest.raises(AgentError, match=r"SyntaxError: expected ':' \(line 1\)"):
        load_agent(f"{path}:run")
    path.write_text("import no_such_package\n")
    with pytest.raises(AgentError, match="No module named 'no_such_package'"):
        load_agent(f"{path}:run")
