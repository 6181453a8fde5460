"""`turnfold try`: run an agent on a few tasks and show what would be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def try_agent(
    agent: Annotated[
        str, typer.Option(help="The agent: module:function or path/to/file.py:function.")
    ] = "",
    command: Annotated[
        str, typer.Option(help="The agent as a command instead, run once a rollout.")
    ] = "",
    tasks: Annotated[
        Path | None,
        typer.Option(help="A .jsonl, .parquet or .arrow file; the demo's doors when left out."),
    ] = None,
    num_tasks: Annotated[int, typer.Option(help="Tasks to take, from the start.", min=1)] = 2,
    n: Annotated[int, typer.Option("--n", help="Rollouts a task.", min=1)] = 2,
    timeout_s: Annotated[float, typer.Option(help="Seconds a rollout may take.")] = 120.0,
    model: Annotated[
        Path | None, typer.Option(help="Directory of the engine's model; a tiny one by default.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="URL of a running vLLM; without it a small server is started.")
    ] = "",
) -> None:
    """Run an agent on a few tasks and show each turn, the reward and the rows to train on.

    Everything that it needs is started for the moment: a log, a gateway, and a tiny model that
    knows nothing but doors. Your agent runs in this process, so what it prints is to be seen and a
    breakpoint works.

        turnfold try --agent my_agent.py:run --tasks my_tasks.jsonl
        turnfold try --command "python my_agent.py" --tasks my_tasks.jsonl
        turnfold try --agent my_agent.py:run --engine http://gpu1:8000 --model ./Qwen3-4B

    Exits 1 when a rollout ends without a reward.
    """
    from turnfold.embedded.tryout.app import Options, run

    options = Options(
        agent=agent,
        command=command,
        tasks=tasks,
        num_tasks=num_tasks,
        n=n,
        timeout_s=timeout_s,
        model=model,
        engine=engine,
    )
    raise typer.Exit(0 if run(options) else 1)
