"""A checkpoint: the tensors of one or several safetensors files, read by byte ranges."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from dlo_core.checkpoint_files import find_files
from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.file_reads import Scratch, check_direct, read_buffered, read_direct
from dlo_core.page_cache import CachedPages, advise
from dlo_core.safetensors_header import CheckpointTensor, SafetensorsFile, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Checkpoint", "CheckpointTensor"]


class _Descriptor:
    """An open file. It is closed when its last user lets go of it.

    So a read in one thread never meets a descriptor that ``close()`` in another gave back and that
    a third got for a file of its own.
    """

    __slots__ = ("number", "pages")

    def __init__(self, file: SafetensorsFile, direct_io: bool) -> None:
        self.number = -1
        direct = os.O_DIRECT if direct_io else 0
        self.number = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | direct)
        self.pages: CachedPages | None = None
        if not direct_io:
            self.pages = CachedPages(self.number, file.nbytes)
            # Nothing but what is wanted; what comes next is announced.
            advise(self.number, 0, 0, "POSIX_FADV_RANDOM")

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

    def __init__(
        self, path: Path, files: Sequence[SafetensorsFile], *, direct_io: bool = False
    ) -> None:
        """Take checked files; use ``open``.

        Raises:
            CheckpointError: A key is in two of them.
        """
        self.path = path
        self._direct_io = direct_io
        self.tensors: Mapping[str, CheckpointTensor] = MappingProxyType(_merge(path, files))
        self._files = {file.path: file for file in files}
        self._opened: dict[Path, _Descriptor] = {}
        self._bytes_read = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, direct_io: bool = False) -> Checkpoint:
        """Read and check all headers; no tensor is read.

        Args:
            path: A ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either.
            direct_io: Read past the page cache.

        Raises:
            CheckpointError: Something is missing, damaged or ambiguous; names the file and the key.
            ConfigError: ``path`` is no path, or its file system takes no direct reads.
        """
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(
                f"checkpoint= wants the path of a safetensors file, folder or index; got a "
                f"{type(path).__name__}"
            )
        where = Path(path)
        files = find_files(where)
        if direct_io:
            for file in files:
                check_direct(file.path)
        return cls(where, files, direct_io=direct_io)

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
        if start < stop:
            self.fill([(name, out.cast("B"))], tensor.offset + start, Scratch())

    def fill(self, outs: Sequence[tuple[str, memoryview]], offset: int, scratch: Scratch) -> None:
        """Read a run of a file's bytes into several memories; threads may do so at once.

        Args:
            outs: Tensors and the memory for their bytes, in the order of the file, in which they
                follow each other without a gap; not more than ``MAX_OUTS``.
            offset: First byte in the file.
            scratch: The calling thread's.

        Raises:
            CheckpointError: As ``read``.
        """
        first = self.tensors[outs[0][0]]
        try:
            self._fill(first.path, offset, outs, scratch)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {first.name!r} from {str(first.path)!r}: {error.strerror or error}"
            ) from error
        with self._lock:
            self._bytes_read += sum(len(out) for _, out in outs)

    def announce(self, name: str, offset: int, nbytes: int) -> None:
        """Tell the system that a run of a file's bytes will be read soon, and no more than these.

        Args:
            name: A tensor of the file.
            offset: First byte in the file.
            nbytes: How many.
        """
        with suppress(OSError):  # the read will say it
            file = self._descriptor(self.tensors[name].path)
            if file.pages is not None:
                file.pages.fetch(offset, offset + nbytes)

    def check_unchanged(self) -> None:
        """Check once more that no file that was read was written to meanwhile.

        Raises:
            CheckpointError: One was; names it and a tensor of it.
        """
        for path, file in list(self._opened.items()):
            self._check(path, file, next(iter(self._files[path].tensors)))

    def check_in_place(self, name: str) -> None:
        """Check that the file of a tensor is the one that was opened, where it was, as it was.

        Raises:
            CheckpointError: It was written to, cut short, replaced or removed.
        """
        path = self.tensors[name].path
        try:
            self._check(path, self._descriptor(path), name)
            status = os.stat(path)
        except OSError as error:
            raise CheckpointError(
                f"{str(path)!r} is not to be had any more ({error.strerror or error}); leave it "
                "where it is while it is in use"
            ) from error
        if (status.st_dev, status.st_ino) != self._files[path].place:
            _refuse_replaced(path, name)

    def give_back_pages(self) -> None:
        """Leave the system's page cache as it was before the files were read."""
        with self._lock:
            for file in self._opened.values():
                if file.pages is not None:
                    file.pages.give_back()

    def close(self) -> None:
        """Close the files; a later ``read`` opens them again. Idempotent."""
        self.give_back_pages()
        with self._lock:
            self._opened.clear()

    def _fill(
        self, path: Path, offset: int, outs: Sequence[tuple[str, memoryview]], scratch: Scratch
    ) -> None:
        file = self._descriptor(path)
        memories = [out for _, out in outs]
        wanted = sum(map(len, memories))
        read = read_direct if self._direct_io else read_buffered
        done = read(file.number, offset, memories, scratch)
        if file.pages is not None:
            file.pages.read(offset, offset + done)
        if done < wanted:
            refuse(
                path,
                f"ended {wanted - done:,} bytes early: the file was truncated while it was "
                "in use; download it again and let nothing write to it",
                _name_at(outs, done),
            )
        # After the bytes were read, so that a change before or meanwhile is seen.
        self._check(path, file, outs[0][0])

    def _check(self, path: Path, file: _Descriptor, name: str) -> None:
        status, known = os.fstat(file.number), self._files[path]
        if (status.st_size, status.st_mtime_ns) != (known.nbytes, known.mtime_ns):
            refuse(
                path,
                f"was written to after the checkpoint was opened ({known.nbytes:,} bytes then, "
                f"{status.st_size:,} now): its bytes may be others'; let nothing write to it",
                name,
            )
        if (status.st_dev, status.st_ino) != known.place:
            _refuse_replaced(path, name)

    def _descriptor(self, path: Path) -> _Descriptor:
        with self._lock:
            if path not in self._opened:
                self._opened[path] = _Descriptor(self._files[path], self._direct_io)
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


def _refuse_replaced(path: Path, name: str) -> NoReturn:
    refuse(
        path,
        "was replaced by another file after the checkpoint was opened; leave it where it is while "
        "it is in use, and offload again to use the new one",
        name,
    )


def _name_at(outs: Sequence[tuple[str, memoryview]], done: int) -> str:
    """Return the name of the tensor that byte ``done`` of a run belongs to."""
    for name, out in outs:
        if done < len(out):
            return name
        done -= len(out)
    return outs[-1][0]


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
