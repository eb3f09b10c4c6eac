import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.core.errors import UserError
from leanbench.core.ragged import ragged_contexts


@given(batch=st.integers(2, 200), longest=st.integers(1000, 2**20), ratio=st.floats(0.05, 0.99))
def test_one_sequence_is_longest_and_the_mean_is_met(batch, longest, ratio):
    if ratio * batch <= 1:
        with pytest.raises(UserError, match="cannot be"):
            ragged_contexts(batch, longest, ratio)
        return
    contexts = ragged_contexts(batch, longest, ratio)
    assert len(contexts) == batch
    assert max(contexts) == longest
    assert min(contexts) >= 1
    # Rounding moves each length by half a token at most; a length below 1 token is lifted to 1.
    assert sum(contexts) / batch == pytest.approx(ratio * longest, abs=1)


def test_the_draw_is_the_same_in_every_process_and_version():
    assert ragged_contexts(4, 4096, 0.5) == (805, 509, 4096, 2782)
    assert ragged_contexts(4, 4096, 0.5) == ragged_contexts(4, 4096, 0.5)
    assert ragged_contexts(8, 4096, 0.5) != ragged_contexts(8, 4095, 0.5)


def test_lengths_are_spread():
    contexts = ragged_contexts(64, 65536, 0.25)
    assert max(contexts) > 20 * min(contexts)


def test_an_impossible_mean_says_what_is_possible():
    with pytest.raises(UserError, match=r"choose ragged above 0\.5 or a batch above 4"):
        ragged_contexts(2, 4096, 0.25)
