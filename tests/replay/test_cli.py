"""The commands on the log, against a real broker with what real services wrote."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner, Result

from turnfold.assembler.app import run as assemble
from turnfold.assembler.settings import Settings as AssemblerSettings
from turnfold.embedded.broker.testing import RunningBroker
from turnfold.healer.app import run as heal
from turnfold.healer.settings import Settings as HealerSettings
from turnfold.log.client import Producer, create_topics, reader_from_start
from turnfold.log.service import Health
from turnfold.replay import cli
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.events import Event
from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import RolloutScript, revised, task
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Trajectory

CONFIG = RunConfig(group_size=2, groups_per_batch=2)
DEADLINE_S = 60.0

app = typer.Typer()
app.command("replay")(cli.replay)
app.command("refold")(cli.refold)
app.command("diff")(cli.diff)
app.command("ledger")(cli.ledger)
app.command("cat")(cli.events_cat)
app.command("publish")(cli.events_publish)
app.command("create")(cli.topics_create)
app.command("check")(cli.topics_check)
app.command("export")(cli.log_export)
app.command("import")(cli.log_import)
app.command("doctor")(cli.doctor)


NewNamespace = Callable[..., str]


class Namespace:
    """Commands on the topics of one namespace."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.bootstrap, self.name = bootstrap, name
        self.topics = Topics(namespace=name)

    def __call__(self, *arguments: str, **environment: str) -> Result:
        """Run a command; TURNFOLD_ variables say where and with which sizes."""
        return CliRunner().invoke(
            app,
            arguments,
            env={
                "COLUMNS": "200",
                "TURNFOLD_BOOTSTRAP": self.bootstrap,
                "TURNFOLD_NAMESPACE": self.name,
                "TURNFOLD_GROUP_SIZE": "2",
                "TURNFOLD_GROUPS_PER_BATCH": "2",
                **environment,
            },
        )

    def read(self, topic: str) -> list[bytes]:
        async def read() -> list[bytes]:
            async with reader_from_start(self.bootstrap, topic) as reader:
                return [record.value or b"" async for record in reader.read_to_end()]

        return asyncio.run(read())


def namespace(broker: RunningBroker, name: str) -> Namespace:
    made = Namespace(broker.bootstrap, name)
    asyncio.run(create_topics(made.bootstrap, made.topics.specs(num_partitions=2)))
    return made


@pytest.fixture
def fresh(broker: RunningBroker, new_namespace: NewNamespace) -> Namespace:
    """Empty topics."""
    return namespace(broker, new_namespace("fresh"))


@pytest.fixture(scope="module")
def done(broker: RunningBroker, new_namespace: NewNamespace) -> Namespace:
    """A namespace in which a healer and an assembler have done their work on nine rollouts."""
    made = namespace(broker, new_namespace("done"))
    asyncio.run(_publish(made, [event for index in range(8) for event in rollout(index)]))
    asyncio.run(_publish(made, [revised("g0-00", reward=0.25), *rollout(9)[:-1]]))
    asyncio.run(_let_services_work(made))
    return made


def rollout(index: int) -> list[Event]:
    """Two rollouts a group; every third has a retry, the last one is aborted."""
    group, slot = divmod(index, 2)
    script = RolloutScript(
        f"g{group}-{slot:02d}", group_id=f"g{group}", index=slot, dispatch_index=group
    )
    script.turn("t0", [1, 2], [3, 4])
    if index % 3 == 0:
        script.turn("t1-given-up", [1, 2, 3, 4, 5], [8, 8], parent="t0")
    script.turn("t1", [1, 2, 3, 4, 5], [6], parent="t0", continuity="healed")
    if index == 7:
        script.abort("agent_error")
    else:
        script.finish(float(index))
    return script.events


async def _publish(made: Namespace, events: Iterable[Event]) -> None:
    async with Producer(made.bootstrap) as producer:
        for event in events:
            await producer.send(made.topics.events, key=event.rollout_id, message=event)


