"""The documentation site builds without warnings and contains everything that its pages refer to."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("mkdocs")
pytestmark = pytest.mark.slow  # CI runs this file in a stage of its own

ROOT = Path(__file__).resolve().parents[1]
REFERENCES = re.compile(r"<(\w+)[^>]*?\s(?:href|src)=\"?([^\">\s]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def references(page: Path) -> list[tuple[str, str]]:
    """Return the page's links and resources, as pairs of tag and target."""
    return REFERENCES.findall(page.read_text("utf-8"))


def pages(site: Path) -> list[Path]:
    return [page for page in site.rglob("*.html") if page.name != "404.html"]  # its links depend on the server


def test_references_are_not_broken(site):
    assert len(pages(site)) > 40
    for page in pages(site):
        for tag, target in references(page):
            path = unquote(target.partition("#")[0])
            if path and not re.match(r"\w+:", path):
                file = page.parent / path
                assert (file / "index.html" if file.is_dir() else file).is_file(), (page, tag, target)


def test_no_external_resources_are_loaded(site):
    for page in pages(site):
        outside = {tag for tag, target in references(page) if re.match(r"\w+:|//", target)}
        assert outside <= {"a"}, page


def test_pages_have_their_style_and_search(site):
    tags = {tag for tag, target in references(site / "index.html") if target.startswith("assets/")}
    assert {"link", "script"} <= tags
    assert (site / "search" / "search_index.json").is_file()


def test_chapters_are_listed_in_wide_windows(site):
    files = [*site.glob("assets/stylesheets/*.css"), *site.glob("assets/javascripts/bundle.*.js")]
    texts = [file.read_text("utf-8") for file in files]
    assert not re.search(r"76\.\d*em", "".join(texts))
    assert sum("68.75em" in text for text in texts) == len(texts) == 3


def test_docstrings_are_rendered(site):
    text = (site / "docs" / "reference" / "generation" / "index.html").read_text("utf-8")
    assert 'id="jaxgen.generate"' in text
    assert "&gt;&gt;&gt;" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
    assert "<blockquote>" not in text
    signature = re.sub("<[^>]*>", "", text[text.index('id="jaxgen.generate"') :]).partition("-&gt;")[0]
    assert signature.count("\n") > 15  # one line per parameter
