"""Rows of runs in other people's formats."""
