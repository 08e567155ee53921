"""Round sizes up to buckets, so that a few programs serve all requests. This module does not import jax."""


def power_of_two(size: int, least: int) -> int:
    """Round a size up to a power of two that is at least `least`."""
    return max(least, 1 << (size - 1).bit_length())


def prompt_bucket(width: int) -> int:
    """Round a prompt's width up to 32, 64, 128, 256, 384, 512, 768, 1024, 1536, ..."""
    power = power_of_two(width, 32)
    return power * 3 // 4 if power >= 512 and width <= power * 3 // 4 else power


def capacity_for(new_tokens: int, recorded: bool, before: int = 0) -> int:
    """Round up the number of new tokens, in finer steps if values are recorded for each token.

    Above 1,024, the sum of the result and of the `before` slots in the same cache is a multiple of 128. A GPU splits
    the product with the values into equal parts, and would otherwise have to pad a copy of the values in every step.
    """
    if recorded:
        return -(-new_tokens // 16) * 16
    capacity = prompt_bucket(max(new_tokens, 128))
    return capacity + -(before + capacity) % 128 if before + capacity > 1024 else capacity
