"""`turnfold dispatcher`."""

from __future__ import annotations

from typing import Annotated

import typer

from turnfold.log.cli import Bootstrap, HealthPort, LogLevel, Namespace


def dispatcher(
    dataset: Annotated[
        str | None,
        typer.Option(help="Tasks: .jsonl, .parquet, .arrow, or a Hugging Face data set directory."),
    ] = None,
    dataset_split: Annotated[
        str | None, typer.Option(help="Split of a data set directory that has several.")
    ] = None,
    num_batches: Annotated[
        int | None, typer.Option(help="Dispatch for this many batches, then end.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data set, then end; for ever without.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of tasks.")] = None,
    shuffle: Annotated[
        bool | None, typer.Option(help="Another order in each epoch (default), or as in the file.")
    ] = None,
    eval_dataset: Annotated[
        str | None, typer.Option(help="Tasks to evaluate on, of any kind that --dataset takes.")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Policy versions between two evaluations.")
    ] = None,
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    run_id: Annotated[str | None, typer.Option(help="The run to dispatch for.")] = None,
    health_port: HealthPort = None,
    log_level: LogLevel = None,
) -> None:
    """Hand tasks to the agents, as many as can still be trained within the staleness bound.

    Each row of the data set becomes the payload of a task, which is run by a group of rollouts.
    The first group is dispatched when every engine serves policy version 0. A group that was lost
    (its worker died, or too few of its rollouts survived) is dispatched again, at most
    TURNFOLD_MAX_ATTEMPTS times in all.

        turnfold dispatcher --dataset tasks.jsonl --num-batches 100
        turnfold dispatcher --dataset tasks.jsonl --eval-dataset held_out.jsonl --eval-every 20

    Evaluation tasks run like any other, take no seat of a batch and are never trained; `turnfold
    evals` shows what they scored.

    Kill it at any moment: the next one goes on after the last task in the log.
    """
    import os

    from turnfold.dispatcher.app import run
    from turnfold.dispatcher.settings import Settings
    from turnfold.log.service import run_service
    from turnfold.schemas.run import RunConfig
    from turnfold.schemas.settings import load

    settings = load(
        Settings,
        os.environ,
        dataset=dataset,
        dataset_split=dataset_split,
        num_batches=num_batches,
        epochs=epochs,
        seed=seed,
        is_shuffled=shuffle,
        eval_dataset=eval_dataset,
        eval_every=eval_every,
        bootstrap=bootstrap,
        namespace=namespace,
        health_port=health_port,
        log_level=log_level,
    )
    config = load(RunConfig, os.environ, run_id=run_id)
    run_service("dispatcher", lambda health, stop: run(settings, config, health, stop), settings)
