"""The server: connections that send no request end, the newest client is served, and TLS. The application is a toy."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from jaxgen.cli.serve import tls_files
from jaxgen.cli.serve_options import parse
from jaxgen.errors import InputError
from jaxgen.serving import server as module
from tests.support.service import answering

ROOT = Path(__file__).resolve().parents[2]
PARTIAL = b"GET / HTTP/1.1\r\nHost: a\r\n"
DECRYPTED = ["--ssl-keyfile", "@encrypted.key", "--ssl-keyfile-password", "secret"]
WHOLE = PARTIAL + b"\r\n"


async def app(scope, receive, send):
    """Answer with "ok", at /slow after 0.6 seconds; the body is not read."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    if scope["path"] == "/slow":
        await asyncio.sleep(0.6)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def connected(url):
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=10) as made:
        yield made


def is_closed(connection) -> bool:
    """Return whether the server closes a connection within 10 seconds, without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def trickle(connection, piece: bytes) -> None:
    """Send something again and again for 10 seconds."""
    for _ in range(200):
        connection.sendall(piece)
        time.sleep(0.05)


def answered(connection: socket.socket) -> bool:
    """Return True if the body "ok" arrives. The header and the body may arrive separately."""
    received = b""
    while not received.endswith(b"ok"):
        part = connection.recv(4096)
        if not part:
            return False
        received += part
    return True


@pytest.fixture(scope="module")
def url():
    with answering(app, header_seconds=0.3) as made:
        yield made


class TestHeaderTime:
    @pytest.mark.parametrize("sent", [b"", b"G", PARTIAL])
    def test_unfinished_header_closes_the_connection(self, url, sent):
        with connected(url) as connection:
            connection.sendall(sent)
            start = time.monotonic()
            assert is_closed(connection)
            assert time.monotonic() - start > 0.2

    def test_bytes_that_trickle_in_change_nothing(self, url):
        with connected(url) as connection:
            connection.sendall(PARTIAL)
            with pytest.raises(ConnectionError):
                trickle(connection, b"X: 1\r\n")

    def test_the_second_request_of_a_connection(self, url):
        with connected(url) as connection:
            connection.sendall(WHOLE)
            assert answered(connection)
            connection.sendall(PARTIAL)
            assert is_closed(connection)

    def test_body_after_the_answer_closes_the_connection(self, url):
        with connected(url) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
            assert answered(connection)
            with pytest.raises(ConnectionError):
                trickle(connection, b"a")

    def test_a_long_answer_is_not_cut_off(self, url):
        with connected(url) as connection:
            connection.sendall(PARTIAL.replace(b"/", b"/slow", 1))
            time.sleep(0.1)
            connection.sendall(b"\r\n")
            assert answered(connection)
            connection.sendall(WHOLE)  # the connection is still open
            assert answered(connection)

    def test_a_long_header(self, url):
        with connected(url) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(PARTIAL + b"X: " + b"a" * 10**6)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(4096).startswith(b"HTTP/1.1 400")


class TestMostConnections:
    def test_longest_waiting_connection_is_closed(self):
        with answering(app, limit=4) as url, contextlib.ExitStack() as stack:
            waiting = [stack.enter_context(connected(url)) for _ in range(4)]
            for connection in waiting:
                connection.sendall(PARTIAL)
            waiting[0].sendall(b"\r\n")  # its next request now waits for a shorter time than the others
            assert answered(waiting[0])
            assert httpx.get(url).text == "ok"
            assert is_closed(waiting[1])
            waiting[0].sendall(WHOLE)
            assert answered(waiting[0])
            waiting[3].sendall(b"\r\n")
            assert answered(waiting[3])

    def test_requests_in_progress_are_not_dropped(self):
        with answering(app, limit=2) as url, contextlib.ExitStack() as stack:
            busy = [stack.enter_context(connected(url)) for _ in range(2)]
            for connection in busy:
                connection.sendall(WHOLE.replace(b"/", b"/slow", 1))
            time.sleep(0.1)
            refused = httpx.get(url)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            for connection in busy:
                assert answered(connection)
            assert httpx.get(url).text == "ok"

    @pytest.mark.parametrize(("files", "most"), [(256, 128), (1024, 768), (4096, 1024), (-1, 1024)])
    def test_number_of_connections_follows_the_limit_on_files(self, monkeypatch, files, most):
        monkeypatch.setattr("resource.getrlimit", lambda kind: (files, files))
        assert module._most_connections() == most


# A process that may open 256 files.
FEW_FILES = """
import resource
import socket

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

