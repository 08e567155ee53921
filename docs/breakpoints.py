"""MkDocs hook: show the list of chapters in windows of at least 1,100 pixels; the theme shows it from 1,220 on."""

from pathlib import Path

# The theme's media queries, in em of 16 pixels; the first is just below the second.
_WIDTHS = {"76.234375em": "68.734375em", "76.25em": "68.75em"}


def on_post_build(config) -> None:
    """Replace the width in the theme's own files; there is no setting for it."""
    assets = Path(config.site_dir, "assets")
    for file in (*assets.glob("stylesheets/*.css"), *assets.glob("javascripts/bundle.*.js")):
        text = file.read_text("utf-8")
        for theirs, ours in _WIDTHS.items():
            text = text.replace(theirs, ours)
        file.write_text(text, "utf-8")
