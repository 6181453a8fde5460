"""`python -m turnfold.embedded.inference --model DIR`: the server alone."""

import sys

import typer

from turnfold.embedded.inference.cli import inference
from turnfold.schemas.errors import UserError

if __name__ == "__main__":
    try:
        typer.run(inference)
    except UserError as error:
        sys.exit(f"turnfold: {error}")
