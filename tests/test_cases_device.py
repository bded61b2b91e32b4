"""Public faults that need a device: they run where there is one, and skip elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from toys import assert_restored, snapshot, twin

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend

WIDTH = 2048


class Deep(nn.Module):
    """Enough work a block that a missing wait has time to show."""

    dlo_blocks = ("blocks",)

    def __init__(self, n: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks several times as wide as needed."""
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.fixture
def cuda(usable_backend: Callable[[str], Backend]) -> Backend:
    """Return the CUDA backend, or skip with its own reason."""
    return usable_backend("cuda")


def resident_on(model: nn.Module, backend: Backend) -> nn.Module:
    return twin(model).to(backend.device)


def batch(backend: Backend, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(2048, WIDTH, generator=gen).to(backend.device)


def test_a_forward_on_a_stream_of_the_users_own_gets_the_right_bits(cuda: Backend) -> None:
    """B03, https://github.com/huggingface/diffusers/pull/12721; true corruption."""
    model = Deep(7)
    resident = resident_on(model, cuda)
    dlo.offload(model, device=cuda)
    mine = cuda.new_stream()
    x = batch(cuda)
    with torch.inference_mode():
        wanted = resident(x)
        cuda.synchronize()
        with cuda.stream(mine):
            got = [model(x) for _ in range(50)]
        cuda.synchronize()
        assert all(torch.equal(one, wanted) for one in got)


def test_disable_right_after_a_forward_gives_the_right_bits_back(cuda: Backend) -> None:
    """B29, https://github.com/pytorch/pytorch/issues/127612. No wait of the host in between."""
    model = Deep(5)
    before = snapshot(model)
    resident = resident_on(model, cuda)
    x = batch(cuda)
    for _ in range(5):
        offloaded = dlo.offload(model, device=cuda)
        with torch.inference_mode():
            got = model(x)
        offloaded.disable()
        with torch.inference_mode():
            assert torch.equal(got, resident(x))
        assert_restored(model, before)


def listed(rank: int) -> list[bool]:
    import dlo_core.registry as registry  # noqa: PLR0402 - in a fresh process

    registry.installed()
    looked = torch.cuda.is_initialized()
    last = torch.cuda.device_count() - 1
    offloaded = dlo.offload(Deep(3), device=f"cuda:{last}")
    others = [torch.cuda.memory_allocated(n) for n in range(last)]
    return [looked, offloaded.device.index == last, not any(others)]


def test_a_look_starts_no_context_and_an_offload_only_that_of_its_device(cuda: Backend) -> None:
    """B43, https://github.com/pytorch/pytorch/pull/145752."""
    assert run_ranks(listed, 1, start_method="spawn") == [[False, True, True]]


FORKED = """
import os, sys, torch
from dlo_core import OffloadConfig, offload, registry
from dlo_core.testing.toys import inputs, make_portable_toy, twin
OffloadConfig(depth=2)
registry.get_backend("cpu")
assert not torch.cuda.is_initialized(), "a look at another backend started CUDA"
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torch.set_num_threads(1)
model = make_portable_toy(4)
resident = twin(model).cuda()
offload(model, device="cuda")
with torch.inference_mode():
    same = torch.equal(model(inputs(0).cuda()), resident(inputs(0).cuda()))
torch.cuda.synchronize()
os._exit(0 if same else 3)
"""


@pytest.mark.timeout(100)
def test_a_process_that_imported_dlo_and_forked_can_offload_in_the_child(cuda: Backend) -> None:
    """B43, "cannot re-initialise in forked process"."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr


def test_new_weights_right_after_a_prefetch_are_wholly_old_or_wholly_new(cuda: Backend) -> None:
    """B29. The copy of the next pass's first block is under way when its source is changed."""
    model = Deep(5)
    new = {"blocks.0.weight": torch.randn(WIDTH, WIDTH) / WIDTH**0.5}
    offloaded = dlo.offload(model, device=cuda)
    x = batch(cuda)
    with torch.inference_mode():
        for _ in range(5):
            model(x)
        offloaded.update_weights(new.items())
        got = model(x)
        resident = Deep(5)
        resident.load_state_dict(new, strict=False)
        assert torch.equal(got, resident.to(cuda.device)(x))


class Heavy(nn.Module):
    """Three blocks of 1.2 GiB, which cost 2 GiB each where sizes are rounded up."""

    dlo_blocks = ("blocks",)
    rows = int(1.2 * 2**30) // (2 * WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Embedding(self.rows, WIDTH, dtype=torch.bfloat16, device="meta") for _ in range(3)
        )
        self.to_empty(device="cpu").requires_grad_(False)
        for number, parameter in enumerate(self.parameters(), start=1):
            parameter.fill_(number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows that ``x`` names."""
        out = torch.zeros((), device=x.device)
        for block in self.blocks:
            out = out + block(x)
        return out


@pytest.mark.timeout(150)
def test_blocks_of_any_size_are_pinned_in_their_own_size(cuda: Backend) -> None:
    """B27, https://github.com/sgl-project/sglang/pull/39021. Real size."""
    model = Heavy()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    torch_pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    offloaded = dlo.offload(model, device=cuda)
    with torch.inference_mode():
        rows = torch.tensor([0, Heavy.rows - 1], device=cuda.device)
        assert bool((model(rows) == 6).all())
    assert weights <= offloaded.stats().pinned_bytes <= 1.01 * weights
    now = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    assert now - torch_pinned < 0.01 * weights, "torch's own pinned memory was taken, too"
    offloaded.shutdown()


def test_a_pass_is_captured_and_replayed_beside_passes(cuda: Backend) -> None:
    """B25, vllm-project/vllm-ascend#10251: capture failed on a stream that was not joined."""
    model = Deep(6)
    resident = resident_on(model, cuda)
    offloaded = dlo.offload(model, device=cuda)
    with torch.inference_mode():
        captured = offloaded.capture(model, batch(cuda))
        wrong = 0
        for seed in range(20):
            x = batch(cuda, seed)
            wrong += not torch.equal(captured(x), resident(x))
            if seed % 3 == 0:
                wrong += not torch.equal(model(x), resident(x))
        assert wrong == 0
        new = {"blocks.0.weight": torch.randn(WIDTH, WIDTH) / WIDTH**0.5}
        offloaded.update_weights(new.items())
        resident.load_state_dict(new, strict=False)
        assert torch.equal(captured(), resident(x))
    offloaded.disable()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_forward_in_a_graph_of_the_users_own_is_refused(cuda: Backend) -> None:
    """B25. It would wait for events from outside of the graph, and leave a stream unjoined."""
    model = Deep(4)
    resident = resident_on(model, cuda)
    offloaded = dlo.offload(model, device=cuda)
    with torch.inference_mode():
        x = batch(cuda)
        wanted = resident(x)
        cuda.synchronize()
        with (
            pytest.raises(dlo.UseError, match=r"offloaded\.capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            model(x)
        assert torch.equal(model(x), wanted)
    offloaded.disable()


class Looking(Deep):
    """Makes the host wait for a value, which no graph can hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks, and look at the result of each."""
        for block in self.blocks:
            x = block(x).tanh()
            if x[0, 0].item() > 2:
                raise ArithmeticError("tanh is below one")
        return x


def test_a_pass_that_waits_for_the_device_is_not_captured_and_goes_on(cuda: Backend) -> None:
    """B25. A capture that fails half-way harms neither the offload nor the device."""
    model = Looking(4)
    resident = resident_on(model, cuda)
    offloaded = dlo.offload(model, device=cuda)
    with torch.inference_mode():
        x = batch(cuda)
        wanted = resident(x)
        with pytest.raises(dlo.UseError, match="could not be captured"):
            offloaded.capture(model, x)
        assert all(torch.equal(model(x), wanted) for _ in range(3))
    offloaded.disable()


@pytest.mark.timeout(150)
# torch's own, of what its compiler imports.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_model_is_captured(cuda: Backend) -> None:
    """B25. The graph holds what the compiler made of the blocks, and dlo's copies."""
    resident, model = resident_on(Deep(4), cuda), Deep(4)
    for block in (*resident.blocks, *model.blocks):  # type: ignore[misc]
        block.compile(fullgraph=True)
    offloaded = dlo.offload(model, device=cuda)
    with torch.inference_mode():
        x = batch(cuda)
        wanted = resident(x)
        captured = offloaded.capture(model, x)
        assert all(torch.equal(captured(x), wanted) for _ in range(5))
    offloaded.disable()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_events_and_pinned_copies_are_what_they_say(cuda: Backend) -> None:
    """B42, https://github.com/vllm-project/vllm-omni/pull/1492: events that were no-ops, and hangs.

    No call on the hot path waits for the device, and every event behind work is pending at first.
    """
    model = Deep(6)
    resident = resident_on(model, cuda)
    offloaded = dlo.offload(model, device=cuda)
    with torch.inference_mode():
        x = batch(cuda)
        wanted = resident(x)
        for _ in range(3):
            model(x)
        cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = [model(x) for _ in range(20)]
            behind = cuda.new_event()
            cuda.current_stream().record_event(behind)
            pending = not behind.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert pending
        behind.synchronize()
        assert all(torch.equal(one, wanted) for one in got)
    offloaded.disable()


class Exchanging(Deep):
    """Every block ends in an all-to-all of the model's own, as sequence parallelism has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks, exchanging rows after each."""
        for block in self.blocks:
            x = block(x).tanh()
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x)
            x = out
        return x


def exchange(rank: int) -> bool:
    # Two ranks share one GPU: NCCL allows that to ranks that seem to be on two hosts.
    os.environ.update(
        NCCL_HOSTID=f"host{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        MASTER_ADDR="127.0.0.1",
    )
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        init_method=os.environ["DLO_TEST_STORE"],
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", 0),
    )
    model = Exchanging(6)
    resident = twin(model).cuda()
    dlo.offload(model, device="cuda", group=dist.group.WORLD)
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn(64, WIDTH, generator=gen).cuda()
    with torch.inference_mode():
        wanted = resident(x)
        same = all(torch.equal(model(x), wanted) for _ in range(40))
    offloaded = dlo.offloaded(model)
    assert offloaded is not None
    offloaded.disable()
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return same


@pytest.mark.timeout(150)
def test_the_models_own_collectives_and_the_gathers_do_not_block_each_other(
    cuda: Backend, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B40, https://github.com/NVIDIA/nccl/issues/592. Two communicators on two streams."""
    monkeypatch.setenv("DLO_TEST_STORE", f"file://{tmp_path}/nccl")
    assert run_ranks(exchange, 2, start_method="spawn", limit_s=140.0) == [True, True]
