"""Public faults in streams and devices: missing waits, wrong streams, hardware assumed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kernels import InnerCalls
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from toys import Block, Toy, assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo
from dlo_core.cpu import CpuBackend
from dlo_core.errors import CheckpointError, ConfigError, FillError
from dlo_core.testing import MODES, Recorder, SimAgreement, SimBackend, World

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_is_overwritten_only_after_the_stream_that_read_it(mode: str) -> None:
    """B03, https://github.com/huggingface/diffusers/pull/12721.

    The forward runs on a compute stream of the user's own; every write into a slot comes after what
    that stream read there.
    """
    recorder = Recorder()
    backend = SimBackend(World(1, mode), recorder=recorder)
    model = make_toy(5)
    resident = twin(model)
    recorder.watch(dlo.offload(model, device=backend))
    mine = backend.new_compute_stream("the user's stream")
    with torch.inference_mode(), backend.compute(), backend.stream(mine):
        for number in range(3):
            assert torch.equal(model(inputs(number)), resident(inputs(number)))
    recorder.check()
    reads = [a for a in recorder.log if a.op == "compute" and a.buffer.startswith("slot")]
    assert reads
    assert {read.timeline for read in reads} == {"the user's stream"}
    for write in (a for a in recorder.log if a.write and a.buffer.startswith("slot")):
        before = recorder.log[: recorder.log.index(write)]
        for read in (a for a in before if a.op == "compute" and a.buffer == write.buffer):
            assert read.stamp.before(write.stamp)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [{}, {"packed": True}, {"packed": True, "resident_layers": 1}])
def test_a_block_inside_of_itself_is_read_on_both_streams(
    settings: dict[str, Any], mode: str
) -> None:
    """The next fill or decode comes after the inner call, too, which nothing else orders.

    Where it is decoded, the inner call comes after that.
    """
    assert InnerCalls(mode, **settings)().races == []


class Bare(nn.Module):
    """A block that is nothing but a norm with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm."""
        out: torch.Tensor = self.norm(x)
        return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["first", "last", "only"])
def test_every_block_waits_for_its_own_weights(place: str, mode: str) -> None:
    """B04, https://github.com/huggingface/diffusers/pull/12077.

    Whoever prefetched it, and whether or not it has a successor.
    """
    torch.manual_seed(0)
    blocks: dict[str, list[nn.Module]] = {
        "first": [Bare(), Block(), Block()],
        "last": [Block(), Block(), Bare()],
        "only": [Bare()],
    }
    model = Toy(blocks[place]).requires_grad_(False)
    resident = twin(model)
    dlo.offload(model, device=SimBackend(World(1, mode)))
    with torch.inference_mode():
        for number in range(3):
            out = model(inputs(number))
            assert not out.isnan().any()
            assert torch.equal(out, resident(inputs(number)))


class Scaled(torch.Tensor):
    """A quantised weight: integers and a scale inside a tensor subclass."""

    @staticmethod
    def __new__(cls: type[Scaled], q: torch.Tensor, scale: float) -> Scaled:
        """Wrap."""
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)
        made.q, made.scale = q, scale
        return made

    q: torch.Tensor
    scale: float

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Dequantise, then do as asked; keep the class where it is only moved about."""
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].q, args[0].scale)
        plain = [a.q.float() * a.scale if isinstance(a, Scaled) else a for a in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("where", ["block", "outside"])
def test_a_weight_in_a_tensor_subclass_is_refused_by_name(where: str) -> None:
    """B06, https://github.com/huggingface/diffusers/pull/13276. Never in silence."""
    model = make_toy(3)
    owner = model.blocks[1].linear if where == "block" else model.post
    assert isinstance(owner, nn.Linear)
    quantised = Scaled(torch.ones(8, 8, dtype=torch.int8), 0.5)
    owner.weight = nn.Parameter(quantised, requires_grad=False)
    name = "blocks.1.linear.weight" if where == "block" else "post.weight"
    kept = owner.weight
    with pytest.raises(ConfigError, match=rf"'{name}' is a .*Scaled.*not supported yet"):
        dlo.offload(model, device=CpuBackend())
    assert owner.weight is kept
    assert dlo.offloaded(model) is None


class Rotary(Toy):
    """A toy with a rotary table that no checkpoint has."""

    table_: torch.Tensor

    def __init__(self) -> None:
        super().__init__([Block(), Block()])
        self.register_buffer("table_", 1.0 / torch.arange(1, 9), persistent=False)

    def forward(self, x: torch.Tensor, skip: Any = ()) -> torch.Tensor:
        """Add the table first."""
        return super().forward(x + self.table_, skip)


def test_a_buffer_that_no_checkpoint_has_is_kept_or_named(tmp_path: Path) -> None:
    """B13, https://github.com/huggingface/transformers/issues/34234. Never garbage."""
    resident = Rotary().requires_grad_(False)
    path = tmp_path / "model.safetensors"
    save_file(resident.state_dict(), path)
    with torch.device("meta"):
        model = Rotary().requires_grad_(False)
    with pytest.raises(CheckpointError, match="'table_'"):
        dlo.offload(model, device=CpuBackend(), checkpoint=path)
    model.table_ = 1.0 / torch.arange(1, 9)
    dlo.offload(model, device=CpuBackend(), checkpoint=path)
    assert torch.equal(model.table_, resident.table_)
    with torch.inference_mode():
        assert torch.equal(model(inputs()), resident(inputs()))


def test_without_a_device_nothing_is_pinned_and_pinning_by_name_is_refused() -> None:
    """B28, https://github.com/pytorch/pytorch/issues/159740; the part of a CPU alone."""
    offloaded = dlo.offload(make_toy(3), device=CpuBackend())
    assert offloaded.stats().pinned_bytes == 0
    model = make_toy(3)
    before = snapshot(model)
    with pytest.raises(ConfigError, match="host='pinned' cannot be had"):
        dlo.offload(model, device=CpuBackend(), host="pinned")
    assert_restored(model, before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_disable_right_after_a_forward_reads_nothing_that_is_under_way(
    ranks: int, mode: str
) -> None:
    """B29, https://github.com/pytorch/pytorch/issues/127612; its ordering part."""

    world = World(ranks, mode)

    def rank_fn(rank: int) -> None:
        recorder = Recorder()
        backend = SimBackend(world, rank, recorder=recorder)
        model = make_toy(5)
        before = snapshot(model)
        group = SimAgreement(world, rank) if ranks > 1 else None
        offloaded = dlo.offload(model, device=backend, group=group)
        recorder.watch(offloaded)
        with torch.inference_mode(), backend.compute():
            model(inputs(rank))
        offloaded.disable()
        recorder.check()
        assert_restored(model, before)

    world.run_ranks(rank_fn)


def one_pass_less(rank: int) -> str:
    model = make_toy(4)
    resident = twin(model)
    group = dist.group.WORLD
    offloaded = dlo.offload(model, device=CpuBackend(), group=group, timeout_s=1.0)
    start, told = time.monotonic(), ""
    with torch.inference_mode():
        for number in range(3 - rank):
            try:
                out = model(inputs(number))
            except FillError as error:
                told = str(error)
                break
            assert torch.equal(out, resident(inputs(number)))
    # Stay, so that the other one does not hear of it by a closed connection.
    dist.barrier()
    assert time.monotonic() - start < 10
    offloaded.shutdown()
    return told


def test_a_rank_that_makes_one_pass_less_is_an_error_in_time_and_no_garbage() -> None:
    """B36, https://github.com/vllm-project/vllm-omni/pull/5764."""
    told = run_ranks(one_pass_less, 2)
    assert "could not be loaded (fill" in told[0]
    assert "blocks." in told[0]
    assert "rank 1 (global rank 1, process " in told[0]
    assert "every rank must call the model equally often" in told[0]
    assert told[1] == ""


def skip_and_reshape(rank: int) -> None:
    model = make_toy(4)
    resident = twin(model)
    dlo.offload(model, device=CpuBackend(), group=dist.group.WORLD)
    with torch.inference_mode():
        for number in range(4):
            # Other shapes on other ranks, and rank 1 skips block 2.
            x = inputs(number)[: 1 + rank]
            skip = (2,) if rank else ()
            assert torch.equal(model(x, skip=skip), resident(x, skip=skip))


def test_ranks_may_skip_blocks_and_have_other_shapes() -> None:
    """B36, https://github.com/vllm-project/vllm-omni/pull/5764; what is not an error."""
    run_ranks(skip_and_reshape, 2)


def slow_to_load(rank: int, path: str) -> None:
    with torch.device("meta"):
        model = Toy([Block() for _ in range(3)])
    model.position = torch.zeros(8)

    def late(progress: dlo.LoadProgress) -> None:
        if progress.done_nbytes == progress.total_nbytes:
            time.sleep(3.5)

    offloaded = dlo.offload(
        model,
        device=CpuBackend(),
        group=dist.group.WORLD,
        checkpoint=path,
        timeout_s=3.0,
        progress=late if rank else False,
    )
    with torch.inference_mode():
        model(inputs(rank))
    offloaded.disable()


def test_a_rank_that_is_slow_to_load_is_waited_for_longer_than_a_fill(tmp_path: Path) -> None:
    """B38, https://github.com/huggingface/transformers/pull/48228."""
    path = tmp_path / "toy.safetensors"
    save_file(make_toy(3).state_dict(), path)
    run_ranks(slow_to_load, 2, str(path), timeout_s=30.0)


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_runs_where_any_touch_of_torch_cuda_raises() -> None:
    """B42, https://github.com/vllm-project/vllm-omni/pull/1492."""
    out = run_python(
        """
        import torch
        from torch import nn

        torch.set_num_threads(1)

        class Raises:
            def __getattr__(self, name):
                raise RuntimeError(f"torch.cuda.{name} was touched")

        torch.cuda = Raises()
        import dlo_core as dlo
        from dlo_core.cpu import CpuBackend

        class Model(nn.Module):
            dlo_blocks = ("blocks",)

            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return x

        model = Model().requires_grad_(False)
        x = torch.ones(2, 4)
        wanted = model(x)
        offloaded = dlo.offload(model, device=CpuBackend())
        assert torch.equal(model(x), wanted)
        offloaded.stats()
        offloaded.disable()
        assert torch.equal(model(x), wanted)
        print("untouched")
        """
    )
    assert out == "untouched\n"


def test_import_and_listing_start_no_thread_and_no_device_and_a_fork_can_offload() -> None:
    """B43, https://github.com/pytorch/pytorch/pull/145752."""
    out = run_python(
        """
        import os, threading
        import torch

        torch.set_num_threads(1)
        import dlo_core as dlo
        from dlo_core import registry
        from dlo_core.cpu import CpuBackend
        from torch import nn

        dlo.OffloadConfig()
        registry.installed()
        assert not torch.cuda.is_initialized()
        assert threading.active_count() == 1, threading.enumerate()

        child = os.fork()
        if child == 0:
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).requires_grad_(False)
            x = torch.ones(2, 4)
            wanted = model(x)
            dlo.offload(model, device=CpuBackend(), blocks=lambda m: list(m))
            same = torch.equal(model(x), wanted)
            os._exit(0 if same else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert out == "0\n"
