"""The script for several GPUs: its ranks on gloo, its gather by peer copies, its tables."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import run_ranks
from test_benchmarks import FOLDER, run_script

from dlo_core.bench.launch import Member
from dlo_core.bench.model import Shape
from dlo_core.registry import get_backend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that imports a script's module, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# --- the ranks ------------------------------------------------------------------------------------


def told_by_ranks(job: Any, measure: Any, size: int = 2) -> list[list[dict[str, Any]]]:
    """Run ``measure`` on gloo ranks and return what each told."""

    def work(rank: int) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        member = Member(rank, size, get_backend("cpu"), lambda what: told.append(json.loads(what)))
        measure(member, job)
        return told

    return run_ranks(work, size, limit_s=60)


def gathered(told: list[list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the findings by contender and rank, as the section keeps them."""
    found: dict[str, dict[str, Any]] = {}
    for each in told:
        for one in each:
            found.setdefault(one["name"], {}).setdefault(str(one["rank"]), {}).update(one["found"])
    return found


@pytest.mark.parametrize(
    ("parallel", "halves", "contenders"),
    [
        ("dp", 0, ("resident", "gather", "local", "local_shared")),
        ("sp", 1, ("resident", "gather", "gather_in_place_depth3", "gather_peer_copies")),
    ],
)
def test_contenders_on_ranks_give_the_resident_bits(
    scripts: Any, parallel: str, halves: int, contenders: tuple[str, ...]
) -> None:
    weights, steps = scripts("ranks_weights"), scripts("ranks_steps")
    report, model = scripts("ranks_report"), scripts("ranks_model")
    shape = Shape(32, 4, 3, halves, "float32")
    nbytes = weights.weights_nbytes(model.make_model(shape, "dp", None), torch.float32)
    path = weights.make_weights(nbytes, torch.float32)
    runs = ((8, 3), (16, 2))
    job = steps.StepsJob(path, shape, parallel, runs, contenders, time.time() + 60)
    found = gathered(told_by_ranks(job, steps.measure_steps))
    if "gather_peer_copies" in found:
        skipped = found.pop("gather_peer_copies")
        assert "CUDA" in skipped["0"]["skipped"]
    assert set(found) == set(contenders) - {"gather_peer_copies"}
    section = {"contenders": found, "reference": "here"}
    results = {"ranks": 2, "host_blocks": True, "sections": {"here": section}}
    rows = report.rows_of(results)
    assert len(rows) == len(found) * len(runs)
    assert all(row.same_bits for row in rows)
    digests = [found["resident"][rank]["runs"]["8"]["digests"] for rank in "01"]
    assert digests[0] != digests[1]
    assert len(found["resident"]["0"]["runs"]["8"]["block_ms"]) == 3 * (1 + halves)
    assert all("host_nbytes" in each for ranks in found.values() for each in ranks.values())
    # A pass of another contender would have other bits if it used other weights.
    found["gather"]["1"]["runs"]["16"]["digests"] = ["x"]
    wrong = [row for row in report.rows_of(results) if not row.same_bits]
    assert [(row.contender, row.tokens) for row in wrong] == [("gather", 16)]


def test_a_contender_that_there_is_no_time_for_is_left_out(scripts: Any) -> None:
    weights, steps = scripts("ranks_weights"), scripts("ranks_steps")
    path = weights.make_weights(1 << 20, torch.float32)
    shape = Shape(32, 4, 2, 0, "float32")
    job = steps.StepsJob(path, shape, "dp", ((8, 1),), ("resident", "gather"), time.time() + 1)
    found = gathered(told_by_ranks(job, steps.measure_steps))
    assert "out of time" in found["gather"]["0"]["skipped"]
    assert "out of time" in found["gather"]["1"]["skipped"]


# --- the gather by peer copies --------------------------------------------------------------------


class MadeRegion:
    """A buffer of each rank, which lie in one process; its barrier is one of threads."""

    def __init__(self, buffers: list[torch.Tensor], barriers: list[threading.Barrier]) -> None:
        self.buffers = buffers
        self.barriers = barriers
        self.reads_late = False

    def get_buffer(
        self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int
    ) -> torch.Tensor:
        if self.reads_late:
            time.sleep(0.03)
        return self.buffers[rank].view(dtype)[storage_offset : storage_offset + sizes[0]]

    def barrier(self, channel: int) -> None:
        self.barriers[channel].wait(10)


