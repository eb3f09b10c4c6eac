"""Correctness: the fp64 reference, the grid of problems that is checked, random problems."""
