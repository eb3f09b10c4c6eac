"""Finds the best launch settings of a kernel for a GPU, keeps them, and picks one for a problem."""
