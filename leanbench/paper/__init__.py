"""The LeanAttention paper (arXiv 2405.10480): claims, predictions and measurements."""
