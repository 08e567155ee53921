"""URLs: checkpoints are copied to the cache, and the commands read and write files, all with fsspec."""

import builtins
import json
import sys
from pathlib import Path

import fsspec
import pytest

from convert.errors import CheckpointError
from convert.hf import load_hf
from convert.hub import local_directory
from jaxgen import demo, remote
from jaxgen.cli.main import main
from jaxgen.errors import ConfigError, InputError

MEMORY = "memory://bucket"
FILES = sorted(path.name for path in demo.PATH.iterdir() if path.suffix in (".json", ".safetensors"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxgen"


@pytest.fixture
def memory():
    """The file system of memory://, empty."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture
def model(memory):
    """The URL of the bundled model, with files that are not part of a checkpoint."""
    for name in FILES:
        memory.pipe(f"/bucket/model/{name}", (demo.PATH / name).read_bytes())
    memory.pipe({"/bucket/model/model.bin": b"pickle", "/bucket/model/folder/config.json": b"{}"})
    return f"{MEMORY}/model"


@pytest.mark.parametrize(
    ("path", "expected"),
    [("gs://a/b", True), ("memory://a", True), ("a/b", False), ("/a://b", False), ("C:\\a", False), ("s3://", False)],
)
def test_urls_are_recognized(path, expected):
    assert remote.is_url(path) is expected


def test_a_checkpoint_is_copied_once(model, memory, cache, monkeypatch):
    copy = local_directory(model)
    assert sorted(path.name for path in copy.iterdir()) == FILES
    assert all((copy / name).read_bytes() == (demo.PATH / name).read_bytes() for name in FILES)
    assert copy.parent == cache / "models"
    assert load_hf(copy)[1].model.vocab_size == load_hf(demo.PATH)[1].model.vocab_size
    monkeypatch.setattr(type(memory), "get_file", None)
    assert local_directory(model) == copy
    assert list((cache / "models").iterdir()) == [copy]


def test_patterns_select_files_in_folders(memory):
    memory.pipe({f"/bucket/{name}": b"1" for name in ("a.json", "b/a.json", "b/c.txt", "c/b/a.json", "c/a.json")})
    copy = remote.local_copy(f"{MEMORY}/", ["*.json"], ["b/*"], lambda _: None)
    names = sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())
    assert names == ["a.json", "b/a.json", "b/c.txt"]


def test_changed_checkpoint_is_copied_again(model, memory):
    before = local_directory(model)
    memory.pipe("/bucket/model/generation_config.json", b'{"max_new_tokens": 7}')
    after = local_directory(model)
    assert after != before
    assert (after / "generation_config.json").read_bytes() == b'{"max_new_tokens": 7}'


def test_weights_are_not_copied_if_the_config_is_refused(model, memory, cache, monkeypatch):
    memory.pipe("/bucket/model/config.json", b'{"model_type": "other"}')
    copied = []
    own = type(memory).get_file
    monkeypatch.setattr(
        type(memory), "get_file", lambda self, path, *rest: copied.append(path) or own(self, path, *rest)
    )
    with pytest.raises(ConfigError, match="other"):
        local_directory(model)
    assert copied
    assert not [path for path in copied if path.endswith(".safetensors")]
    assert list((cache / "models").iterdir()) == []


def test_truncated_copy_is_not_kept(model, memory, cache, monkeypatch):
    def get_file(self, path, target):
        Path(target).write_bytes(self.cat_file(path)[:100])

    monkeypatch.setattr(type(memory), "get_file", get_file)
    with pytest.raises(
        InputError, match=r"memory://bucket/model: config.json arrived with 100 of \d+ bytes: try again"
    ):
        local_directory(model)
    assert list((cache / "models").iterdir()) == []


def test_a_directory_without_a_checkpoint(memory):
    memory.pipe("/bucket/notes.txt", b"")
    with pytest.raises(InputError, match="memory://bucket has none of the files of a checkpoint"):
        local_directory(MEMORY)
    with pytest.raises(InputError, match="memory://bucket/nowhere"):
        local_directory(f"{MEMORY}/nowhere")


def test_load_hf_names_the_function_that_copies(model):
    with pytest.raises(CheckpointError, match="local_directory copies a URL to"):
        load_hf(model)


def test_missing_package_is_named(monkeypatch):
    with pytest.raises(InputError, match=r"^gs://bucket/file: .*gcsfs"):
        remote.read("gs://bucket/file")
    with pytest.raises(InputError, match=r"^other://bucket/file: ValueError: Protocol not known: other"):
        remote.read("other://bucket/file")
    own = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "fsspec":
            raise ModuleNotFoundError("No module named 'fsspec'", name="fsspec")
        return own(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r'fsspec is missing: to use URLs, run pip install -e "\.\[remote\]"'):
        remote.read("gs://bucket/file")


def test_fsspec_is_not_imported_for_local_files(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert local_directory(demo.PATH) == demo.PATH


@pytest.mark.parametrize("words", [["--html", "gs://a/b", "A"], ["train", "--out", "gs://a/b"]])
def test_urls_are_refused_for_other_options(words, capsys):
    assert main(words) == 2
    assert "'gs://a/b' is a URL, which is not offered here: copy it to a file first" in capsys.readouterr().err


def test_shards_need_a_shared_file(capsys):
    assert main(["--input", "x", "--output", "gs://a/b", "--shard", "0/2"]) == 2
    assert "cannot be a URL: name a shared file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_prompts_and_answers(kind, memory, tmp_path, cache, capsys):
    root = MEMORY if kind == "memory" else f"file://{tmp_path}/deep"
    with fsspec.open(f"{root}/prompts", "w", auto_mkdir=True) as stream:
        stream.write("A\nB\n")
    options = ["--max-new-tokens", "3", "--slots", "2"]
    assert main(["--input", f"{root}/prompts", "--output", f"{root}/new/answers", *options]) == 0
    (tmp_path / "prompts").write_text("A\nB\n")
    assert main(["--input", str(tmp_path / "prompts"), "--output", str(tmp_path / "answers"), *options]) == 0
    with fsspec.open(f"{root}/new/answers", "rb") as stream:
        assert stream.read() == (tmp_path / "answers").read_bytes()
    assert [path for path in (cache / "outputs").rglob("*") if path.is_file()] == []
    capsys.readouterr()
    assert main(["--input", f"{root}/prompts", "--output", f"{root}/new/answers", *options]) == 2
    assert f"{root}/new/answers exists: choose another name, or remove it" in capsys.readouterr().err
    assert main(["--input", f"{root}/missing", "--output", f"{root}/other", *options]) == 2
    assert f"{root}/missing does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_stay_if_they_cannot_be_copied(memory, tmp_path, cache, monkeypatch, capsys):
    def put_file(self, *_):
        raise PermissionError("no")

    monkeypatch.setattr(type(memory), "put_file", put_file)
    (tmp_path / "prompts").write_text("A\nB\n")
    command = ["--input", str(tmp_path / "prompts"), "--output", f"{MEMORY}/answers", "--max-new-tokens", "3"]
    assert main(command) == 2
    (file,) = (path for path in (cache / "outputs").rglob("*") if path.is_file())
    assert f"memory://bucket/answers: PermissionError: no: the answers are in {file}" in capsys.readouterr().err
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == 2
