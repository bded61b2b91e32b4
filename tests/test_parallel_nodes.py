"""The example of docs/parallelism.md under torchrun, on one node and on two simulated ones."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "parallel_forward.py"
LINE = re.compile(r"rank (\d): equal bits (\w+), shares with (\d), host (\d+) bytes")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(num_nodes: int, per_node: int, *options: str) -> dict[int, tuple[str, int, int]]:
    """Run the example; return (equal, others that it shares with, host bytes) by rank."""
    port = str(free_port())
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    jobs = []
    for node in range(num_nodes):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_nodes)]
        command += ["--node-rank", str(node), "--nproc-per-node", str(per_node)]
        command += ["--master-addr", "127.0.0.1", "--master-port", port, str(EXAMPLE), *options]
        command += ["--node-name", f"node{node}"]
        jobs.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        told = [job.communicate(timeout=150)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [0] * num_nodes, "\n".join(told)
    rows = (match.groups() for text in told for match in LINE.finditer(text))
    return {int(rank): (same, int(others), int(host)) for rank, same, others, host in rows}


def test_one_node_of_four_ranks() -> None:
    """DP2 x TP2: each shares with one, and holds half of its own part."""
    told = torchrun(1, 4, "--dp", "2", "--tp", "2")
    assert sorted(told) == [0, 1, 2, 3]
    assert {row[:2] for row in told.values()} == {("True", 1)}
    (host,) = {row[2] for row in told.values()}
    assert torchrun(1, 2, "--dp", "1", "--tp", "2")[0][2] == pytest.approx(2 * host, rel=0.01)


def test_two_nodes_whose_ranks_share_within_each() -> None:
    """DP4 on two nodes: a rank shares with the other one of its node."""
    within = torchrun(2, 2, "--dp", "4", "--shard-within", "node")
    assert {row[:2] for row in within.values()} == {("True", 1)}
    across = torchrun(2, 2, "--dp", "4")
    assert {row[:2] for row in across.values()} == {("True", 3)}
    assert sorted(within) == sorted(across) == [0, 1, 2, 3]
    assert within[0][2] == pytest.approx(2 * across[0][2], rel=0.01)
