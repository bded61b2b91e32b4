"""A segment: anonymous memory that the ranks of one node share.

One rank makes it and hands its descriptor to the others over a socket. Neither has a name in any
file system, so a process that is killed at any moment leaves nothing behind: the memory goes with
the last process that maps it.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress

import torch

from dlo_core.errors import HostMemoryError
from dlo_core.pages import view_of
from dlo_core.touch import Touching

__all__ = ["Segment", "SegmentMaker", "receive"]

_CREDENTIALS = struct.Struct("3i")
_FOUND_S = 10.0


class SegmentMaker:
    """Makes the memory, and hands it to whoever asks for it under its address.

    Attributes:
        address: What the others need to know; without a file behind it.
    """

    def __init__(self, nbytes: int) -> None:
        """Make the memory and answer from now on, in a thread.

        Raises:
            HostMemoryError: The system has no such memory, or no room for it.
        """
        self.nbytes = nbytes
        self._descriptor = _create(nbytes)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The leading zero: an address of the abstract kind, which goes with the socket.
            self.address = f"dlo-{os.getpid()}-{secrets.token_hex(12)}"
            self._listener.bind(f"\0{self.address}")
            self._listener.listen(128)
            self._thread = threading.Thread(target=self._answer, name="dlo-segment", daemon=True)
            self._thread.start()
        except BaseException:
            self._listener.close()
            os.close(self._descriptor)
            raise

    def duplicate(self) -> int:
        """Return a descriptor of the memory for this process."""
        return os.dup(self._descriptor)

    def close(self) -> None:
        """Answer no more. Idempotent."""
        if self._descriptor < 0:
            return
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        os.close(self._descriptor)
        self._descriptor = -1

    def _answer(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer, suppress(OSError):
                if _user_of(peer) == os.geteuid():
                    socket.send_fds(peer, [b"dlo"], [self._descriptor])


def receive(address: str, node: str) -> int:
    """Return a descriptor of the memory that another rank made.

    Args:
        address: Of its maker.
        node: For the error.

    Raises:
        HostMemoryError: It cannot be had from here.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_FOUND_S)
            asking.connect(f"\0{address}")
            _, descriptors, _, _ = socket.recv_fds(asking, 16, 1)
            if not descriptors:
                raise OSError("the other rank runs as another user")
            return descriptors[0]
    except OSError as error:
        raise HostMemoryError(
            f"the shared host memory of node {node!r} cannot be handed from rank to rank "
            f"({error}): ranks that share it must run as one user in one network namespace (one "
            "container); use host='pinned' or 'pageable', or give the containers host names of "
            "their own"
        ) from error


class Segment:
    """The memory as this process maps it."""

    def __init__(self, descriptor: int, nbytes: int, part: tuple[int, int]) -> None:
        """Map the memory and have this rank's part of its pages made.

        Args:
            descriptor: Of the memory; stays the caller's (Python's mapping has one of its own).
            nbytes: Its size.
            part: (i, n): this rank is the i-th of n that make the pages.

        Raises:
            HostMemoryError: There is no room for the pages; without this a later write into them
                would be the end of the process.
        """
        self.nbytes = nbytes
        try:
            pages = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # Fewer pages to make and to lock, where the system has huge ones for shared memory.
                with suppress(OSError):
                    pages.madvise(mmap.MADV_HUGEPAGE)
            with torch.inference_mode(False):
                self._tensor: torch.Tensor | None = view_of(pages)
            _make_pages(descriptor, self._tensor, part)
        except (OSError, ValueError) as error:
            raise _no_room(nbytes, error) from error

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes; raises after ``release``."""
        if self._tensor is None:
            raise HostMemoryError("this shared memory was released")
        return self._tensor

    def release(self) -> None:
        """Let the mapping go with its last view. Idempotent."""
        self._tensor = None


def _create(nbytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise HostMemoryError("this system has no anonymous shared memory (memfd_create)")
    descriptor = -1
    try:
        descriptor = os.memfd_create("dlo", os.MFD_CLOEXEC)
        os.truncate(descriptor, nbytes)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise _no_room(nbytes, error) from error
    return descriptor


def _make_pages(descriptor: int, memory: torch.Tensor, part: tuple[int, int]) -> None:
    """Make one of ``part[1]`` parts of the pages.

    Raises:
        OSError: There is no room.
    """
    cuts = [memory.nbytes * (part[0] + step) // part[1] for step in (0, 1)]
    start, stop = (cut // mmap.PAGESIZE * mmap.PAGESIZE for cut in cuts)
    if part[0] == part[1] - 1:
        stop = memory.nbytes
    if start >= stop:
        return
    with Touching(memory.data_ptr() + start, stop - start) as touching:
        code = touching.reach(memory.data_ptr() + stop)
    if not touching.supported:
        # One page after the other.
        os.posix_fallocate(descriptor, start, stop - start)
    elif code:
        # What would end the process at a write is told as a bad address here.
        code = errno.ENOSPC if code == errno.EFAULT else code
        raise OSError(code, os.strerror(code))


def _no_room(nbytes: int, error: Exception) -> HostMemoryError:
    return HostMemoryError(
        f"cannot make {nbytes:,} bytes of shared host memory ({error}): the node or its container "
        "has no room for it; use gather mode, host='mapped', or a higher limit"
    )


def _user_of(peer: socket.socket) -> int:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(raw)[1]
    return user
