"""Agents that are commands: real processes against a real gateway."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from turnfold.agents import GatewayClient
from turnfold.agents.attempts.app import Attempt
from turnfold.agents.commands.app import CommandAgent, CommandError
from turnfold.agents.deadlines import deadlines
from turnfold.schemas.events import RolloutAborted, RolloutFinished
from turnfold.schemas.testing import task

EndOf = Callable[..., Awaitable[Any]]

Write = Callable[[str], str]


@pytest.fixture
def command(tmp_path: Path) -> Write:
    """Writes a Python program and gives the command that runs it."""

    def write(body: str) -> str:
        path = tmp_path / "my agent.py"
        head = "import json, os, signal, subprocess, sys, time\nfrom pathlib import Path\n"
        path.write_text(f"{head}HERE = Path({str(tmp_path)!r})\n{body}\n")
        return shlex.join([sys.executable, str(path)])

    return write


@pytest.fixture
def end_of(bench: Any, client: GatewayClient) -> Callable[..., Awaitable[Any]]:
    """Runs a command for one rollout and gives the end that the log has."""

    async def run(
        command: str,
        *,
        timeout_s: float = 60.0,
        setup_timeout_s: float | None = None,
        payload: Any = None,
        **options: str,
    ) -> Any:
        sent = task("g0", n=1, payload=payload or {}, rollout_timeout_s=timeout_s)
        times = deadlines(timeout_s, 10.0, setup_timeout_s)
        agent = CommandAgent(command, **options)
        await Attempt(agent, sent.payload, client.rollout_of(sent, 0), times).run()
        return (await bench.ends())["g0-00"]

    return run


async def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_command_gets_the_task_and_the_api_and_prints_its_reward(
    bench: Any, end_of: EndOf, command: Write
) -> None:
    program = command(
        """
import openai
task = json.loads(os.environ["TURNFOLD_TASK"])
assert task == json.loads(Path(os.environ["TURNFOLD_TASK_FILE"]).read_text())
message = [{"role": "user", "content": f"open door {task['door']}"}]
answer = openai.OpenAI().chat.completions.create(model="policy", messages=message)
print("it said", answer.choices[0].message.content)
info = {"rollout": os.environ["TURNFOLD_ROLLOUT_ID"], "time": os.environ["TURNFOLD_TIMEOUT_S"]}
print(json.dumps({"rewards": {"door": 0.25, "code": 0.5}, "info": info}))
"""
    )
    end = await end_of(program, payload={"door": 3})
    assert isinstance(end, RolloutFinished), end
    assert (end.reward, end.rewards) == (0.75, {"door": 0.25, "code": 0.5})
    assert end.info == {"rollout": "g0-00", "time": "47"}
    assert len(bench.engine.requests) == 1


async def test_the_anthropic_sdk_finds_its_variables_too(end_of: EndOf, command: Write) -> None:
    program = command(
        """
import anthropic
message = [{"role": "user", "content": "open door 3"}]
answer = anthropic.Anthropic().messages.create(model="policy", max_tokens=9, messages=message)
Path(os.environ["TURNFOLD_RESULT_FILE"]).write_text(json.dumps({"reward": len(answer.content)}))
"""
    )
    assert (await end_of(program)).reward == 1.0


async def test_a_reward_that_the_command_gives_to_the_gateway_itself_counts(
    end_of: EndOf, command: Write
) -> None:
    program = command(
        """
import httpx
url = f"{os.environ['OPENAI_BASE_URL']}/rollouts/current/finish"
key = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
httpx.post(url, headers=key, json={"reward": 0.125}).raise_for_status()
"""
    )
    assert (await end_of(program)).reward == 0.125


async def test_a_command_gets_no_key_but_its_own(
    end_of: EndOf, command: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNFOLD_CONTROL_KEY", "control")
    monkeypatch.setenv("TURNFOLD_KEY_SECRET", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    program = command(
        """
names = {name for name in os.environ if name.startswith("TURNFOLD_")}
assert names == {"TURNFOLD_TASK", "TURNFOLD_TASK_FILE", "TURNFOLD_RESULT_FILE",
                 "TURNFOLD_ROLLOUT_ID", "TURNFOLD_TIMEOUT_S"}, names
