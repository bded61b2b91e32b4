"""The header of one safetensors file: parsed and checked without reading any tensor.

The format: 8 bytes, little endian, the header's length; the header, a JSON object from a tensor's
name to its dtype, shape and byte range; then the bytes, without holes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dlo_core.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DTYPES", "CheckpointTensor", "read_header"]

_PREFIX = 8
_MAX_HEADER = 100_000_000
_LFS = b"version https://git-lfs"

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
        "F8_E5M2": "float8_e5m2",
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
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors of the safetensors file at ``path``.

    Raises:
        CheckpointError: The file is missing, truncated, or no safetensors file; names it and the
            key.
    """
    header, data_start, data_nbytes = _load(path)
    tensors = {
        name: _tensor(path, name, entry, data_start, data_nbytes)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_tiling(path, tensors, data_start, data_nbytes)
    return tensors


def _load(path: Path) -> tuple[dict[str, Any], int, int]:
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            prefix = file.read(_PREFIX)
            if prefix.startswith(_LFS[:_PREFIX]):
                _refuse(path, "is a Git LFS pointer and not the file itself; run: git lfs pull")
            if len(prefix) < _PREFIX:
                _refuse(path, f"has {total} bytes, too few for a header; download it again")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(total - _PREFIX, _MAX_HEADER):
                _refuse(
                    path,
                    f"says that its header has {length:,} bytes, but it has {total:,} in all; it "
                    "is "
                    "truncated or no safetensors file (a .bin or .pt must be converted)",
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique(path))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        _refuse(path, f"has a header that is a {type(header).__name__}, not an object")
    return header, _PREFIX + length, total - _PREFIX - length


def _unique(path: Path) -> Any:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
            _refuse(path, f"names {twice!r} twice in its header")
        return made

    return build


def _tensor(
    path: Path, name: str, entry: Any, data_start: int, data_nbytes: int
) -> CheckpointTensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        _refuse(path, "lacks dtype, shape or data_offsets", name)
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        _refuse(path, f"has dtype {entry['dtype']!r}; known: {', '.join(DTYPES)}", name)
    shape = entry["shape"]
    if not isinstance(shape, list) or not all(_is_count(length) for length in shape):
        _refuse(path, f"has shape {shape!r}; wanted a list of whole numbers", name)
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        _refuse(path, f"has data_offsets {offsets!r}; wanted [start, end]", name)
    start, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - start != nbytes:
        _refuse(path, f"covers {end - start:,} bytes, but {dtype} {shape} has {nbytes:,}", name)
    if end > data_nbytes:
        _refuse(
            path,
            f"ends at byte {end:,} of the data, but the file has only {data_nbytes:,}: it is "
            "truncated; "
            "download it again",
            name,
        )
    return CheckpointTensor(name, path, dtype, tuple(shape), data_start + start, nbytes)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_tiling(
    path: Path, tensors: dict[str, CheckpointTensor], data_start: int, data_nbytes: int
) -> None:
    """Refuse overlaps, holes and trailing bytes, as the format demands."""
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            what = (
                "overlaps the one before it" if tensor.offset < end else "leaves a hole before it"
            )
            _refuse(path, f"{what} (starts at byte {tensor.offset:,}, wanted {end:,})", tensor.name)
        end = tensor.offset + tensor.nbytes
    if end != data_start + data_nbytes:
        extra = data_start + data_nbytes - end
        _refuse(path, f"has {extra:,} bytes after its last tensor; download it again")


def _refuse(path: Path, text: str, name: str | None = None) -> NoReturn:
    key = f": {name!r}" if name is not None else ""
    raise CheckpointError(f"{str(path)!r}{key} {text}")
