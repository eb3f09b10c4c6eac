"""LeanAttention in servers and libraries. Each module imports one of them."""
