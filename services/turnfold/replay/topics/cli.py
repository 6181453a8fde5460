"""`turnfold topics …`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnfold.replay.options.cli import Bootstrap, Namespace, settings_of

if TYPE_CHECKING:
    from turnfold.log.settings import ServiceSettings


def topics_create(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of events, tasks and trajectories.")
    ] = 4,
    replication: Annotated[int, typer.Option(min=1, help="Copies of each partition.")] = 1,
    retention_hours: Annotated[
        float | None, typer.Option(help="Keep the log this long; for ever when left out.")
    ] = None,
) -> None:
    """Create the topics that are missing, and name what differs on those that exist.

    A rollout's events stay in one partition, so more partitions let more healers share the work.
    The number cannot be changed later without a new namespace.
    """
    import asyncio

    from turnfold.log.client import create_topics

    settings = settings_of(bootstrap, namespace)
    specs = settings.topics.specs(partitions, _retention_ms(retention_hours))
    for name in asyncio.run(create_topics(settings, specs, replication)):
        typer.echo(f"created {name}")
    _show_topic_differences(settings, specs)


def topics_check(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of events, tasks and trajectories.")
    ] = 4,
    retention_hours: Annotated[
        float | None, typer.Option(help="How long the log should be kept; for ever if left out.")
    ] = None,
) -> None:
    """Compare the topics with what they should be, and look for records that are still needed.

    A batch that is not trained needs its trajectories, an open rollout its events. Those that have
    used up half of their retention time are named in a warning. Exit 1 when a topic differs, or
    when something that is needed has expired.
    """
    import asyncio

    from turnfold.replay.topics.app import retention_findings

    settings = settings_of(bootstrap, namespace)
    specs = settings.topics.specs(partitions, _retention_ms(retention_hours))
    is_different = _show_topic_differences(settings, specs)
    found = asyncio.run(retention_findings(settings, settings.namespace))
    for finding in found:
        typer.echo(str(finding))
    if is_different or any(finding.is_lost for finding in found):
        raise typer.Exit(1)


def _retention_ms(hours: float | None) -> int:
    return -1 if hours is None else int(hours * 3_600_000)


def _show_topic_differences(kafka: ServiceSettings, specs: Any) -> bool:
    import asyncio

    from turnfold.log.client import topic_differences

    differences = asyncio.run(topic_differences(kafka, specs))
    lines = [f"{topic}: {what}" for topic, found in differences.items() for what in found]
    for line in lines or [f"all {len(differences)} topics are as they should be"]:
        typer.echo(line)
    return bool(lines)
