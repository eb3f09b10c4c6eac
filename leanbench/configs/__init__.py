"""Tuned launch settings: the files, the look-up, the formula that carries timings to other
problems.
"""
