"""`turnfold assembler`."""

from __future__ import annotations

from typing import Annotated

import typer

from turnfold.log.cli import Bootstrap, HealthPort, LogLevel, Namespace


def assembler(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    run_id: Annotated[str | None, typer.Option(help="The run whose batches to cut.")] = None,
    health_port: HealthPort = None,
    log_level: LogLevel = None,
) -> None:
    """Cut finished rollouts into batches.

    Reads tasks and trajectories, and appends a manifest to the batches topic whenever enough groups
    are complete: oldest dispatched first, never beyond the staleness bound. A group that is late
    closes with its survivors at its deadline; whatever is dropped is dropped with a reason.

    Sizes and bounds (TURNFOLD_GROUPS_PER_BATCH, TURNFOLD_MAX_STALENESS, …) must be the same for all
    services of a run. Kill it at any moment: the next one takes the same decisions.
    """
    import os

    from turnfold.assembler.app import run
    from turnfold.assembler.settings import Settings
    from turnfold.log.service import run_service
    from turnfold.schemas.run import RunConfig
    from turnfold.schemas.settings import load

    settings = load(
        Settings,
        os.environ,
        bootstrap=bootstrap,
        namespace=namespace,
        health_port=health_port,
        log_level=log_level,
    )
    config = load(RunConfig, os.environ, run_id=run_id)
    run_service("assembler", lambda health, stop: run(settings, config, health, stop), settings)
