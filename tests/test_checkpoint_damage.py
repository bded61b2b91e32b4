"""Damaged checkpoints: each is refused with its path, the key where there is one, and a hint.

B30, https://github.com/sgl-project/sglang/pull/32279: an index whose files are not all there.
B31, https://github.com/Comfy-Org/ComfyUI/issues/15602: truncated files, pointers, foreign formats.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from dlo_core.checkpoint import Checkpoint
from dlo_core.errors import CheckpointError, ConfigError, DloError

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_bytes(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file with a header of our choice."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": F32 | changes}


def good() -> bytes:
    return save({"w": torch.ones(4), "v": torch.ones(2)})


def refusal(path: Path) -> str:
    """Return the message with which ``path`` is refused."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# name: (bytes of the file, key that must be named or None, what must be said)
DAMAGED: dict[str, tuple[bytes, str | None, str]] = {
    "empty": (b"", None, "has 0 bytes, too few"),
    "four bytes": (b"\x04\0\0\0", None, "has 4 bytes, too few"),
    "length only": (b"\x08" + bytes(7), None, "truncated"),
    "length of 2^40": (file_bytes({}, length=1 << 40), None, "1,099,511,627,776 bytes, but it has"),
    "length of 2^64-1": (b"\xff" * 8 + b"{}", None, "truncated or no safetensors file"),
    "cut by 10 bytes": (good()[:-10], "w", "truncated; download it again"),
    "cut inside the header": (good()[:40], None, "truncated"),
    "2 extra bytes": (good() + b"\0\0", None, "has 2 bytes after its last tensor"),
    "git lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n",
        None,
        "git lfs pull",
    ),
    "torch zip": (b"PK\x03\x04" + bytes(100), None, "convert it"),
    "torch pickle": (b"\x80\x02}q\0" + bytes(100), None, "is a pickle; convert it"),
    "web page": (b"<!DOCTYPE html><html></html>", None, "web page"),
    "gguf": (b"GGUF" + bytes(100), None, "GGUF"),
    "header is no JSON": (file_bytes(b"{nothing}"), None, "damaged header"),
    "header is no UTF-8": (file_bytes(b'{"\xff": 1}'), None, "damaged header"),
    "header is a list": (file_bytes([1]), None, "has a list as its header; wanted a JSON object"),
    "header is a number": (file_bytes(5), None, "has a int as its header"),
    "header is too deep": (file_bytes(b"[" * 100_000), None, "damaged header"),
    "header with a giant number": (file_bytes(b"1" * 10_000), None, "damaged header"),
    "key twice": (
        file_bytes(f'{{"w": {json.dumps(F32)}, "w": {json.dumps(F32)}}}'.encode(), bytes(8)),
        "w",
        "is there twice",
    ),
    "entry is no object": (file_bytes({"w": [1]}), "w", "dtype, shape, data_offsets"),
    "entry lacks its shape": (
        file_bytes({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
        "w",
        "dtype, shape, data_offsets",
    ),
    "unknown dtype": (file_bytes(entry(dtype="F4"), bytes(8)), "w", "has dtype 'F4'; dlo knows"),
    "dtype is no string": (file_bytes(entry(dtype=[1]), bytes(8)), "w", "has dtype [1]"),
    "negative shape": (file_bytes(entry(shape=[-2]), bytes(8)), "w", "has shape [-2]"),
    "fractional shape": (file_bytes(entry(shape=[2.0]), bytes(8)), "w", "has shape [2.0]"),
    "boolean shape": (file_bytes(entry(shape=[True, 2]), bytes(8)), "w", "has shape [True, 2]"),
    "shape is no list": (file_bytes(entry(shape=2), bytes(8)), "w", "has shape 2"),
    "shape is too large": (file_bytes(entry(shape=[1 << 64, 0])), "w", "has shape [184467"),
    "product is too large": (
        file_bytes(entry(shape=[1 << 40] * 5000, data_offsets=[0, 8]), bytes(8)),
        "w",
        "the file is damaged",
    ),
    "negative offset": (file_bytes(entry(data_offsets=[-8, 0]), bytes(8)), "w", "data_offsets"),
    "offsets backwards": (file_bytes(entry(data_offsets=[8, 0]), bytes(8)), "w", "data_offsets"),
    "three offsets": (file_bytes(entry(data_offsets=[0, 4, 8]), bytes(8)), "w", "data_offsets"),
    "offsets behind the end": (
        file_bytes(entry(data_offsets=[1 << 50, (1 << 50) + 8]), bytes(8)),
        "w",
        "the file has only 8",
    ),
    "fewer bytes than the shape has": (
        file_bytes(entry(shape=[3]), bytes(8)),
        "w",
        "has 8 bytes by its data_offsets, but by its shape [3]",
    ),
    "overlap": (
        file_bytes({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, bytes(12)),
        "b",
        "overlaps the one before it",
    ),
    "the same bytes for two": (file_bytes({"a": F32, "b": F32}, bytes(8)), "b", "overlaps"),
    "hole": (
        file_bytes({"a": F32, "b": F32 | {"data_offsets": [12, 20]}}, bytes(20)),
        "b",
        "leaves a hole to the one before it: it starts at byte 12 of the data, wanted 8",
    ),
    "hole at the start": (
        file_bytes(entry(data_offsets=[4, 12]), bytes(12)),
        "w",
        "leaves a hole",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_refused_by_path_key_and_hint(damage: str, tmp_path: Path) -> None:
    content, key, says = DAMAGED[damage]
    path = write(tmp_path / "x.safetensors", content)
    for given_path in (path, tmp_path):
        message = refusal(given_path)
        assert repr(str(path)) in message
        assert says in message
        assert key is None or repr(key) in message
        assert len(message) < 1000


@pytest.mark.parametrize("length", [0x3C, 0x0280])
def test_a_good_length_that_begins_like_a_stranger_is_good(tmp_path: Path, length: int) -> None:
    """A header of 60 bytes makes the file begin like a web page, one of 640 like a pickle."""
    header = json.dumps({"w": F32}, separators=(",", ":")).encode().ljust(length)
    path = write(tmp_path / "x.safetensors", file_bytes(header, bytes(8)))
    assert Checkpoint.open(path).tensors["w"].nbytes == 8


def test_a_header_beyond_the_limit_of_the_format_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(1 << 31)  # sparse
    assert "more than the 100,000,000" in refusal(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_what_safetensors_refuses_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Compare with the reference on files with a few bytes changed, cut or added."""
    content = bytearray(save({"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.int16)}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.sampled_from(b'\0\xff{}[],:"0129aF-.'))
    cut = data.draw(st.integers(0, 3))
    content = content[: len(content) - cut] + bytes(data.draw(st.integers(0, 2)))
    path = write(tmp_path_factory.mktemp("fuzz") / "x.safetensors", bytes(content))
    try:
        ours = {name: t.shape for name, t in Checkpoint.open(path).tensors.items()}
    except DloError:
        return
    try:
        theirs = {name: tuple(t.shape) for name, t in load(bytes(content)).items()}
    except (SafetensorError, KeyError) as error:
        # Only what cannot make wrong numbers may differ.
        assert re.search("metadata|start of header|InvalidHeaderStart", str(error), re.I)  # noqa: PT017
        return
    assert ours == theirs


# --- paths ------------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    message = refusal(tmp_path / "absent")
    assert f"there is no checkpoint at {str(tmp_path / 'absent')!r}" in message


def test_a_hub_name_is_not_a_path() -> None:
    assert "must be downloaded first" in refusal(Path("Wan-AI/Wan2.1-T2V-14B-Diffusers"))


def test_a_path_with_a_null_byte() -> None:
    assert "there is no checkpoint" in refusal(Path("a\0b"))


@pytest.mark.parametrize("value", [5, {"w": torch.ones(1)}, None])
def test_no_path_at_all(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"wants the path .* got a"):
        Checkpoint.open(value)


def test_an_empty_folder(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert repr(str(tmp_path)) in message
    assert "has no .safetensors file and no index" in message


def test_a_folder_of_pickles(tmp_path: Path) -> None:
    write(tmp_path / "pytorch_model.bin", b"x")
    assert "'pytorch_model.bin' is a pickle: convert it" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_pickle(tmp_path: Path, name: str) -> None:
    assert "is a pickle by its name; convert it" in refusal(write(tmp_path / name, b"x"))


def test_a_pipeline_folder_is_told_which_of_its_folders_to_give(tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "transformer").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "transformer" / "model.safetensors")
    assert "its folder 'transformer' has one: give that path" in refusal(tmp_path)


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    message = refusal(tmp_path)
    assert "x.safetensors" in message
    assert "is a folder; wanted a file" in message


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    assert "is no regular file" in refusal(tmp_path / "x.safetensors")


def test_a_forbidden_file_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.safetensors", good())

    def refuse_open(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse_open)
    assert "Permission denied" in refusal(path)


# --- several files ----------------------------------------------------------------------------


def test_a_key_in_two_files_names_both(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"w": torch.ones(1).half()}, tmp_path / "model.fp16.safetensors")
    message = refusal(tmp_path)
    assert "'w' is both in 'model.fp16.safetensors' and in 'model.safetensors'" in message


def test_a_gap_in_numbered_files_is_seen_without_an_index(tmp_path: Path) -> None:
    for number in (1, 3):
        save_file({f"w{number}": torch.ones(1)}, tmp_path / f"m-0000{number}-of-00003.safetensors")
    assert "lacks 'm-00002-of-00003.safetensors', one of 3 files" in refusal(tmp_path)


def index_of(folder: Path, weight_map: Any, name: str = "m.safetensors.index.json") -> Path:
    content = weight_map if isinstance(weight_map, bytes) else json.dumps(weight_map).encode()
    return write(folder / name, content)


def test_two_indexes_are_ambiguous(tmp_path: Path) -> None:
    for name in ("m.safetensors.index.json", "m.safetensors.index.fp16.json"):
        index_of(tmp_path, {"weight_map": {"w": "m-1.safetensors"}}, name)
    message = refusal(tmp_path)
    assert "'m.safetensors.index.fp16.json', 'm.safetensors.index.json'" in message
    assert "give the path of the one you mean" in message


@pytest.mark.parametrize("rival", ["m.safetensors", "m.fp16.safetensors"])
def test_an_index_beside_a_whole_file_is_ambiguous(tmp_path: Path, rival: str) -> None:
    index = index_of(tmp_path, {"weight_map": {"w": "m-1.safetensors"}})
    save_file({"w": torch.ones(1)}, tmp_path / "m-1.safetensors")
    save_file({"w": torch.zeros(1)}, tmp_path / rival)
    assert f"('m.safetensors.index.json', {rival!r})" in refusal(tmp_path)
    assert Checkpoint.open(index).tensors.keys() == {"w"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        ([1], "has no weight_map"),
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": ["w"]}, "has no weight_map"),
        ({"weight_map": {"w": 5}}, "'w' gives 5 as its file"),
        ({"weight_map": {"w": ""}}, "'w' gives '' as its file"),
        ({"weight_map": {"w": "/etc/x.safetensors"}}, "'w' gives the file '/etc/x.safetensors'"),
        ({"weight_map": {"w": "../x.safetensors"}}, "outside of the folder"),
        ({"weight_map": {"w": "a/../../x.safetensors"}}, "outside of the folder"),
        ({"weight_map": {"w": "a\0.safetensors"}}, "'w' gives the file"),
        ({"weight_map": {"w": "m-1.bin"}}, "which is no .safetensors; convert it"),
        ({"weight_map": {"w": "gone.safetensors"}}, "wants the file 'gone.safetensors' ('w')"),
        ({"weight_map": {"w": "x" * 5000 + ".safetensors"}}, "not there"),
    ],
)
def test_broken_index_is_refused(tmp_path: Path, content: Any, says: str) -> None:
    (tmp_path / "folder").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    index = index_of(tmp_path / "folder", content)
    for given_path in (index, index.parent):
        message = refusal(given_path)
        assert repr(str(index)) in message
        assert says in message


def test_a_missing_shard_is_named_with_a_key(tmp_path: Path) -> None:
    """B30: the indexed file that is not there left its weights uninitialised."""
    save_file({"a": torch.ones(4, 4)}, tmp_path / "m-1.safetensors")
    files = {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"}
    index_of(tmp_path, {"weight_map": files})
    message = refusal(tmp_path)
    assert "wants the file 'm-2.safetensors' ('b' and 1 more): not there" in message


def test_a_dangling_link_is_a_missing_shard(tmp_path: Path) -> None:
    index_of(tmp_path, {"weight_map": {"a": "m-1.safetensors"}})
    (tmp_path / "m-1.safetensors").symlink_to(tmp_path / "blob")
    assert "wants the file 'm-1.safetensors' ('a'): not there" in refusal(tmp_path)


def test_a_key_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4, 4)}, tmp_path / "m-1.safetensors")
    index_of(tmp_path, {"weight_map": {"a": "m-1.safetensors", "b": "m-1.safetensors"}})
    assert "says that 'm-1.safetensors' has 'b': it has not" in refusal(tmp_path)


def test_a_key_in_two_shards_is_ambiguous_whatever_the_index_says(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(1)}, tmp_path / "m-1.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "m-2.safetensors")
    index_of(tmp_path, {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}})
    assert "'b' is both in 'm-1.safetensors' and in 'm-2.safetensors'" in refusal(tmp_path)


def test_a_damaged_shard_is_named_and_not_the_index(tmp_path: Path) -> None:
    path = write(tmp_path / "m-1.safetensors", good()[:-10])
    index_of(tmp_path, {"weight_map": {"w": "m-1.safetensors"}})
    assert repr(str(path)) in refusal(tmp_path)
