"""Accept paths with doubled and trailing slashes, which clients make when they join a base URL and a path."""

from __future__ import annotations

import re
from typing import Any

_SLASHES = re.compile("/{2,}")


class PlainPaths:
    """ASGI middleware that removes doubled and trailing slashes from the paths of requests."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, with a plain path."""
        if scope["type"] == "http":
            path = _SLASHES.sub("/", scope["path"])
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)
