"""Commands `turnfold gateway` and `turnfold relay`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from turnfold.log.cli import Bootstrap, HealthPort, LogLevel, Namespace


def gateway(
    model: Annotated[
        str | None, typer.Option(help="Directory with the tokenizer and chat template.")
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="URL of an inference engine; repeat for replicas.")
    ] = None,
    engine_kind: Annotated[
        str | None, typer.Option(help="Which server the engines are: vllm or sglang.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    public_url: Annotated[
        str | None, typer.Option(help="URL under which agents reach this gateway.")
    ] = None,
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    reply_format: Annotated[
        str | None, typer.Option(help="How the model writes tool calls: qwen, reasoning or plain.")
    ] = None,
    log_level: LogLevel = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Written as JSON {base_url, pid} once it serves.")
    ] = None,
    dev: Annotated[
        bool, typer.Option(help="Use well-known keys when none are set: one machine only.")
    ] = False,
) -> None:
    """Serve model APIs to agents and record every turn in the log.

    An agent gets a base URL and an api key of one rollout:

        turnfold gateway --model ./model --engine http://127.0.0.1:8000 --dev

        curl -X POST http://127.0.0.1:8080/v1/rollouts -H 'authorization: Bearer turnfold-dev' \\
             -d '{"group_id": "g1"}'

    and talks to it as to OpenAI. TURNFOLD_CONTROL_KEY guards the control API, TURNFOLD_KEY_SECRET
    signs session keys and must be the same on all gateways of one log.
    """
    from turnfold.gateway.app import serve_gateway

    serve_gateway(
        os.environ,
        ready_file=ready_file,
        is_dev=dev,
        model=model,
        engines=tuple(engine) if engine else None,
        engine_kind=engine_kind,
        host=host,
        port=port,
        public_url=public_url,
        bootstrap=bootstrap,
        namespace=namespace,
        reply_format=reply_format,
        log_level=log_level,
    )


def relay(
    engine: Annotated[
        list[str] | None, typer.Option(help="URL of an inference engine; repeat for replicas.")
    ] = None,
    engine_kind: Annotated[
        str | None, typer.Option(help="Which server the engines are: vllm or sglang.")
    ] = None,
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    health_port: HealthPort = None,
    log_level: LogLevel = None,
) -> None:
    """Load each new policy into every engine and say in the log when it is served.

    Engines that restart with older weights get the newest ones again.

        turnfold relay --engine http://127.0.0.1:8000
    """
    from turnfold.gateway.relay.app import run_relay

    options: dict[str, Any] = {
        "engines": tuple(engine) if engine else None,
        "engine_kind": engine_kind,
        "bootstrap": bootstrap,
        "namespace": namespace,
        "health_port": health_port,
        "log_level": log_level,
    }
    run_relay(os.environ, **options)


def main() -> None:
    """`python -m turnfold.gateway`: the gateway alone."""
    typer.run(gateway)
