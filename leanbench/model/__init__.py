"""The performance model: what a kernel's schedule would take on a GPU that is not here."""
