"""Comparisons: two runs or two kernels cell by cell, and the runs of a report side by side.

Both pair rows of the same problem (`match`) and put ratios of their latencies (`ratios`) into
words.
"""
