"""`python -m turnfold.embedded.broker`: the same as `turnfold broker`, without loading the other commands."""

import typer

from turnfold.embedded.broker.cli import broker

app = typer.Typer(rich_markup_mode="markdown", add_completion=False, pretty_exceptions_enable=False)
app.command()(broker)

if __name__ == "__main__":
    app()
