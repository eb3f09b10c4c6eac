"""What every room stands on: problems, schedules, inputs, errors, files. Imports no other room."""

__version__ = "0.1.0"
