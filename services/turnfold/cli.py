"""The `turnfold` command: every part of the pipeline, and what works on the log.

Each package keeps its own commands in its `cli.py`, which imports nothing heavy; this module only
names them.
"""

from __future__ import annotations

import sys

import typer

from turnfold.agents.cli import asyncapi, worker
from turnfold.assembler.cli import assembler
from turnfold.dispatcher.cli import dispatcher
from turnfold.embedded.broker.cli import broker
from turnfold.embedded.demo.cli import demo
from turnfold.embedded.inference.cli import inference
from turnfold.embedded.tiny.cli import tiny_model
from turnfold.embedded.tryout.cli import try_agent
from turnfold.gateway.cli import gateway, relay
from turnfold.healer.cli import healer
from turnfold.replay.cli import (
    diff,
    doctor,
    events_cat,
    events_publish,
    ledger,
    log_export,
    log_import,
    refold,
    replay,
    topics_check,
    topics_create,
)
from turnfold.replay.drift.cli import drift
from turnfold.replay.evals.cli import evals
from turnfold.replay.stragglers.cli import stragglers
from turnfold.schemas.errors import UserError
from turnfold.trainer.cli import train

_LOCAL = "On one machine"
_SERVICES = "Services"
_LOG = "The log"

app = typer.Typer(
    name="turnfold",
    help=(
        "Turn the model calls of unmodified LLM agents into reinforcement-learning updates, "
        "with a Kafka log as the only source of truth.\n\n"
        "Start with `turnfold demo`. Every option is also a TURNFOLD_* environment variable."
    ),
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("demo", rich_help_panel=_LOCAL)(demo)
app.command("try", rich_help_panel=_LOCAL)(try_agent)
app.command("broker", rich_help_panel=_LOCAL)(broker)
app.command("inference", rich_help_panel=_LOCAL)(inference)
app.command("tiny-model", rich_help_panel=_LOCAL)(tiny_model)

app.command("gateway", rich_help_panel=_SERVICES)(gateway)
app.command("relay", rich_help_panel=_SERVICES)(relay)
app.command("healer", rich_help_panel=_SERVICES)(healer)
app.command("assembler", rich_help_panel=_SERVICES)(assembler)
app.command("dispatcher", rich_help_panel=_SERVICES)(dispatcher)
app.command("worker", rich_help_panel=_SERVICES)(worker)
app.command("train", rich_help_panel=_SERVICES)(train)

app.command("replay", rich_help_panel=_LOG)(replay)
app.command("refold", rich_help_panel=_LOG)(refold)
app.command("diff", rich_help_panel=_LOG)(diff)
app.command("ledger", rich_help_panel=_LOG)(ledger)
app.command("drift", rich_help_panel=_LOG)(drift)
app.command("stragglers", rich_help_panel=_LOG)(stragglers)
app.command("evals", rich_help_panel=_LOG)(evals)
app.command("export", rich_help_panel=_LOG)(log_export)
app.command("import", rich_help_panel=_LOG)(log_import)
app.command("doctor", rich_help_panel=_LOG)(doctor)
app.command("asyncapi", rich_help_panel=_LOG)(asyncapi)

events = typer.Typer(help="Read events from the log, or publish some.", no_args_is_help=True)
events.command("cat")(events_cat)
events.command("publish")(events_publish)
app.add_typer(events, name="events", rich_help_panel=_LOG)

topics = typer.Typer(help="Create the topics, or check them.", no_args_is_help=True)
topics.command("create")(topics_create)
topics.command("check")(topics_check)
app.add_typer(topics, name="topics", rich_help_panel=_LOG)


def main() -> None:
    """Entry point: an error that a person can act on is one line, exit 1."""
    try:
        app()
    except UserError as error:
        sys.exit(f"turnfold: {error}")


if __name__ == "__main__":
    main()
