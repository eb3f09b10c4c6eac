"""`python -m leanbench`."""

from leanbench.cli.main import main

# Processes that compile import this file again, under another name.
if __name__ == "__main__":
    main()
