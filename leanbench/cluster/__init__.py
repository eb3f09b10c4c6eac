"""Clusters: agents on their GPUs, dispatch of jobs, and recovery from lost agents."""
