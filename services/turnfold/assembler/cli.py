"""`turnfold assembler`."""

from __future__ import annotations

from typing import Annotated

import typer


def assembler(
    bootstrap: Annotated[
        str | None, typer.Option(help="Kafka bootstrap servers, host:port.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Prefix of all topics.")] = None,
    run_id: Annotated[str | None, typer.Option(help="The run whose batches to cut.")] = None,
    health_port: Annotated[
        int | None, typer.Option(help="Port of /healthz, /readyz and /metrics.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
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
    run_service(
        "assembler",
        lambda health, stop: run(settings, config, health, stop),
        health_port=settings.health_port,
        log_level=settings.log_level,
    )
