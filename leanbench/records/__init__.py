"""Runs on disk: rows, samples, run directories, environments."""
