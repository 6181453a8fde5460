"""The `turnfold demo` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where runs are kept, each with its log and weights.")
    ] = Path("runs"),
    batches: Annotated[int, typer.Option(help="Batches to train.", min=1)] = 20,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest run instead of a new one.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the model and of the tasks.")] = 0,
    agent: Annotated[
        str, typer.Option(help="An agent of yours: path/to/file.py:function; needs --tasks.")
    ] = "",
    command: Annotated[
        str, typer.Option(help="An agent of yours as a command; needs --tasks.")
    ] = "",
    tasks: Annotated[
        Path | None, typer.Option(help="Tasks of yours: a .jsonl, .parquet or .arrow file.")
    ] = None,
) -> None:
    """Run the whole pipeline on this machine and watch the reward rise.

    Starts an embedded broker, a tiny but real model, the gateway, healer, assembler, dispatcher and
    a verl trainer, each as its own process, and an agent written with the plain `openai` SDK that
    learns to use a tool. It ends with the reward curve, the ledger of every sampled token, and a
    replay of the log that proves that the rows and batches come out byte for byte the same.

    Kill any of the processes while it runs: it is started again and nothing is lost. Ctrl-C stops
    cleanly; `turnfold demo --resume` goes on.

    With an agent and tasks of yours it trains those instead, on the same tiny model, which knows
    nothing but doors: enough to see the whole pipeline work on them.

        turnfold demo --agent my_agent.py:run --tasks my_tasks.jsonl --batches 3
    """
    from turnfold.embedded.demo.app import Own, run_demo
    from turnfold.embedded.demo.recipe import CONFIG, training

    run_dir = newest_run(directory) if resume else next_run(directory)
    own = None
    if agent or command or tasks is not None:
        if tasks is None or not (agent or command):
            raise typer.BadParameter(
                "an agent of yours needs tasks, and tasks need an agent or a command",
                param_hint="--tasks",
            )
        own = Own(agent=agent, command=command, dataset=tasks)
    model_dir = directory / f"model-{seed}"
    is_good = run_demo(run_dir, model_dir, CONFIG, training(batches), seed=seed, own=own)
    raise typer.Exit(0 if is_good else 1)


def runs(directory: Path) -> list[Path]:
    """Runs in `directory`, oldest first: demo-0001, demo-0002, …"""
    return sorted(path for path in directory.glob("demo-*") if path.is_dir())


def next_run(directory: Path) -> Path:
    taken = runs(directory)
    number = int(taken[-1].name.removeprefix("demo-")) + 1 if taken else 1
    return directory / f"demo-{number:04d}"


def newest_run(directory: Path) -> Path:
    taken = runs(directory)
    if not taken:
        raise typer.BadParameter(f"no run to resume in {directory}/", param_hint="--resume")
    return taken[-1]
