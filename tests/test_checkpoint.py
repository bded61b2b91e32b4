"""Reading a checkpoint: which tensors it has, and their bytes by range."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from toys import same_bits

from dlo_core.checkpoint import Checkpoint
from dlo_core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return random bits; of a bool only the two that there are."""
    gen = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=gen)
    return raw.to(torch.uint8).view(dtype).view(shape)


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a CPU tensor."""
    array: Any = tensor.numpy()
    return memoryview(array)


def open_files(folder: Path) -> list[int]:
    """Return this process's descriptors of files in ``folder``."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        # The descriptor that listed them is gone already.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(str(folder)):
                found.append(int(number))
    return found


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return the whole tensor."""
    known = checkpoint.tensors[name]
    raw = torch.empty(known.nbytes, dtype=torch.uint8)
    checkpoint.read(name, 0, known.nbytes, memory(raw))
    return raw.view(known.dtype).view(known.shape)


def save_index(folder: Path, shards: dict[str, dict[str, torch.Tensor]], name: str) -> Path:
    """Write shards and their index, as Hugging Face does."""
    weight_map = {key: file for file, tensors in shards.items() for key in tensors}
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    index = folder / name
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        f"block.{number}.{str(dtype).removeprefix('torch.')}": random_tensor(
            dtype, 3, 5, seed=number
        )
        for number, dtype in enumerate(DTYPES)
    }


def test_every_dtype_is_read_bit_for_bit(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "all.safetensors")
    with Checkpoint.open(tmp_path / "all.safetensors") as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            known = checkpoint.tensors[name]
            assert (known.dtype, known.shape) == (tensor.dtype, tuple(tensor.shape))
            assert same_bits(read_tensor(checkpoint, name), tensor)


def test_scalars_and_empty_tensors_are_tensors_too(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(7.5),
        "empty": torch.empty(0, 3),
        "last": torch.empty(2, 0, dtype=torch.bfloat16),
        "one": torch.ones(1, dtype=torch.int8),
    }
    save_file(tensors, tmp_path / "odd.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            assert same_bits(read_tensor(checkpoint, name), tensor)
        assert checkpoint.tensors["scalar"].shape == ()
        assert checkpoint.tensors["empty"].nbytes == 0


def test_a_file_without_tensors_is_an_empty_checkpoint(tmp_path: Path) -> None:
    save_file({}, tmp_path / "none.safetensors", metadata={"format": "pt"})
    assert dict(Checkpoint.open(tmp_path).tensors) == {}


def test_opening_reads_no_tensor_and_opens_no_file_for_long(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert not open_files(tmp_path)
    assert checkpoint.bytes_read == 0
    assert "0 open" in repr(checkpoint)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_byte_range_is_the_slice_of_the_whole(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("range")
    tensor = random_tensor(torch.bfloat16, 7, 13)
    save_file({"before": torch.ones(3), "w": tensor}, folder / "a.safetensors")
    raw = bytes(tensor.view(torch.uint8).flatten().tolist())
    start = data.draw(st.integers(0, len(raw)))
    stop = data.draw(st.integers(start, len(raw)))
    out = bytearray(stop - start)
    with Checkpoint.open(folder) as checkpoint:
        checkpoint.read("w", start, stop, memoryview(out))
        assert bytes(out) == raw[start:stop]
        assert checkpoint.bytes_read == stop - start


def test_typed_memory_is_filled_by_its_bytes(tmp_path: Path) -> None:
    save_file({"w": torch.arange(4.0)}, tmp_path / "a.safetensors")
    out = torch.zeros(2, 2)
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.read("w", 0, 16, memory(out))
    assert torch.equal(out, torch.tensor([[0.0, 1.0], [2.0, 3.0]]))


def test_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(torch.uint8, 1000)
    save_file({"w": tensor}, tmp_path / "a.safetensors")
    asked: list[int] = []
    preadv = os.preadv

    def short(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        asked.append(len(buffers[0]))
        return preadv(file, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset)

    monkeypatch.setattr(os, "preadv", short)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert same_bits(read_tensor(checkpoint, "w"), tensor)
    assert asked[:4] == [1000, 500, 250, 125]


def test_many_threads_read_at_once_and_every_byte_is_counted(tmp_path: Path) -> None:
    tensors = {f"w{n}": random_tensor(torch.int32, 500, seed=n) for n in range(8)}
    save_index(
        tmp_path,
        {
            "a-00001-of-00002.safetensors": dict(list(tensors.items())[:4]),
            "a-00002-of-00002.safetensors": dict(list(tensors.items())[4:]),
        },
        "a.safetensors.index.json",
    )
    wrong: list[str] = []

    def work(seed: int) -> None:
        order = random.Random(seed)
        for name in order.choices(sorted(tensors), k=50):
            if not same_bits(read_tensor(checkpoint, name), tensors[name]):
                wrong.append(name)

    with Checkpoint.open(tmp_path) as checkpoint:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert checkpoint.bytes_read == 8 * 50 * 2000
        assert "2 open" in repr(checkpoint)


def test_close_gives_descriptors_back_and_a_later_read_opens_again(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    read_tensor(checkpoint, "w")
    (opened,) = open_files(tmp_path)
    assert not os.get_inheritable(opened)
    checkpoint.close()
    checkpoint.close()
    assert not open_files(tmp_path)
    assert torch.equal(read_tensor(checkpoint, "w"), torch.ones(4))
    checkpoint.close()


def test_close_during_a_read_in_another_thread_does_not_swap_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    preadv = os.preadv

    def closing(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        checkpoint.close()
        with (tmp_path / "other").open("wb+") as other:
            assert other.fileno() != file
            return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", closing)
    assert torch.equal(read_tensor(checkpoint, "w"), torch.ones(4))


def test_forgotten_checkpoint_closes_its_files(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    read_tensor(checkpoint, "w")
    del checkpoint
    assert not open_files(tmp_path)


def test_a_string_path_works(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    with Checkpoint.open(str(tmp_path / "a.safetensors")) as checkpoint:
        assert checkpoint.path == tmp_path / "a.safetensors"
        assert checkpoint.tensors["w"].path == tmp_path / "a.safetensors"


def test_tensors_cannot_be_changed(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    tensors: Any = Checkpoint.open(tmp_path).tensors
    with pytest.raises(TypeError):
        tensors["w"] = None


@pytest.mark.parametrize(
    ("start", "stop", "room"), [(0, 17, 17), (-1, 4, 5), (8, 4, 0), (0, 4, 5), (0, 4, 3)]
)
def test_bytes_that_are_not_there_cannot_be_asked_for(
    tmp_path: Path, start: int, stop: int, room: int
) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        with pytest.raises(ConfigError, match="'w' has 16 bytes"):
            checkpoint.read("w", start, stop, memoryview(bytearray(room)))
        assert checkpoint.bytes_read == 0


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="has no 'v'"):
        Checkpoint.open(tmp_path).read("v", 0, 4, memoryview(bytearray(4)))


# --- folders and indexes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors.index.fp16.json",
        "diffusion_pytorch_model.fp16.safetensors.index.json",
    ],
)
@pytest.mark.parametrize("by_folder", [True, False])
def test_an_index_is_followed_by_any_of_its_usual_names(
    tmp_path: Path, name: str, by_folder: bool
) -> None:
    first, second = {"a": torch.ones(2)}, {"b": torch.zeros(3)}
    shards = {"m-1.safetensors": first, "m-2.safetensors": second}
    index = save_index(tmp_path, shards, name)
    with Checkpoint.open(tmp_path if by_folder else index) as checkpoint:
        assert checkpoint.tensors.keys() == {"a", "b"}
        assert torch.equal(read_tensor(checkpoint, "b"), torch.zeros(3))


def test_a_folder_without_an_index_is_all_its_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "y.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "._x.safetensors").write_bytes(b"what macOS leaves behind")
    assert Checkpoint.open(tmp_path).tensors.keys() == {"a", "b"}


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    save_index(tmp_path, {"m-1.safetensors": {"a": torch.ones(2)}}, "m.safetensors.index.json")
    save_file({"other": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert Checkpoint.open(tmp_path).tensors.keys() == {"a"}


def test_keys_that_the_index_forgot_are_there_as_for_hugging_face(tmp_path: Path) -> None:
    index = save_index(
        tmp_path, {"m-1.safetensors": {"a": torch.ones(2)}}, "m.safetensors.index.json"
    )
    save_file({"a": torch.ones(2), "extra": torch.ones(1)}, tmp_path / "m-1.safetensors")
    assert Checkpoint.open(index).tensors.keys() == {"a", "extra"}


def test_links_out_of_the_folder_are_followed_as_in_the_hugging_face_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    index = save_index(blobs, {"m-1.safetensors": {"a": torch.ones(2)}}, "m.safetensors.index.json")
    for name in ("m-1.safetensors", index.name):
        (snapshot / name).symlink_to(blobs / name)
    with Checkpoint.open(snapshot) as checkpoint:
        assert torch.equal(read_tensor(checkpoint, "a"), torch.ones(2))


# --- files that change while they are used ----------------------------------------------------


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def _rewrite(path: Path) -> None:
    save_file({"w": torch.zeros(4)}, path)
    _touch(path)


def _touch(path: Path) -> None:
    # File systems count time in steps; a test is quicker than one.
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_cut, "ended 8 bytes early: the file was truncated"),
        (_rewrite, "was written to after the checkpoint was opened"),
        (_grow, "was written to after the checkpoint was opened"),
        (os.remove, "cannot read 'w' from .* No such file"),
    ],
)
def test_a_file_that_changed_since_open_is_refused(
    tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(4)}, path)
    checkpoint = Checkpoint.open(path)
    change(path)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_tensor(checkpoint, "w")
    assert "'w'" in str(caught.value)
    assert str(path) in str(caught.value)
    assert checkpoint.bytes_read == 0
    checkpoint.close()


def test_writing_into_an_open_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(4)}, path)
    with Checkpoint.open(path) as checkpoint:
        read_tensor(checkpoint, "w")
        with path.open("rb+") as file:
            file.seek(-4, os.SEEK_END)
            file.write(bytes(4))
        _touch(path)
        with pytest.raises(CheckpointError, match="was written to"):
            read_tensor(checkpoint, "w")


def test_replacing_an_open_file_leaves_the_bits_that_were_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(4)}, path)
    with Checkpoint.open(path) as checkpoint:
        read_tensor(checkpoint, "w")
        save_file({"w": torch.zeros(4)}, tmp_path / "b.safetensors")
        (tmp_path / "b.safetensors").replace(path)
        assert torch.equal(read_tensor(checkpoint, "w"), torch.ones(4))


def test_a_failing_disk_is_told_with_path_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with Checkpoint.open(tmp_path) as checkpoint:
        with pytest.raises(
            CheckpointError, match=r"'w' from .*a\.safetensors.*output error"
        ) as caught:
            read_tensor(checkpoint, "w")
        assert isinstance(caught.value.__cause__, OSError)
