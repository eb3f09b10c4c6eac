"""One file a command: parse, call the core, print."""
