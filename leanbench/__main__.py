"""`python -m leanbench`."""

from leanbench.cli.main import main

main()
