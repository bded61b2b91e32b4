"""Gathers by copies: who is asked what in which order, on all ranks or on none."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from toys import assert_restored, inputs, make_toy, snapshot

import dlo_core as dlo
from dlo_core import gathering, startup
from dlo_core.agreement import GroupAgreement
from dlo_core.cpu import CpuBackend, GlooCollective
from dlo_core.engine import _KEPT
from dlo_core.host import PrivateStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup

SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0, "gather_by": "copies"}
ORDER = ["options", "memory", "empty", "empty", "end of memory", "vote", "settle", "vote"]


class Copies(GlooCollective):
    """Gathers over gloo, and writes down what it is asked; may fail, and be stuck."""

    def __init__(self, group: ProcessGroup, backend: Backend) -> None:
        super().__init__(group)
        self.backend = backend

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Say what is allocated inside."""
        self.backend.say("memory")
        self.backend.inside = True
        try:
            yield
        finally:
            self.backend.inside = False
            self.backend.say("end of memory")

    def settle_memory(self) -> None:
        """Fail where it is to."""
        self.backend.say("settle")
        if self.backend.fails == "settle":
            raise RuntimeError("no window")

    def stuck(self) -> bool:
        """Return what it is to."""
        return self.backend.is_stuck

    def close(self) -> None:
        """Say so, once."""
        if self._group is not None:
            self.backend.say("close")
        super().close()


class Backend(CpuBackend):
    """A CPU whose ranks gather by copies, it says."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails, self.said = fails, list[str]()
        self.inside = self.is_stuck = False

    def say(self, what: str) -> None:
        """Write down."""
        self.said.append(what)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Say what lands in the memory of gathers; fail there where it is to."""
        if self.inside:
            self.say("empty")
            if self.fails == "empty":
                raise MemoryError("no device memory")
        return super().empty(nbytes)

    def copies_refusal(self) -> str | None:
        """Give no reason, or one."""
        return "it has no engines" if self.fails == "refusal" else None

    def copies_options(self, timeout_s: float) -> None:
        """Say so; gloo has none."""
        self.say("options")

    def copies_collective(self, group: ProcessGroup) -> Copies:
        """Return ours."""
        return Copies(group, self)


def offload(model: Any, backend: CpuBackend, **settings: Any) -> Any:
    return dlo.offload(model, device=backend, group=dist.group.WORLD, **(SHORT | settings))


@contextmanager
def votes_written_to(backend: Backend) -> Iterator[None]:
    """Have the two votes that matter written down."""
    vote = GroupAgreement.vote

    def noted(self: GroupAgreement, error: BaseException | None, what: str) -> None:
        if what in ("loading", "making the slots known to the peers"):
            backend.say("vote")
        vote(self, error, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupAgreement, "vote", noted)
        yield


@pytest.mark.parametrize("stages", [2, 0])
def test_buffers_are_allocated_voted_for_settled_and_voted_for(stages: int) -> None:
    def work(rank: int) -> list[str]:
        model, backend = make_toy(5), Backend()
        with torch.inference_mode(), votes_written_to(backend):
            expected = [model(each) for each in inputs(3)]
            offloaded = offload(model, backend, stages=stages, resident_layers=1)
            got = [model(each) for each in inputs(3)]
            offloaded.disable()
        assert all(map(torch.equal, got, expected))
        return backend.said

    # Two slots and the stages. The close is last: what was settled is let go with the group.
    order = [*ORDER[:4], *["empty"] * stages, *ORDER[4:]]
    assert run_ranks(work, 2) == [[*order, "close"]] * 2


@pytest.mark.parametrize(
    ("fails", "kind", "text", "last"),
    [
        ("refusal", dlo.ConfigError, "gather_by='copies'.*it has no engines.*'kernels'", []),
        ("empty", dlo.DloError, "no device memory", ["vote", "close"]),
        ("settle", dlo.DloError, "no window", ["settle", "vote", "close"]),
    ],
)
def test_one_rank_that_fails_is_an_error_on_both_and_leaves_nothing(
    fails: str, kind: type[Exception], text: str, last: list[str]
) -> None:
    def work(rank: int) -> list[str]:
        model, backend = make_toy(3), Backend(fails if rank == 1 else "")
        before = snapshot(model)
        raised = kind if rank == 0 or fails == "refusal" else (MemoryError, RuntimeError)
        with votes_written_to(backend), pytest.raises(raised, match=text):
            offload(model, backend)
        assert_restored(model, before)
        return backend.said

    for said in run_ranks(work, 2):
        assert said[len(said) - len(last) :] == last
        assert ("settle" in said) == (fails == "settle")
        assert fails != "refusal" or said == []


