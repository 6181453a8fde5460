"""What retention may take from a run."""

from turnfold.replay.topics.retention import Need, findings

DAY_MS = 24 * 3_600_000


def need(written_at: float | None) -> Need:
    return Need(
        why="batch 7, not trained yet, names rollout r3",
        topic="turnfold.trajectories",
        partition=1,
        offset=17,
        written_at=written_at,
    )


def texts(written_at: float | None, retention_ms: int = DAY_MS) -> list[str]:
    found = findings([need(written_at)], {"turnfold.trajectories": retention_ms}, now=100_000.0)
    return [str(finding) for finding in found]


def test_a_needed_record_that_expired_is_lost() -> None:
    assert texts(None) == [
        "LOST: batch 7, not trained yet, names rollout r3 at turnfold.trajectories/1@17, which has "
        "expired"
    ]


def test_a_needed_record_past_half_of_its_time_is_warned_of() -> None:
    (text,) = texts(100_000.0 - 20 * 3600)
    assert "written 20.0 h ago; retention.ms keeps it 24.0 h, so it may go in 4.0 h" in text


def test_a_young_record_and_a_topic_without_retention_are_well() -> None:
    assert texts(100_000.0 - 3600) == []
    assert texts(0.0, retention_ms=-1) == []
