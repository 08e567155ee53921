"""Downloads from a local hub server that implements only what huggingface_hub needs for a download."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from convert import CheckpointError, load_hf
from convert.hub import local_directory
from jaxgen import ConfigError, InputError, Tokenizer
from tests.support.checkpoints import GENERATION, QWEN2, weights, write
from tests.support.gguf_files import content, stored
from tests.support.models import slow
from tests.support.tokenizers import CHATML, byte_level_backend, save

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = re.compile(r"/api/models/(?P<model>.+?)/(?P<what>revision|tree)/(?P<revision>[^/]+)")
FILE = re.compile(r"/(?P<model>.+?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")

# This program reads lines of JSON, each with hub ids, an environment, and the files for stdout and stderr. For each
# line it forks a process, because huggingface_hub reads the environment only once. The process calls local_directory
# and writes the result or the error as JSON; the program then prints the process's exit status. A fork starts fast,
# because the program has already imported jax. Retries do not sleep.
CALLS = """
import faulthandler, json, os, signal, sys, time

time.sleep = lambda seconds: None
from jaxgen.errors import JaxgenError
from convert.hub import local_directory

for line in sys.stdin:
    models, environment, out, err = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    assert "huggingface_hub" not in sys.modules
    signal.alarm(120)
    os.environ |= environment
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    faulthandler.enable()
    for model in models:
        try:
            print(json.dumps(["path", str(local_directory(model))]))
        except JaxgenError as error:
            print(json.dumps([type(error).__name__, str(error)]))
    sys.exit()
