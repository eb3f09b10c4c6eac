"""The performance model: what a kernel's schedule would take on a GPU that is not here."""

#: Said with every prediction; tests/model/test_measured.py holds the figures against the model.
KNOWN_ERROR = "Model error on the 39 H200 medians it was fitted to: 1.3% median, 10.5% worst; unchecked elsewhere."
