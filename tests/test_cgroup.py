"""Limits of the system: both versions of cgroups, the whole chain above a process, and the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pinning import machine_of

from dlo_core import startup
from dlo_core.cgroup import memory_bounds
from dlo_core.machine import Machine

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def second(
    folder: str, limit: str, used: int, *, high: str = "max", cache: int = 0
) -> dict[str, str]:
    """Return the files of a cgroup of version 2."""
    where = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{where}/memory.max": f"{limit}\n",
        f"{where}/memory.high": f"{high}\n",
        f"{where}/memory.current": f"{used}\n",
        f"{where}/memory.stat": f"anon 5\nfile {cache + 9}\ninactive_file {cache - cache // 3}\n"
        f"active_file {cache // 3}\n",
    }


def free(root: Path) -> list[tuple[str, int]]:
    return [(each.name, each.free_nbytes) for each in memory_bounds(root)]


def test_every_cgroup_of_the_chain_is_read(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/self/cgroup": "0::/pods/one/main\n", "proc/self/mountinfo": V2_MOUNT + "\n"}
        | second("pods/one/main", "max", 10 * MIB)
        | second("pods/one", f"{100 * MIB}", 60 * MIB, cache=30 * MIB)
        | second("pods", f"{900 * MIB}", 100 * MIB, high=f"{500 * MIB}"),
    )
    # Page cache is dropped before anybody is killed; above memory.high everybody is slowed down.
    assert free(root) == [("cgroup /pods/one", 70 * MIB), ("cgroup /pods", 400 * MIB)]


def test_in_a_namespace_the_own_cgroup_is_the_root(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT + "\n"}
        | second("", f"{64 * MIB}", 80 * MIB),
    )
    # Over its limit already: nothing is free, not less than nothing.
    assert free(root) == [("cgroup /", 0)]


@pytest.mark.parametrize("mounted", ["/", "/docker/abc"])
def test_the_first_version_is_read_where_it_is_mounted(mounted: str, tmp_path: Path) -> None:
    own = "" if mounted != "/" else "/docker/abc"
    where = f"sys/fs/cgroup/memory{own}"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
            "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
            "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            f"34 31 0:32 {mounted} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            f"{where}/memory.limit_in_bytes": f"{2 * 9223372036854771712 // 2}\n",
            f"{where}/memory.usage_in_bytes": f"{50 * MIB}\n",
            f"{where}/memory.stat": f"cache 1\nhierarchical_memory_limit {80 * MIB}\n"
            f"total_inactive_file {3 * MIB}\ntotal_active_file {2 * MIB}\n",
        },
    )
    ((name, nbytes),) = free(root)
    assert nbytes == 35 * MIB
    assert name == f"cgroup /{own.strip('/')}"


def test_a_limit_is_known_again_by_every_process_under_it(tmp_path: Path) -> None:
    """Two ranks in cgroups of their own, below one that holds for both."""
    files = second("pods", f"{100 * MIB}", MIB) | {"proc/self/mountinfo": V2_MOUNT}
    files |= second("pods/one", f"{50 * MIB}", 0) | second("pods/two", f"{50 * MIB}", 0)
    keys = []
    for name in ("one", "two"):
        root = write(tmp_path, {**files, "proc/self/cgroup": f"0::/pods/{name}\n"})
        keys.append([bound.key for bound in memory_bounds(root)])
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] == keys[1][1]


def test_damaged_and_missing_files_are_no_limit(tmp_path: Path) -> None:
    assert memory_bounds(tmp_path) == ()
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "rubbish\n0::/../outside\n",
            "proc/self/mountinfo": f"rubbish\n- -\n{V2_MOUNT}\n",
            "sys/fs/cgroup/memory.max": "many\n",
            "sys/fs/cgroup/memory.current": "",
        },
    )
    assert memory_bounds(root) == ()


def test_the_machine_tells_what_is_available_and_what_may_be_locked(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:  100 kB\nMemAvailable:   64 kB\n",
            "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\n"
            "Max locked memory         8388608              16777216             bytes\n",
            "proc/self/status": "Name:\tx\nVmLck:\t    1024 kB\n",
            "proc/sys/kernel/random/boot_id": "abc-1\n",
        },
    )
    machine = Machine(root)
    assert [(b.name, b.free_nbytes) for b in machine.memory_bounds()] == [("MemAvailable", 65536)]
    lock = machine.lock_bound()
    assert lock is not None
    assert lock.free_nbytes == 7 * MIB
    assert machine.node.endswith(" abc-1")
    assert Machine(root, "here").node == "here"
    unlimited = "Max locked memory         unlimited            unlimited            bytes\n"
    (root / "proc/self/limits").write_text(unlimited)
    assert machine.lock_bound() is None


def test_this_machine_can_be_read() -> None:
    bounds = Machine().memory_bounds()
    assert bounds[0].name == "MemAvailable"
    assert all(bound.free_nbytes > 0 for bound in bounds)
    seen: Any = startup
    with machine_of(node="elsewhere"):
        assert seen.Machine().node == "elsewhere"
    assert seen.Machine is Machine
