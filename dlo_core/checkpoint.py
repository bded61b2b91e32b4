"""A checkpoint: the tensors of one or several safetensors files, read by byte ranges."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dlo_core.checkpoint_files import find_files
from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.safetensors_header import CheckpointTensor, SafetensorsFile, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Checkpoint", "CheckpointTensor"]

_READ_NBYTES = 64 << 20


class _Descriptor:
    """An open file. It is closed when its last user lets go of it.

    So a read in one thread never meets a descriptor that ``close()`` in another gave back and that
    a third got for a file of its own.
    """

    __slots__ = ("number",)

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        """Close it."""
        if self.number >= 0:
            os.close(self.number)


class Checkpoint:
    """The tensors of a checkpoint, known from headers; bytes are read on demand.

    Attributes:
        path: As it was given.
        tensors: By key.
    """

    def __init__(self, path: Path, files: Sequence[SafetensorsFile]) -> None:
        """Take checked files; use ``open``.

        Raises:
            CheckpointError: A key is in two of them.
        """
        self.path = path
        self.tensors: Mapping[str, CheckpointTensor] = MappingProxyType(_merge(path, files))
        self._files = {file.path: file for file in files}
        self._opened: dict[Path, _Descriptor] = {}
        self._bytes_read = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read and check all headers; no tensor is read.

        Args:
            path: A ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either.

        Raises:
            CheckpointError: Something is missing, damaged or ambiguous; names the file and the key.
            ConfigError: ``path`` is no path.
        """
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(
                f"checkpoint= wants the path of a safetensors file, folder or index; got a "
                f"{type(path).__name__}"
            )
        where = Path(path)
        return cls(where, find_files(where))

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        return self._bytes_read

    def read(self, name: str, start: int, stop: int, out: memoryview) -> None:
        """Read bytes ``[start, stop)`` of a tensor into ``out``; threads may do so at once.

        Args:
            name: Key of the tensor.
            start: First byte, counted from the tensor's own.
            stop: End.
            out: Writable contiguous memory of ``stop - start`` bytes.

        Raises:
            ConfigError: The tensor has no such bytes, or ``out`` another size.
            CheckpointError: The file cannot be read, or it changed since ``open``; what is in
                ``out`` then must not be used.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ConfigError(f"checkpoint {str(self.path)!r} has no {name!r}")
        if not 0 <= start <= stop <= tensor.nbytes or out.nbytes != stop - start:
            raise ConfigError(
                f"{name!r} has {tensor.nbytes:,} bytes; asked for [{start:,}, {stop:,}) into "
                f"{out.nbytes:,}"
            )
        if start == stop:
            return
        try:
            self._fill(tensor, tensor.offset + start, out.cast("B"))
        except OSError as error:
            raise CheckpointError(
                f"cannot read {name!r} from {str(tensor.path)!r}: {error.strerror or error}"
            ) from error
        with self._lock:
            self._bytes_read += stop - start

    def close(self) -> None:
        """Close the files; a later ``read`` opens them again. Idempotent."""
        with self._lock:
            self._opened.clear()

    def _fill(self, tensor: CheckpointTensor, at: int, out: memoryview) -> None:
        file = self._descriptor(tensor.path)
        done = 0
        while done < len(out):
            got = os.preadv(file.number, [out[done : done + _READ_NBYTES]], at + done)
            if got == 0:
                refuse(
                    tensor.path,
                    f"ended {len(out) - done:,} bytes early: the file was truncated while it was "
                    "in use; download it again and let nothing write to it",
                    tensor.name,
                )
            done += got
        # After the bytes were read, so that a change before or meanwhile is seen.
        status, known = os.fstat(file.number), self._files[tensor.path]
        if (status.st_size, status.st_mtime_ns) != (known.nbytes, known.mtime_ns):
            refuse(
                tensor.path,
                f"was written to after the checkpoint was opened ({known.nbytes:,} bytes then, "
                f"{status.st_size:,} now): its bytes may be others'; let nothing write to it",
                tensor.name,
            )

    def _descriptor(self, path: Path) -> _Descriptor:
        with self._lock:
            if path not in self._opened:
                self._opened[path] = _Descriptor(path)
            return self._opened[path]

    def __enter__(self) -> Checkpoint:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the files."""
        self.close()

    def __repr__(self) -> str:
        """Show where it is and how much there is."""
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        return (
            f"Checkpoint({str(self.path)!r}, {len(self.tensors)} tensors in {len(self._files)} "
            f"files, {total:,} bytes, {len(self._opened)} open)"
        )


def _merge(path: Path, files: Sequence[SafetensorsFile]) -> dict[str, CheckpointTensor]:
    tensors: dict[str, CheckpointTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                refuse(
                    path,
                    f"is both in {tensors[name].path.name!r} and in {file.path.name!r}; give the "
                    "path of the file or index that you mean",
                    name,
                )
            tensors[name] = tensor
    return tensors