from jaxgen.serving.server import server
from tests.serving.test_server import app

with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server(app).run(sockets=[listener])
"""


@pytest.mark.slow
def test_open_files_do_not_run_out():
    """New clients are answered while hundreds of others never finish their headers."""
    command = [sys.executable, "-c", FEW_FILES]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        for count in (242, 400):
            for _ in range(count):
                stack.enter_context(connected(url)).sendall(PARTIAL)
            for _ in range(10):
                assert httpx.get(url, timeout=5).text == "ok"
        process.terminate()
        assert process.communicate(timeout=30)[1] == ""  # asyncio logs an error if no file can be opened


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Make an authority, and with it the certificates of a server and a client, in the files of one folder."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    usage = ["-addext", "keyUsage=critical,keyCertSign,digitalSignature"]
    openssl(*new, *usage, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE"]
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    for owner in ("server", "client"):
        openssl(*new, *signed, *name, "-subj", f"/CN={owner}", "-keyout", f"{owner}.key", "-out", f"{owner}.pem")
    openssl("ec", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", "encrypted.key")
    (folder / "both.pem").write_text((folder / "server.key").read_text() + (folder / "server.pem").read_text())
    return folder


class TestTls:
    def options(self, certificates, *words) -> dict:
        """Return uvicorn's options for words of the command in which "@" stands for the folder of certificates."""
        return tls_files(parse([word.replace("@", f"{certificates}/") for word in words]))

    def context(self, certificates, client: str | None = None) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=certificates / "ca.pem")
        if client is not None:
            made.load_cert_chain(certificates / f"{client}.pem", certificates / f"{client}.key")
        return made

    @pytest.mark.parametrize(
        "words",
        [
            ["--ssl-certfile", "@server.pem", "--ssl-keyfile", "@server.key"],
            ["--ssl-certfile", "@server.pem", *DECRYPTED],
            ["--ssl-certfile", "@both.pem"],
        ],
    )
    def test_https(self, certificates, words):
        with answering(app, limit=1, header_seconds=0.3, **self.options(certificates, *words)) as url:
            assert url.startswith("https:")
            assert httpx.get(url, verify=self.context(certificates)).text == "ok"
            with connected(url) as plain:
                context = self.context(certificates)
                with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
                    connection.sendall(PARTIAL)
                    assert is_closed(connection)

    def test_certificates_of_clients(self, certificates):
        words = ["--ssl-certfile", "@both.pem", "--ssl-ca-certs", "@ca.pem"]
        with answering(app, **self.options(certificates, *words)) as url:
            assert httpx.get(url, verify=self.context(certificates, "client")).text == "ok"
            with pytest.raises(httpx.TransportError):
                httpx.get(url, verify=self.context(certificates))

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["--ssl-keyfile", "@server.key"], "--ssl-keyfile needs --ssl-certfile"),
            (["--ssl-ca-certs", "@ca.pem"], "--ssl-ca-certs needs --ssl-certfile"),
            (["--ssl-keyfile-password", "secret"], "--ssl-keyfile-password needs --ssl-certfile"),
            (["--ssl-certfile", "@nothing.pem"], "--ssl-certfile: .*No such file"),
            (["--ssl-certfile", "@server.pem"], "both must be PEM files"),  # without a private key
            (["--ssl-certfile", "@server.pem", "--ssl-keyfile", "@client.key"], "KEY_VALUES_MISMATCH"),
            (["--ssl-certfile", "@server.pem", "--ssl-keyfile", "@encrypted.key"], "set --ssl-keyfile-password"),
            (["--ssl-certfile", "@server.pem", *DECRYPTED[:-1], "wrong"], "set --ssl-keyfile-password"),
            (
                [
                    "--ssl-certfile",
                    "@client.pem",
                    "--ssl-keyfile",
                    "@encrypted.key",
                    "--ssl-keyfile-password",
                    "secret",
                ],
                "KEY_VALUES_MISMATCH",
            ),
            (["--ssl-certfile", "@both.pem", "--ssl-ca-certs", "@server.key"], "--ssl-ca-certs .* must be a PEM file"),
        ],
    )
    def test_bad_certificates_are_refused(self, certificates, words, text):
        with pytest.raises(InputError, match=text):
            self.options(certificates, *words)
