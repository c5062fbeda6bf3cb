"""`python -m kvhold`: the command line."""

from kvhold.cli import main

main()
