"""The words of a command, and what it says."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from turnfold.agents.commands.output import how_it_ended, no_reward, result_in, with_tail
from turnfold.agents.commands.template import BadTemplate, Places, filled, split
from turnfold.agents.results import InvalidResult, Result

PLACES = Places(
    rollout_id="run/7-02", directory="/tmp/x", task_file="/tmp/x/t.json", result_file="/tmp/x/r"
)


def words(command: str, task: dict[str, Any] | None = None) -> list[str]:
    return filled(split(command), PLACES, task or {}, ["OPENAI_BASE_URL", "OPENAI_API_KEY"])


def test_a_container_command_gets_a_name_the_variables_and_the_image_of_the_task() -> None:
    command = "docker run --rm --name {name} {env} -v {directory}:/work {image} python agent.py"
    assert words(command, {"image": "sandbox:3"}) == [
        *("docker", "run", "--rm", "--name", "turnfold-run-7-02"),
        *("-e", "OPENAI_API_KEY", "-e", "OPENAI_BASE_URL"),
        *("-v", "/tmp/x:/work", "sandbox:3", "python", "agent.py"),
    ]


def test_what_a_task_says_stays_one_word_and_no_shell_reads_it() -> None:
    assert words("run {image}", {"image": "a b; rm -rf / $(id)"}) == ["run", "a b; rm -rf / $(id)"]


def test_a_value_cannot_become_an_option() -> None:
    with pytest.raises(BadTemplate, match="must not begin with a dash"):
        words("docker run {image}", {"image": "--privileged"})


def test_a_field_that_is_no_text_is_written_as_json_and_other_braces_are_left_alone() -> None:
    assert words("run {seed} --config '{\"a\": 1}' {}", {"seed": 3}) == [
        *("run", "3", "--config", '{"a": 1}', "{}")
    ]


def test_a_name_that_nobody_knows_is_an_error_that_says_which_are_known() -> None:
    with pytest.raises(BadTemplate, match=r"names \{imge\}, .* field of the task .* \{env\}"):
        words("docker run {imge}", {"image": "x"})


def test_an_unfinished_quote_and_an_empty_command_are_refused() -> None:
    with pytest.raises(BadTemplate, match="No closing quotation"):
        split("sh -c 'echo")
    with pytest.raises(BadTemplate, match="the command is empty"):
        split("  ")


@pytest.mark.parametrize(
    ("stdout", "result"),
    [
        ('{"reward": 0.5}', Result(reward=0.5)),
        ('noise\n{"reward": 1}\n{"reward": 2}\n{"level": "info"}\nbye', Result(reward=2.0)),
        ('{"rewards": {"a": 0.25, "b": 0.5}}', Result(reward=0.75, rewards={"a": 0.25, "b": 0.5})),
        (
            '{"reward": 0, "is_truncated": true, "info": {"seed": "3"}, "status": "finished"}',
            Result(reward=0.0, is_truncated=True, info={"seed": "3"}),
        ),
        ("0.5", None),
        ("", None),
        ("{broken", None),
    ],
)
def test_the_last_line_with_a_reward_counts(stdout: str, result: Result | None) -> None:
    assert result_in("", stdout) == result


def test_the_file_comes_before_the_output_and_must_hold_a_reward() -> None:
    assert result_in('{\n  "reward": 0.25\n}\n', '{"reward": 1}') == Result(reward=0.25)
    with pytest.raises(InvalidResult, match="result file: expected an object"):
        result_in("0.25", "")


@pytest.mark.parametrize(
    "line", ['{"reward": "0.5"}', '{"reward": true}', '{"rewards": {}}', '{"rewards": {"a": null}}']
)
def test_a_reward_that_is_no_number_is_a_mistake_and_not_a_guess(line: str) -> None:
    with pytest.raises(InvalidResult):
        result_in("", line)


def test_output_without_a_reward_is_told_how_to_give_one() -> None:
    assert "its last line is 'nan'" in no_reward("x\nnan\n\n")
    assert "it wrote nothing" in no_reward("\n")
    assert '{"reward": 0.5} on stdout' in no_reward("")


def test_an_exit_status_is_said_in_words() -> None:
    assert how_it_ended(3) == "exit code 3"
    assert how_it_ended(75) == "exit code 75 (EX_TEMPFAIL)"
    assert how_it_ended(-signal.SIGTERM) == "killed by SIGTERM"
    # A container says 128 + signal.
    assert how_it_ended(137) == "killed by SIGKILL, as for want of memory"


def test_the_end_of_stderr_is_kept_without_the_key() -> None:
    text = with_tail("exit code 1", "x" * 5000 + "\nbad key tf-abc.def here\n", "tf-abc.def")
    assert text.startswith("exit code 1; the end of its stderr:\nxxx")
    assert text.endswith("bad key [key] here")
    assert len(text) < 1600
