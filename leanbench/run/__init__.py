"""From a sweep file and flags to rows on disk: axes, cells, worker process, run directory."""
