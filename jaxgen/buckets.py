"""Round sizes up to buckets, so that a few programs serve all requests. This module does not import jax."""


def power_of_two(size: int, least: int) -> int:
    """Round a size up to a power of two that is at least `least`."""
    return max(least, 1 << (size - 1).bit_length())


def prompt_bucket(width: int) -> int:
    """Round a prompt's width up to a power of two or, above 256, to the midpoint between two powers of two."""
    power = power_of_two(width, 32)
    return power * 3 // 4 if power >= 512 and width <= power * 3 // 4 else power


def capacity_for(new_tokens: int, recorded: bool) -> int:
    """Round up the number of new tokens, in finer steps if the scores of each token are recorded."""
    return -(-new_tokens // 16) * 16 if recorded else prompt_bucket(max(new_tokens, 128))