"""


class Hub(ThreadingHTTPServer):
    """A hub that serves `models`, each a dict of files. `refused` maps ids to an HTTP status and an error code.

    If the code is None, all requests for that model fail; otherwise, only those for files. The first `cuts` downloads
    of weights are cut short. Responses contain `commit` and `etag` (None: the correct etag). `asked` lists downloads.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: dict[str, dict[str, bytes]] = {}
        self.refused: dict[str, tuple[int, str | None]] = {}
        self.cuts = 0
        self.commit, self.etag = COMMIT, None
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        match = API.fullmatch(path) or FILE.fullmatch(path)
        assert match is not None, path
        model, revision = match["model"], match["revision"]
        status, code = self.server.refused.get(model, (None, None))
        if status is not None and (code is None or "file" in match.groupdict()):
            return self.respond(status, {"X-Error-Code": code} if code else {})
        files = self.server.models.get(model)
        if files is None:
            return self.respond(404, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", "v1", COMMIT):
            return self.respond(404, {"X-Error-Code": "RevisionNotFound"})
        if match.re is FILE:
            return self.send_file(match["file"], files[match["file"]])
        if match["what"] == "revision":
            return self.send_json(
                {"id": model, "sha": self.server.commit, "siblings": [{"rfilename": name} for name in files]}
            )
        return self.send_json(
            [{"type": "file", "path": n, "size": len(c), "oid": digest(c)[:40]} for n, c in files.items()]
        )

    do_HEAD = do_GET

    def send_json(self, content):
        self.respond(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def send_file(self, name: str, content: bytes):
        etag = self.server.etag or f'"{digest(content)}"'
        headers = {"ETag": etag, "X-Repo-Commit": self.server.commit}
        status, size = 200, len(content)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked:
            status, start = 206, int(asked[1])
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
            content = content[start:]
        if self.command == "GET":
            self.server.asked.append(name)
            if name.endswith(".safetensors") and self.server.cuts > 0:
                self.server.cuts -= 1
                self.close_connection = True
                return self.respond(status, headers, content, sent=len(content) // 2)
        return self.respond(status, headers, content)

    def respond(self, status: int, headers: dict[str, str], content: bytes = b"", sent: int | None = None):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:sent])

    def log_message(self, format, *arguments):
        pass


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    config = QWEN2 | {"vocab_size": 263}
    folder = write(tmp_path_factory.mktemp("hub") / "model", config, weights(config), GENERATION, shards=2)
    (folder / "chat_template.jinja").write_text(CHATML)
    return save(folder, byte_level_backend(), tokenizer_config={"eos_token": "<|im_end|>"})


@pytest.fixture(scope="module")
def hub(checkpoint):
    files = files_of(checkpoint)
    small = {name: content for name, content in files.items() if not name.endswith(".safetensors")}
    hub = Hub()
    hub.models = {
        "owner/model": {**files, "README.md": b"#", "pytorch_model.bin": b"x", "onnx/model.safetensors": b"x"},
        "owner/pickled": {**small, "pytorch_model.bin": b"x"},
        "owner/other": {**files, "config.json": b'{"model_type": "gpt2"}', "only-here.safetensors": b"x"},
        "owner/bare": {"model.safetensors": b"x", "config.gguf": b"x"},
        "owner/gated": files,
        "owner/gated-401": files,
    }
    hub.refused = {
        "owner/gated": (403, "GatedRepo"),
        "owner/gated-401": (401, "GatedRepo"),
        "owner/unauthorised": (401, None),
        "owner/busy": (503, None),
    }
    yield hub
    hub.stop()


@pytest.fixture(scope="module")
def caller():
    """Yield a process that runs the program CALLS."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"JAX_PLATFORMS": "cpu", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", CALLS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()
    assert process.returncode == 0


@pytest.fixture
def fetch(hub, caller, tmp_path):
    """Return a function that calls `local_directory` in a separate process, with the test's own cache."""

    def fetch(*models, **environment) -> list[tuple[str, str]]:
        settings = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        out, err = tmp_path / "stdout", tmp_path / "stderr"
        print(json.dumps([models, settings | environment, str(out), str(err)]), file=caller.stdin, flush=True)
        assert caller.stdout.readline() == "0\n", err.read_text()
        assert "Traceback" not in err.read_text()
        return [tuple(json.loads(line)) for line in out.read_text().splitlines()]

    return fetch


def closed_port() -> str:
    hub = Hub()
    hub.stop()
    return hub.address


@pytest.mark.slow
def test_a_model_is_fetched_once_and_loads(fetch, hub, checkpoint):
    hub.asked.clear()
    (kind, path), *others = fetch("owner/model", "owner/model@v1", f"owner/model@{COMMIT}")
    assert kind == "path", path
    assert others == [(kind, path)] * 2
    expected = files_of(checkpoint)
    assert files_of(Path(path)) == expected
    assert sorted(hub.asked) == sorted(expected)

    params, cfg = load_hf(path)
    wanted, wanted_cfg = load_hf(checkpoint)
    assert cfg == wanted_cfg
    np.testing.assert_array_equal(params["model"]["norm"]["weight"], wanted["model"]["norm"]["weight"])
    tokenizer = Tokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.chat_template == CHATML

    assert fetch("owner/model", HF_HUB_OFFLINE="1", HF_ENDPOINT=closed_port()) == [(kind, path)]
    assert fetch("owner/model", HF_ENDPOINT=closed_port()) == [(kind, path)]


@pytest.mark.slow
def test_a_gguf_file_is_fetched(fetch, hub):
    whole = content({"general.architecture": "bert"}, {"one": stored(np.ones((3, 32)), "Q8_0")})
    names = [f"sub/x-0000{number}-of-00002.gguf" for number in (1, 2)]
    files = {name: whole + name.encode() for name in ("model.Q8_0.gguf", "other.gguf", *names)}
    hub.models["owner/files"] = files
    hub.asked.clear()
    asked = ["owner/files/model.Q8_0.gguf", "owner/files/model.Q8_0.gguf@v1", f"owner/files/{names[0]}"]
    (_, path), again, (_, first), (kind, text), (_, part) = fetch(
        *asked, "owner/files/absent.gguf", f"owner/files/{names[1]}"
    )
    assert again == ("path", path)
    assert Path(path).read_bytes() == files["model.Q8_0.gguf"]
    assert first.endswith(names[0])
    assert sorted(hub.asked) == ["model.Q8_0.gguf", *names]
    assert kind == "InputError"
    assert "owner/files has no file absent.gguf" in text
    assert "pass the first one" in part
    assert fetch(asked[0], HF_HUB_OFFLINE="1", HF_ENDPOINT=closed_port()) == [("path", path)]


@pytest.mark.slow
def test_unavailable_models_are_one_line_errors(fetch, hub):
    expected = {
        "owner/absent": ("InputError", ["neither a directory nor a model on", hub.address, "HF_TOKEN"]),
        "absent": ("InputError", ["neither a directory nor a model on"]),
        "owner/model@v2": ("InputError", ["owner/model has no revision 'v2'", "branch"]),
        "owner/gated": ("InputError", ["gated", f"{hub.address}/owner/gated", "HF_TOKEN"]),
        "owner/gated-401": ("InputError", ["gated", "HF_TOKEN"]),
        "owner/unauthorised": ("InputError", ["401", "HF_TOKEN"]),
        "owner/busy": ("InputError", ["503", "later"]),
        "owner/pickled": ("InputError", ["has no *.safetensors"]),
        "owner/bare": ("InputError", ["has no config.json"]),
        "owner/other": ("ConfigError", ["owner/other", "'gpt2' is not implemented"]),
        "owner/a--b": ("InputError", ["neither a directory nor a hub id"]),
    }
    hub.asked.clear()
    for (model, (kind, parts)), (raised, text) in zip(expected.items(), fetch(*expected), strict=True):
        assert raised == kind, text
        assert "\n" not in text
        assert model.partition("@")[0] in text
        for part in parts:
            assert part in text
    assert not [name for name in hub.asked if name.endswith(".safetensors")]


@pytest.mark.slow
def test_missing_connection_is_an_error(fetch):
    ((kind, text),) = fetch("owner/model", HF_ENDPOINT=closed_port())
    assert kind == "InputError"
    assert "owner/model is not a directory here and cannot be downloaded" in text
    assert "the cache lacks all or part of it" in text
    ((kind, text),) = fetch("owner/model", HF_HUB_OFFLINE="1")
    assert kind == "InputError"
    assert "lacks all or part of owner/model" in text
    assert "HF_HUB_OFFLINE is set" in text


@pytest.mark.slow
def test_interrupted_download_is_an_error(fetch, hub, checkpoint, tmp_path):
    """Old releases of huggingface_hub fail, and new ones resume the download. Neither uses a partial file."""
    hub.cuts = 10**6
    ((kind, text),) = fetch("owner/model")
    assert kind == "InputError"
    assert "cannot be downloaded" in text
    assert "\n" not in text
    assert not list(tmp_path.glob("home/hub/*/snapshots/*/*.safetensors"))
    ((kind, text),) = fetch("owner/model", HF_HUB_OFFLINE="1")
    assert kind == "InputError"
    assert "interrupted" in text or "lacks all or part of owner/model" in text

    hub.cuts = 1
    *given_up, (kind, path) = fetch("owner/model", "owner/model")
    assert all(kind == "path" or "cannot be downloaded" in text for kind, text in given_up)
    assert (kind, hub.cuts) == ("path", 0)
    assert files_of(Path(path)) == files_of(checkpoint)


@pytest.mark.parametrize("sent", ["../../../../evil", *slow("/tmp/evil", "..", ".", "x" * 5000, "a/b", "\\\\host\\x")])
@pytest.mark.parametrize("field", ["commit", "etag"])
def test_server_cannot_name_files_outside_the_cache(fetch, hub, tmp_path, monkeypatch, field, sent):
    monkeypatch.setattr(hub, field, sent)
    for kind, text in fetch("owner/model", f"owner/model@{COMMIT}"):
        assert kind == "InputError"
        assert len(text) < 600
        assert "\n" not in text
    outside = {path.name for path in tmp_path.iterdir()} - {"home", "stdout", "stderr"}
    assert not outside
    assert not [path for path in tmp_path.glob("home/**/*") if "evil" in path.name]


def test_a_damaged_download_says_how_to_fetch_it_again(fetch):
    ((_, path),) = fetch("owner/model")
    shard = sorted(Path(path).glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content[:-1])
    advice = rf"was downloaded: delete {Path(path).parents[1]}, and the next use downloads it again"
    with pytest.raises(CheckpointError, match=advice):
        load_hf(path)
    (Path(path) / "tokenizer.json").unlink()
    (Path(path) / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match=advice):
        Tokenizer.from_pretrained(path)


def test_a_directory_is_returned_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert local_directory("owner/model") == Path("owner/model")
    assert local_directory(tmp_path) == tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "",
        "./absent",
        "/absent",
        "~/absent",
        "../absent",
        "a/b/c",
        "a/",
        "a b",
        "a@",
        "ä/b",
        "../../absent",
        "a\0b",
        "a/b\n",
        "/" * 9999,
    ],
)
def test_text_that_is_neither_a_directory_nor_an_id_is_refused(text):
    with pytest.raises(InputError, match="is neither a directory nor a hub id, such as"):
        local_directory(text)


@pytest.mark.parametrize("revision", ["../../x", "/x", "a\0b", "a\n", "x" * 300, "a/../b", "é"])
def test_bad_revisions_are_refused(revision):
    with pytest.raises(InputError, match=r"is not a revision of owner/model|is neither a directory"):
        local_directory(f"owner/model@{revision}")


def test_very_long_id_is_refused():
    with pytest.raises(InputError) as caught:
        local_directory("a" * 5000)
    assert len(str(caught.value)) < 600


def test_file_in_place_of_a_directory_is_refused(checkpoint):
    with pytest.raises(InputError, match=r"config\.json is a file: pass the directory"):
        local_directory(checkpoint / "config.json")


def test_missing_huggingface_hub_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r'owner/model is not a directory: .*pip install -e "\.\[hub\]"'):
        local_directory("owner/model")
