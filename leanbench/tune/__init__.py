"""Search for the best launch settings of a kernel on a GPU, and their check on other problems."""
