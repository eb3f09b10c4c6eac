"""The performance model: what a kernel's schedule would take on a GPU that is not here."""

#: Said with every prediction; tests/model/test_measured.py holds the figures against the model.
KNOWN_ERROR = (
    "The model was fitted to 39 medians on an H200: over these its error is 1.3% in the median and 10.5% at most; "
    "elsewhere it is unchecked."
)
