"""The small checkpoint that comes with the package, in Hugging Face's layout."""

from pathlib import Path

PATH = Path(__file__).parent
