"""Settings of topics."""

import pytest

from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.topic_config import TopicConfig


def test_a_topics_own_settings_come_before_the_defaults() -> None:
    config = TopicConfig({"retention.ms": "-1", "cleanup.policy": "compact,delete"})

    assert config.limit("retention.ms") is None
    assert config.number("max.message.bytes") == 1_048_588
    assert config.is_compacted
    assert config.is_expiring
    assert not TopicConfig({}).is_compacted


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("retention.msec", "1", "Unknown topic config name: retention.msec"),
        ("retention.ms", "soon", "retention.ms: expected a number of at least -1, got 'soon'"),
        ("segment.bytes", "-1", "segment.bytes: expected a number of at least 0, got '-1'"),
        ("min.cleanable.dirty.ratio", "x", "min.cleanable.dirty.ratio: expected a number"),
        ("cleanup.policy", "keep", "cleanup.policy: expected compact or delete, got 'keep'"),
        ("message.timestamp.type", "LogAppendTime", "expected CreateTime, got 'LogAppendTime'"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_was_expected(
    name: str, value: str, message: str
) -> None:
    with pytest.raises(Refused, match=message) as caught:
        TopicConfig({name: value})
    assert caught.value.code is ErrorCode.INVALID_CONFIG