def gather_by_copies(
    peer_copies: Any, *, in_place: bool, deaf: int | None, ranks: int = 3, rounds: int = 3
) -> bool:
    """Gather on threads, in turns slow to come and slow to read; ``deaf``: a barrier left out."""
    nbytes = 64
    buffers = [torch.zeros(nbytes * ranks + 16, dtype=torch.uint8) for _ in range(ranks)]
    barriers = [threading.Barrier(1 if channel == deaf else ranks) for channel in range(2)]
    right: list[bool] = []

    def run(rank: int) -> None:
        region = MadeRegion(buffers, barriers)
        start = 16 + rank * nbytes if in_place else 16
        gather = peer_copies.PeerCopies(rank, ranks, lambda _: (region, start))
        slot = buffers[rank][16:] if in_place else torch.zeros(nbytes * ranks, dtype=torch.uint8)
        shard = buffers[rank][start : start + nbytes]
        for number in range(rounds):
            slow = number % ranks == rank
            region.reads_late = (number + 1) % ranks == rank
            if slow:
                time.sleep(0.03)
            shard.fill_(10 * number + rank)
            gather.all_gather(slot, shard)
            seen = slot.view(ranks, nbytes).clone()
            # What comes next may overwrite it at once.
            shard.fill_(255)
            right.append(all(bool((seen[r] == 10 * number + r).all()) for r in range(ranks)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return len(right) == ranks * rounds and all(right)


def _peer_copies(scripts: Any) -> Any:
    pytest.importorskip("dlo_cuda", reason="the experiment stands on the CUDA backend")
    return scripts("peer_copies")


@pytest.mark.parametrize("in_place", [False, True])
def test_peer_copies_gather_every_shard_and_need_both_barriers(
    scripts: Any, in_place: bool
) -> None:
    peer_copies = _peer_copies(scripts)
    assert gather_by_copies(peer_copies, in_place=in_place, deaf=None)
    assert not gather_by_copies(peer_copies, in_place=in_place, deaf=0)
    assert not gather_by_copies(peer_copies, in_place=in_place, deaf=1)


def test_closing_peer_copies_gives_the_group_back_once(scripts: Any) -> None:
    closed: list[int] = []
    made = _peer_copies(scripts).PeerCopies(
        0, 2, lambda _: (None, 0), on_close=partial(closed.append, 1)
    )
    made.close()
    made.close()
    assert closed == [1]


def test_views_are_found_in_the_buffer_that_all_ranks_map_once(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed._symmetric_memory as symmetric

    met: list[torch.Tensor] = []

    def rendezvous(made: torch.Tensor, group: Any) -> torch.Tensor:
        met.append(made)
        return made

    peer_copies, group = _peer_copies(scripts), SimpleNamespace()
    monkeypatch.setattr(peer_copies, "_allocate", lambda n, _: torch.empty(n, dtype=torch.uint8))
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    regions = peer_copies.SymmetricRegions(group, torch.device("cpu"))
    first, second = regions.empty(8192), regions.empty(8192)
    for view, buffer, start in ((first[100:200], first, 100), (second, second, 0)):
        region, found = regions.find(view)
        assert region is buffer
        assert found == start
    assert regions.find(first)[0] is first
    assert [made.data_ptr() for made in met] == [first.data_ptr(), second.data_ptr()]


# --- limits and tables ----------------------------------------------------------------------------


def made_results() -> dict[str, Any]:
    """Two ranks, four blocks of 1 GB; the link gives 50 GB/s, a gather writes 400."""

    def runs(steps: dict[int, float]) -> dict[str, Any]:
        return {
            str(tokens): {
                "step_ms": ms,
                "digests": ["a"],
                "allocated_nbytes": 2e9,
                "reserved_nbytes": 3e9,
                "used_nbytes": 4e9,
                "block_ms": [ms / 4] * 4,
                "energy_j": 5.0,
            }
            for tokens, ms in steps.items()
        }

    def contender(steps: dict[int, float], pinned: int = 0, shared: int = 0) -> dict[str, Any]:
        one = {
            "runs": runs(steps),
            "start_s": 1.5,
            "blocks_nbytes": [10**9] * 4,
            "pinned_nbytes": pinned,
            "shared_nbytes": shared,
            "host_nbytes": 10**9,
        }
        return {"0": one, "1": one}

    links = {"link_all_gb_s": 50.0, "link_all_shared_gb_s": 40.0, "gather_gb_s": 400.0}
    return {
        "machine": {"torch": "9"},
        "ranks": 2,
        "host_blocks": False,
        "sections": {
            "links": {"ranks": {"0": links | {"link_all_gb_s": 60.0}, "1": links}},
            "modes": {
                "reference": "modes",
                "contenders": {
                    "resident": contender({100: 30.0, 200: 60.0, 300: 120.0}),
                    "gather": contender({100: 41.0, 200: 60.0, 300: 120.0}, pinned=2 * 10**9),
                    "local": contender({100: 80.0, 200: 80.0, 300: 120.0}, pinned=4 * 10**9),
                    "local_shared": contender({100: 101.0}, 4 * 10**9, 4 * 10**9),
                },
            },
            "fsdp": {"reference": "modes", "contenders": {}, "error": "killed after 9 s"},
            "settings": {
                "reference": "modes",
                "contenders": {"gather_residents20": contender({100: 31.0})},
            },
        },
    }


def test_a_step_is_held_against_the_limit_of_its_mode(scripts: Any) -> None:
    rows = {
        (row.contender, row.tokens): row for row in scripts("ranks_report").rows_of(made_results())
    }
    gather = rows["gather", 100]
    # 2 GB over the slower rank's 50 GB/s are longer than 30 ms of compute and 10 ms of gathers.
    assert (gather.resident_ms, gather.copy_ms, gather.gather_ms) == (30.0, 40.0, 10.0)
    assert gather.limit_ms == 40.0
    assert gather.ratio == pytest.approx(41 / 40)
    assert gather.simulated_ms == pytest.approx(40.0)
    assert rows["gather", 300].limit_ms == 120.0
    assert rows["local", 100].limit_ms == 80.0
    assert rows["local_shared", 100].limit_ms == 100.0
    # Half of the blocks stay.
    assert rows["gather_residents20", 100].limit_ms == 30.0
    assert gather.energy_j == 10.0


def test_without_rates_and_without_a_resident_run_nothing_is_claimed(scripts: Any) -> None:
    results = made_results()
    del results["sections"]["links"]
    del results["sections"]["modes"]["contenders"]["resident"]
    row = scripts("ranks_report").rows_of(results)[0]
    assert (row.limit_ms, row.ratio, row.simulated_ms, row.same_bits) == (None,) * 4
    assert "| – |" in scripts("ranks_tables").tables(results, [row])


def test_the_modes_cross_where_the_link_hides_a_whole_model(scripts: Any) -> None:
    report = scripts("ranks_report")
    points = report.crossing(report.rows_of(made_results()))
    # 80 ms of copies lie a third of the way from 60 to 120 ms of compute.
    assert points["limits_tokens"] == pytest.approx(233.3)
    # 80/60 at 200 tokens, 1 at 300, 1.03 between.
    assert points["measured_tokens"] == pytest.approx(291.0)


def test_the_tables_tell_all_that_was_found(scripts: Any) -> None:
    results = made_results()
    rows = scripts("ranks_report").rows_of(results)
    text = scripts("ranks_tables").tables(results, rows)
    assert (
        "| modes | gather | 100 | 41.0 | 40.0 | 1.025 | 40.0 | 30.0 | 40.0 | 10.0 | yes |" in text
    )
    assert "| modes | gather | 2.00 | 4.00 | 1.50 |" in text
    # One copy that both ranks lock.
    assert "| modes | local_shared | 2.00 | 4.00 | 1.50 |" in text
    assert "- fsdp: killed after 9 s" in text
    assert "modes, gather, 100 tokens: 1.025 of its limit, within 1.03" in text
    assert "from 291 tokens on" in text


def test_what_a_device_did_is_told_by_kind_and_by_pass(scripts: Any) -> None:
    events = [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 80, 30.0),
        ("Memcpy HtoD (Pinned -> Device)", 80, 200.0),
        ("Memcpy PtoP (Device -> Device)", 4, 2.0),
        ("nvjet_hsh_256x128_64x4", 320, 150.0),
        ("cudaLaunchKernel", 900, 0.0),
    ]
    told = scripts("ranks_activity").summary(events, 2)
    assert told["kinds"] == {
        "comm kernels": [40, 15.0],
        "copies from the host": [40, 100.0],
        "copies between devices": [2, 1.0],
        "other kernels": [160, 75.0],
    }
    assert next(iter(told["longest"])).startswith("Memcpy HtoD")
    results = made_results()
    results["sections"]["modes"]["contenders"]["gather"]["0"]["runs"]["100"]["activity"] = told
    text = scripts("ranks_tables").tables(results, scripts("ranks_report").rows_of(results))
    assert "- gather, 100 tokens, a pass on rank 0: comm kernels 40 in 15.00 ms" in text


def test_the_busiest_lane_is_told_by_its_kernels_and_gaps(scripts: Any) -> None:
    compute = [(7, "matmul", at, at + 40.0) for at in (0.0, 42.0, 100.0, 138.0)]
    beside = [
        (13, "ncclDevKernel_AllGather", 0.0, 500.0),
        (14, "Memcpy HtoD (Pinned -> Device)", 0.0, 500.0),
        (15, "compare", 0.0, 3.0),
    ]
    told = scripts("ranks_activity").lane([*beside, *compute], 2)
    # Between the second and the third there are 18 us; the last one overlaps.
    assert told == {"kernels": 2, "kernels_ms": 0.08, "gaps_ms": 0.01, "long_gaps_ms": 0.009}
    assert scripts("ranks_activity").lane([], 2) == {}


# --- the script -----------------------------------------------------------------------------------


def test_multicast_is_off_for_every_rank(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MULTICAST_OFF:
        monkeypatch.setenv(name, "something else")
    script = scripts("several_gpus")
    assert os.environ.items() >= MULTICAST_OFF.items()
    options = script.parse(["--device", "cuda:0", "--ranks", "2"])
    environment = scripts("ranks_section").environment
    made = [environment(options, script.SECTIONS["few_channels"], r) for r in range(2)]
    assert made[0]["NCCL_HOSTID"] != made[1]["NCCL_HOSTID"]
    assert made[0]["NCCL_MAX_CTAS"] == "4"
    assert not any(name in each for each in made for name in MULTICAST_OFF)


def test_a_section_whose_reference_is_not_asked_for_brings_its_own(scripts: Any) -> None:
    find = scripts("several_gpus").reference_for
    assert find("fsdp", ["links", "modes", "fsdp"]) == "modes"
    assert find("settings", ["links", "fsdp", "settings"]) == "fsdp"
    assert find("fsdp", ["links", "fsdp", "settings"]) == "fsdp"
    assert find("sp_rivals", ["modes", "sp_rivals"]) == "sp_rivals"
    assert find("unequal", ["unequal"]) == "unequal"


def test_a_section_that_cannot_run_here_is_left_out_with_the_reason(scripts: Any) -> None:
    script = scripts("several_gpus")
    options = script.parse(["--device", "cpu", "--small", "--ranks", "3"])
    assert "8 heads cannot be divided among 3 ranks" in script.why_not(options, "sp", 100)
    assert "vllm_omni is not installed" in script.why_not(options, "omni", 100)
    assert script.why_not(options, "modes", 5) == "out of budget"
    assert not script.why_not(options, "modes", 100)


def test_the_memory_grows_until_there_is_enough_or_no_more(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    script, free, most = scripts("several_gpus"), [5], [12]

    def grow(nbytes: int, *, limit_s: float) -> None:
        free.append(min(free[-1] + 4, most[0]))

    monkeypatch.setattr(script, "grow", grow)
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=free[-1] * 10**9)
    )
    assert script.grow_until(8 * 10**9, limit_s=10) == 9.0
    assert script.grow_until(100 * 10**9, limit_s=10) == 12.0
    assert free == [5, 9, 12, 12]


def test_wrong_bits_and_a_gather_mode_that_did_not_run_are_failures(scripts: Any) -> None:
    script, report = scripts("several_gpus"), scripts("ranks_report")

    def verdict(results: dict[str, Any]) -> int:
        rows = [row.to_dict() for row in report.rows_of(results)]
        return int(script.verdict(results | {"rows": rows}))

    assert verdict(made_results()) == 0
    results = made_results()
    results["sections"]["modes"]["contenders"]["local"]["1"]["runs"]["100"]["digests"] = ["b"]
    assert verdict(results) == 1
    results = made_results()
    del results["sections"]["modes"]["contenders"]["gather"]
    assert verdict(results) == 1
    results = made_results()
    results["sections"]["modes"]["contenders"]["gather_copies"] = {"1": {"errors": ["x"]}}
    assert verdict(results) == 1


def a_section(scripts: Any, tmp_path: Path, *contenders: str, until_s: float = 300) -> Any:
    """Return what runs ``modes`` with ranks of our own making and returns the answer."""
    module = scripts("ranks_section")
    script = scripts("several_gpus")
    arguments = ["--device", "cpu", "--small", "--ranks", "2", "--run", "modes"]
    arguments += ["--reference", "modes", "--weights", "nowhere", "--contenders"]
    options = script.parse([*arguments, ",".join(contenders)])
    options.until, options.answer = time.time() + until_s, str(tmp_path / "answer")

    def run(monkeypatch: pytest.MonkeyPatch, run_ranks: Any) -> dict[str, Any]:
        monkeypatch.setattr("dlo_core.bench.launch.run_ranks", run_ranks)
        before = signal.getsignal(signal.SIGALRM)
        code = module.run_section(options)
        assert signal.getsignal(signal.SIGALRM) is before
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
        found: dict[str, Any] = json.loads((tmp_path / "answer").read_text())
        assert code == (1 if "error" in found else 0)
        return found

    return run


def tell_all(on_tell: Any, name: str, **found: Any) -> None:
    for rank in range(2):
        on_tell(rank, json.dumps({"name": name, "rank": rank, "found": found}))


@pytest.mark.parametrize("how", ["dies", "is silent", "says so"])
def test_contenders_behind_one_that_fails_have_their_turn_in_new_processes(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(scripts("ranks_section"), "_SILENCE_S", 0.5)
    started: list[tuple[str, ...]] = []

    def run_ranks(measure: Any, arguments: Any, *, on_tell: Any, **_: Any) -> None:
        names = arguments[0].contenders
        started.append(names)
        for name in names:
            if name != "gather_copies":
                tell_all(on_tell, name, runs={}, done=True)
                continue
            if how == "dies":
                on_tell(0, json.dumps({"name": name, "rank": 0, "found": {"runs": {"8": {}}}}))
                raise RuntimeError("rank 1 failed: NCCL refused the window")
            if how == "is silent":
                time.sleep(20)
            tell_all(on_tell, name, errors=[None, "NCCL refused the window"], done=True)
            return

    run = a_section(scripts, tmp_path, "gather", "gather_copies", "local_shared", "local")
    found = run(monkeypatch, run_ranks)
    assert started == [
        ("resident", "gather", "gather_copies", "local_shared", "local"),
        ("local_shared", "local"),
    ]
    contenders = found["contenders"]
    assert found["complete"]
    assert "error" not in found
    assert [name for name, ranks in contenders.items() if "errors" in ranks["0"]] == [
        "gather_copies"
    ]
    said = json.dumps(contenders["gather_copies"]["0"]["errors"])
    assert ("no rank said anything" if how == "is silent" else "refused") in said
    if how == "dies":
        assert contenders["gather_copies"]["0"]["runs"] == {"8": {}}


def test_no_new_processes_are_started_when_the_time_is_up(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def run_ranks(*_: Any, **__: Any) -> None:
        started.append(1)
        raise RuntimeError("dead")

    run = a_section(scripts, tmp_path, "gather", "local", until_s=20)
    found = run(monkeypatch, run_ranks)
    assert started == [1]
    assert found["contenders"]["resident"]["0"]["errors"] == ["RuntimeError: dead"]
    assert "out of time" in found["contenders"]["gather"]["0"]["skipped"]
    assert "out of time" in found["contenders"]["local"]["0"]["skipped"]


def test_a_contender_that_fails_is_told_by_all_ranks_and_is_their_last(scripts: Any) -> None:
    weights, steps = scripts("ranks_weights"), scripts("ranks_steps")
    made = scripts("ranks_contenders")
    contender: Any = made.Contender

    class Fails(contender):  # type: ignore[misc]
        """Comes up, cannot be called, and cannot be let go either."""

        def attach(self, member: Member, model: Any) -> Any:
            def fail(*args: Any) -> None:
                raise RuntimeError(f"{'not' if args else 'not even gone'} on rank {member.rank}")

            return made.Attached(fail, dict, fail)

    made.CONTENDERS["gather_copies"] = Fails("dlo")
    path = weights.make_weights(1 << 20, torch.float32)
    names = ("resident", "gather_copies", "gather")
    shape = Shape(32, 4, 2, 0, "float32")
    job = steps.StepsJob(path, shape, "dp", ((8, 1),), names, time.time() + 60)
    found = gathered(told_by_ranks(job, steps.measure_steps))
    assert set(found) == {"resident", "gather_copies"}
    wanted = [f"RuntimeError: not on rank {rank}" for rank in range(2)]
    assert all(found["gather_copies"][rank]["errors"] == wanted for rank in "01")
    assert all(ranks[rank]["done"] for ranks in found.values() for rank in "01")


def test_what_is_half_told_makes_tables_too(scripts: Any) -> None:
    """They are written while the ranks run."""
    report, tables = scripts("ranks_report"), scripts("ranks_tables")
    results = made_results()
    del results["sections"]["modes"]["contenders"]["resident"]["1"]
    del results["sections"]["modes"]["contenders"]["gather"]["0"]
    results["sections"]["settings"] = {"contenders": {"gather_depth3": {"0": {"errors": ["x"]}}}}
    results["sections"]["sp"] = {"contenders": {}, "ranks": {}, "reference": "sp"}
    rows = report.rows_of(results)
    by_name = {(row.contender, row.tokens): row for row in rows}
    assert by_name["gather", 100].same_bits is False
    assert "gather_depth3: ['x']" in tables.tables(results, rows)


def test_every_section_and_contender_is_documented(scripts: Any) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    script, contenders = scripts("several_gpus"), scripts("ranks_contenders").CONTENDERS
    assert all(f"| `{name}` |" in text for name in script.SECTIONS)
    assert all(f"`{name}`" in text for name in contenders)
    asked = {name for section in script.SECTIONS.values() for name in section.contenders}
    assert asked | {"resident"} == set(contenders)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_runs_on_a_cpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--small", "--ranks", "2", "--out", str(tmp_path)]
    done = run_script("several_gpus.py", *options, limit_s=580)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "several_gpus.json").read_text())
    for name, found in results["sections"].items():
        if name == "omni":
            assert "not installed" in found["skipped"]
        else:
            assert found["complete"], name
    assert all(row["same_bits"] for row in results["rows"])
    assert {row["section"] for row in results["rows"]} >= {"modes", "fsdp", "sp", "unequal"}
    assert (tmp_path / "several_gpus.md").read_text() in done.stdout


@pytest.mark.slow
def test_three_ranks_tell_rates_and_contention(scripts: Any) -> None:
    weights, links = scripts("ranks_weights"), scripts("ranks_links")
    path = weights.make_weights(1 << 20, torch.float32)
    job = links.LinksJob(path, 3 * 256 * 100, 1 << 16, 64)
    rates = gathered(told_by_ranks(job, links.measure_links, 3))[""]
    assert all(found[name] > 0 for found in rates.values() for name in ("gather_gb_s", "link_gb_s"))
    beside = gathered(told_by_ranks(job, links.measure_contention, 3))[""]
    assert all(found["gloo"]["in_place"]["right"] for found in beside.values())
    assert "CUDA" in beside["0"]["peer_copies"]
