"""Checks of this machine, each with one finding. See leanbench.doctor.checks."""
