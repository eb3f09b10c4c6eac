"""Answers from published rows: what was measured for a shape, and which kernel to choose."""
