"""The numbers that the demo shows, from the log alone."""

from turnfold.embedded.demo.display import sparkline
from turnfold.embedded.demo.progress import Progress
from turnfold.schemas.batches import BatchCut, GroupRef, Positions, RolloutRef
from turnfold.schemas.policies import PolicyPublished, PolicyServed
from turnfold.schemas.testing import aborted, finished, started, task, turn


def batch(index: int, rewards: list[float], min_version: int) -> BatchCut:
    rollouts = tuple(
        RolloutRef(
            rollout_id=f"r{slot}",
            index=slot,
            partition=0,
            offset=slot,
            digest="",
            reward=reward,
            num_rows=2,
            num_tokens=9,
            num_trained=3,
            max_row_tokens=5,
            min_policy_version=min_version,
            max_policy_version=min_version,
        )
        for slot, reward in enumerate(rewards)
    )
    return BatchCut(
        run_id="default",
        index=index,
        groups=(GroupRef(group_id=f"g{index}", dispatch_index=index, rollouts=rollouts),),
        positions=Positions(tasks={}, trajectories={}),
        at=0.0,
        config_digest="",
    )


def published(version: int, **metrics: float) -> PolicyPublished:
    return PolicyPublished(
        run_id="default", policy_version=version, weights_uri="", metrics=metrics
    )


def test_a_rollout_is_in_flight_from_its_start_to_its_end() -> None:
    progress = Progress()
    for event in (started("r1"), started("r2"), started("r3"), finished("r1"), aborted("r2")):
        progress.feed(event)
    assert progress.in_flight == {"r3"}
    assert (progress.num_rollouts, progress.num_finished, progress.num_aborted) == (3, 1, 1)


def test_turns_are_counted_by_continuity_and_sampled_tokens() -> None:
    progress = Progress()
    progress.feed(turn("r1", "t0", prompt=[1], output=[2, 3], continuity="first"))
    progress.feed(turn("r1", "t1", prompt=[1, 2, 3], output=[4], continuity="healed"))
    assert progress.continuity == {"first": 1, "healed": 1}
    assert progress.num_sampled == 3


def test_a_batch_shows_reward_and_staleness_once_it_is_trained() -> None:
    progress = Progress()
    progress.feed(batch(1, [0.0, 1.0], min_version=0))
    progress.feed(batch(3, [1.0, 0.5], min_version=1))
    progress.feed(published(0))
    assert progress.rewards == []
    progress.feed(published(1, optimizer_steps=4))
    assert progress.rewards == [0.5]
    assert progress.batches[1].is_trained
    assert (progress.batches[3].mean_staleness, progress.batches[3].max_staleness) == (1.0, 1)


def test_the_first_manifest_of_an_index_counts() -> None:
    progress = Progress()
    progress.feed(batch(1, [1.0], min_version=0))
    progress.feed(batch(1, [0.0], min_version=0))
    assert progress.batches[1].mean_reward == 1.0


def test_served_and_published_versions_only_grow() -> None:
    progress = Progress()
    for version in (0, 2, 1):
        progress.feed(PolicyServed(run_id="default", policy_version=version))
        progress.feed(published(version))
    assert (progress.served, progress.published) == (2, 2)


def test_groups_are_counted() -> None:
    progress = Progress()
    progress.feed(task("g1"))
    progress.feed(task("g2"))
    assert progress.num_groups == 2


def test_a_sparkline_has_one_bar_a_value_and_stays_in_range() -> None:
    assert sparkline([0.0, 0.5, 1.0, 1.5, -1.0]) == "▁▅██▁"
    assert sparkline([]) == ""
