import itertools

from jaxgen.buckets import capacity_for


def test_a_cache_of_more_than_1024_slots_has_a_multiple_of_128():
    for before, new_tokens in itertools.product((32, 64, 128, 384), (100, 500, 1000, 1100, 3000)):
        capacity = capacity_for(new_tokens, False, before)
        assert capacity >= new_tokens
        assert (before + capacity) % 128 == 0 or before + capacity <= 1024
