"""Many machines: agents on a cluster's GPUs, jobs that are handed to them, and what happens where
one is lost.
"""
