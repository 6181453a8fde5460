"""`turnfold healer`."""

from __future__ import annotations

from typing import Annotated

import typer

from turnfold.log.cli import Bootstrap, HealthPort, LogLevel, Namespace


def healer(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    partitions: Annotated[
        str | None,
        typer.Option(help="Partitions of the events topic to own, such as 0-1 or 0,3; else all."),
    ] = None,
    health_port: HealthPort = None,
    log_level: LogLevel = None,
) -> None:
    """Fold the events of rollouts into trajectories.

    When a rollout ends, all its turns become training rows with masks, sampling logprobs and a
    ledger in which every sampled token is trained, masked or dropped with a reason. A rollout whose
    deadline passes is aborted. Records that cannot be used go to the dead letters.

    Kill it at any moment: the next one goes on where it was, and each trajectory is written once.
    To share the work, give each process its own partitions:

    ```
    turnfold healer --partitions 0-1
    turnfold healer --partitions 2-3
    ```
    """
    import os

    from turnfold.healer.app import run
    from turnfold.healer.settings import Settings
    from turnfold.log.service import run_service
    from turnfold.schemas.settings import load

    settings = load(
        Settings,
        os.environ,
        bootstrap=bootstrap,
        namespace=namespace,
        partitions=partitions,
        health_port=health_port,
        log_level=log_level,
    )
    run_service("healer", lambda health, stop: run(settings, health, stop), settings)
