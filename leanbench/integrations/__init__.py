"""LeanAttention inside other people's servers and libraries. Each module imports one of them."""
