"""Reuse: after a failure the host shards serve the next offload, if they are what it would read."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from poison import PoisonBackend
from ranks import run_ranks
from safetensors.torch import save_file
from toys import AwkwardBlock, Block, Toy, inputs, make_mixed_toy, make_toy, twin

import dlo_core as dlo

if TYPE_CHECKING:
    from pathlib import Path

N = 4


def stored(folder: Path, seed: int = 0) -> Path:
    path = folder / f"toy-{seed}.safetensors"
    if not path.exists():
        save_file(make_toy(N, seed).state_dict(), path)
    return path


def empty_toy() -> Toy:
    """Return the toy with its parameters on meta and its buffer real."""
    position = make_toy(N).position
    with torch.device("meta"):
        model = Toy([Block() for _ in range(N)]).requires_grad_(False)
    model.position = position
    return model


def offload(model: Toy, **options: Any) -> dlo.LayerwiseOffload:
    given: dict[str, Any] = {"timeout_s": 1.2, "load_timeout_s": 20.0, **options}
    return dlo.offload(model, device=PoisonBackend(0), group=dist.group.WORLD, **given)


def several(model: torch.nn.Module) -> None:
    for _ in range(4):
        model(inputs())


def fail(offloaded: dlo.LayerwiseOffload, rank: int) -> None:
    """Let rank 1 stay away from a pass, until every rank has failed."""
    (model,) = offloaded.models
    if rank == 0:
        with pytest.raises(dlo.FillTimeout, match="rank 1"):
            several(model)
    limit = time.monotonic() + 5
    while not offloaded.failed:
        assert time.monotonic() < limit
        time.sleep(0.01)
    dist.barrier()


def right(model: torch.nn.Module, rank: int, seed: int = 0) -> bool:
    reference = make_toy(N, seed)
    return all(
        torch.equal(model(inputs(rank + number)), reference(inputs(rank + number)))
        for number in range(3)
    )


@pytest.mark.parametrize("source", ["checkpoint", "module"])
def test_the_same_ranks_go_on_without_reading_the_checkpoint_again(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same memory, no byte of a tensor read, the same bits, values that come back."""
    path = stored(tmp_path) if source == "checkpoint" else None
    read = []
    preadv = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda *args: (read.append(got := preadv(*args)), got)[1],  # type: ignore[func-returns-value]
    )

    def job(rank: int) -> int:
        model = empty_toy() if path else make_toy(N)
        old = offload(model, checkpoint=path)
        assert old.engine is not None
        memory = old.engine.store.slab.data_ptr()
        assert right(model, rank)
        fail(old, rank)
        read.clear()
        new = offload(model, checkpoint=path, reuse=old)
        assert new.engine is not None
        assert new.engine.store.slab.data_ptr() == memory
        nbytes = sum(read)
        assert right(model, rank)
        assert not new.failed
        old.shutdown()
        assert right(model, rank)
        new.disable()
        assert right(model, rank)
        return nbytes

    assert run_ranks(job, 2) == [0, 0]


def test_packed_shards_are_read_again_where_they_can_be(tmp_path: Path) -> None:
    path = stored(tmp_path)

    def job(rank: int) -> None:
        for source in (path, None):
            model = empty_toy() if source else make_toy(N)
            old = offload(model, checkpoint=source, packed=True)
            assert right(model, rank)
            fail(old, rank)
            if source:
                new = offload(model, checkpoint=source, packed=True, reuse=old)
                assert right(model, rank)
                new.disable()
                assert right(model, rank)
            else:
                with pytest.raises(dlo.ConfigError, match="packed shards are not passed on"):
                    offload(model, packed=True, reuse=old)
                old.shutdown()

    run_ranks(job, 2)


def test_a_rank_that_was_started_again_reads_and_the_other_does_not(tmp_path: Path) -> None:
    path = stored(tmp_path)

    def job(rank: int) -> bool:
        model = empty_toy()
        old = offload(model, checkpoint=path)
        fail(old, rank)
        assert old.engine is not None
        memory = old.engine.store.slab.data_ptr()
        if rank == 1:
            # As a new process has it: nothing.
            old.shutdown()
            model = empty_toy()
        new = offload(model, checkpoint=path, reuse=None if rank else old)
        assert new.engine is not None
        kept = new.engine.store.slab.data_ptr() == memory
        assert right(model, rank)
        new.disable()
        return kept

    assert run_ranks(job, 2)[0]


def spoil(offloaded: dlo.LayerwiseOffload) -> None:
    assert offloaded.engine is not None
    offloaded.engine.store.shard(1)[17] += 1


