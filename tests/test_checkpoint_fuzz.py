"""Hostile checkpoints: whatever the bytes, a clear error or the tensors that safetensors reads."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from dlo_core.checkpoint import Checkpoint
from dlo_core.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

FAST = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LONG = settings(FAST, max_examples=6_000)

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a.bias": torch.zeros(3, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3, dtype=torch.int64),
}
GOOD = save(TENSORS)
(LENGTH,) = struct.unpack("<Q", GOOD[:8])
HEADER: dict[str, Any] = json.loads(GOOD[8 : 8 + LENGTH])
DATA = GOOD[8 + LENGTH :]

numbers = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**40, 2**62, 2**63 - 1, 2**64, -(2**63)]),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
)
junk = st.recursive(
    st.one_of(numbers, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=6,
)


@st.composite
def headers(draw: st.DrawFn) -> Any:
    """Return a header with a few places edited."""
    header: Any = json.loads(json.dumps(HEADER))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*TENSORS, "new", "__metadata__", "../x", ""]))
        kind = draw(st.sampled_from(["drop", "junk", "dtype", "shape", "offsets", "copy"]))
        if kind == "drop":
            header.pop(name, None)
        elif kind == "junk":
            header[name] = draw(junk)
        elif kind == "copy":
            header[name] = dict(HEADER[draw(st.sampled_from(list(TENSORS)))])
        elif isinstance(header.get(name), dict):
            dtypes = st.sampled_from(["F32", "BF16", "F8_E4M3", "F4", "U64", "X", ""])
            edits = {
                "dtype": ("dtype", st.one_of(dtypes, junk)),
                "shape": ("shape", st.one_of(st.lists(numbers, max_size=4), junk)),
                "offsets": ("data_offsets", st.one_of(st.lists(numbers, max_size=3), junk)),
            }
            key, values = edits[kind]
            header[name][key] = draw(values)
    return header


def check(path: Path, content: bytes) -> None:
    """Check that the file gives ``CheckpointError`` or just what safetensors gives."""
    path.write_bytes(content)
    tracemalloc.start()
    refused = str(path)
    try:
        opened: Checkpoint | None = Checkpoint.open(path)
    except CheckpointError as error:
        opened, refused = None, str(error)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in refused
    assert peak < 1_000_000 + 40 * len(content), "no more memory than the file justifies"
    try:
        theirs = load_file(path)
    except (SafetensorError, OSError, KeyError, ValueError, OverflowError, RuntimeError):
        assert opened is None, "what safetensors refuses is refused"
        return
    if opened is None:
        # Stricter than safetensors in names given twice, which JSON keeps the last of.
        return
    with opened:
        assert opened.tensors.keys() == theirs.keys()
        for name, tensor in opened.tensors.items():
            out = bytearray(tensor.nbytes)
            opened.read(name, 0, tensor.nbytes, memoryview(out))
            assert tensor.dtype == theirs[name].dtype
            assert tuple(tensor.shape) == tuple(theirs[name].shape)
            whole = theirs[name].contiguous().reshape(-1).view(torch.uint8)
            assert bytes(out) == bytes(whole.tolist())


def build(header: Any, data: bytes, claimed: int | None = None) -> bytes:
    raw = json.dumps(header).encode("utf-8", "surrogatepass")
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw) if claimed is None else claimed) + raw + data


@given(headers())
@FAST
def test_an_edited_header(tmp_path: Path, header: Any) -> None:
    check(tmp_path / "x.safetensors", build(header, DATA))


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)))
@FAST
def test_a_changed_byte_and_a_cut(tmp_path: Path, at: int, value: int, length: int) -> None:
    content = bytearray(GOOD)
    content[at] = value
    check(tmp_path / "x.safetensors", bytes(content[:length]))


@given(st.binary(max_size=200))
@FAST
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    check(tmp_path / "x.safetensors", content)


@given(headers(), st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 600)), st.binary(max_size=9))
@FAST
def test_a_claimed_header_length(tmp_path: Path, header: Any, claimed: int, data: bytes) -> None:
    check(tmp_path / "x.safetensors", build(header, DATA + data, claimed))


@given(
    st.dictionaries(
        st.sampled_from(["a.weight", "b"]),
        st.one_of(
            st.sampled_from(["x.safetensors", "../x.safetensors", "/etc/passwd", "", ".", "y"]),
            junk,
        ),
    )
)
@FAST
def test_an_index_of_any_content(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / "x.safetensors").write_bytes(GOOD)
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    try:
        opened = Checkpoint.open(index)
    except CheckpointError:
        return
    assert all(tensor.path.parent == tmp_path for tensor in opened.tensors.values())
    assert set(weight_map) <= set(opened.tensors)


@pytest.mark.slow
@pytest.mark.timeout(300)
@given(headers())
@LONG
def test_many_edited_headers(tmp_path: Path, header: Any) -> None:
    check(tmp_path / "x.safetensors", build(header, DATA))
