"""`python -m turnfold.gateway`."""

from turnfold.gateway.cli import main

main()
