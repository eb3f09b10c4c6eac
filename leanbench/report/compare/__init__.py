"""Comparisons: two runs or two kernels cell by cell, and ratios over problems."""
