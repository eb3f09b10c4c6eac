"""Whole models: the decode step of a language model, measured and predicted with each kernel.

Models are made from a config, with random weights and a KV cache of any context.
"""

#: The kernel that computes no attention. Its step is the bound of all others and is timed in the
#: rounds of every problem; it is not compared with other kernels.
BOUND = "no_attention"