def test_bytes_that_are_not_what_was_read_are_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One byte, on one rank; and other values, and another model."""
    path, other = stored(tmp_path), stored(tmp_path, 1)

    def job(rank: int) -> list[str]:
        model = empty_toy()
        old = offload(model, checkpoint=path)
        fail(old, rank)
        if rank == 0:
            spoil(old)
        new = offload(model, checkpoint=path, reuse=old)
        assert right(model, rank)
        fail(new, rank)
        third = offload(model, checkpoint=other, reuse=new)
        assert right(model, rank, seed=1)
        fail(third, rank)
        del model
        again = make_toy(N, 1)
        fourth = offload(again, reuse=third, resident=("blocks.1.norm",))
        assert right(again, rank, seed=1)
        fourth.disable()
        return [record.getMessage() for record in caplog.records if "reuse=" in record.msg]

    told = run_ranks(job, 2)
    assert "something has written over them" in told[0][0]
    assert [len(texts) for texts in told] == [3, 2]
    assert "another one or has changed" in told[1][0]
    assert "is not the same" in told[1][1]


@pytest.mark.slow
def test_what_cannot_be_had_is_refused_on_all_and_can_be_tried_again(tmp_path: Path) -> None:
    """Nothing to read instead; an argument that is no offload; a rank that comes too late."""
    path = stored(tmp_path)

    def job(rank: int) -> list[str]:
        told = []
        model = make_toy(N)
        old = offload(model)
        fail(old, rank)
        if rank == 1:
            spoil(old)
        with pytest.raises(dlo.ConfigError) as caught:
            offload(model, reuse=old)
        told.append(str(caught.value))
        with pytest.raises(dlo.ConfigError) as caught:
            offload(model, checkpoint=path, reuse="old" if rank else old)
        told.append(str(caught.value))
        assert dlo.offloaded(model) is None
        new = offload(model, checkpoint=path, reuse=old)
        assert right(model, rank)
        # Weights that were updated are not what the checkpoint has.
        new.update_weights(make_toy(N, 1).state_dict())
        fail(new, rank)
        with pytest.raises(dlo.ConfigError) as caught:
            offload(model, checkpoint=path, reuse=new)
        told.append(str(caught.value))
        last = offload(model, checkpoint=path)
        assert right(model, rank)
        last.disable()
        return told

    for rank, told in enumerate(run_ranks(job, 2)):
        assert "nothing to read instead" in told[0]
        assert "must be an earlier LayerwiseOffload" in told[1]
        assert "were updated" in told[2]
        assert rank == 1 or "rank 1" in told[0]


@pytest.mark.parametrize("resident_layers", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_awkward_blocks_and_what_no_checkpoint_has(tmp_path: Path, resident_layers: int) -> None:
    """Odd dtypes, ties, and large buffers that are streamed and that no file holds."""
    path = tmp_path / "mixed.safetensors"
    kept = {name: tensor.contiguous() for name, tensor in make_mixed_toy(N).state_dict().items()}
    save_file({k: t for k, t in kept.items() if not k.endswith(("again", ".table"))}, path)

    def make() -> Toy:
        model = make_mixed_toy(N)
        for module in model.modules():
            if isinstance(module, AwkwardBlock):
                module.register_buffer("table", module.table, persistent=False)
        return model

    def job(rank: int) -> bool:
        model, reference = make(), make()
        options: dict[str, Any] = {"checkpoint": path, "resident_layers": resident_layers}
        old = offload(model, **options)
        for _ in range(2):
            fail(old, rank)
            new = offload(model, **options, reuse=old)
            for seed in range(2):
                assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
            old = new
        old.disable()
        return torch.equal(model(inputs()), reference(inputs()))

    assert run_ranks(job, 2) == [True, True]


def test_fewer_ranks_read_anew(tmp_path: Path) -> None:
    """The survivors' shards are cut for more ranks than there are."""
    path = stored(tmp_path)

    def job(rank: int) -> bool:
        both = dist.new_group([0, 1])
        model = empty_toy()
        old = offload(model, checkpoint=path, timeout_s=1.0)
        if rank == 2:
            return True
        with pytest.raises(dlo.FillError, match="rank 2"):
            several(model)
        new = dlo.offload(model, device=PoisonBackend(0), group=both, checkpoint=path, reuse=old)
        assert new.size == 2
        assert right(model, rank)
        new.disable()
        return True

    assert run_ranks(job, 3) == [True] * 3


def test_twin_is_untouched() -> None:
    """The witness of these tests sees other values."""
    assert not right(twin(make_toy(N, 1)), 0)
