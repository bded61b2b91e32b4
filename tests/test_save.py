"""``save()``: what it writes is read by every reader, or nothing is there."""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from poison import PoisonBackend
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_state import MODELS, everywhere, world
from torch import nn
from toys import Toy, inputs, make_toy, same_bits, twin

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Read with safetensors' own reader, by the index where there is one."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        found |= load_file(path)
    indexes = list(folder.glob("*.index.json"))
    if indexes:
        content = json.loads(indexes[0].read_text())
        assert content["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        for name, file in content["weight_map"].items():
            assert name in load_file(folder / file)
        assert content["weight_map"].keys() == found.keys()
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("limit", [None, 900])
def test_what_is_saved_is_what_torch_would_save(
    limit: int | None, kind: str, size: int, tmp_path: Path
) -> None:
    """Names, shapes, dtypes and bits, in one file or several; and it can be streamed from."""
    target = tmp_path / "new" / "folder"

    def job(rank: int) -> bool:
        model = MODELS[kind]()
        reference = twin(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world())
        with torch.no_grad():
            model(inputs())
        path = offloaded.save(target, max_shard_bytes=limit, to_rank=size - 1)
        wanted = reference.state_dict()
        got = read_all(target)
        assert got.keys() == wanted.keys()
        assert all(same_bits(got[name], wanted[name]) for name in wanted)
        with torch.no_grad():
            assert torch.equal(model(inputs(rank)), reference(inputs(rank)))
        offloaded.disable()
        again = dlo.offload(model, device=PoisonBackend(0), group=world(), checkpoint=path)
        with torch.no_grad():
            assert torch.equal(model(inputs(rank)), reference(inputs(rank)))
        again.disable()
        return True

    assert all(everywhere(job, size))
    names = files_in(target)
    if limit is None:
        assert names == ["model.safetensors"]
    else:
        assert names[-1] == "model.safetensors.index.json"
        assert len(names) > 2
        assert names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors"


def test_ranks_that_keep_all_save_once(tmp_path: Path) -> None:
    """In rank-local mode with a group one rank writes; all return the path."""

    def job(rank: int) -> str:
        offloaded = dlo.offload(
            make_toy(3), device=PoisonBackend(0), group=world(), use_allgather=False
        )
        return str(offloaded.save(tmp_path / "w.safetensors"))

    assert run_ranks(job, 2) == [str(tmp_path / "w.safetensors")] * 2
    assert load_file(tmp_path / "w.safetensors").keys() == make_toy(3).state_dict().keys()
    assert everything_in(tmp_path) == ["w.safetensors"]


def test_every_tensor_is_aligned_to_its_dtype(tmp_path: Path) -> None:
    """Readers that map the file need it, and the format has no padding."""
    model = MODELS["awkward"]()
    dlo.offload(model, device=PoisonBackend(0)).save(tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in model.state_dict().items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0


def test_diffusers_reads_it(tmp_path: Path) -> None:
    """Under the names that its own loader looks for, one file or several."""
    pytest.importorskip("diffusers")
    from diffusers_zoo import build

    model: Any = build("flux", dtype=torch.bfloat16)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    for folder, limit in ((tmp_path / "one", None), (tmp_path / "some", 40_000)):
        offloaded.save(folder, max_shard_bytes=limit)
        model.save_config(folder)
        again = type(model).from_pretrained(folder, torch_dtype=torch.bfloat16)
        got = again.state_dict()
        assert got.keys() == wanted.keys()
        assert all(same_bits(got[name], wanted[name]) for name in wanted)
    assert (tmp_path / "one" / "diffusion_pytorch_model.safetensors").exists()
    assert len(files_in(tmp_path / "some")) > 3


def test_transformers_reads_it(tmp_path: Path) -> None:
    """Under the names that its own loader looks for, one file or several; ties as it has them."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=4, num_heads=2
    )
    model = transformers.T5EncoderModel(config).eval().requires_grad_(False)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded = dlo.offload(model, device=PoisonBackend(0), blocks=["encoder.block"])
    for folder, limit in ((tmp_path / "one", None), (tmp_path / "some", 6_000)):
        offloaded.save(folder, max_shard_bytes=limit)
        config.save_pretrained(folder)
        again = transformers.T5EncoderModel.from_pretrained(folder)
        got = again.state_dict()
        assert got.keys() == wanted.keys()
        assert all(same_bits(got[name], wanted[name]) for name in wanted)
    assert (tmp_path / "one" / "model.safetensors").exists()


# --- refusals and failures ------------------------------------------------------------------------


def bad_calls(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    (tmp_path / "there.safetensors").write_bytes(b"x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other.safetensors").write_bytes(b"x")
    (tmp_path / "plain").write_bytes(b"x")
    return {
        "a file that is there": ({"path": tmp_path / "there.safetensors"}, "overwrites nothing"),
        "a folder with weights": ({"path": tmp_path / "full"}, r"'.*other\.safetensors' is there"),
        "a file as a folder": ({"path": tmp_path / "plain" / "x"}, "no folder"),
        "a pickle": ({"path": tmp_path / "x.pt"}, "writes safetensors"),
        "no path": ({"path": 3}, "path of a folder"),
        "an empty path": ({"path": ""}, "path of a folder"),
        "no bytes": ({"path": tmp_path / "n", "max_shard_bytes": 0}, "max_shard_bytes"),
        "half bytes": ({"path": tmp_path / "n", "max_shard_bytes": 0.5}, "max_shard_bytes"),
        "a strange rank": ({"path": tmp_path / "n", "to_rank": 7}, "to_rank"),
        "strange progress": ({"path": tmp_path / "n", "progress": "yes"}, "progress"),
        "a strange model": ({"path": tmp_path / "n", "model": nn.Linear(1, 1)}, "enabled"),
    }


@pytest.mark.parametrize("size", [1, 2])
def test_bad_arguments_are_refused_on_every_rank_and_nothing_is_made(
    size: int, tmp_path: Path
) -> None:
    """Though one rank alone gave them."""
    calls = bad_calls(tmp_path)
    before = everything_in(tmp_path)

    def job(rank: int) -> bool:
        model = make_toy(3)
        reference = twin(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=20)
        for name, (arguments, told) in calls.items():
            given = dict(arguments) if rank == 0 else {"path": tmp_path / "n"}
            with pytest.raises(dlo.ConfigError, match=told):
                offloaded.save(given.pop("path"), **given)
            assert everything_in(tmp_path) == before, name
        assert torch.equal(model(inputs(rank)), reference(inputs(rank)))
        return True

    assert all(everywhere(job, size))


class DiskFull:
    """Lets so many writes through, then the disk is full."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.pwrite = os.pwrite

    def __call__(self, number: int, data: Any, offset: int) -> int:
        """Write half of what is asked, as a system may."""
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.pwrite(number, data[: max(1, len(data) // 2)], offset)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("after", [0, 3, 40])
def test_a_full_disk_is_an_error_on_every_rank_and_nothing_is_left(
    after: int, size: int, tmp_path: Path
) -> None:
    """In the header, early, late; then there is room and it works."""

    def job(rank: int) -> bool:
        model = make_toy(4)
        reference = twin(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=20)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", DiskFull(after))
            with pytest.raises(dlo.CheckpointError, match="No space left on device"):
                offloaded.save(tmp_path / "a" / "b", max_shard_bytes=500)
            if size > 1:
                dist.barrier()
            assert everything_in(tmp_path) == []
            if size > 1:
                dist.barrier()
        assert torch.equal(model(inputs(rank)), reference(inputs(rank)))
        offloaded.save(tmp_path / f"{size}", max_shard_bytes=500)
        assert read_all(tmp_path / f"{size}").keys() == reference.state_dict().keys()
        if size > 1:
            dist.barrier()
        return True

    assert all(everywhere(job, size))


def test_a_disk_without_room_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded = dlo.offload(make_toy(3), device=PoisonBackend(0))
    fills = offloaded.stats().fills
    usage = SimpleNamespace(free=100)
    monkeypatch.setattr("dlo_core.save_plan.shutil.disk_usage", lambda path: usage)
    with pytest.raises(dlo.CheckpointError, match="the disk has 100"):
        offloaded.save(tmp_path / "a")
    assert everything_in(tmp_path) == []
    assert offloaded.stats().fills == fills


@pytest.mark.parametrize("size", [1, 2])
def test_progress_is_told_and_its_exception_cancels(size: int, tmp_path: Path) -> None:
    seen: list[dlo.LoadProgress] = []

    def job(rank: int) -> bool:
        model = make_toy(4)
        nbytes = sum(t.nbytes for t in model.state_dict().values())
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=20)

        def cancel(now: dlo.LoadProgress) -> None:
            if now.done_nbytes > nbytes // 2:
                raise KeyboardInterrupt("enough")

        expected: type[BaseException] = KeyboardInterrupt if rank == 0 else dlo.AgreementError
        with pytest.raises(expected, match="enough"):
            offloaded.save(tmp_path / "x", progress=cancel)
        assert everything_in(tmp_path) == []
        if size > 1:
            dist.barrier()
        seen.clear()
        offloaded.save(tmp_path / "x", progress=seen.append)
        if rank == 0:
            assert [one.done_nbytes for one in seen] == sorted({p.done_nbytes for p in seen})
            assert seen[-1].done_nbytes == seen[-1].total_nbytes == nbytes
        return True

    assert all(everywhere(job, size))


def test_a_rank_that_fails_before_it_reads_serves_the_others(tmp_path: Path) -> None:
    def job(rank: int) -> bool:
        model = make_toy(4)
        reference = twin(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=20)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dlo_core.save.reporting", lambda *args: 1 / 0)
            expected: type[BaseException] = dlo.AgreementError if rank else ZeroDivisionError
            with pytest.raises(expected, match="division by zero"):
                offloaded.save(tmp_path / "x")
        assert everything_in(tmp_path) == []
        assert torch.equal(model(inputs(rank)), reference(inputs(rank)))
        return True

    assert all(run_ranks(job, 2))


def test_a_checkpoint_that_is_streamed_from_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(make_toy(3).state_dict(), path)
    before = path.read_bytes()
    model = make_toy(3)
    offloaded = dlo.offload(model, device=PoisonBackend(0), checkpoint=path)
    for target in (path, tmp_path, os.path.relpath(path)):
        with pytest.raises(dlo.ConfigError, match="overwrites nothing"):
            offloaded.save(target)
    assert path.read_bytes() == before
    assert everything_in(tmp_path) == ["model.safetensors"]


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    offloaded = dlo.offload(make_toy(3), device=PoisonBackend(0))
    rival = tmp_path / "model-00002-of-00003.safetensors"

    def make(now: dlo.LoadProgress) -> None:
        rival.write_bytes(b"theirs")

    nbytes = sum(t.nbytes for t in make_toy(3).state_dict().values())
    with pytest.raises(dlo.CheckpointError, match="by somebody else"):
        offloaded.save(tmp_path, progress=make, max_shard_bytes=nbytes // 3 + 200)
    assert rival.read_bytes() == b"theirs"
    assert everything_in(tmp_path) == [rival.name]


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    model = Toy([nn.Linear(8, 8) for _ in range(3)]).requires_grad_(False)
    model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    offloaded = dlo.offload(model, device=PoisonBackend(0))
    with pytest.raises(dlo.ConfigError, match=r"'wide' is torch\.complex128"):
        offloaded.save(tmp_path)
    assert dict(offloaded.named_tensors())["wide"].dtype == torch.complex128


def test_saving_needs_an_offload_that_is_enabled(tmp_path: Path) -> None:
    offloaded = dlo.offload(make_toy(3), device=PoisonBackend(0))
    calls: list[Callable[[], Any]] = [
        lambda: offloaded.save(tmp_path),
        offloaded.state_dict,
        lambda: list(offloaded.named_tensors()),
        lambda: offloaded.update_weights({}),
    ]
    offloaded.disable()
    for call in calls:
        with pytest.raises(dlo.UseError, match="not enabled"):
            call()
    offloaded.shutdown()
    for call in calls:
        with pytest.raises(dlo.UseError, match="shut down"):
            call()
