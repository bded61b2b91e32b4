"""A save plan: which safetensors files hold which tensors at which bytes, and their headers.

Pure, but for ``check_target``, which looks at the disk. All offsets are known before the first byte
is read, so tensors can be written in any order.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.safetensors_header import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from dlo_core.state import Named

__all__ = ["PlannedFile", "SavePlan"]

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_ALIGNMENT = 8
_OURS = r"(-\d+-of-\d+)?\.safetensors(\.index\.json)?"


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file.

    Attributes:
        path: Its final name.
        header: Its first bytes: the header with its length.
        places: First byte in the file and bytes of every tensor, by name.
    """

    path: Path
    header: bytes
    places: dict[str, tuple[int, int]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(nbytes for _, nbytes in self.places.values())


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What is written.

    Attributes:
        folder: Where.
        base: How all file names begin.
        files: The safetensors files.
        alone: Whether nothing else of the kind may be in the folder.
    """

    folder: Path
    base: str
    files: tuple[PlannedFile, ...]
    alone: bool

    @classmethod
    def make(
        cls,
        path: str | os.PathLike[str],
        named: Sequence[Named],
        *,
        base: str,
        max_shard_bytes: int | None,
    ) -> SavePlan:
        """Plan the files for ``named``.

        Args:
            path: A folder, or the name of a ``.safetensors`` file.
            named: What to write.
            base: How file names begin in a folder.
            max_shard_bytes: Most bytes of tensors in one file, a larger tensor alone excepted;
                None: one file.

        Raises:
            ConfigError: An argument or a dtype cannot be honoured.
        """
        folder, base, alone = _where(path, base)
        if max_shard_bytes is not None and (
            isinstance(max_shard_bytes, bool)
            or not isinstance(max_shard_bytes, int)
            or max_shard_bytes < 1
        ):
            raise ConfigError(
                "max_shard_bytes must be a positive whole number, or None for one file; got "
                f"{max_shard_bytes!r}"
            )
        if not named:
            raise ConfigError("the model has no tensors to save")
        for one in named:
            if one.tensor.dtype not in _NAMES:
                raise ConfigError(
                    f"{one.name!r} is {one.tensor.dtype}, which safetensors cannot hold; stream "
                    "named_tensors() to a format of your own, or convert it before offload()"
                )
        parts = _split(named, max_shard_bytes)
        count = len(parts)
        names = (
            [f"{base}{_SUFFIX}"]
            if count == 1
            else [f"{base}-{n:05d}-of-{count:05d}{_SUFFIX}" for n in range(1, count + 1)]
        )
        files = tuple(_lay(folder / name, part) for name, part in zip(names, parts, strict=True))
        return cls(folder, base, files, alone)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.nbytes for file in self.files)

    @property
    def index_path(self) -> Path | None:
        """The index file, where there are several files."""
        return self.folder / f"{self.base}{_INDEX}" if len(self.files) > 1 else None

    @property
    def result(self) -> Path:
        """What ``checkpoint=`` takes."""
        return self.index_path or self.files[0].path

    def index(self) -> bytes:
        """Return the content of the index file."""
        weight_map = {name: file.path.name for file in self.files for name in file.places}
        content = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()

    def check_target(self) -> None:
        """Look whether the files can be made.

        Raises:
            ConfigError: There is a checkpoint already, or the path is something else.
            CheckpointError: The disk has no room, or cannot be read.
        """
        try:
            self._check_target()
        except OSError as error:
            raise CheckpointError(
                f"cannot save to {str(self.folder)!r}: {error.strerror or error}"
            ) from error

    def _check_target(self) -> None:
        nearest = self.folder
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir():
            raise ConfigError(f"cannot save to {str(self.folder)!r}: {str(nearest)!r} is no folder")
        mine = re.compile(
            rf"{re.escape(self.base)}(-\d+-of-\d+)?{re.escape(_SUFFIX)}(\.index\.json)?"
        )
        for entry in sorted(self.folder.iterdir()) if nearest == self.folder else ():
            other = self.alone and entry.name.endswith((_SUFFIX, _INDEX))
            if mine.fullmatch(entry.name) or (other and not entry.name.startswith(".")):
                raise ConfigError(
                    f"save() overwrites nothing, and {str(entry)!r} is there; give a new folder or "
                    "file name, or remove it first"
                )
        need = self.nbytes + sum(len(file.header) for file in self.files)
        free = shutil.disk_usage(nearest).free
        if need > free:
            raise CheckpointError(
                f"cannot save to {str(self.folder)!r}: it takes {need:,} bytes and the disk has "
                f"{free:,}; free some, or save elsewhere"
            )


def _where(path: str | os.PathLike[str], base: str) -> tuple[Path, str, bool]:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(
            f"save() wants the path of a folder or of a {_SUFFIX} file; got {path!r:.80}"
        )
    where = Path(path).absolute()
    if where.suffix == _SUFFIX and where.stem:
        return where.parent, where.stem, False
    if where.suffix in (".json", ".bin", ".pt", ".pth", ".ckpt"):
        raise ConfigError(
            f"save() writes safetensors, to a folder or a {_SUFFIX} file; got {str(path)!r}"
        )
    return where, base, True


def _split(named: Sequence[Named], limit: int | None) -> list[list[Named]]:
    parts: list[list[Named]] = [[]]
    filled = 0
    for one in named:
        nbytes = _nbytes(one.tensor)
        if limit is not None and parts[-1] and filled + nbytes > limit:
            parts.append([])
            filled = 0
        parts[-1].append(one)
        filled += nbytes
    return parts


def _lay(path: Path, named: Iterable[Named]) -> PlannedFile:
    # Wide dtypes first: every tensor is then aligned to its own, which readers that map the file
    # need, and the format allows no padding.
    ordered = sorted(named, key=lambda one: -one.tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends: dict[str, tuple[int, int]] = {}
    stop = 0
    for one in ordered:
        start, stop = stop, stop + _nbytes(one.tensor)
        header[one.name] = {
            "dtype": _NAMES[one.tensor.dtype],
            "shape": list(one.tensor.shape),
            "data_offsets": [start, stop],
        }
        ends[one.name] = (start, stop)
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _HEADER_ALIGNMENT)
    first = len(raw) + 8
    places = {name: (first + start, stop - start) for name, (start, stop) in ends.items()}
    return PlannedFile(path, len(raw).to_bytes(8, "little") + raw, places)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