assert os.environ["OPENAI_API_KEY"].startswith("tf-")
print(json.dumps({"reward": 1}))
"""
    )
    assert (await end_of(program)).reward == 1.0


async def test_a_task_too_long_for_a_variable_is_in_the_file(end_of: EndOf, command: Write) -> None:
    program = command(
        """
assert "TURNFOLD_TASK" not in os.environ
task = json.loads(Path(os.environ["TURNFOLD_TASK_FILE"]).read_text())
print(json.dumps({"reward": len(task["text"])}))
"""
    )
    end = await end_of(program, payload={"text": "x" * 200_000})
    assert end.reward == 200_000


@pytest.mark.parametrize(
    ("body", "reason", "message"),
    [
        ("sys.exit('no such file: x')", "agent_error", "exit code 1; .*no such file: x"),
        ("raise ValueError('boom')", "agent_error", "ValueError: boom"),
        ("print('done')", "agent_error", "no reward: expected .*its last line is 'done'"),
        ("""print('{"reward": "high"}')""", "invalid_result", "float"),
        ("sys.exit(75)", "environment_error", "EX_TEMPFAIL"),
        ("os.kill(os.getpid(), 9)", "agent_error", "killed by SIGKILL"),
        ("""print('{"reward": 1}'); sys.exit(2)""", "agent_error", "exit code 2"),
    ],
)
async def test_a_command_that_fails_says_why_in_the_log(
    end_of: EndOf, command: Write, body: str, reason: str, message: str
) -> None:
    end = await end_of(command(body))
    assert isinstance(end, RolloutAborted)
    assert end.reason == reason
    assert_matches(message, end.message)


async def test_the_key_of_the_rollout_is_not_in_the_reason(end_of: EndOf, command: Write) -> None:
    end = await end_of(command("sys.exit(f'refused: {os.environ[\"OPENAI_API_KEY\"]}')"))
    assert "refused: [key]" in end.message
    assert "tf-" not in end.message


async def test_at_its_deadline_the_whole_process_group_ends(end_of: EndOf, command: Write) -> None:
    program = command(
        """
child = subprocess.Popen(["sleep", "3600"])
(HERE / "pids").write_text(f"{os.getpid()} {child.pid}")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("still thinking", file=sys.stderr, flush=True)
while True: time.sleep(1)
"""
    )
    end = await end_of(program, timeout_s=4.0)
    assert end.reason == "agent_timeout"
    assert_matches("no reward after 3 s; .*killed by SIGKILL.*still thinking", end.message)
    for pid in (Path(program_folder(program)) / "pids").read_text().split():
        assert await gone(int(pid))


async def test_what_it_started_in_the_background_does_not_outlive_it(
    end_of: EndOf, command: Write, eventually: Any
) -> None:
    program = command(
        """
child = subprocess.Popen(["sleep", "3600"])
(HERE / "pid").write_text(str(child.pid))
print(json.dumps({"reward": 1}))
"""
    )
    assert (await end_of(program)).reward == 1.0
    pid = int((Path(program_folder(program)) / "pid").read_text())
    await eventually(lambda: gone(pid))


async def test_a_reward_within_the_grace_counts_as_truncated(end_of: EndOf, command: Write) -> None:
    program = command(
        """
def score(*_):
    print(json.dumps({"reward": 0.5}), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, score)
