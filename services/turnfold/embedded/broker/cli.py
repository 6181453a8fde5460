"""`turnfold broker`: the development broker as a command."""

from pathlib import Path
from typing import Annotated

import typer


def broker(
    data: Annotated[
        Path, typer.Option(help="Folder for topics and offsets; made if it is not there.")
    ] = Path("data"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = 9092,
    fsync: Annotated[
        bool,
        typer.Option(
            "--fsync",
            help="Acknowledge only what is on the disk: survives a power cut, and is slower. "
            "Without it, what was acknowledged survives the death of the broker's process.",
        ),
    ] = False,
    auto_create_topics: Annotated[
        bool,
        typer.Option(help="Create a topic, with one partition, when a client first asks for it."),
    ] = True,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="File to write host:port to as soon as clients can connect."),
    ] = None,
    exit_with_parent: Annotated[
        bool,
        typer.Option(
            "--exit-with-parent",
            help="Also stop when standard input is closed, as it is when the parent process dies.",
        ),
    ] = False,
) -> None:
    """Run a Kafka broker for development, in one process and one folder.

    It speaks the Kafka protocol to any client: topics, consumer groups, idempotent and transactional
    producers, retention, compaction. There is one node, no replica, no access control and no encryption, so
    keep it to a laptop or a test; production is Apache Kafka.

    Stop it with Ctrl-C, and start it again on the same folder: everything acknowledged is still there, even
    after kill -9.

        turnfold broker --data ./data
        turnfold topics create
    """
    from turnfold.embedded.broker.app import StartError, run

    try:
        run(
            data,
            host=host,
            port=port,
            fsync=fsync,
            auto_create_topics=auto_create_topics,
            ready_file=ready_file,
            exit_with_parent=exit_with_parent,
        )
    except StartError as error:
        typer.echo(f"turnfold broker: {error}", err=True)
        raise typer.Exit(1) from None
