"""Remove spaces before punctuation and contractions, as HF's tokenizers do."""


def clean_up(text: str) -> str:
    """Remove spaces using the same replacements as HF's `clean_up_tokenization`, in the same order."""
    for mark in (".", "?", "!", ","):
        text = text.replace(" " + mark, mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(" " + ending, ending)
    return text