while True: time.sleep(1)
"""
    )
    end = await end_of(program, timeout_s=10.0)
    assert isinstance(end, RolloutFinished), end
    assert (end.reward, end.is_truncated) == (0.5, True)


async def test_the_worker_that_stops_ends_its_commands(
    bench: Any, command: Write, tmp_path: Path, eventually: Any
) -> None:
    program = command("(HERE / 'pid').write_text(str(os.getpid()))\ntime.sleep(3600)")

    async def has_started() -> bool:
        return (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text())

    async with bench.worker("", command=program, grace_s=0.1):
        await bench.dispatch(n=1)
        await eventually(has_started)
    (end,) = (await bench.ends()).values()
    assert end.reason == "worker_shutdown"
    assert await gone(int((tmp_path / "pid").read_text()))


@pytest.mark.field_case("OpenEnv#1036")
async def test_a_set_up_that_hangs_ends_at_its_own_deadline_and_is_not_the_agents_fault(
    end_of: EndOf, command: Write, tmp_path: Path
) -> None:
    end = await end_of(
        command("(HERE / 'ran').touch()"),
        setup="sleep 3600",
        setup_timeout_s=0.5,
        timeout_s=600.0,
    )
    assert (end.reason, end.message) == ("setup_timeout", "SetUpTimedOut: not ready after 0.5 s")
    assert not (tmp_path / "ran").exists()


async def test_a_set_up_that_fails_is_the_environments_failure(
    end_of: EndOf, command: Write
) -> None:
    end = await end_of(
        command("raise SystemExit"),
        setup="sh -c 'echo no such image: {image} >&2; exit 3'",
        payload={"image": "sandbox:9"},
    )
    assert end.reason == "environment_error"
    assert_matches("exit code 3.*no such image: sandbox:9", end.message)


CONTAINER_STAND_IN = """\
#!/bin/sh
# Not Docker: it takes the same words. As with Docker, the "container" gets only the variables that
# `-e` names, and goes on when the client is killed, until `rm -f`.
here=$(dirname "$0")
if [ "$1" = rm ]; then kill -9 -"$(cat "$here/$3.pid")"; rm "$here/$3.pid"; exit; fi
[ "$1" = run ] && [ "$2" = --name ] || exit 125
name=$3; shift 3
vars="PATH=$PATH"
while [ "$1" = -e ]; do vars="$vars $2=$(printenv "$2" | tr -d ' ')"; shift 2; done
image=$1; shift
setsid sh -c 'echo $$ > "$1"; shift; exec env -i "$@"' sh "$here/$name.pid" $vars IMAGE=$image "$@" &
wait $!
"""


@pytest.fixture
def container_stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "container-stand-in"
    path.write_text(CONTAINER_STAND_IN)
    path.chmod(0o755)
    return path


async def test_a_container_command_runs_the_image_of_the_task_with_only_the_named_variables(
    end_of: EndOf, container_stand_in: Path
) -> None:
    script = (
        '[ -n "$OPENAI_API_KEY" ] && [ -z "$HOME" ] && '
        'printf \'{"reward": 1, "info": {"image": "%s"}}\' "$IMAGE"'
    )
    end = await end_of(
        f"{container_stand_in} run --name {{name}} {{env}} {{image}} "
        + shlex.join(["sh", "-c", script]),
        cleanup=f"{container_stand_in} rm -f {{name}}",
        payload={"image": "sandbox:3"},
    )
    assert isinstance(end, RolloutFinished), end
    assert end.info == {"image": "sandbox:3"}


async def test_the_cleanup_ends_a_container_that_outlived_its_client(
    end_of: EndOf, container_stand_in: Path, tmp_path: Path
) -> None:
    end = await end_of(
        f"{container_stand_in} run --name {{name}} {{env}} {{image}} "
        f"sh -c 'echo $$ > {tmp_path}/inner; exec sleep 3600'",
        cleanup=f"{container_stand_in} rm -f {{name}}",
        payload={"image": "sandbox:3"},
        timeout_s=4.0,
    )
    assert end.reason == "agent_timeout"
    assert await gone(int((tmp_path / "inner").read_text()))


def test_a_program_that_is_not_there_is_said_before_anything_runs() -> None:
    with pytest.raises(CommandError, match=r"no program 'no-such-program' here; .* `sh -c"):
        CommandAgent("no-such-program --fast")
    with pytest.raises(CommandError, match=r"TURNFOLD_SETUP_COMMAND: .*No closing quotation"):
        CommandAgent("true", setup="sh -c '")


async def test_much_output_neither_blocks_nor_fills_the_memory(
    end_of: EndOf, command: Write
) -> None:
    program = command(
        """
for _ in range(2000):
    print("x" * 10_000)
    print("y" * 10_000, file=sys.stderr)
print(json.dumps({"reward": 1}))
"""
    )
    assert (await end_of(program, timeout_s=60.0)).reward == 1.0


def program_folder(program: str) -> str:
    return os.path.dirname(shlex.split(program)[1])


def assert_matches(pattern: str, text: str) -> None:

    assert re.search(pattern, text, re.DOTALL), text
