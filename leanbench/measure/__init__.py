"""Measuring on a real GPU: correctness first, then time, compared with the read floor."""