async def _let_services_work(made: Namespace) -> None:
    async with Producer(made.bootstrap) as producer:
        for index in range(4):
            dispatched = task(f"g{index}", n=2, dispatch_index=index)
            await producer.send(made.topics.tasks, key=f"g{index}", message=dispatched)
    healer = HealerSettings(bootstrap=made.bootstrap, namespace=made.name)
    await _run_until(
        lambda health, stop: heal(healer, health, stop),
        lambda: _count(made, made.topics.trajectories, 9),
    )
    assembler = AssemblerSettings(bootstrap=made.bootstrap, namespace=made.name)
    await _run_until(
        lambda health, stop: assemble(assembler, CONFIG, health, stop),
        lambda: _count(made, made.topics.batches, 2),
    )


async def _count(made: Namespace, topic: str, number: int) -> bool:
    async with reader_from_start(made.bootstrap, topic) as reader:
        return len([record async for record in reader.read_to_end()]) >= number


async def _run_until(
    service: Callable[[Health, asyncio.Event], Awaitable[None]],
    is_done: Callable[[], Awaitable[bool]],
) -> None:
    stop, deadline = asyncio.Event(), time.monotonic() + DEADLINE_S
    running = asyncio.ensure_future(service(Health("test"), stop))
    while not await is_done():
        assert time.monotonic() < deadline, "the service did not do its work"
        assert not running.done(), running
        await asyncio.sleep(0.1)
    stop.set()
    await running


@pytest.mark.field_case("AReaL#1343")
def test_a_replay_proves_trajectories_and_decisions_identical(done: Namespace) -> None:
    result = done("replay")
    assert result.exit_code == 0, result.output
    assert "1 rollouts have no end in the log yet" in result.output
    assert result.output.splitlines()[-1].startswith(
        "identical: 9 trajectories and 2 decisions from"
    )


def test_a_replay_by_several_processes_gives_the_same_digest(done: Namespace) -> None:
    alone, together = done("replay"), done("replay", "--processes", "2")
    assert together.exit_code == 0, together.output
    assert together.output.splitlines()[-1] == alone.output.splitlines()[-1]
    assert done("replay", "--processes", "2", "--out", "rows.jsonl").exit_code == 2


def test_a_replay_of_some_rollouts_leaves_the_others_out(done: Namespace) -> None:
    assert "identical: 1 trajectories from 4 events" in done("replay", "--rollout", "g1-00").output
    assert "identical: 2 trajectories from" in done("replay", "--group", "g1").output


def test_a_replay_of_a_time_or_of_offsets_takes_the_rollouts_that_began_there(
    done: Namespace,
) -> None:
    placed = [json.loads(line) for line in done("cat", "--position").stdout.splitlines()]
    starts = [p for p in placed if p["event"]["type"] == "rollout_started"]
    named = f"{starts[0]['partition']}:{starts[0]['offset']}-{starts[0]['offset']}"
    of_offsets = done("replay", "--offsets", named)
    assert of_offsets.exit_code == 0, of_offsets.output
    assert of_offsets.output.splitlines()[-1].startswith("identical: ")
    only = done("replay", "--rollout", starts[0]["event"]["rollout_id"])
    assert (
        of_offsets.output.splitlines()[-1].split("digest")[1]
        == (only.output.splitlines()[-1].split("digest")[1])
    )
    assert "identical: 9 trajectories" in done("replay", "--since", "2020-01-01").output
    assert "identical: 0 trajectories" in done("replay", "--until", "2020-01-01T12:00Z").output
    refused = done("replay", "--offsets", "7").exception
    assert isinstance(refused, UserError)
    assert "expected PARTITION:FIRST-LAST" in str(refused)


def test_a_replay_of_a_run_leaves_other_runs_out(done: Namespace) -> None:
    assert "identical: 9 trajectories from" in done("replay", "--run", "default").output
    assert "identical: 0 trajectories from 0" in done("replay", "--run", "other").output


