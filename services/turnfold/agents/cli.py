"""`turnfold worker` and `turnfold asyncapi`."""

from __future__ import annotations

from typing import Annotated

import typer

from turnfold.log.cli import Bootstrap, HealthPort, LogLevel, Namespace


def worker(
    agent: Annotated[
        str | None,
        typer.Option(help="The agent: module:function or path/to/file.py:function."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="The agent as a command instead, run once a rollout."),
    ] = None,
    setup_command: Annotated[
        str | None, typer.Option(help="Run before the command; if it fails, no agent is to blame.")
    ] = None,
    cleanup_command: Annotated[
        str | None, typer.Option(help="Run after the command, whatever happened.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Rollouts that run at a time, over all groups.")
    ] = None,
    gateway_url: Annotated[str | None, typer.Option(help="Where the gateway listens.")] = None,
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    health_port: HealthPort = None,
    log_level: LogLevel = None,
) -> None:
    """Run an agent for every task that the dispatcher hands out.

    The agent is an async function that gets the task (a row of the data set) and a rollout with
    `base_url` and `api_key` for any OpenAI client, and returns its reward:

        async def run(task, rollout) -> float: ...

        turnfold worker --agent my_agent.py:run --concurrency 32

    or any program, which finds the task in $TURNFOLD_TASK (JSON), the API in $OPENAI_BASE_URL and
    $OPENAI_API_KEY (or $ANTHROPIC_…), and prints {"reward": 0.5} in the end:

        turnfold worker --command "python my_agent.py"

        turnfold worker --command "docker run --rm --name {name} {env} {image} python agent.py"
            --setup-command "docker pull {image}" --cleanup-command "docker rm -f {name}"

    TURNFOLD_CONTROL_KEY is the gateway's control key. Start as many workers as you like, on any
    machine: they share the tasks. An exception, a timeout or a result that is no number ends the
    rollout without a reward, which is not a reward of 0. On SIGTERM what runs gets some seconds to
    finish. `turnfold try` runs an agent on a few tasks without any of this.
    """
    import os

    from turnfold.agents.worker.app import run
    from turnfold.agents.worker.settings import Settings
    from turnfold.log.service import run_service
    from turnfold.schemas.run import RunConfig
    from turnfold.schemas.settings import load

    settings = load(
        Settings,
        os.environ,
        agent=agent,
        command=command,
        setup_command=setup_command,
        cleanup_command=cleanup_command,
        concurrency=concurrency,
        gateway_url=gateway_url,
        bootstrap=bootstrap,
        namespace=namespace,
        health_port=health_port,
        log_level=log_level,
    )
    config = load(RunConfig, os.environ)
    run_service("worker", lambda health, stop: run(settings, config, health, stop), settings)


def asyncapi(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of YAML.")] = False,
    bootstrap: Annotated[
        str | None, typer.Option(help="Kafka bootstrap servers to name in the document.")
    ] = None,
    namespace: Namespace = None,
) -> None:
    """Print the AsyncAPI document of all topics: what is in them, for any language.

    turnfold asyncapi > turnfold.asyncapi.yaml
    """
    import os

    from turnfold.agents.asyncapi.app import document
    from turnfold.log.settings import ServiceSettings
    from turnfold.schemas.settings import load

    settings = load(ServiceSettings, os.environ, bootstrap=bootstrap, namespace=namespace)
    text = document(settings.topics, settings.bootstrap, "json" if as_json else "yaml")
    typer.echo(text)
