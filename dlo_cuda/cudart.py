"""The CUDA runtime: the few calls that torch does not hand out, on the library that torch loaded.

torch has ``cudaHostRegister`` but not ``cudaGetLastError``, without which a refused registration
comes up again as the error of the next kernel. A second copy of the library would have an error
state of its own, so the one that is mapped into this process is used.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dlo_core.errors import BackendError
from dlo_core.registration import Registrar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["READ_ONLY", "CudaRuntime", "Runtime", "load_runtime"]

READ_ONLY = 8
"""Flag of a registration that the device only reads."""
_HOST_REGISTER_SUPPORTED = 99
_READ_ONLY_SUPPORTED = 113


class Runtime(Registrar, Protocol):
    """What registering host memory takes; every call returns 0 or an error code."""

    def can_register(self) -> bool:
        """Return whether the device reads registered host memory."""

    def can_register_readonly(self) -> bool:
        """Return whether memory that may not be written can be registered."""


class CudaRuntime:
    """``libcudart``, for one device."""

    def __init__(
        self,
        library: Any,
        device: int,
        on_device: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Declare the calls; nothing is called yet.

        Args:
            library: The library, as ctypes gives it.
            device: Index of the device.
            on_device: Makes a context in which this device is the thread's current one; without
                it a call would wake the first device up.
        """
        self._library = library
        self._device = device
        self._on_device = on_device
        for name, arguments in (
            ("cudaHostRegister", [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]),
            ("cudaHostUnregister", [ctypes.c_void_p]),
            ("cudaGetLastError", []),
            ("cudaDeviceSynchronize", []),
            ("cudaDeviceGetAttribute", [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int]),
        ):
            call = getattr(library, name)
            call.argtypes, call.restype = arguments, ctypes.c_int
        library.cudaGetErrorString.argtypes = [ctypes.c_int]
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        """Page-lock a range for the device."""
        with self._on_device():
            return int(self._library.cudaHostRegister(address, nbytes, flags))

    def host_unregister(self, address: int) -> int:
        """Unlock the range that begins at ``address``."""
        with self._on_device():
            return int(self._library.cudaHostUnregister(address))

    def take_error(self) -> int:
        """Return the error that this thread was left with, and clear it."""
        return int(self._library.cudaGetLastError())

    def describe(self, code: int) -> str:
        """Return the text of an error code."""
        text: bytes = self._library.cudaGetErrorString(code)
        return text.decode(errors="replace")

    def synchronize(self) -> int:
        """Block until the device is idle."""
        with self._on_device():
            return int(self._library.cudaDeviceSynchronize())

    def can_register(self) -> bool:
        """Return what the device says."""
        return self._attribute(_HOST_REGISTER_SUPPORTED) == 1

    def can_register_readonly(self) -> bool:
        """Return what the device says."""
        return self._attribute(_READ_ONLY_SUPPORTED) == 1

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int(0)
        if self._library.cudaDeviceGetAttribute(ctypes.byref(value), number, self._device):
            self.take_error()
            return 0
        return value.value


def load_runtime(device: int, maps: Path = Path("/proc/self/maps")) -> CudaRuntime:
    """Return the runtime that this process has loaded.

    Raises:
        BackendError: There is none, or it lacks a call.
    """
    try:
        found = re.search(r"\s(/\S*libcudart[^/\s]*\.so\S*)$", maps.read_text(), re.MULTILINE)
    except OSError as error:
        raise BackendError(f"cannot look for the CUDA runtime: {error}") from error
    if found is None:
        raise BackendError("this process has not loaded libcudart as a shared library")
    try:
        library = ctypes.CDLL(found.group(1))
        return CudaRuntime(library, device, partial(torch.cuda.device, device))
    except (OSError, AttributeError) as error:
        raise BackendError(f"the CUDA runtime {found.group(1)} cannot be used: {error}") from error
