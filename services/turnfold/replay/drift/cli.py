"""The command `turnfold drift`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from turnfold.replay.options.cli import (
    Bootstrap,
    Groups,
    LogPath,
    Namespace,
    Rollouts,
    run_with_progress,
    source_of,
)

if TYPE_CHECKING:
    from rich.table import Table

    from turnfold.replay.drift.report import ClientDrift, Cost, Drift, Offender

CONTINUITIES = ("first", "extended", "healed", "forked", "reset", "passthrough")


def drift(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    file: LogPath = None,
    rollout: Rollouts = None,
    group: Groups = None,
    top: Annotated[int, typer.Option(min=0, help="So many of the worst sessions.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which clients' histories drifted from what was sampled, why, and what it cost.

    For each harness, protocol and model how its turns continued, the tokens that healing saved, and what
    drift cost in training rows and in tokens read again; the same for each cause; and the worst sessions.

    ```
    turnfold drift
    turnfold drift --group run-000003 --top 3
    ```
    """
    from turnfold.replay.drift.report import Drift
    from turnfold.replay.rebuild import Selection

    source = source_of(bootstrap, namespace, file)
    selection = Selection(rollout or (), group or ())

    async def collect(advance: Callable[[int], None]) -> Drift:
        found = Drift()
        async for record in source.read(source.topics.events):
            advance(1)
            if selection.holds_event(record):
                found.add(record)
        return found

    found = run_with_progress("reading events", source, collect)
    if as_json:
        _print_json(found, top)
    else:
        _show(found, top)


def _print_json(found: Drift, top: int) -> None:
    import msgspec

    report = {
        "turns": found.num_turns,
        "clients": found.clients(),
        "causes": [{"cause": cause, **msgspec.to_builtins(c)} for cause, c in found.causes()],
        "worst_sessions": found.offenders(top),
    }
    typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())


def _show(found: Drift, top: int) -> None:
    from rich.console import Console

    from turnfold.replay.drift.report import total_cost

    console = Console()
    console.print(_clients_table(found.clients()))
    if found.causes():
        console.print()
        console.print(_causes_table(found.causes()))
    worst = found.offenders(top)
    if worst:
        console.print()
        console.print(_offenders_table(worst))
    cost = total_cost(cost for _, cost in found.causes())
    typer.echo(
        f"{found.num_turns} turns: {cost.num_healed} healed, which saved as many rows and "
        f"{cost.saved_tokens:,} tokens; {cost.num_broken} broke off, which cost as many rows and "
        f"at most {cost.repeated_tokens:,} tokens"
    )


def _clients_table(clients: Sequence[ClientDrift]) -> Table:
    table = _table(
        "harness",
        "protocol",
        "model",
        numbers=("turns", *CONTINUITIES, "drifted", "tokens saved", "rows cost", "tokens repeated"),
    )
    for entry in clients:
        drifted = entry.cost.num_healed + entry.cost.num_broken
        table.add_row(
            entry.client.harness or "?",
            entry.client.protocol,
            entry.client.model,
            f"{entry.num_turns:,}",
            *(f"{entry.continuities[name]:,}" for name in CONTINUITIES),
            f"{100 * drifted / entry.num_turns:.1f} %",
            f"{entry.cost.saved_tokens:,}",
            f"{entry.cost.num_broken:,}",
            f"{entry.cost.repeated_tokens:,}",
        )
    return table


def _causes_table(causes: Sequence[tuple[str, Cost]]) -> Table:
    table = _table("cause", numbers=("healed", "tokens saved", "rows cost", "tokens repeated"))
    for cause, cost in causes:
        numbers = (cost.num_healed, cost.saved_tokens, cost.num_broken, cost.repeated_tokens)
        table.add_row(cause, *(f"{number:,}" for number in numbers))
    return table


def _offenders_table(offenders: Sequence[Offender]) -> Table:
    table = _table("rollout", "session", numbers=("rows cost", "tokens repeated"))
    table.add_column("causes")
    table.add_column("first at")
    for offender in offenders:
        at = f", message {offender.first_message_index}" * (offender.first_message_index >= 0)
        table.add_row(
            offender.rollout_id,
            offender.session_id,
            f"{offender.cost.num_broken:,}",
            f"{offender.cost.repeated_tokens:,}",
            ", ".join(f"{cause} {number}" for cause, number in offender.causes.most_common()),
            f"turn {offender.first_turn_id}{at}",
        )
    return table


def _table(*names: str, numbers: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
