"""Tuned launch settings: files, lookup, and the formula that applies timings to other problems."""
