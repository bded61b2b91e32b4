"""``dlo pack``: a packed copy of a checkpoint holds the same bits, and is read by ranges."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dlo_core.checkpoint import Checkpoint
from dlo_core.cli import app
from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.layout import TensorSpec, contiguous_stride
from dlo_core.pack import pack_checkpoint
from dlo_core.recipe import Recipe
from dlo_core.source import StoredTensor

if TYPE_CHECKING:
    from pathlib import Path


def tensors() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    return {
        "big": (torch.randn(200, 301, generator=gen) * 0.02).to(torch.bfloat16),
        "small": torch.randn(7, generator=gen).to(torch.bfloat16),
        "float": torch.randn(50, 60, generator=gen),
        "noise": torch.randint(-32768, 32767, (9000,), dtype=torch.int16, generator=gen).view(
            torch.bfloat16
        ),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path, metadata={"format": "pt"})
    return path


def read(checkpoint: Checkpoint, name: str, start: int, stop: int) -> torch.Tensor:
    recipe = Recipe.of(checkpoint.tensors[name])
    spec = TensorSpec(name, recipe.dtype, recipe.shape, contiguous_stride(recipe.shape))
    out = torch.full((stop - start,), 0xEE, dtype=torch.uint8)
    StoredTensor(checkpoint, recipe).read(spec, start, stop, out)
    return out


def test_a_packed_copy_holds_the_same_bits(source: Path) -> None:
    made = pack_checkpoint(source)
    assert made.path == source.with_name("model-packed.safetensors")
    assert (made.num_tensors, made.num_packed) == (6, 1)
    assert made.nbytes == sum(t.nbytes for t in tensors().values())
    assert made.path.stat().st_size < source.stat().st_size
    with Checkpoint.open(made.path) as checkpoint:
        for name, tensor in tensors().items():
            stored = checkpoint.tensors[name]
            assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape))
            whole = tensor.contiguous().flatten().view(torch.uint8)
            assert torch.equal(read(checkpoint, name, 0, tensor.nbytes), whole)
    # Other readers see bytes, and what was not packed.
    plain = load_file(made.path)
    assert plain["big"].dtype == torch.uint8
    assert torch.equal(plain["float"], tensors()["float"])


def test_ranges_are_read_without_the_rest(source: Path) -> None:
    made = pack_checkpoint(source)
    whole = tensors()["big"].flatten().view(torch.uint8)
    with Checkpoint.open(made.path) as checkpoint:
        for start, stop in ((0, 1), (8191, 8193), (5, 8192), (30000, 42140), (16384, 16384)):
            assert torch.equal(read(checkpoint, "big", start, stop), whole[start:stop])
        before = checkpoint.bytes_read
        read(checkpoint, "big", 10000, 10002)
        assert checkpoint.bytes_read - before < 8192


def test_a_folder_with_an_index_is_copied_whole(tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    folder.mkdir()
    parts = [dict(list(tensors().items())[:2]), dict(list(tensors().items())[2:])]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    made = pack_checkpoint(folder)
    assert made.path == tmp_path / "transformer-packed"
    with Checkpoint.open(made.path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors())
    told = json.loads((made.path / "model.safetensors.index.json").read_text())
    assert told["metadata"]["total_size"] == made.packed_nbytes
    assert (made.path / "config.json").exists()
    with pytest.raises(ConfigError, match="exists"):
        pack_checkpoint(folder)
    with pytest.raises(ConfigError, match="for a folder or an index is a folder"):
        pack_checkpoint(folder, tmp_path / "out.safetensors")
    with pytest.raises(CheckpointError, match="packed already"):
        pack_checkpoint(made.path, tmp_path / "again")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["transformer", "transformer-packed"]


@pytest.mark.parametrize("by_index", [False, True])
def test_files_in_folders_below_the_index_keep_their_places(
    tmp_path: Path, by_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    (folder / "below").mkdir(parents=True)
    weight_map = {"big": "below/a.safetensors", "float": "a.safetensors"}
    for name, file in weight_map.items():
        save_file({name: tensors()[name]}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    monkeypatch.chdir(tmp_path)
    made = pack_checkpoint(index.relative_to(tmp_path) if by_index else "model")
    assert made.num_packed == 1
    with Checkpoint.open(made.path) as checkpoint:
        whole = tensors()["big"].flatten().view(torch.uint8)
        assert torch.equal(read(checkpoint, "big", 0, len(whole)), whole)
        assert set(checkpoint.tensors) == set(weight_map)


@pytest.mark.parametrize("at", [70, 2000, 12000])
def test_damage_in_the_file_is_named(source: Path, at: int) -> None:
    made = pack_checkpoint(source)
    with Checkpoint.open(made.path) as checkpoint:
        stored = checkpoint.tensors["big"]
    raw = bytearray(made.path.read_bytes())
    raw[stored.offset + at] ^= 0x41
    made.path.write_bytes(raw)
    with (
        Checkpoint.open(made.path) as checkpoint,
        pytest.raises(CheckpointError, match=r"'big'.*damaged"),
    ):
        read(checkpoint, "big", 0, stored.nbytes)


def test_metadata_that_lies_is_refused(source: Path) -> None:
    made = pack_checkpoint(source)
    raw = made.path.read_bytes()
    for old, new, text in (
        (rb"\"BF16\"", rb"\"F32 \"", "wanted BF16"),
        (rb"[200,301]", rb"[200,300]", "bytes"),
        (rb"\"version\":1", rb"\"version\":7", "version 7"),
        (rb"\"tensors\":", rb"\"tensorz\":", "damaged metadata"),
    ):
        assert old in raw
        made.path.write_bytes(raw.replace(old, new))
        with (
            pytest.raises(CheckpointError, match=text),
            Checkpoint.open(made.path) as checkpoint,
        ):
            read(checkpoint, "big", 0, 100)


def test_a_failure_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dlo_core.pack.os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        pack_checkpoint(source)
    assert [p.name for p in source.parent.iterdir()] == [source.name]


def test_what_another_process_of_the_same_number_writes_is_left_alone(source: Path) -> None:
    other = source.with_name(f".model-packed.safetensors.{os.getpid()}.part")
    other.write_bytes(b"half")
    assert pack_checkpoint(source).num_packed == 1
    assert other.read_bytes() == b"half"


def test_the_command_says_what_it_did(source: Path) -> None:
    result = CliRunner().invoke(app, ["pack", str(source), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["num_packed"] == 1
    assert told["verified"]
    again = CliRunner().invoke(app, ["pack", str(source)])
    assert again.exit_code == 2
    assert "exists" in again.stderr
