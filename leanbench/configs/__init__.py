"""Timed launch settings: signatures, files, look-up."""
