"""`turnfold doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnfold.replay.options.cli import Bootstrap, Namespace, settings_of


def doctor(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    gateway: Annotated[
        list[str] | None, typer.Option(help="URL of a gateway; may be repeated.")
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="URL of an inference engine; may be repeated.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model directory to look at.")] = None,
    data: Annotated[Path, typer.Option(help="Where data is kept, for its free space.")] = Path(),
) -> None:
    """Look at everything a run needs, and say what to do about what is missing. Exit 1 on a failure.

    ```
    turnfold doctor --gateway http://127.0.0.1:8080 --engine http://127.0.0.1:8000
    ```
    """
    import asyncio

    from rich.console import Console
    from rich.table import Table

    from turnfold.replay.doctor.app import examine
    from turnfold.replay.doctor.checks import Check

    settings = settings_of(bootstrap, namespace)

    async def collect() -> list[Check]:
        found = examine(
            kafka=settings,
            namespace=settings.namespace,
            gateways=tuple(gateway or ()),
            engines=tuple(engine or ()),
            model=model,
            data=data,
        )
        return [check async for check in found]

    checks = asyncio.run(collect())
    table = Table("", "what", "found", "what to do", box=None, pad_edge=False)
    signs = {"ok": "[green]ok[/]", "warning": "[yellow]note[/]", "failure": "[red]FAIL[/]"}
    for check in checks:
        table.add_row(signs[check.state], check.name, check.detail, check.advice)
    Console().print(table)
    if any(check.state == "failure" for check in checks):
        raise typer.Exit(1)
