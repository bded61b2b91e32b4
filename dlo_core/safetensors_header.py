"""The header of one safetensors file: parsed and checked without reading any tensor.

The format: 8 bytes, little endian, the header's length; the header, a JSON object from a tensor's
name to its dtype, shape and byte range; then the bytes, without holes.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dlo_core.errors import CheckpointError
from dlo_core.packed_format import VERSION, count_chunks, index_nbytes
from dlo_core.page_cache import advise

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["DTYPES", "PACKED_KEY", "CheckpointTensor", "SafetensorsFile", "read_header", "refuse"]

PACKED_KEY = "dlo.packed"
_PREFIX = 8
_MAX_HEADER = 100_000_000  # the format's own limit
_TOO_LARGE = 1 << 63
_FIELDS = ("dtype", "shape", "data_offsets")

# What is often found in place of a safetensors file, by its first bytes.
_STRANGERS = {
    b"version ": "is a Git LFS pointer and not the file itself; run: git lfs pull",
    b"PK\x03\x04": "is a zip archive, as torch.save() writes; convert it: "
    "safetensors.torch.save_file(torch.load(path, weights_only=True), new_path)",
    b"\x80\x02": "is a pickle; convert it: "
    "safetensors.torch.save_file(torch.load(path, weights_only=True), new_path)",
    b"GGUF": "is a GGUF file; dlo reads safetensors",
    b"<": "looks like a web page that was saved in place of the file; download it again",
}

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name)
    for name, torch_name in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, torch_name)
}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor as it lies on disk, row-major.

    Attributes:
        name: Its key.
        path: The file.
        dtype: Its dtype.
        shape: Its shape.
        offset: First byte in the file.
        nbytes: Length in bytes.
        packed_nbytes: Bytes of the segment in the file, where the tensor is packed; 0: it lies
            there as it is. See ``packed_format.py``.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    packed_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One file as its header describes it.

    Attributes:
        path: The file.
        nbytes: Its size.
        mtime_ns: When it was last written to, as the file system says.
        place: Device and number by which the file system knows it.
        tensors: By key, in the header's order.
        metadata: What the file says of itself.
    """

    path: Path
    nbytes: int
    mtime_ns: int
    place: tuple[int, int]
    tensors: dict[str, CheckpointTensor]
    metadata: dict[str, str]


def read_header(path: Path) -> SafetensorsFile:
    """Return what the safetensors file at ``path`` holds.

    Raises:
        CheckpointError: The file is missing, truncated, or no safetensors file; names it and the
            key.
    """
    status, raw = _load(path)
    header = _parse(path, raw)
    start = _PREFIX + len(raw)
    span = (start, status.st_size - start)
    metadata = _check_metadata(path, header.pop("__metadata__", {}))
    tensors = {name: _tensor(path, name, entry, span) for name, entry in header.items()}
    _check_tiling(path, tensors.values(), span)
    if PACKED_KEY in metadata:
        tensors |= _packed(path, tensors, metadata[PACKED_KEY])
    place = status.st_dev, status.st_ino
    return SafetensorsFile(path, status.st_size, status.st_mtime_ns, place, tensors, metadata)


