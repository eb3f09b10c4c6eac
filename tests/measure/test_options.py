import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.measure.options import MeasureOptions
from leanbench.measure.timing import Effort


@given(
    st.builds(
        MeasureOptions,
        effort=st.builds(Effort, relative_ci=st.floats(0, 0.5), min_samples=st.integers(6, 9)),
        cache=st.sampled_from(["cold", "warm"]),
        sustained=st.booleans(),
        energy=st.booleans(),
        window_s=st.floats(2, 100),
        occupancy=st.booleans(),
        counters=st.booleans(),
        prefill=st.integers(0, 2),
    )
)
def test_options_go_through_json(options):
    written = json.loads(json.dumps(options.to_dict()))
    assert MeasureOptions.from_dict(written) == options
    assert ("prefill" in written) == (options.prefill > 0)


def test_an_option_that_is_not_known_is_not_passed_over():
    with pytest.raises(TypeError, match="heat"):
        MeasureOptions.from_dict({**MeasureOptions().to_dict(), "heat": True})
