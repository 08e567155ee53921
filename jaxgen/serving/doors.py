"""Refuse requests that a page of another web site makes through a browser on this machine.

A browser sends a form, or a text without a type, to any address without asking. Such a page could occupy all slots,
although it cannot read the answers. With a DNS name that changes its address to 127.0.0.1, it could read them too.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxgen.errors import shown
from jaxgen.serving.http_errors import ApiError

_READS = ("GET", "HEAD", "OPTIONS")  # methods that change nothing


class Doors:
    """ASGI middleware that checks a request's Host and Origin.

    Args:
        app: the application.
        refuse: makes the response to a refused request.
        hosts: the names that the Host header may have, without ports. This machine's own names, such as localhost and
            127.0.0.1, may be used too. If empty, or if one of the names is "*", any name may be used.
        origins: the origins of pages that may use the service, in addition to its own; "*" for all.
    """

    def __init__(
        self, app: ASGIApp, refuse: Callable[[ApiError], ASGIApp], hosts: Sequence[str], origins: Sequence[str]
    ):
        self._app, self._refuse = app, refuse
        self._hosts = frozenset() if "*" in hosts else frozenset(name.lower() for name in hosts)
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        app = self._app
        if scope["type"] == "http" and (error := self._error(scope["method"], Headers(scope=scope))):
            app = self._refuse(error)
        await app(scope, receive, send)

    def _error(self, method: str, headers: Headers) -> ApiError | None:
        hosts = headers.getlist("host")
        if self._hosts:
            for host in hosts:
                name = _host_name(host)
                if name not in self._hosts and not is_loopback(name):
                    what = f"the Host header has the name {shown(name)}, which is not one of this service"
                    return ApiError(421, f"{what}: use localhost, or start the service with --allowed-host NAME")
        if method in _READS:
            return None
        origin = headers.get("origin")
        if origin is not None and not self._is_welcome(origin, hosts, headers.get("sec-fetch-site")):
            what = f"a page from {shown(origin)} may not use this service"
            return ApiError(403, f"{what}: start the service with --cors-origin URL")
        return None

    def _is_welcome(self, origin: str, hosts: list[str], site: str | None) -> bool:
        """Return whether a page of an origin may send requests. `site` is what the browser says about the origin."""
        if origin in self._origins or "*" in self._origins or site == "same-origin":
            return True
        return hosts == [origin.partition("://")[2]]


def check_json(headers: Headers) -> None:
    """Raise an error unless a request's Content-Type is JSON, which a browser does not send without asking first."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        got = f"its type is {shown(kind)}" if kind else "it has no type"
        raise ApiError(415, f"the body must be JSON, but {got}: send Content-Type: application/json")


def is_loopback(name: str) -> bool:
    """Return whether a name or an address, without a port, always means this machine."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _host_name(host: str) -> str:
    """Return the name in a Host header, in lower case, without the port and the brackets of an IPv6 address."""
    name, bracket, _ = host.partition("]")
    return (name.removeprefix("[") if bracket else host.partition(":")[0]).lower()
