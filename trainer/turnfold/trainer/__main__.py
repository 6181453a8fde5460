"""`python -m turnfold.trainer`: the same as `turnfold train`."""

import sys

import typer

from turnfold.schemas.errors import UserError
from turnfold.trainer.cli import train

if __name__ == "__main__":
    try:
        typer.run(train)
    except UserError as error:
        sys.exit(f"turnfold train: {error}")
