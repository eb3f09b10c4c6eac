"""What is on disk: rows, samples, run directories, the environment of a run."""
