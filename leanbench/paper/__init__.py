"""The LeanAttention paper (arXiv 2405.10480): its claims, and what models and runs say of them."""
