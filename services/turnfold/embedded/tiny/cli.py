"""`turnfold tiny-model`: build the small model that the demo trains."""

from pathlib import Path
from typing import Annotated

import typer


def tiny_model(
    out: Annotated[Path, typer.Option(help="Directory to write the model to.")],
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
) -> None:
    """Build a Qwen3 model of about 0.1 million weights that RL can teach in minutes on a CPU.

    It comes with a small byte-level BPE tokenizer and a ChatML template with tools, and it has been
    warmed up on the demo's task (look up the code of a door, then say it) until it knows the format
    and is mostly wrong. Takes about half a minute; does nothing when the directory holds this very
    model already.

        turnfold tiny-model --out /tmp/tiny
        turnfold inference --model /tmp/tiny
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from turnfold.embedded.tiny.build import build
    from turnfold.embedded.tiny.recipe import Recipe

    columns = (TextColumn("warming up the tiny model"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        bar = progress.add_task("warm-up", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        was_built = build(out, Recipe(seed=seed), show)
    typer.echo(f"{out}: built" if was_built else f"{out}: already there, nothing to do")
