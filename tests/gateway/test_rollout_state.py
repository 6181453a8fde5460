from typing import Any

from turnfold.gateway.rollouts.state import RolloutState
from turnfold.schemas.events import (
    Event,
    RewardRevised,
    RolloutAborted,
    RolloutFinished,
    RolloutStarted,
    TurnCompleted,
    TurnFailed,
)
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.wire import Logprobs, TokenIds

STARTED = RolloutStarted(rollout_id="r", event_id="r:started", group_id="g")


def turn(turn_id: str, prompt: list[int], output: list[int], **fields: Any) -> TurnCompleted:
    shared = fields.get("shared_len", 0)
    return TurnCompleted(
        rollout_id="r",
        event_id=turn_id,
        session_id="main",
        turn_id=turn_id,
        prompt_tail=TokenIds.of(prompt),
        output_ids=TokenIds.of(output),
        logprobs=Logprobs.of([-1.0] * len(output)),
        num_prompt_tokens=shared + len(prompt),
        reply=ChatMessage(role="assistant", content=turn_id),
        **fields,
    )


FIRST = turn("t0", [1, 2], [3], request_digest="d0", new_messages=(ChatMessage(role="user"),))
SECOND = turn(
    "t1", [4], [5], request_digest="d1", parent_turn_id="t0", shared_len=3, continuity="extended"
)
FINISHED = RolloutFinished(rollout_id="r", event_id="r:finished", reward=0.5)


def folded(*events: Event) -> RolloutState:
    state = RolloutState(STARTED)
    for event in events:
        state.apply(event)
    return state


def counts(state: RolloutState) -> tuple[Any, ...]:
    return state.status, state.reward, state.num_turns, state.num_output_tokens, state.continuity


def test_doubled_events_change_nothing() -> None:
    events: list[Event] = [STARTED, FIRST, SECOND, FINISHED]
    doubled = [event for event in events for _ in range(2)]
    assert counts(folded(*doubled)) == counts(folded(*events))
    assert counts(folded(*events)) == ("finished", 0.5, 2, 2, {"first": 1, "extended": 1})


def test_the_first_end_counts() -> None:
    aborted = RolloutAborted(rollout_id="r", event_id="r:aborted", reason="deadline")
    assert counts(folded(aborted, FINISHED, FIRST))[:3] == ("aborted", None, 0)
    assert counts(folded(FINISHED, aborted))[:2] == ("finished", 0.5)


def test_a_revised_reward_wins() -> None:
    revised = RewardRevised(rollout_id="r", event_id="v", reward=1.0)
    assert folded(FINISHED, revised).reward == 1.0


def test_a_repeated_request_means_a_turn_that_was_not_continued() -> None:
    assert folded(FIRST).recorded("main", "d0") is not None
    state = folded(FIRST, SECOND)
    assert state.recorded("main", "d0") is None
    latest = state.recorded("main", "d1")
    assert latest is not None
    assert latest.reply.content == "t1"
    assert state.recorded("other", "d1") is None


def test_an_idempotency_key_names_its_turn_whatever_came_after() -> None:
    keyed = turn("t0", [1, 2], [3], request_digest="d0", idempotency_key="k")
    state = folded(keyed, SECOND)
    assert state.recorded("main", "d0", idempotency_key="k") is not None
    assert state.recorded("main", "d0", idempotency_key="other") is None


def test_a_turn_that_does_not_fit_is_counted_and_left_out() -> None:
    orphan = turn("t9", [4], [5], parent_turn_id="missing", shared_len=3)
    state = folded(FIRST, orphan)
    assert (state.num_turns, state.num_unusable) == (1, 1)


def test_failures_are_counted_by_reason() -> None:
    failed = TurnFailed(rollout_id="r", event_id="f", session_id="main", reason="engine_error")
    assert folded(failed, failed).failures == {"engine_error": 1}
