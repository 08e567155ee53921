"""Round sizes up to buckets, so that a few programs serve all requests. This module does not import jax."""


def power_of_two(size: int, least: int) -> int:
    """Return the larger of `least` and the size rounded up to a power of two."""
    return max(least, 1 << (size - 1).bit_length())


def prompt_bucket(width: int) -> int:
    """Round a prompt's width up to 32, 64, 128, 256, 384, 512, 768, 1024, 1536, ..."""
    power = power_of_two(width, 32)
    return power * 3 // 4 if power >= 512 and width <= power * 3 // 4 else power


def rows_bucket(prompts: int) -> int:
    """Round a number of prompts up to 1, 4, 8, 16, 32, ..."""
    return prompts if prompts == 1 else power_of_two(prompts, 4)


def capacity_for(new_tokens: int, recorded: bool) -> int:
    """Round up the number of new tokens, in finer steps if values are recorded for each token."""
    return -(-new_tokens // 16) * 16 if recorded else prompt_bucket(max(new_tokens, 128))


def cache_slots(slots: int) -> int:
    """Round up a number of cache slots to a multiple of 128 if it is above 1,024; return a symbolic size unchanged.

    With more than 1,024 slots, a GPU splits the product of attention weights and values into equal parts. Without the
    rounding, every step would copy the values in order to pad them.
    """
    return -(-slots // 128) * 128 if isinstance(slots, int) and slots > 1024 else slots
