"""`python -m turnfold.embedded.tiny --out DIR`: the builder alone."""

import sys

import typer

from turnfold.embedded.tiny.cli import tiny_model
from turnfold.schemas.errors import UserError

if __name__ == "__main__":
    try:
        typer.run(tiny_model)
    except UserError as error:
        sys.exit(f"turnfold: {error}")
