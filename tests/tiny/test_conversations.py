import json
from itertools import islice
from random import Random
from typing import Any

from turnfold.embedded.tiny import task
from turnfold.embedded.tiny.conversations import Example, examples, right_examples
from turnfold.embedded.tiny.tokenizer import build_tokenizer

TOKENIZER: Any = build_tokenizer()


def answers(example: Example) -> list[str]:
    """The texts that the assistant wrote, each up to its end of turn."""
    written = [t for t, own in zip(example.token_ids, example.is_answer, strict=True) if own]
    return str(TOKENIZER.decode(written)).split("<|im_end|>")[:-1]


def call_of(answer: str) -> dict[str, Any]:
    body = answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    call: dict[str, Any] = json.loads(body)
    return call


def test_both_answers_and_their_ends_are_marked() -> None:
    example = right_examples(TOKENIZER)[3]
    call, answer = answers(example)
    assert call_of(call) == {"name": "lookup", "arguments": {"door": "3"}}
    assert answer == "the code is 2"
    assert sum(example.is_answer) < len(example.token_ids)


def test_there_is_one_right_example_for_each_door() -> None:
    doors = [call_of(answers(e)[0])["arguments"]["door"] for e in right_examples(TOKENIZER)]
    assert doors == [str(door) for door in range(task.NUM_DOORS)]


def test_the_same_random_source_gives_the_same_examples() -> None:
    first, second = (list(islice(examples(TOKENIZER, Random(4), 0.5, 0.5), 20)) for _ in range(2))
    assert first == second


def test_all_examples_are_right_when_asked_for() -> None:
    for example in islice(examples(TOKENIZER, Random(0), 1.0, 0.0), 30):
        text = TOKENIZER.decode(example.token_ids)
        door = text.split("open door ")[1][0]
        code = text.split("<tool_response>\ncode ")[1][0]
        call, answer = answers(example)
        assert call_of(call)["arguments"]["door"] == door
        assert answer == f"the code is {code}"


def test_wrong_doors_are_told_apart_by_the_tool() -> None:
    texts = [
        str(TOKENIZER.decode(example.token_ids))
        for example in islice(examples(TOKENIZER, Random(0), 0.0, 0.0), 60)
    ]
    assert any("no such door" in text for text in texts)


def test_odd_calls_mean_the_same_and_are_written_otherwise() -> None:
    calls = [answers(e)[0] for e in islice(examples(TOKENIZER, Random(0), 1.0, 1.0), 40)]
    assert any('{"name":"lookup","arguments"' in call for call in calls)
    assert any('{"arguments": {"door": ' in call for call in calls)
    for call in calls:
        door = call_of(call)["arguments"]["door"]
        usual = {"name": "lookup", "arguments": {"door": door}}
        assert call_of(call) == usual
        assert json.dumps(usual) not in call
