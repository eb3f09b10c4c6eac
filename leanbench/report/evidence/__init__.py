"""Evidence behind the documents: which run or log each published figure is of, and whether that is
of the kernels and settings as they are.
"""