def test_ranks_on_two_nodes_are_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(dlo.ConfigError, match="on one node; rank 0 is on 'a' and rank 2 on 'b'"):
        gathering.check_one_node(["a", "a", "b"])
    gathering.check_one_node(["a", "a"])
    make_wish: Any = vars(startup)["make_wish"]

    def work(rank: int) -> list[str]:
        def elsewhere(*args: Any, **kwargs: Any) -> Any:
            made = make_wish(*args, **kwargs)
            object.__setattr__(made, "node", f"node{rank}")
            return made

        monkeypatch.setattr(startup, "make_wish", elsewhere)
        backend = Backend()
        with pytest.raises(dlo.ConfigError, match="rank 0 is on 'node0' and rank 1 on 'node1'"):
            offload(make_toy(3), backend)
        return backend.said

    assert run_ranks(work, 2) == [[], []]


def test_the_means_must_be_known_the_same_on_all_ranks_and_had() -> None:
    with pytest.raises(dlo.ConfigError, match="gather_by must be 'kernels' or 'copies'; got 'x'"):
        dlo.OffloadConfig(gather_by="x")

    def work(rank: int) -> None:
        with pytest.raises(dlo.ConfigError, match="CpuBackend gathers by its comm library's"):
            offload(make_toy(3), CpuBackend())
        with pytest.raises(dlo.AgreementError, match="differ in gather_by"):
            offload(make_toy(3), Backend(), gather_by=("copies", "kernels")[rank])
        # Without a gather it is without effect, as stages are.
        offload(make_toy(3), CpuBackend(), use_allgather=False).disable()

    run_ranks(work, 2)


def test_a_stuck_gather_keeps_its_memory_and_nothing_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(rank: int) -> tuple[int, str, int]:
        model, backend = make_toy(3), Backend()
        offloaded = offload(model, backend)
        backend.is_stuck = True
        stream, store = type(backend.current_stream()), offloaded.engine.store
        buffers = [slot.buffer for slot in offloaded.engine.pool.slots]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream, "synchronize", lambda self: pytest.fail("waited"))
            patch.setattr(backend, "synchronize", lambda: pytest.fail("waited"))
            patch.setattr(type(store), "release", lambda self: pytest.fail("gave memory back"))
            offloaded.shutdown()
        kept: Any = _KEPT.pop()
        assert all(a.buffer is b for a, b in zip(kept[3].slots, buffers, strict=True))
        said = backend.said.count("close")
        kept[0].close()
        kept[1].release()
        return said, caplog.text, len(buffers)

    for closed, text, count in run_ranks(work, 2):
        assert (closed, count) == (1, 2)
        assert "end this process" in text


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_start_that_fails_gives_memory_back_behind_the_gathers_or_not_at_all(
    is_stuck: bool,
) -> None:
    def work(rank: int) -> list[str]:
        model, backend = make_toy(3), Backend("settle" if rank == 1 else "")
        backend.is_stuck = is_stuck
        before, release = snapshot(model), PrivateStore.release

        def noted(self: PrivateStore) -> None:
            backend.say("give back")
            release(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PrivateStore, "release", noted)
            with pytest.raises((dlo.DloError, RuntimeError), match="no window"):
                offload(model, backend)
        assert_restored(model, before)
        assert len(_KEPT) == is_stuck
        _KEPT.clear()
        return backend.said[backend.said.index("settle") + 1 :]

    assert run_ranks(work, 2) == [["close"] if is_stuck else ["close", "give back"]] * 2


# --- NCCL, without a device -----------------------------------------------------------------------


