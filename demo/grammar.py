"""Small rules of English for the sentences of the bundled model."""


def a(noun: str) -> str:
    """Return a noun after its indefinite article, or as it is if it has a definite one."""
    if noun.startswith("the "):
        return noun
    an = noun[0].lower() in "aeiou" and not noun.startswith(("uni", "uku", "use"))
    return f"{'an' if an else 'a'} {noun}"


def capital(text: str) -> str:
    """Return a text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
