"""Measuring on a real GPU: correctness first, then time beside the read floor."""