def test_a_replay_is_resumed_from_its_checkpoint(done: Namespace, tmp_path: Path) -> None:
    folder = str(tmp_path / "replay.d")
    assert done("replay", "--checkpoint", folder, "--processes", "2").exit_code == 0
    resumed = done("replay", "--checkpoint", folder, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert resumed.output == done("replay").output
    assert done("replay", "--resume").exit_code == 2


def test_a_replay_needs_no_setting_of_the_run(done: Namespace) -> None:
    result = done("replay", TURNFOLD_GROUPS_PER_BATCH="3")
    assert result.exit_code == 0
    assert "9 trajectories and 2 decisions" in result.output


def _copy_changed(done: Namespace, fresh: Namespace, **changes: object) -> None:
    """The events of the first rollout, and its trajectory with other values in some fields."""
    found = [codec.decode(Trajectory, v) for v in done.read(done.topics.trajectories)]
    original = next(t for t in found if t.rollout_id == "g0-00")
    changed = msgspec.structs.replace(original, **changes)

    async def copy() -> None:
        await _publish(fresh, rollout(0))
        async with Producer(fresh.bootstrap) as producer:
            await producer.send(fresh.topics.trajectories, key="g0", message=changed)

    asyncio.run(copy())


def test_a_tampered_trajectory_fails_the_replay_and_is_explained(
    done: Namespace, fresh: Namespace
) -> None:
    _copy_changed(done, fresh, reward=99.0)
    result = fresh("replay")
    assert result.exit_code == 1
    assert "DIFFERENT rollout g0-00: the trajectory in the log has other bytes" in result.output
    assert "rollout g0-00: reward: written 99.0, rebuilt 0.0" in result.output
    assert fresh("replay", "--processes", "2").output == result.output


def test_a_trajectory_of_an_older_fold_is_counted_and_not_compared(
    done: Namespace, fresh: Namespace
) -> None:
    _copy_changed(done, fresh, fold_version=1, rows=())
    result = fresh("replay")
    assert result.exit_code == 0, result.output
    assert (
        "1 trajectories were written by version 1 of the fold and are not compared" in result.output
    )


def test_a_rollout_that_nobody_healed_fails_the_replay(fresh: Namespace) -> None:
    asyncio.run(_publish(fresh, rollout(0)))
    result = fresh("replay")
    assert result.exit_code == 1
    assert "finished in the log, but no trajectory was written" in result.output


def test_rows_are_written_for_other_tools_in_the_mode_asked_for(
    done: Namespace, tmp_path: Path
) -> None:
    linear, tree = tmp_path / "linear.parquet", tmp_path / "tree.parquet"
    assert "rebuilt" in done("replay", "--mode", "linear", "--out", str(linear)).output
    assert done("replay", "--mode", "tree", "--out", str(tree)).exit_code == 0
    assert pq.read_table(tree).num_rows == pq.read_table(linear).num_rows + 4  # given-up answers
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linear.parquet", "tree.parquet"]


def test_an_unknown_mode_is_refused(done: Namespace) -> None:
    result = done("replay", "--mode", "zigzag")
    assert result.exit_code == 2
    assert "expected linear or tree" in result.output


def test_the_ledger_adds_up_to_all_sampled_tokens(done: Namespace) -> None:
    result = done("ledger", "--check")
    assert result.exit_code == 0, result.output
    assert "100.00 %" in result.output
    assert "orphan 6" in result.output
    assert "in_flight 5" in result.output
    assert "g2-01" in done("ledger", "--each").output


def test_a_turn_is_followed_into_its_batch(done: Namespace) -> None:
    result = done("ledger", "--turn", "t1", "--rollout", "g1-00")
    assert result.exit_code == 0, result.output
    assert "turn t1 of rollout g1-00 (completed), session main, group g1" in result.output
    assert "row          0, tokens 5 to 5 of 6, all 1 with mask 1" in result.output
    assert "batch        1, policy 0 → 1, not trained yet" in result.output
    assert "step 1 of the batch, step 1 of the run" in result.output
    missing = done("ledger", "--turn", "t77").exception
    assert isinstance(missing, UserError)
    assert str(missing) == "there is no turn t77 in the log"


def test_a_log_refolds_beside_the_old_trajectories_and_the_difference_is_shown(
    done: Namespace, tmp_path: Path
) -> None:
    tree = tmp_path / "tree.jsonl"
    assert done("refold", "--mode", "tree", "--out", str(tree)).exit_code == 0
    shown = done("diff", done.name, str(tree), "--tokens")
    assert "6 sampled tokens: dropped (orphan) → trained" in shown.output
    assert "only right: row 0 of 7 tokens" in shown.output
    assert done("diff", done.name, str(tree), "--check").exit_code == 1
    same = tmp_path / "same.msgpack"
    done("refold", "--mode", "linear", "--out", str(same))
    assert done("diff", done.name, str(same), "--check").exit_code == 0


def test_a_log_refolds_with_another_reward_into_another_namespace_once(
    done: Namespace, tmp_path: Path, new_namespace: NewNamespace
) -> None:
    rescored = new_namespace("rescored")
    (tmp_path / "rewards.py").write_text("def score(t):\n    return 10.0 + t.num_turns\n")
    command = ("refold", "--reward", f"{tmp_path / 'rewards.py'}:score", "--to", rescored)
    assert f"9 written to {rescored}, 0 were there already" in done(*command).output
    assert f"0 written to {rescored}, 9 were there already" in done(*command).output
    refused = done("refold", "--mode", "tree", "--to", rescored).exception
    assert isinstance(refused, UserError)
    assert f"{rescored}.trajectories holds another trajectory of rollout" in str(refused)
    shown = done("diff", done.name, rescored).output
    assert "1 rollouts the same, 7 changed (7 in reward)" in shown
    assert "the namespace of the log itself" in str(
        done("refold", "--mode", "tree", "--to", done.name).exception
    )


def test_an_exported_log_gives_the_same_digest_and_the_same_verdict(
    done: Namespace, tmp_path: Path
) -> None:
    path = tmp_path / "log.tflog"
    assert done("export", str(path)).exit_code == 0
    from_file = done("replay", "--file", str(path), TURNFOLD_BOOTSTRAP="127.0.0.1:1")
    assert from_file.exit_code == 0, from_file.output
    assert from_file.output.splitlines()[-1] == done("replay").output.splitlines()[-1]


def test_one_rollout_can_be_exported_for_a_bug_report(done: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "bug.tflog"
    assert done("export", str(path), "--rollout", "g0-00").exit_code == 0
    result = done("replay", "--file", str(path))
    assert "identical: 2 trajectories from 6 events" in result.output
    assert "g0-01" not in done("ledger", "--each", "--file", str(path)).output


def test_an_imported_log_replays_to_the_same_trajectories(
    done: Namespace, broker: RunningBroker, tmp_path: Path, new_namespace: NewNamespace
) -> None:
    path = tmp_path / "log.tflog"
    done("export", str(path), "--events-only")
    copy = Namespace(broker.bootstrap, new_namespace("copy"))
    assert copy("import", str(path)).exit_code == 0
    exported = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    done("replay", "--mode", "linear", "--out", str(exported[0]))
    assert copy("replay", "--mode", "linear", "--out", str(exported[1])).exit_code == 0
    assert rows_in(exported[0]) == rows_in(exported[1])
    with pytest.raises(UserError, match=f"topic {copy.name}.events is not empty"):
        raise copy("import", str(path)).exception or AssertionError("it was imported twice")


def rows_in(path: Path) -> dict[str, object]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {f"{line['rollout_id']} {line.get('revision', 0)}": line["rows"] for line in lines}


def test_a_file_that_is_no_log_is_one_clear_error(done: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    error = done("replay", "--file", str(path)).exception
    assert isinstance(error, UserError)
    assert "is no turnfold log file" in str(error)


@pytest.mark.field_case("rl-insight#170")
@pytest.mark.field_case("trl#6491")
def test_what_a_policy_version_said_and_how_long_it_took_can_be_read_from_the_log(
    done: Namespace,
) -> None:
    lines = done("cat", "--rollout", "g1-01").stdout.splitlines()
    turns = [e for e in map(json.loads, lines) if e["type"] == "turn_completed"]
    assert [turn["policy_versions"][0]["policy_version"] for turn in turns] == [0, 0, 0]
    assert {"output_ids", "logprobs", "prompt_tail"} <= turns[0].keys()


def test_events_that_were_printed_can_be_published_again(
    done: Namespace, fresh: Namespace, tmp_path: Path
) -> None:
    printed = done("cat", "--rollout", "g1-01").stdout
    assert [json.loads(line)["type"] for line in printed.splitlines()] == [
        "rollout_started",
        "turn_completed",
        "turn_completed",
        "turn_completed",
        "rollout_finished",
    ]
    path = tmp_path / "events.jsonl"
    path.write_text(printed)
    assert "5 events are valid" in fresh("publish", "--check", str(path)).stderr
    assert "5 events published" in fresh("publish", str(path)).stderr
    assert fresh("cat").stdout == printed
    placed = json.loads(fresh("cat", "--position", "--limit", "1").stdout)
    assert placed["offset"] == 0
    assert placed["event"]["rollout_id"] == "g1-01"


def test_a_line_that_is_no_event_is_named_and_the_lines_before_it_are_published(
    fresh: Namespace, tmp_path: Path
) -> None:
    start = codec.encode_json(rollout(0)[0]).decode()
    path = tmp_path / "events.jsonl"
    path.write_text(f'{start}\n\n{{"type": "rollout_finished", "rollout_id": "g0-00"}}\n')
    error = fresh("publish", str(path)).exception
    assert isinstance(error, UserError)
    assert str(error).startswith("line 3: not RolloutStarted")
    assert "missing required field `event_id`" in str(error)
    assert len(fresh.read(fresh.topics.events)) == 1


def test_topics_are_created_once_and_checked(
    broker: RunningBroker, new_namespace: NewNamespace
) -> None:
    made = Namespace(broker.bootstrap, new_namespace("made-by-command"))
    missing = made("check")
    assert missing.exit_code == 1
    assert f"{made.name}.events: does not exist" in missing.output
    created = made("create", "--partitions", "3", "--retention-hours", "24")
    assert f"created {made.name}.events" in created.output
    assert "all 6 topics are as they should be" in created.output
    assert made("check", "--partitions", "3", "--retention-hours", "24").exit_code == 0
    other = made("check", "--partitions", "5")
    assert other.exit_code == 1
    assert f"{made.name}.events: partitions: expected 5, found 3" in other.output
    assert "created" not in made("create", "--partitions", "3").output


def test_a_batch_that_is_not_trained_is_watched_for_its_retention(done: Namespace) -> None:
    options = ("--partitions", "2")
    assert done("check", *options).exit_code == 0
    assert "warning" not in done("check", *options).output


def test_the_doctor_finds_everything_well_where_it_is(done: Namespace, tmp_path: Path) -> None:
    result = done("doctor", "--data", str(tmp_path / "not-yet"))
    assert result.exit_code == 0, result.output
    assert "all events processed" in result.output


def test_the_doctor_says_what_to_do_about_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    nowhere = Namespace("127.0.0.1:1", "nowhere")
    result = nowhere(
        "doctor",
        *("--model", str(tmp_path), "--gateway", "http://127.0.0.1:1/v1"),
        *("--engine", "http://127.0.0.1:1"),
    )
    assert result.exit_code == 1
    assert "no Kafka broker answers at 127.0.0.1:1" in result.output
    assert "turnfold broker" in result.output
    assert "lacks tokenizer.json" in result.output
    assert "http://127.0.0.1:1/readyz" in result.output


def test_without_topics_the_doctor_advises_to_create_them(
    broker: RunningBroker, new_namespace: NewNamespace
) -> None:
    result = Namespace(broker.bootstrap, new_namespace("not-there"))("doctor")
    assert result.exit_code == 1
    assert "turnfold topics create" in result.output
    assert os.environ.get("TURNFOLD_NAMESPACE") is None
