"""`turnfold events …`, `turnfold export` and `turnfold import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from turnfold.replay.options.cli import (
    Bootstrap,
    Groups,
    LogPath,
    Namespace,
    Rollouts,
    run_with_progress,
    settings_of,
    source_of,
)


def events_cat(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    file: LogPath = None,
    rollout: Rollouts = None,
    group: Groups = None,
    limit: Annotated[int | None, typer.Option(help="Stop after this many events.")] = None,
    position: Annotated[
        bool, typer.Option("--position", help='Wrap each event: {"partition", "offset", "event"}.')
    ] = False,
) -> None:
    """Print events as JSON lines, token ids as plain integers.

    What is printed can be published again:

    ```
    turnfold events cat --rollout r1 | turnfold events publish --namespace copy
    ```
    """
    import asyncio
    from contextlib import aclosing
    from itertools import count

    from turnfold.replay import app
    from turnfold.replay.rebuild import Selection
    from turnfold.schemas import codec

    source = source_of(bootstrap, namespace, file)
    selection = Selection(rollout or (), group or ())

    async def show() -> None:
        numbers = count(1)
        async with aclosing(app.events(source, selection)) as found:
            async for record, event in found:
                if isinstance(event, str):
                    typer.echo(f"{record}: {event}", err=True)
                    continue
                place = {"partition": record.partition, "offset": record.offset}
                line = codec.encode_json({**place, "event": event} if position else event)
                typer.echo(line.decode())
                if next(numbers) == limit:
                    return

    asyncio.run(show())


def events_publish(
    path: Annotated[
        Path | None, typer.Argument(help="JSON lines; standard input when it is left out or -.")
    ] = None,
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether every line is an event.")
    ] = False,
) -> None:
    """Publish events written as JSON, one a line; docs/events.md shows them all.

    Each is acknowledged by Kafka before the next is sent. A line that is no event ends the command
    with its number and what was wrong; the lines before it are published.
    """
    import asyncio
    import sys

    from turnfold.replay import app

    settings = settings_of(bootstrap, namespace)

    def publish(lines: Any) -> int:
        return asyncio.run(app.publish(lines, settings, settings.namespace, is_checked_only=check))

    if path is None or str(path) == "-":
        number = publish(sys.stdin)
    else:
        with path.open(encoding="utf-8") as lines:
            number = publish(lines)
    typer.echo(f"{number} events are valid" if check else f"{number} events published", err=True)


def log_export(
    path: Annotated[Path, typer.Argument(help="The file to write, such as bug.tflog.")],
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    rollout: Rollouts = None,
    group: Groups = None,
    events_only: Annotated[
        bool, typer.Option("--events-only", help="Leave out everything that can be rebuilt.")
    ] = False,
) -> None:
    """Write the log, or some rollouts of it, to one compressed file.

    ```
    turnfold export bug.tflog --rollout run-000003-01
    turnfold replay --file bug.tflog
    ```

    The file holds prompts and answers as tokens and text: treat it as you treat those.
    """
    from turnfold.replay import app
    from turnfold.replay.client import KafkaLog
    from turnfold.replay.rebuild import Selection

    settings = settings_of(bootstrap, namespace)
    source = KafkaLog(settings, settings.namespace)
    number = run_with_progress(
        "exporting",
        source,
        lambda advance: app.export(
            source,
            path,
            Selection(rollout or (), group or ()),
            is_events_only=events_only,
            on_progress=advance,
        ),
    )
    typer.echo(f"{number} records, {path.stat().st_size:,} bytes in {path}")


def log_import(
    path: Annotated[Path, typer.Argument(help="A file written by `turnfold export`.")],
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
) -> None:
    """Load an exported log into empty topics, which are created.

    It is a new log then: offsets begin at 0, and the trajectories and manifests in it still name those of
    the old one. To prove that a log gives the same bytes, replay the file: `turnfold replay --file`.
    """
    import asyncio

    from turnfold.replay import app

    settings = settings_of(bootstrap, namespace)
    number = asyncio.run(app.import_log(path, settings, settings.namespace))
    typer.echo(f"{number} records in the topics of {settings.namespace}")
