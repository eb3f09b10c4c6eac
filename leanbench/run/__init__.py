"""From a sweep file and flags to rows on disk: axes, cells, the run directory, the worker process
and the loop.
"""