def _packed(
    path: Path, tensors: dict[str, CheckpointTensor], text: str
) -> dict[str, CheckpointTensor]:
    """Return the packed tensors as what they hold."""
    try:
        told = json.loads(text)
        version, entries = told["version"], dict(told["tensors"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{str(path)!r} has damaged metadata {PACKED_KEY!r} ({error!r}); pack it again"
        ) from error
    if version != VERSION:
        refuse(path, f"was packed in version {version!r:.20}, this dlo reads {VERSION}")
    made = {}
    for name, entry in entries.items():
        stored, shape = tensors.get(name), entry.get("shape") if isinstance(entry, dict) else None
        if stored is None or stored.dtype != torch.uint8 or len(stored.shape) != 1:
            refuse(path, "is packed by the metadata, but is no run of bytes in the file", name)
        if shape is None or entry.get("dtype") != "BF16" or not _are_counts(shape):
            refuse(path, f"is packed as {entry!r:.80}; wanted BF16 and a shape", name)
        nbytes = _nbytes(shape, torch.bfloat16)
        if index_nbytes(count_chunks(nbytes), 0) > stored.nbytes:
            refuse(path, f"is packed in {stored.nbytes:,} bytes, too few for {shape}", name)
        made[name] = replace(
            stored,
            dtype=torch.bfloat16,
            shape=tuple(shape),
            nbytes=nbytes,
            packed_nbytes=stored.nbytes,
        )
    return made


def _check_metadata(path: Path, metadata: Any) -> dict[str, str]:
    fits = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    # Null stands for no metadata.
    if not fits and metadata is not None:
        refuse(path, "has a __metadata__ that is no object of strings; the file is damaged")
    return metadata or {}


def refuse(path: Path, text: str, name: str | None = None) -> NoReturn:
    """Raise the error about a file, or about one key in it.

    Raises:
        CheckpointError: Always.
    """
    key = f": {name!r}" if name is not None else ""
    raise CheckpointError(f"{str(path)!r}{key} {text}")


def _load(path: Path) -> tuple[os.stat_result, bytes]:
    """Return the file's status and the bytes of its header, no more than the file has."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            refuse(path, f"is {'a folder' if path.is_dir() else 'no regular file'}; wanted a file")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            # Nothing behind the header is wanted yet.
            advise(file.fileno(), 0, 0, "POSIX_FADV_RANDOM")
            prefix = file.read(_PREFIX)
            length = _header_nbytes(path, prefix, status.st_size)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if len(raw) < length:
        refuse(path, "became shorter while its header was read; nothing must write to it")
    return status, raw


def _header_nbytes(path: Path, prefix: bytes, total: int) -> int:
    if len(prefix) < _PREFIX:
        refuse(path, f"has {total} bytes, too few for a safetensors file; download it again")
    length = int.from_bytes(prefix, "little")
    if length <= min(total - _PREFIX, _MAX_HEADER):
        return length
    # Only now: a good length may begin with the same bytes.
    for magic, text in _STRANGERS.items():
        if prefix.startswith(magic):
            refuse(path, text)
    if length <= total - _PREFIX:
        refuse(
            path,
            f"says that its header has {length:,} bytes, more than the {_MAX_HEADER:,} that the "
            "format allows; it is damaged or no safetensors file",
        )
    refuse(
        path,
        f"says that its header has {length:,} bytes, but it has {total:,} in all: it is truncated "
        "or no safetensors file; download it again",
    )


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{str(path)!r} has a damaged header ({error}); download it again"
        ) from error
    if not isinstance(header, dict):
        refuse(path, f"has a {type(header).__name__} as its header; wanted a JSON object")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"{key!r} is there twice")
        made[key] = value
    return made


def _tensor(path: Path, name: str, entry: Any, span: tuple[int, int]) -> CheckpointTensor:
    """Check one entry; ``span`` is where the file's data starts, and its length."""
    data_start, data_nbytes = span
    if not isinstance(entry, dict) or any(field not in entry for field in _FIELDS):
        refuse(path, f"has no {', '.join(_FIELDS)} in the header; got {entry!r:.80}", name)
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        refuse(path, f"has dtype {entry['dtype']!r:.80}; dlo knows {', '.join(DTYPES)}", name)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape):
        refuse(path, f"has shape {shape!r:.80}; wanted a list of whole numbers", name)
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(path, f"has data_offsets {offsets!r:.80}; wanted [start, end]", name)
    start, end = offsets
    nbytes = _nbytes(shape, dtype)
    if end - start != nbytes:
        refuse(
            path,
            f"has {end - start:,} bytes by its data_offsets, but by its shape {shape!r:.80} and "
            f"{dtype} it has {nbytes:,}; the file is damaged",
            name,
        )
    if end > data_nbytes:
        refuse(
            path,
            f"ends at byte {end:,} of the data, but the file has only {data_nbytes:,}: it is "
            "truncated; download it again",
            name,
        )
    return CheckpointTensor(name, path, dtype, tuple(shape), data_start + start, nbytes)


def _are_counts(value: Any) -> bool:
    # bool is an int to Python, but not to JSON.
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < _TOO_LARGE for item in value
    )


def _nbytes(shape: list[int], dtype: torch.dtype) -> int:
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
        if nbytes >= _TOO_LARGE:  # before a hostile header makes numbers of a million digits
            return _TOO_LARGE
    return nbytes


def _check_tiling(path: Path, tensors: Iterable[CheckpointTensor], span: tuple[int, int]) -> None:
    """Refuse overlaps, holes and trailing bytes, as the format demands."""
    data_start, data_nbytes = span
    end = data_start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a hole to"
            refuse(
                path,
                f"{what} the one before it: it starts at byte {tensor.offset - data_start:,} of "
                f"the data, wanted {end - data_start:,}; the file is damaged",
                tensor.name,
            )
        end += tensor.nbytes
    extra = data_start + data_nbytes - end
    if extra:
        refuse(path, f"has {extra:,} bytes after its last tensor; download it again")
