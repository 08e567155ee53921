"""The expression for text that ends at a tag."""

from __future__ import annotations

from jaxgen.grammar.expression import Characters, Expression, Repeat, choice, complement, sequence


def free_text(*ends: str) -> Expression:
    """Return the expression for any text that contains none of `ends`; it may end with a part of one of them.

    All `ends` begin with the same character, which occurs only once in each.
    """
    first, begun = ends[0][0], dict.fromkeys(end[:length] for end in ends for length in range(1, len(end)))
    apart = [
        sequence(text, any_but(first, *(end[len(text)] for end in ends if end.startswith(text)))) for text in begun
    ]
    beginnings = Repeat(choice(begun), 0, None)
    return sequence(Repeat(choice([any_but(first), sequence(beginnings, choice(apart))]), 0, None), beginnings)


def any_but(*letters: str) -> Expression:
    """Return the expression for any character except some."""
    return Characters(complement(tuple((ord(letter), ord(letter)) for letter in sorted(set(letters)))))
