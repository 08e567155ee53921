"""Common code for programs on JAX."""

from __future__ import annotations

from typing import Any

import jax
from worker import Program


class JaxProgram(Program):
    """A program under test that runs on JAX."""

    def __init__(self) -> None:
        self.compilations = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, _: float, **__: Any) -> None:
        self.compilations += event == "/jax/core/compile/backend_compile_duration"

    def compiled(self) -> int:
        return self.compilations

    @property
    def device_peak(self) -> int | None:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    def device(self) -> dict[str, Any]:
        """Return facts about the devices."""
        first = jax.devices()[0]
        return {"platform": first.platform, "device": first.device_kind, "devices": jax.device_count()}
