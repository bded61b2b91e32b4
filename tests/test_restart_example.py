"""The example job: a rank is killed half-way, and all pictures are there in the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlo_core.demo.sampler import sample
from dlo_core.demo.weights import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

JOB = Path(__file__).resolve().parent.parent / "examples" / "restart_job.py"
PICTURES, STEPS = 6, 4


def launch(
    out: Path, *options: str, restarts: int, share_store: bool
) -> subprocess.CompletedProcess[str]:
    """Run the example with two ranks under the launcher."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "--max-restarts", str(restarts)]
    launcher += ["--monitor-interval", "0.2"]
    paths = ":".join(path for path in sys.path if path)
    return subprocess.run(
        [*launcher, str(JOB), "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not share_store)),
        },
    )


def test_a_job_whose_rank_is_killed_comes_back_by_itself(tmp_path: Path) -> None:
    options = ["--pictures", str(PICTURES), "--steps", str(STEPS), "--timeout-s", "20"]
    done = launch(tmp_path, *options, "--fault", "kill", restarts=3, share_store=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0: done" in done.stdout
    assert "exitcode: -9" in done.stderr
    model = load_model()
    for number in range(PICTURES):
        labels = torch.tensor([number % 10])
        expected = sample(model, labels, seed=number, num_steps=STEPS, guidance=2.0)
        assert torch.equal(torch.load(tmp_path / f"{number}.pt"), expected), number


def test_a_store_that_outlives_an_attempt_is_refused(tmp_path: Path) -> None:
    done = launch(tmp_path, "--pictures", "2", "--steps", "1", restarts=1, share_store=True)
    assert done.returncode != 0
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in done.stderr
