"""What every room stands on: problems, schedules, inputs, errors, files. Imports no other room."""