class FakeEvent:
    """A mark that is reached or not."""

    reached = True

    def record(self, stream: Any) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return whether it is."""
        return FakeEvent.reached


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[[], Any], list[str]]]:
    """Makes a collective on a fake of NCCL; and what it was asked."""
    copies = pytest.importorskip("dlo_cuda.copies")
    said: list[str] = []

    @contextmanager
    def context(*args: Any) -> Iterator[None]:
        yield

    def make_pool(allocator: None) -> str:
        said.append("pool")
        return "pool"

    cuda = SimpleNamespace(
        MemPool=make_pool,
        use_mem_pool=context,
        device=context,
        Event=FakeEvent,
        current_stream=lambda device=None: SimpleNamespace(synchronize=lambda: None),
        synchronize=lambda device: said.append("synchronize"),
    )
    group = SimpleNamespace(
        _get_backend=lambda device: SimpleNamespace(
            mem_allocator=None,
            register_mem_pool=lambda pool, symm: said.append(f"register {pool} {symm}"),
            deregister_mem_pool=lambda pool: said.append(f"deregister {pool}"),
        )
    )
    monkeypatch.setattr(copies.torch, "cuda", cuda)
    monkeypatch.setattr(copies.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(copies.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(copies, "living", lambda group: group)

    def abort(group: Any, *, failed: bool = False) -> None:
        said.append("abort, failed" if failed else "abort")

    monkeypatch.setattr(copies, "abort_group", abort)
    monkeypatch.setattr("dlo_core.accelerator.abort_group", abort)
    monkeypatch.setattr("dlo_core.accelerator.living", lambda group: group)
    for module in ("dlo_cuda.copies", "dlo_core.accelerator"):
        monkeypatch.setattr(
            f"{module}.all_gather_bytes", lambda out, shard, group: said.append("gather")
        )
    monkeypatch.setattr(copies, "_GRACE_S", 0.01)
    monkeypatch.setattr(FakeEvent, "reached", True)
    yield lambda: copies.CopyCollective(group, torch.device("cpu")), said
    copies._KEPT.clear()


def settled(make: Callable[[], Any]) -> Any:
    collective = make()
    with collective.memory():
        pass
    collective.settle_memory()
    return collective


def test_windows_are_taken_back_before_the_group_is_given_up(nccl: Any) -> None:
    make, said = nccl
    collective = settled(make)
    assert said == ["pool", "gather", "register pool True"]
    collective.all_gather(torch.empty(2), torch.empty(1))
    collective.close()
    collective.close()
    assert said[3:] == ["gather", "deregister pool", "abort", "synchronize"]


def test_what_was_never_settled_is_not_taken_back(nccl: Any) -> None:
    make, said = nccl
    collective = make()
    with collective.memory():
        pass
    collective.close()
    assert said == ["pool", "abort", "synchronize"]


def test_nothing_waits_for_a_stuck_gather(nccl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make, said = nccl
    collective = settled(make)
    collective.all_gather(torch.empty(2), torch.empty(1))
    monkeypatch.setattr(FakeEvent, "reached", False)

    def fail(group: Any, *, failed: bool) -> None:
        said.append("abort, failed" if failed else "abort")
        raise RuntimeError("Failed to deregister segment handle")

    monkeypatch.setattr("dlo_cuda.copies.abort_group", fail)
    collective.abort(RuntimeError("a peer is gone"))
    assert collective.stuck()
    collective.close()
    assert said[3:] == ["gather", "abort, failed"]


def test_what_cuda_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = pytest.importorskip("dlo_cuda.copies")
    monkeypatch.setattr(copies.dist, "ProcessGroupNCCL", None, raising=False)
    assert copies.copies_refusal({}) == "this torch is built without NCCL"
    kind = SimpleNamespace(register_mem_pool=1, deregister_mem_pool=1)
    monkeypatch.setattr(copies.dist, "ProcessGroupNCCL", kind, raising=False)
    assert "has no NCCL_CTA_POLICY_ZERO" in copies.copies_refusal({})
    kind.NCCL_CTA_POLICY_ZERO = 2
    nccl = SimpleNamespace(version=lambda: (2, 27, 9))
    monkeypatch.setattr(copies.torch.cuda, "nccl", nccl)
    assert "NCCL is 2.27.9" in copies.copies_refusal({})
    nccl.version = lambda: (2, 28, 9)
    assert copies.copies_refusal({}) is None
    assert "NCCL_P2P_DISABLE=1 is set" in copies.copies_refusal({"NCCL_P2P_DISABLE": "1"})


# --- two devices ----------------------------------------------------------------------------------


def gather_on_devices(rank: int, stages: int) -> None:
    """Run both means on two devices, twice, with the resident bits."""
    torch.cuda.set_device(rank)
    model = make_toy(5).to(f"cuda:{rank}")
    args = [each.to(f"cuda:{rank}") for each in inputs(3)]
    with torch.inference_mode():
        expected = [model(each) for each in args]
    # Outside of inference mode: what is made there cannot be offloaded.
    model.to("cpu")
    for means in ("copies", "kernels", "copies"):
        offloaded = dlo.offload(
            model,
            device=f"cuda:{rank}",
            group=dist.group.WORLD,
            **(SHORT | {"gather_by": means, "stages": stages, "resident_layers": 1}),
        )
        with torch.inference_mode():
            got = [model(each) for each in args]
        assert all(map(torch.equal, got, expected)), means
        offloaded.disable()
    offloaded = dlo.offload(model, device=f"cuda:{rank}", group=dist.group.WORLD, **SHORT)
    with torch.inference_mode():
        model(args[0])
    offloaded.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 0])
def test_two_devices_give_the_resident_bits(
    stages: int, usable_backend: Callable[[str], Any]
) -> None:
    backend = usable_backend("cuda")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    if reason := backend.copies_refusal():
        pytest.skip(reason)
    run_ranks(gather_on_devices, 2, stages, limit_s=120, start_method="spawn")
