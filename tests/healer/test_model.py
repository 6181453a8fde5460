"""The fold of a partition against a reference of a few lines: any events, any crash, any memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnfold.healer.opened import OpenRollouts
from turnfold.healer.partition import PartitionFold, Released, RestartPoint
from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import Event
from turnfold.schemas.testing import aborted, finished, started, turn
from turnfold.schemas.trajectories import Trajectory

TOPIC = "turnfold.events"


@dataclass
class Model:
    """A rollout as somebody would note it down who was there."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """Over prompt and output of the last turn."""
    num_turns: int = 0
    end: str = ""

    def turn(self, prompt: list[int], output: list[int]) -> None:
        num_new = len(prompt) - len(self.mask)
        self.prompt, self.output = prompt, output
        self.mask = [*self.mask, *[0] * num_new, *[1] * len(output)]
        self.num_turns += 1

    def again(self, output: list[int]) -> None:
        """The last prompt was sent again, and the client went on with this answer."""
        self.mask = [*self.mask[: len(self.prompt)], *[1] * len(output)]
        self.output = output
        self.num_turns += 1

    def rows(self) -> list[tuple[list[int], list[int]]]:
        if self.end == "aborted" or not self.num_turns:
            return []
        return [([*self.prompt, *self.output], self.mask)]


def rows(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    return [(row.token_ids.tolist(), row.loss_mask.tolist()) for row in trajectory.rows]


class HealerMachine(RuleBasedStateMachine):
    """Rollouts that run side by side under a healer that is killed now and then.

    What a crash leaves is what the healer committed: a restart point and `through`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Record] = []
        self.events: list[Event] = []
        self.models: dict[str, Model] = {}
        self.written: list[Trajectory] = []
        self.through = 0
        self.committed: tuple[RestartPoint, int] = (RestartPoint(0, 0.0), 0)
        self.fold = self.new_fold(RestartPoint(0, 0.0))

    def new_fold(self, begins: RestartPoint) -> PartitionFold:
        opened = OpenRollouts({}, max_bytes=2500)  # one or two of the rollouts
        return PartitionFold(TOPIC, 0, log_time=begins.log_time, opened=opened)

    def publish(self, event: Event) -> None:
        offset = len(self.log)
        record = Record(
            topic=TOPIC,
            partition=0,
            offset=offset,
            key=event.rollout_id.encode(),
            value=codec.encode(event),
            timestamp=float(offset),
        )
        self.log.append(record)
        self.events.append(event)

    def open_names(self) -> list[str]:
        return [name for name, model in self.models.items() if not model.end]

    @rule()
    def start(self) -> None:
        name = f"r{len(self.models)}"
        self.models[name] = Model([])
        self.publish(started(name))

    @precondition(lambda self: self.open_names())
    @rule(data=st.data())
    def take_a_turn(self, data: Any) -> None:
        name = data.draw(st.sampled_from(self.open_names()))
        model = self.models[name]
        number = model.num_turns
        parent = f"t{number - 1}" if number else None
        shared = [*model.prompt, *model.output]
        prompt, output = [*shared, 1000 + number], [100 * number + index for index in range(3)]
        self.publish(
            turn(
                name,
                f"t{number}",
                prompt=prompt,
                output=output,
                parent=parent,
                shared_len=len(shared),
            )
        )
        model.turn(prompt, output)

    @precondition(lambda self: any(self.models[n].num_turns for n in self.open_names()))
    @rule(data=st.data())
    def ask_again(self, data: Any) -> None:
        """The same prompt once more; only the second answer is gone on with."""
        names = [name for name in self.open_names() if self.models[name].num_turns]
        name = data.draw(st.sampled_from(names))
        model = self.models[name]
        output = [900 + model.num_turns]
        self.publish(turn(name, f"t{model.num_turns}", prompt=model.prompt, output=output))
        model.again(output)

    @precondition(lambda self: self.open_names())
    @rule(data=st.data(), is_aborted=st.booleans())
    def end(self, data: Any, is_aborted: bool) -> None:
        name = data.draw(st.sampled_from(self.open_names()))
        self.models[name].end = "aborted" if is_aborted else "completed"
        self.publish(aborted(name) if is_aborted else finished(name))

    @precondition(lambda self: self.events)
    @rule(data=st.data())
    def deliver_again(self, data: Any) -> None:
        self.publish(data.draw(st.sampled_from(self.events)))

    @rule(data=st.data())
    def work(self, data: Any) -> None:
        """Fold up to some place and commit it with its results, as one transaction."""
        position = data.draw(st.integers(self.through, len(self.log)))
        for record in self.log[self.through : position]:
            for outcome in self.fold.feed(record):
                if isinstance(outcome, Released):
                    self.written.append(outcome.trajectory)
        self.through = position
        self.committed = (self.fold.restart_point(position), position)

    @rule()
    def crash(self) -> None:
        begins, through = self.committed
        self.fold, self.through = self.new_fold(begins), through
        for record in self.log[begins.offset : through]:
            self.fold.warm_up(record)

    @invariant()
    def what_is_written_is_what_the_notes_say(self) -> None:
        names = [trajectory.rollout_id for trajectory in self.written]
        assert len(names) == len(set(names))
        for trajectory in self.written:
            model = self.models[trajectory.rollout_id]
            assert rows(trajectory) == model.rows()
            assert trajectory.num_turns == model.num_turns

    def teardown(self) -> None:
        for record in self.log[self.through :]:
            for outcome in self.fold.feed(record):
                if isinstance(outcome, Released):
                    self.written.append(outcome.trajectory)
        self.what_is_written_is_what_the_notes_say()
        ended = {name for name, model in self.models.items() if model.end}
        assert {trajectory.rollout_id for trajectory in self.written} == ended


TestHealer = pytest.mark.field_case("verl#7579")(HealerMachine.TestCase)
TestHealer.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
