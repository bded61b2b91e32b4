"""Packing a checkpoint: each bf16 tensor that gets smaller becomes a segment, bit for bit.

A tensor is in memory at a time. The files get hidden names until all of them are written, and
nothing that exists is replaced. See ``packed_format.py``, and ``docs/packed.md`` for the metadata.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from dlo_core.checkpoint import Checkpoint
from dlo_core.checkpoint_files import find_files
from dlo_core.coder import codec_of
from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.file_reads import Scratch
from dlo_core.packed import decode_segment, measure, padded, write_segment
from dlo_core.packed_format import VERSION
from dlo_core.progress import reporting
from dlo_core.registry import resolve
from dlo_core.safetensors_header import DTYPES, PACKED_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend
    from dlo_core.progress import LoadProgress, Report
    from dlo_core.safetensors_header import CheckpointTensor, SafetensorsFile

__all__ = ["Packed", "pack_checkpoint"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_RATIO = 0.9
_PREFIX = 8


@dataclass(frozen=True, slots=True)
class Packed:
    """What packing a checkpoint came to.

    Attributes:
        path: The new checkpoint, as ``checkpoint=`` takes it.
        num_tensors: All tensors.
        num_packed: Those that are packed; the others lie there as they were.
        nbytes: Bytes of all tensors.
        packed_nbytes: Bytes that they take now.
        verified: Whether each was decoded and compared.
    """

    path: Path
    num_tensors: int
    num_packed: int
    nbytes: int
    packed_nbytes: int
    verified: bool

    @property
    def ratio(self) -> float:
        """Bytes now to bytes before."""
        return self.packed_nbytes / self.nbytes if self.nbytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values that JSON can hold."""
        return asdict(self) | {"path": str(self.path), "ratio": self.ratio}


def pack_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | Backend = "cpu",
    verify: bool = True,
    progress: bool | Callable[[LoadProgress], None] = False,
) -> Packed:
    """Write a packed copy of a safetensors checkpoint.

    Args:
        path: A ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either.
        out: A file for a file, else a folder, which must not exist; None: beside the source, its
            name with ``-packed``.
        device: Where the tensors are coded.
        verify: Whether each is decoded again and compared.
        progress: As in ``enable``.

    Raises:
        ConfigError: ``out`` exists, or is of the wrong kind.
        CheckpointError: The source cannot be read or is packed already, or the copy cannot be
            written; nothing is left then.
        BackendError: There is no usable backend for ``device``.
    """
    source = Path(path)
    files = find_files(source)
    for file in files:
        if PACKED_KEY in file.metadata:
            raise CheckpointError(f"{str(file.path)!r} is packed already")
    target = _target(source, out)
    packer = _Packer(resolve(device), verify=verify)
    copy = _Copy(source, target)
    try:
        total = sum(tensor.nbytes for file in files for tensor in file.tensors.values())
        with (
            Checkpoint(source, files) as checkpoint,
            reporting(progress, total, "packing") as report,
        ):
            for file in files:
                copy.write(file, checkpoint, packer, report)
            checkpoint.check_unchanged()
            report.finish()
        result = copy.commit()
    except OSError as error:
        raise CheckpointError(
            f"cannot write {str(target)!r}: {error.strerror or error}; nothing was left there"
        ) from error
    finally:
        copy.discard()
    count = sum(len(file.tensors) for file in files)
    return Packed(result, count, copy.num_packed, total, copy.nbytes, verify)


def _target(source: Path, out: str | os.PathLike[str] | None) -> Path:
    single = source.is_file() and source.suffix != ".json"
    if out is None:
        base = source.absolute() if single or source.is_dir() else source.absolute().parent
        suffix = base.suffix if single else ""
        target = base.with_name(f"{base.name.removesuffix(suffix)}-packed{suffix}")
    else:
        target = Path(out).absolute()
    if single and target.suffix != ".safetensors":
        raise ConfigError(f"out= for one file must end in .safetensors; got {str(target)!r}")
    if not single and target.suffix == ".safetensors":
        raise ConfigError(
            f"out= for a folder or an index is a folder, whose name must not end in .safetensors; "
            f"got {str(target)!r}"
        )
    if os.path.lexists(target):
        raise ConfigError(f"{str(target)!r} exists; nothing is replaced: give another out=")
    return target


class _Packer:
    """Codes tensors on one device."""

    def __init__(self, backend: Backend, *, verify: bool) -> None:
        self._backend = backend
        self._codec = codec_of(backend)
        self._verify = verify

    def pack(self, tensor: CheckpointTensor, data: torch.Tensor) -> torch.Tensor | None:
        """Return the segment of a tensor's bytes on the host, or None where it is not worth it."""
        if tensor.dtype != torch.bfloat16 or not tensor.nbytes:
            return None
        run = torch.zeros(padded(tensor.nbytes), dtype=torch.uint8, device=self._backend.device)
        run[: tensor.nbytes].copy_(data)
        index = measure(self._codec, run, tensor.nbytes, [(0, tensor.nbytes)])
        if index.header.nbytes > _MOST_RATIO * tensor.nbytes:
            return None
        row = torch.empty(index.header.nbytes, dtype=torch.uint8, device=self._backend.device)
        write_segment(self._codec, run, index, row)
        if self._verify:
            again = torch.empty_like(run)
            decode_segment(self._codec, row, again)
            if not torch.equal(again, run):
                raise CheckpointError(
                    f"{tensor.name!r} does not come out as it went in; this is a fault of dlo or "
                    "of the device: nothing was written"
                )
        return row.cpu()


