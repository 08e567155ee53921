"""The device or the mesh of devices that the command runs on."""

from __future__ import annotations

import contextlib
import math

import jax

from jaxgen.errors import InputError


def use_device(chosen: tuple[str, int | None] | None) -> contextlib.AbstractContextManager:
    """Start jax's backends; return a context in which arrays are created on the chosen device.

    `chosen` is a platform and a device index (None for the first device), or None for jax's choice (see JAX_PLATFORMS).
    Raise an `InputError` if the platform cannot be started, or if the device does not exist.
    """
    platform, number = chosen or (None, None)
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")  # so that jax does not initialize a GPU and reserve its memory
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        name = "jax" if platform is None else f"--device {platform}"
        raise InputError(f"{name} found no device: {error}") from error
    if number is None and devices[0].platform == jax.default_backend():
        return contextlib.nullcontext()
    if (number or 0) >= len(devices):
        raise InputError(f"--device {platform}:{number}: the last device is {platform}:{len(devices) - 1}")
    return jax.default_device(devices[number or 0])


def mesh_of_devices(sizes: tuple[int, int] | None) -> jax.sharding.Mesh | None:
    """Return a mesh of size `(data, model)` with the devices of all processes, or None if `sizes` is None."""
    if sizes is None:
        return None
    if math.prod(sizes) != jax.device_count():
        raise InputError(
            f"--mesh {sizes[0]}x{sizes[1]} needs {math.prod(sizes)} devices, but there are {jax.device_count()}"
        )
    return jax.make_mesh(sizes, ("data", "model"))
