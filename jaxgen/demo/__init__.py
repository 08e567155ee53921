"""The bundled model: a small checkpoint in Hugging Face's layout."""

from pathlib import Path

PATH = Path(__file__).parent