class _Copy:
    """The files of the new checkpoint, hidden until all are there."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source.absolute()
        self._folder = self._source if source.is_dir() else self._source.parent
        self._target = target
        self._single = target.suffix == ".safetensors"
        # Processes in containers may have one number and one disk.
        self._hidden = target.with_name(f".{target.name}.{uuid4().hex[:8]}.part")
        self.num_packed = 0
        self.nbytes = 0

    def write(
        self, file: SafetensorsFile, checkpoint: Checkpoint, packer: _Packer, report: Report
    ) -> None:
        """Write the copy of one file."""
        path = self._hidden
        if not self._single:
            # An index may name files in folders below its own.
            path = path / file.path.relative_to(self._folder)
            path.parent.mkdir(parents=True, exist_ok=True)
        # No offset of the copy is as long as the longest number, nor any segment's length.
        room = len(_header(file, {}, dict.fromkeys(file.tensors, (_LONGEST, _LONGEST))))
        places: dict[str, tuple[int, int]] = {}
        rows: dict[str, int] = {}
        with path.open("xb") as out:
            out.seek(room)
            at = 0
            for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
                data = torch.empty(tensor.nbytes, dtype=torch.uint8)
                _read(checkpoint, tensor, data)
                row = packer.pack(tensor, data)
                kept = data if row is None else row
                out.write(memoryview(kept.numpy()))  # type: ignore[arg-type]
                places[tensor.name] = (at, at + kept.numel())
                at += kept.numel()
                if row is not None:
                    rows[tensor.name] = row.numel()
                report.add(tensor.nbytes)
            head = _header(file, rows, places)
            out.seek(0)
            # A header may end in spaces.
            filled = head[_PREFIX:].ljust(room - _PREFIX)
            out.write(len(filled).to_bytes(_PREFIX, "little") + filled)
            out.flush()
            os.fsync(out.fileno())
        self.num_packed += len(rows)
        self.nbytes += at

    def commit(self) -> Path:
        """Give everything its name; return the checkpoint's path."""
        result = self._target
        if not self._single:
            for beside in sorted(self._folder.glob("*.json")):
                if beside.name.endswith(".index.json") and self._source == self._folder:
                    self._copy_index(beside)
                elif beside == self._source:
                    self._copy_index(beside)
                    result = self._target / beside.name
                elif beside.name == "config.json":
                    shutil.copyfile(beside, self._hidden / beside.name)
        if os.path.lexists(self._target):
            raise CheckpointError(f"{str(self._target)!r} was made by somebody else meanwhile")
        self._hidden.rename(self._target)
        return result

    def _copy_index(self, index: Path) -> None:
        told = json.loads(index.read_bytes())
        if isinstance(told.get("metadata"), dict) and "total_size" in told["metadata"]:
            told["metadata"]["total_size"] = self.nbytes
        (self._hidden / index.name).write_text(json.dumps(told, indent=2) + "\n")

    def discard(self) -> None:
        """Remove what did not get its name. Idempotent."""
        if self._hidden.is_dir():
            shutil.rmtree(self._hidden, ignore_errors=True)
        with suppress(OSError):
            self._hidden.unlink()


_LONGEST = 10**18


def _header(
    file: SafetensorsFile, rows: dict[str, int], places: dict[str, tuple[int, int]]
) -> bytes:
    """Return the length and the header of a copy; with no ``rows``, at its longest."""
    entries: dict[str, Any] = {}
    packed = {}
    for name, tensor in file.tensors.items():
        shape: list[int] = list(tensor.shape)
        dtype = _NAMES[tensor.dtype]
        if name in rows or (not rows and places[name][0] == _LONGEST):
            packed[name] = {"dtype": dtype, "shape": shape}
        entries[name] = {
            "dtype": "U8" if name in rows else dtype,
            "shape": [rows[name]] if name in rows else shape,
            "data_offsets": list(places[name]),
        }
        if not rows and places[name][0] == _LONGEST:
            entries[name]["shape"] = [*shape, _LONGEST]
    told = json.dumps({"version": VERSION, "tensors": packed}, separators=(",", ":"))
    metadata = file.metadata | {PACKED_KEY: told}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(_PREFIX, "little") + text


def _read(checkpoint: Checkpoint, tensor: CheckpointTensor, data: torch.Tensor) -> None:
    if tensor.nbytes:
        memory = memoryview(data.numpy())  # type: ignore[arg-type]
        checkpoint.fill([(tensor.name, memory)], tensor.offset, Scratch())
