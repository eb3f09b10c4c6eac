"""Whole models: a decode step of a language model from its config, with random weights and a KV
cache of any context, measured and predicted with each kernel in the place of its attention.
"""

#: The kernel whose step is the bound of all others; it is timed in every problem's rounds. It
#: computes no attention, so it is none of the kernels that are compared with each other.
BOUND = "no_attention"
