import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.model.engine import Load, share


def test_bandwidth_is_shared_by_demand_and_weight():
    loads = [Load(1.1, 2, 60, sms=3), Load(0.9, 1, 40, sms=2)]
    share(loads, available=260, sm_limit=64)
    assert [load.rate for load in loads] == [30, 40]
    # What a CTA could get were it faster: its part of the SM's port.
    assert [load.reach for load in loads] == [32, 64]
    loads = [Load(1.1, 2, 60, sms=3), Load(0.9, 1, 60, sms=3)]
    share(loads, available=120, sm_limit=64)
    assert [load.rate for load in loads] == pytest.approx([11, 18])
    assert [load.reach for load in loads] == pytest.approx([11, 18])
    modest, greedy = Load(1, 1, 10, sms=1), Load(1, 1, 60, sms=2)
    share([greedy, modest], available=90, sm_limit=64)
    assert (modest.rate, greedy.rate) == pytest.approx((10, 40))
    assert modest.reach == pytest.approx(30)


loads = st.lists(
    st.builds(
        lambda weight, ctas, demand, sms: Load(weight, ctas, demand, sms),
        st.floats(0.8, 1.2),
        st.integers(1, 4),
        st.floats(5, 64),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=12,
)


@given(loads, st.floats(10, 5000))
def test_no_byte_is_lost_or_made(loads, available):
    share(loads, available, sm_limit=64)
    given = sum(load.rate * load.ctas * load.sms for load in loads)
    demand = sum(load.demand * load.sms for load in loads)
    assert given == pytest.approx(min(available, demand))
    for load in loads:
        assert 0 < load.rate * load.ctas <= load.demand * (1 + 1e-9)
        assert load.reach >= load.rate * (1 - 1e-9)
