"""Host tiers: what was asked for or a clear error, exact, within every budget, and given back."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from leaks import nothing_left
from pinning import CountingAllocator, PinningBackend, machine_of
from poison import PoisonBackend
from ranks import run_ranks
from safetensors.torch import save_file
from toys import WideBlock, assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo
from dlo_core.cpu import CpuBackend
from dlo_core.host import PrivateStore

if TYPE_CHECKING:
    from pathlib import Path

    from toys import Toy

SHORT: dict[str, Any] = {"timeout_s": 10.0, "load_timeout_s": 10.0}
BLOCK = 1024
N = 10


def start(model: Toy, backend: Any, **settings: Any) -> dlo.LayerwiseOffload:
    group = dist.group.WORLD if dist.is_initialized() else None
    return dlo.offload(model, device=backend, group=group, **{**SHORT, **settings})


def check(model: Toy, resident: Any) -> None:
    with torch.inference_mode():
        for number in range(3):
            assert torch.equal(model(inputs(number)), resident(inputs(number)))


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "blocks"),
    [(0, 0), (BLOCK // 2, 0), (5 * BLOCK // 2, 2), (N * BLOCK, N), (1 << 50, N), (None, N)],
)
@pytest.mark.parametrize("host", [None, "pinned", "shared"])
def test_a_pin_budget_is_kept(host: str | None, budget: int | None, blocks: int) -> None:
    backend = PinningBackend()
    model = make_toy(N)
    resident, before = twin(model), snapshot(model)
    with nothing_left(backend):
        offloaded = start(model, backend, host=host, pin_budget_bytes=budget)
        stats = offloaded.stats()
        if host == "shared":
            # Whole pages, of which the first block that is pinned begins one or not.
            assert (stats.pinned_bytes > 0) == (blocks > 0)
            assert stats.shared_bytes == stats.host_bytes == N * BLOCK
            assert offloaded.footprint.pinned_nbytes == blocks * BLOCK
        else:
            assert [block.tier for block in stats.blocks].count("pinned") == blocks
            assert stats.pinned_bytes == blocks * BLOCK
            assert stats.pageable_bytes == (N - blocks) * BLOCK
            assert offloaded.footprint.pinned_nbytes == stats.pinned_bytes
            assert offloaded.footprint.pageable_nbytes == stats.pageable_bytes
        assert stats.pinned_bytes == backend.counted.taken
        assert stats.host_bytes == offloaded.footprint.host_nbytes == N * BLOCK
        check(model, resident)
        offloaded.disable()
        assert backend.counted.taken == 0
        del offloaded
    assert_restored(model, before)


def test_a_budget_below_nothing_is_refused() -> None:
    with pytest.raises(dlo.ConfigError, match=r"pin_budget_bytes must be .* 0 or more"):
        dlo.OffloadConfig(pin_budget_bytes=-1)
    config = dlo.OffloadConfig(pin_budget_bytes=5, host="shared")
    assert dlo.OffloadConfig.of(json.loads(json.dumps(config.to_dict()))) == config


def test_pinned_blocks_are_spread_over_the_ring() -> None:
    with start(make_toy(N), PinningBackend(), pin_budget_bytes=3 * BLOCK) as offloaded:
        tiers = [block.tier for block in offloaded.stats().blocks]
    assert [n for n, tier in enumerate(tiers) if tier == "pinned"] == [3, 6, 9]


@pytest.mark.parametrize("budget", [3, 8])
def test_blocks_that_stay_are_pinned_last(budget: int) -> None:
    """They are copied once; what the others leave of the budget is theirs."""
    settings = {"pin_budget_bytes": budget * BLOCK, "resident_layers": 3}
    with start(make_toy(N), PinningBackend(), **settings) as offloaded:
        blocks = offloaded.stats().blocks
    pinned = [block.resident for block in blocks if block.tier == "pinned"]
    assert (len(pinned), sum(pinned)) == (budget, max(0, budget - (N - 3)))


def test_ranks_with_different_tiers_gather_alike(tmp_path: Path) -> None:
    path = tmp_path / "toy.safetensors"
    save_file(make_toy(N).state_dict(), path)
    settings: list[dict[str, Any]] = [
        {"host": None},
        {"pin_budget_bytes": 700},
        {"host": "pageable"},
        {"host": "mapped"},
    ]

    def body(rank: int) -> list[str]:
        backend = PinningBackend(delay_s=0.0005)
        model = make_toy(N)
        resident, before = twin(model), snapshot(model)
        with nothing_left(backend):
            offloaded = start(model, backend, checkpoint=path, **settings[rank])
            check(model, resident)
            tiers = [block.tier for block in offloaded.stats().blocks]
            offloaded.disable()
            del offloaded
        assert_restored(model, before)
        return tiers

    tiers = run_ranks(body, 4)
    assert [sorted(set(each)) for each in tiers] == [
        ["pinned"],
        ["pageable", "pinned"],
        ["pageable"],
        ["mapped"],
    ]


# --- exactness (B27) ------------------------------------------------------------------------------


def test_an_allocator_that_rounds_takes_no_more_than_the_weights() -> None:
    """B27, https://github.com/sgl-project/sglang/pull/39021: blocks of 1.2 units, ten of them."""
    unit = 1 << 20
    sizes = [unit * 6 // 5 // 256 * 256] * 10
    naive = CountingAllocator(rounds=True)
    buffers = [naive.allocate(nbytes) for nbytes in sizes]
    assert naive.taken > 1.6 * sum(sizes)
    for buffer in buffers:
        buffer.release()

    allocator = CountingAllocator(rounds=True)
    store = PrivateStore(allocator, sizes, [True] * 10)
    assert sum(sizes) <= allocator.taken == store.pinned_nbytes <= 1.01 * sum(sizes)
    # Every byte is there and no two blocks share one, wherever the buffers begin.
    for number in range(10):
        with store.writing(number) as shard:
            shard.copy_(torch.arange(shard.numel()).add_(number).to(torch.uint8))
    for number, nbytes in enumerate(sizes):
        whole = torch.arange(nbytes).add_(number).to(torch.uint8)
        assert torch.equal(store.whole(number), whole)
        parts = store.parts(number)
        assert [at for at, _ in parts] == sorted({at for at, _ in parts})
        assert torch.equal(torch.cat([part for _, part in parts]), whole)
    split = [number for number in range(10) if len(store.parts(number)) > 1]
    assert split
    with pytest.raises(dlo.UseError, match=rf"block {split[0]} lies in 2 parts"):
        store.shard(split[0])
    store.release()
    assert allocator.taken == 0


@pytest.mark.parametrize("gathers", [True, False])
def test_a_model_over_a_rounding_allocator_is_exact_and_right(gathers: bool) -> None:
    def body(rank: int) -> None:
        backend = PinningBackend(rounds=True, host_registration=False)
        torch.manual_seed(0)
        model = make_toy(3)
        for place in (0, 2):
            model.blocks[place] = WideBlock().requires_grad_(False)
            wide = torch.rand(257, 1000)
            model.blocks[place].extra = torch.nn.Parameter(wide, requires_grad=False)
        resident, before = twin(model), snapshot(model)
        with nothing_left(backend):
            offloaded = start(model, backend, use_allgather=gathers)
            store = offloaded.engine.store  # type: ignore[union-attr]
            assert store.nbytes <= backend.counted.taken <= 1.01 * store.nbytes
            # What was looked at to find out is given back.
            assert any(len(store.parts(number)) > 1 for number in range(3))
            check(model, resident)
            offloaded.disable()
            assert backend.counted.taken == 0
            del offloaded, store
        assert_restored(model, before)

    run_ranks(body, 2)


def test_an_exact_allocator_is_asked_for_one_buffer() -> None:
    backend = PinningBackend()
    with start(make_toy(N), backend) as offloaded:
        assert [n for n in backend.counted.asked if n >= N * BLOCK] == [N * BLOCK]
        store = offloaded.engine.store  # type: ignore[union-attr]
        assert all(len(store.parts(number)) == 1 for number in range(N))


# --- what cannot be had (B28) ---------------------------------------------------------------------


def test_a_tier_that_the_backend_cannot_have_is_refused_by_name() -> None:
    model = make_toy(3)
    before = snapshot(model)
    with pytest.raises(dlo.ConfigError, match="host='pinned' cannot be had"):
        start(model, CpuBackend(), host="pinned")
    with pytest.raises(dlo.ConfigError, match=r"host='shared' cannot be had: .* cannot page-lock"):
        start(model, PinningBackend(host_registration=False), host="shared")
    with pytest.raises(dlo.ConfigError, match="host must be one of 'pinned', 'shared', 'mapped'"):
        start(model, CpuBackend(), host="paged")
    assert_restored(model, before)


def test_shared_is_for_ranks_that_do_not_gather() -> None:
    def body(rank: int) -> None:
        model = make_toy(3)
        before = snapshot(model)
        backend = PoisonBackend(0)
        with nothing_left(backend), pytest.raises(dlo.ConfigError, match="use_allgather=False"):
            start(model, backend, host="shared" if rank == 1 else None)
        assert_restored(model, before)

    run_ranks(body, 2)


def test_pageable_by_name_is_pageable_where_there_is_pinned_memory_too() -> None:
    backend = PinningBackend()
    with start(make_toy(N), backend, host="pageable") as offloaded:
        assert offloaded.stats().pinned_bytes == backend.counted.taken == 0
        assert offloaded.stats().pageable_bytes == N * BLOCK


def test_a_pin_that_fails_half_way_pins_what_it_can_and_says_so() -> None:
    """B28, https://github.com/LMCache/LMCache-Ascend/issues/5: a low limit on locked memory."""
    backend = PinningBackend(limit=6 * BLOCK)
    model = make_toy(N)
    resident = twin(model)
    with pytest.warns(dlo.DloWarning, match=r"10,240 bytes: ulimit -l is 6,144 .* 5,120 bytes are"):
        offloaded = start(model, backend)
    stats = offloaded.stats()
    assert stats.pinned_bytes == backend.counted.taken == 5 * BLOCK
    assert stats.pageable_bytes == 5 * BLOCK
    check(model, resident)
    offloaded.disable()
    assert backend.counted.taken == 0


def test_a_pin_that_fails_altogether_leaves_all_pageable() -> None:
    backend = PinningBackend(limit=BLOCK // 2)
    with pytest.warns(dlo.DloWarning, match="0 bytes are pinned instead"):
        offloaded = start(make_toy(N), backend)
    assert offloaded.stats().pageable_bytes == N * BLOCK
    offloaded.disable()


def test_told_to_pin_by_name_it_is_an_error_and_earlier_pins_are_released() -> None:
    def body(rank: int) -> str:
        # The second buffer of a rounding allocator, on one rank.
        limit = 32 * BLOCK + 4096 if rank == 1 else None
        backend = PinningBackend(limit=limit, rounds=True)
        model = make_toy(4 * N)
        before = snapshot(model)
        with nothing_left(backend):
            with pytest.raises(dlo.HostMemoryError) as caught:
                start(model, backend, host="pinned", use_allgather=False)
            text = str(caught.value)
            del caught
        assert backend.counted.taken == 0
        assert_restored(model, before)
        return text

    for text in run_ranks(body, 2):
        assert "page-lock 8,192 bytes: ulimit -l is 36,864 and 32,768 are used" in text


def test_the_systems_lock_limit_counts_where_the_driver_asks_it(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    limits = "Max locked memory         3500                 3500                 bytes\n"
    (tmp_path / "proc/self/limits").write_text(limits)
    with machine_of(tmp_path):
        for asks, pinned in ((True, 3), (False, N)):
            with start(make_toy(N), PinningBackend(lock_limit=asks)) as offloaded:
                assert offloaded.stats().pinned_bytes == pinned * BLOCK
        model = make_toy(N)
        before = snapshot(model)
        with pytest.raises(dlo.HostMemoryError, match=r"10,240 bytes and ulimit -l leaves 3,500"):
            start(model, PinningBackend(lock_limit=True), host="pinned")
        assert_restored(model, before)


# --- the ledger, end to end -----------------------------------------------------------------------


def container(root: Path, limit: int) -> Path:
    """Write the files of a container whose cgroup leaves ``limit`` bytes."""
    files = {
        "proc/meminfo": "MemAvailable: 64000000 kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/memory.max": f"{limit + 512}\n",
        "sys/fs/cgroup/memory.current": "512\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_ranks_that_fit_one_by_one_but_not_together_are_refused(tmp_path: Path) -> None:
    root = container(tmp_path, 3 * N * BLOCK + BLOCK)

    def body(rank: int) -> str:
        backend = PoisonBackend(0)
        with machine_of(root):
            alone = dlo.offload(make_toy(N), device=backend)  # one by one it fits
            alone.shutdown()
            del alone
            model = make_toy(N)
            before = snapshot(model)
            with nothing_left(backend), pytest.raises(dlo.HostMemoryError) as caught:
                start(model, backend, use_allgather=False, host="pageable")
            text = str(caught.value)
            del caught
            assert_restored(model, before)
            # In gather mode each keeps a quarter.
            start(model, backend).disable()
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        texts = run_ranks(body, 4)
    assert len(set(texts)) == 1
    assert "ranks 0, 1, 2, 3 together want 40,960 bytes and cgroup / has 31,744 free" in texts[0]


@pytest.mark.parametrize(("room", "stored", "tier"), [(11, False, "shared"), (9, True, "mapped")])
def test_where_the_choice_is_free_a_tier_that_fits_is_taken_and_said(
    room: int, stored: bool, tier: str, tmp_path: Path
) -> None:
    root = container(tmp_path / "root", room * BLOCK)
    path = tmp_path / "toy.safetensors"
    save_file(make_toy(N).state_dict(), path)

    def body(rank: int) -> None:
        backend = PoisonBackend(0)
        model = make_toy(N)
        resident, before = twin(model), snapshot(model)
        with machine_of(root), pytest.warns(dlo.DloWarning, match=f"the {tier} tier is used"):
            offloaded = start(
                model, backend, use_allgather=False, checkpoint=path if stored else None
            )
        assert {block.tier for block in offloaded.stats().blocks} == {tier}
        check(model, resident)
        offloaded.disable()
        assert_restored(model, before)

    run_ranks(body, 2)


# --- what it says of itself -----------------------------------------------------------------------


def test_the_log_and_repr_show_the_bytes_by_tier(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dlo"):
        offloaded = start(make_toy(N), PinningBackend(), pin_budget_bytes=4 * BLOCK)
    assert "host 10240 bytes (pinned 4,096, pageable 6,144)" in caplog.text
    assert "host: pinned 4,096, pageable 6,144" in repr(offloaded)
    assert "4 pinned" in repr(offloaded.engine.store)  # type: ignore[union-attr]
    told = offloaded.stats().to_dict()
    assert told["pageable_bytes"] == 6 * BLOCK
    assert told["blocks"][0]["tier"] == "pageable"
    offloaded.shutdown()
    assert "host:" not in repr(offloaded)
