"""A checkpoint: a safetensors file, a folder of them, or a Hugging Face index, read by ranges."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

from dlo_core.errors import CheckpointError
from dlo_core.safetensors_header import CheckpointTensor, read_header

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Checkpoint"]

_INDEX = ".safetensors.index.json"
_FILE = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_READ_NBYTES = 64 << 20


class Checkpoint:
    """The tensors of a checkpoint, known from headers; bytes are read on demand.

    Attributes:
        path: As it was given.
        tensors: By key.
    """

    def __init__(self, path: Path, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Take checked tensors; use ``open``."""
        self.path = path
        self.tensors = tensors
        self._bytes_read = 0
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read and check all headers; no tensor is read.

        Args:
            path: A ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either.

        Raises:
            CheckpointError: Something is missing or damaged; names the file and the key.
        """
        where = Path(path)
        if not where.exists():
            raise CheckpointError(f"there is no checkpoint at {str(where)!r}")
        if where.is_dir():
            return cls(where, _from_folder(where))
        if where.name.endswith(".json"):
            return cls(where, _from_index(where))
        if where.suffix in _PICKLES:
            _refuse(where, "is a pickle; convert it to safetensors first")
        return cls(where, read_header(where))

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
            out: Writable bytes, ``stop - start`` of them.

        Raises:
            CheckpointError: The file cannot be read or has become shorter.
        """
        tensor = self.tensors[name]
        if not 0 <= start <= stop <= tensor.nbytes or len(out) != stop - start:
            raise ValueError(f"{name!r} has {tensor.nbytes} bytes; asked for [{start}, {stop})")
        done = 0
        try:
            file = self._file(tensor.path)
            while done < stop - start:
                piece = out[done : done + _READ_NBYTES]
                got = os.preadv(file, [piece], tensor.offset + start + done)
                if got == 0:
                    _refuse(
                        tensor.path,
                        f"ended inside {name!r}: it has become shorter since it was opened; "
                        "nothing must "
                        "write to a checkpoint while it is loaded",
                    )
                done += got
        except OSError as error:
            raise CheckpointError(
                f"cannot read {name!r} from {str(tensor.path)!r}: {error.strerror or error}"
            ) from error
        with self._lock:
            self._bytes_read += done

    def close(self) -> None:
        """Close the files. Idempotent; a later ``read`` opens them again."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            os.close(file)

    def _file(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[path]

    def __enter__(self) -> Checkpoint:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the files."""
        self.close()

    def __del__(self) -> None:
        """Close what was left open."""
        self.close()

    def __repr__(self) -> str:
        """Show where it is and how much there is."""
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        return f"Checkpoint({str(self.path)!r}, {len(self.tensors)} tensors, {total:,} bytes)"


def _from_folder(folder: Path) -> dict[str, CheckpointTensor]:
    indexes = sorted(path for path in folder.iterdir() if path.name.endswith(_INDEX))
    if len(indexes) > 1:
        names = ", ".join(path.name for path in indexes)
        _refuse(folder, f"has several indexes ({names}); give the path of the one that is meant")
    if indexes:
        return _from_index(indexes[0])
    files = sorted(path for path in folder.iterdir() if path.name.endswith(_FILE))
    if not files:
        pickles = [p.name for p in sorted(folder.iterdir()) if p.suffix in _PICKLES]
        hint = f"; {pickles[0]!r} is a pickle: convert it first" if pickles else ""
        _refuse(folder, f"has no {_FILE} file and no index{hint}")
    tensors: dict[str, CheckpointTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                _refuse(
                    folder,
                    f"has {name!r} in {tensors[name].path.name!r} and in {file.name!r} (two "
                    "variants?); "
                    "give the path of the file that is meant",
                )
            tensors[name] = tensor
    return tensors


def _from_index(index: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors that the index names; what else its files hold is not part of it."""
    weight_map = _weight_map(index)
    keys: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        keys.setdefault(file, []).append(name)
    tensors: dict[str, CheckpointTensor] = {}
    for file, names in keys.items():
        path = index.parent / file
        if not path.is_file():
            _refuse(
                index,
                f"names the file {file!r} for {names[0]!r} and {len(names) - 1} more keys, but it "
                "is not "
                "there; download it again",
            )
        header = read_header(path)
        for name in names:
            if name not in header:
                _refuse(index, f"says that {name!r} is in {file!r}, but it is not")
            tensors[name] = header[name]
        unnamed = [name for name in header if name not in weight_map]
        if unnamed:
            _refuse(path, f"holds {unnamed[0]!r}, which the index {index.name!r} does not name")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {str(index)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(index)!r} is not JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse(index, "has no weight_map; it is not the index of a checkpoint")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            _refuse(index, f"gives {file!r} as the file of {name!r}")
        parts = PurePosixPath(file)
        if parts.is_absolute() or ".." in parts.parts:
            _refuse(index, f"names {file!r} for {name!r}, which lies outside of its folder")
    return weight_map


def _refuse(path: Path, text: str) -> NoReturn:
    raise CheckpointError(f"{str(path)!r} {text}")
