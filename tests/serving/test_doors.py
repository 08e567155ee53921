"""Requests that a page of another web site could send are refused, and so are keys that cannot be used."""

import contextlib
import json
import re

import httpx
import pytest

from jaxgen.errors import InputError
from jaxgen.serving.api_keys import Keys
from jaxgen.serving.app import Service
from jaxgen.serving.doors import is_loopback
from tests.support.service import KEY, running

ORIGIN = "https://app.example.org"
BODY = json.dumps({"tokens": [65]}).encode()
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def service():
    with running(warm=False, options={"cors_origins": [ORIGIN], "allowed_hosts": ["Box.example.org"]}) as made:
        yield made


@pytest.fixture(scope="module")
def http(service):
    with httpx.Client(base_url=service.url) as made:
        yield made


class TestHost:
    @pytest.mark.parametrize(
        "host", "localhost localhost:80 LOCALHOST 127.0.0.1 127.1.2.3:80 [::1] [::1]:80 box.example.org:443".split()
    )
    def test_allowed_hosts_are_accepted(self, http, host):
        assert http.get("/health", headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host", "evil.example evil.example:80 127.0.0.1.evil.example localhost.evil.example 10.0.0.1 [::2]:80".split()
    )
    @pytest.mark.parametrize("path", ["/health", "/metrics", "/", "/v1/models", "/nowhere"])
    def test_other_hosts_are_refused(self, http, host, path):
        answer = http.get(path, headers={"Host": host})
        assert answer.status_code == 421
        assert "--allowed-host" in answer.json()["error"]["message"]

    def test_any_host_is_accepted_by_default(self):
        for hosts in ((), ("a", "*")):
            with running(warm=False, options={"allowed_hosts": hosts}) as service:
                assert httpx.get(f"{service.url}/health", headers={"Host": "any.example"}).status_code == 200

    def test_loopback_hosts_are_recognized(self):
        assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.255.0.1", "::1", "::ffff:127.0.0.1"]))
        assert not any(map(is_loopback, ["", "0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "127.1"]))


class TestOrigin:
    def post(self, http, **headers):
        return http.post("/detokenize", content=BODY, headers={**JSON, **headers})

    def test_allowed_origins_are_accepted(self, http, service):
        own = service.url
        assert self.post(http).status_code == 200
        assert self.post(http, Origin=own).status_code == 200  # the chat page
        assert self.post(http, Origin=own.replace("http:", "https:")).status_code == 200  # a proxy with TLS
        assert self.post(http, Origin=ORIGIN).status_code == 200
        # Behind a proxy that replaces the Host header, the browser knows best.
        assert (
            self.post(http, **{"Origin": "https://other.example", "Sec-Fetch-Site": "same-origin"}).status_code == 200
        )

    @pytest.mark.parametrize("origin", ["https://evil.example", "null", "", "http://127.0.0.1:1", f"{ORIGIN}:1"])
    @pytest.mark.parametrize("site", ["cross-site", "same-site", "none", None])
    def test_other_origins_are_refused(self, http, origin, site):
        answer = self.post(http, **{"Origin": origin} | ({"Sec-Fetch-Site": site} if site else {}))
        assert answer.status_code == 403
        assert "--cors-origin" in answer.json()["error"]["message"]

    def test_read_only_requests_accept_any_origin(self, http):
        assert http.get("/metrics", headers={"Origin": "https://evil.example"}).status_code == 200
        assert http.delete("/v1/responses/a", headers={"Origin": "https://evil.example"}).status_code == 403
        assert http.delete("/v1/responses/a").status_code == 404

    def test_all_origins(self):
        with running(warm=False, options={"cors_origins": ["*"]}) as service:
            answer = httpx.post(f"{service.url}/detokenize", content=BODY, headers={**JSON, "Origin": "null"})
            assert answer.status_code == 200


class TestContentType:
    @pytest.mark.parametrize(
        "kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", "application/json;"]
    )
    def test_json_content_types_are_accepted(self, http, kind):
        assert http.post("/detokenize", content=BODY, headers={"Content-Type": kind}).status_code == 200

    @pytest.mark.parametrize(
        "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; a=+json", "", "json", None]
    )
    def test_other_content_types_are_refused(self, http, kind):
        answer = http.post("/detokenize", content=BODY, headers={} if kind is None else {"Content-Type": kind})
        assert answer.status_code == 415
        assert "send Content-Type: application/json" in answer.json()["error"]["message"]

    def test_other_paths_and_methods(self, http):
        assert http.post("/health").status_code == 405
        assert http.post("/nowhere").status_code == 404

    def test_allowed_page_can_read_the_refusal(self, http):
        answer = http.post("/detokenize", content=BODY, headers={"Origin": ORIGIN})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (415, ORIGIN)

    def test_refusals_are_counted(self, http):
        http.post("/detokenize", content=BODY)
        assert re.search('request_error_total.*status="415"', http.get("/metrics").text)


class TestKeys:
    @pytest.mark.parametrize(
        "header", ["Bearer", "Bearer ", "bearer", "Bearer  ", "", f"Basic {KEY}", KEY, f"Bearer {KEY} ", "Bearer None"]
    )
    def test_wrong_headers_are_not_admitted(self, header):
        assert not Keys([KEY, "other"]).admit(header)

    def test_right_headers_are_admitted(self):
        keys = Keys(["one two", KEY])
        assert keys.admit(f"Bearer {KEY}")
        assert keys.admit("bearer one two")
        assert keys.client("bEaReR one two") == keys.client("Bearer one two") != keys.client(f"Bearer {KEY}")
        assert Keys([]).admit("")

    @pytest.mark.parametrize(
        ("key", "text"),
        [
            ("", "is empty"),
            (" ", "whitespace"),
            ("secret ", "whitespace"),
            ("\tsecret", "whitespace"),
            ("se\ncret", "contains a character that a header cannot contain"),
            ("secret\x7f", "a character"),
            ("secret\xa0key", "a character"),
            ("secretключ", "a character"),
            ("secret\udcff", "a character"),
        ],
    )
    def test_bad_keys_are_refused_without_showing_them(self, key, text):
        with pytest.raises(InputError, match=rf"^keys\[1\] .*{text}") as caught:
            Keys(["good", key])
        assert "secret" not in str(caught.value)

    def test_wrong_types_are_refused(self):
        with pytest.raises(TypeError, match="must be a list"):
            Keys("secret")
        with pytest.raises(TypeError, match=r"keys\[0\] must be a string, got NoneType"):
            Keys([None])

    def test_service_checks_its_keys(self):
        with contextlib.ExitStack() as stack, pytest.raises(InputError, match=r"keys\[0\] is empty"):
            stack.enter_context(running(warm=False, keys=[""]))
        assert Service.__init__.__kwdefaults__["keys"] == ()
