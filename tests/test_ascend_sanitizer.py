"""torch_npu's own race detector: silent about the engine, loud about each missing wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ascend import needs_stub
from mutations import ORDERING, RESIDENTS, sites

pytestmark = needs_stub
HERE = Path(__file__).parent
SHARED = ("Transfer.acquire", "Transfer.release", "Transfer._wait_for_reader")
OWNERS = {
    "local": ("LocalTransfer", "Transfer."),
    "staged": ("StagedTransfer", "Transfer."),
    "in place": ("GatheringTransfer", "Transfer."),
    "several streams": ("Transfer.",),
}
SIZES = {"several streams": 1}
# Only a second compute stream can miss this one.
SEVERAL = "stream.wait_event(slot.drained)"


def sites_of(way: str) -> list[int]:
    """Return the waits and records that this way of a fill goes through."""
    return [
        site.number
        for site in sites()
        if not (site.timing_only or site.of_graphs)
        and str(site) not in RESIDENTS
        and site.owner.startswith(OWNERS[way])
        and (SEVERAL in site.text and site.owner == "Transfer._wait_for_reader")
        == (way == "several streams")
    ]


def detect(way: str, numbers: list[int]) -> tuple[dict[int, list[str]], str]:
    """Return what each rank met, by site, and all that the detector wrote."""
    done = subprocess.run(
        [
            sys.executable,
            str(HERE / "ascend_sanitizer.py"),
            way,
            str(SIZES.get(way, 2)),
            *map(str, numbers),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "TORCH_NPU_SANITIZER": "1",
            "PYTHONWARNINGS": "ignore",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["site"]: each["found"] for each in told}, done.stderr


def test_every_wait_has_a_way() -> None:
    ordering = {
        site.number
        for site in sites()
        if not (site.timing_only or site.of_graphs) and str(site) not in RESIDENTS
    }
    assert ordering == {number for way in OWNERS for number in sites_of(way)}
    assert set(ORDERING) == {"wait_event", "record_event"}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", OWNERS)
def test_the_detector_is_silent_about_the_engine_and_finds_each_missing_wait(way: str) -> None:
    clean, said = detect(way, [-1])
    assert clean == {-1: [""] * SIZES.get(way, 2)}, said[-4000:]
    assert "data race" not in said
    assert "missing record_stream" not in said
    numbers = sites_of(way)
    assert numbers
    found, said = detect(way, numbers)
    assert found.keys() == set(numbers), said[-4000:]
    assert [number for number in numbers if "race" not in found[number]] == []
