import pytest

from jaxgen.buckets import cache_slots


@pytest.mark.parametrize(("slots", "rounded"), [(160, 160), (1024, 1024), (1025, 1152), (1568, 1664), (3200, 3200)])
def test_a_cache_of_more_than_1024_slots_has_a_multiple_of_128(slots, rounded):
    assert cache_slots(slots) == rounded
