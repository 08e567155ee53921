import codecs
import json
import os

import pytest


@pytest.mark.slow
def test_schema_is_read_from_a_file(run, checkpoint, tmp_path):
    file = tmp_path / "schema.json"
    file.write_bytes(codecs.BOM_UTF8 + json.dumps({"enum": ["é", True]}).encode())
    status, text, errors = run("--model", checkpoint, "A", "--max-new-tokens", 9, "--json-schema", file)
    assert (status, errors) == (0, "")
    assert json.loads(text) in ("é", True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x81", "not UTF-8: invalid start byte at byte 1"),
        ('{"type": "null"}'.encode("utf-16"), "not UTF-8"),
        (b"", "the schema is not valid JSON: Expecting value"),
        (b"[" * 20_000, "the schema is not valid JSON: nested too deeply"),
        (b" " * 9_000_000, "larger than 4,000,000 bytes, the maximum"),
        (b'{"type": "null", "type": "null"}', "duplicate keys: type"),
        (b'{"type": "string", "minLength": 1000000000}', "the schema is too large"),
        (b'{"$ref": "#"}', "the schema matches no text"),
        (b'{"type": "string", "pattern": "a\\\\b"}', "has a word boundary"),
        (b'{"type": "array", "uniqueItems": true}', "the schema has uniqueItems"),
    ],
)
def test_bad_schemas_are_refused(refused, checkpoint, tmp_path, content, words, monkeypatch):
    monkeypatch.delattr("jaxgen.cli.answer.load_hf")  # the schema is read before the weights
    file = tmp_path / "schema.json"
    file.write_bytes(content)
    line = refused("--model", checkpoint, "A", "--json-schema", file)
    assert words in line
    assert str(file) in line


@pytest.mark.slow
def test_unsupported_keyword_is_left_out_with_a_warning(run, refused, checkpoint, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(
        '{"type": "array", "uniqueItems": true, "minItems": 1, "items": {"pattern": "^a$", "type": "string"}}'
    )
    asked = ("--model", checkpoint, "A", "--max-new-tokens", 9, "--json-schema", file)
    status, text, errors = run(*asked, "--json-schema-unsupported", "warn")
    assert (status, {*json.loads(text)}) == (0, {"a"})
    assert "not enforced: the schema has uniqueItems" in errors
    assert "use that too" in refused("--model", checkpoint, "A", "--json-schema-unsupported", "warn")


def test_unreadable_files_are_refused(refused, checkpoint, tmp_path, monkeypatch):
    arguments = ("--model", checkpoint, "A", "--json-schema")
    assert "is not a regular file but a directory" in refused(*arguments, tmp_path)
    assert "nowhere: No such file or directory" in refused(*arguments, tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file but a pipe" in refused(*arguments, tmp_path / "pipe")
    line = refused(*arguments, "x" * 5000)
    assert "File name too long" in line
    assert len(line) < 300
    file = tmp_path / "schema.json"
    file.write_text("{}")
    file.chmod(0)
    if os.access(file, os.R_OK):  # root can read every file
        pytest.skip("every file can be read")
    assert f"{file}: Permission denied" in refused(*arguments, file)


@pytest.mark.parametrize("pattern", ["(?=a)b", "[", r"(a)\1", "(a|b)*a(a|b){25}", "a{9999999}"])
def test_bad_patterns_are_refused(refused, checkpoint, pattern, monkeypatch):
    monkeypatch.delattr("jaxgen.cli.answer.load_hf")
    assert "the pattern" in refused("--model", checkpoint, "A", "--regex", pattern)
