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
    advertised_host: Annotated[
        str,
        typer.Option(
            help="Name that clients connect to, which the certificate is for; "
            "the address at which they reached the broker if not given."
        ),
    ] = "",
    tls_certificate: Annotated[
        Path | None,
        typer.Option(help="PEM file with the certificate chain; with it the broker speaks TLS."),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(help="PEM file with its private key, if that is not in the same file."),
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file with authorities: every client needs a certificate of theirs."),
    ] = None,
    users: Annotated[
        Path | None,
        typer.Option(
            help="File with lines of name:password; with it clients log in (SASL, PLAIN or SCRAM-SHA-256)."
        ),
    ] = None,
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
    producers, retention, compaction. There is one node, no replica, and who may log in may do anything, so
    keep it to a laptop, a test or a trial; production is Apache Kafka.

    Stop it with Ctrl-C, and start it again on the same folder: everything acknowledged is still there, even
    after kill -9.

        turnfold broker --data ./data
        turnfold topics create

    Before you let it listen on more than this machine, give it a certificate and users:

        turnfold broker --host 0.0.0.0 --advertised-host broker.lab --tls-certificate broker.pem --users users.txt
    """
    from turnfold.embedded.broker.app import StartError, run

    try:
        run(
            data,
            host=host,
            port=port,
            advertised_host=advertised_host,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            users=users,
            fsync=fsync,
            auto_create_topics=auto_create_topics,
            ready_file=ready_file,
            exit_with_parent=exit_with_parent,
        )
    except StartError as error:
        typer.echo(f"turnfold broker: {error}", err=True)
        raise typer.Exit(1) from None
