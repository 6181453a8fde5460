import json
from collections import Counter

import pytest

from turnfold.embedded.tiny import task

PAYLOAD = {"door": 3, "code": 5}


@pytest.mark.parametrize(
    ("door", "answer", "expected"),
    [
        (None, None, 0.0),
        (None, "the code is 5", 0.0),
        ("4", None, 0.1),
        ("4", "the code is 5", 0.1),
        (["3"], None, 0.1),
        ("3", None, 0.5),
        ("3", "the code is 6", 0.5),
        ("3", "the code is 55", 0.5),
        ("3", "the code is 5 or 6", 0.5),
        ("3", "", 0.5),
        ("3", "the code is 5", 1.0),
        (3, "It is 5.", 1.0),
        (" 3 ", "5", 1.0),
    ],
)
def test_the_reward_grows_with_how_far_the_attempt_got(
    door: object, answer: str | None, expected: float
) -> None:
    assert task.reward(PAYLOAD, door=door, answer=answer) == pytest.approx(expected)


def test_the_tool_tells_the_code_of_the_right_door_only() -> None:
    assert task.lookup(PAYLOAD, "3") == "code 5"
    assert task.lookup(PAYLOAD, 3) == "code 5"
    assert task.lookup(PAYLOAD, "5") == "no such door"
    assert task.lookup(PAYLOAD, {"door": 3}) == "no such door"


def test_the_question_names_the_door() -> None:
    assert task.question(PAYLOAD) == "open door 3"


def test_tasks_depend_on_the_seed_alone() -> None:
    assert task.tasks(20, seed=1) == task.tasks(20, seed=1)
    assert task.tasks(20, seed=1) != task.tasks(20, seed=2)
    assert task.tasks(30, seed=1)[:20] == task.tasks(20, seed=1)


def test_every_run_of_tasks_has_each_door_and_each_code_once() -> None:
    payloads = task.tasks(5 * task.NUM_DOORS, seed=7)
    for start in range(0, len(payloads), task.NUM_DOORS):
        run = payloads[start : start + task.NUM_DOORS]
        assert sorted(p["door"] for p in run) == list(range(task.NUM_DOORS))
        assert sorted(p["code"] for p in run) == list(range(task.NUM_CODES))


def test_the_door_does_not_give_the_code_away() -> None:
    pairs = Counter((p["door"], p["code"]) for p in task.tasks(800, seed=0))
    assert len(pairs) > 60
    assert max(pairs.values()) < 40


def test_payloads_and_tools_are_json() -> None:
    assert json.loads(json.dumps(task.tasks(3))) == task.tasks(3)
    assert json.loads(json.dumps(task.TOOLS)) == task.TOOLS


def test_no_tasks_are_an_empty_list() -> None:
    assert task.tasks(0) == []
