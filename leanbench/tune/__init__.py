"""The search for the best launch settings of a kernel on a GPU, and its check by other problems."""
