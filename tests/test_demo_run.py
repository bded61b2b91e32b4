"""``dlo demo`` from options to exit code."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import demo_targets
import numpy as np
import pytest
import torch

from dlo_core.demo import run
from dlo_core.demo.job import Job
from dlo_core.demo.launch import RankError
from dlo_core.demo.proof import find_differences, first_difference
from dlo_core.demo.run import demo

if TYPE_CHECKING:
    from pathlib import Path

    from dlo_core.demo.result import RankResult


def made_results(job: Job) -> list[RankResult]:
    return [demo_targets.made_result(job, rank) for rank in range(job.ranks)]


def flip_bit(result: RankResult, mode: str, place: tuple[int, int, int]) -> RankResult:
    """Return ``result`` with the last bit of one streamed pixel changed."""
    runs = []
    for streamed in result.streamed:
        images = streamed.images.copy()
        if streamed.mode == mode:
            images.view(np.int32)[place] ^= 1
        runs.append(dataclasses.replace(streamed, images=images))
    return dataclasses.replace(result, streamed=tuple(runs))


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> list[RankResult]:
    """Let the demo take these results instead of starting processes."""
    results = made_results(Job())
    monkeypatch.setattr(run, "run_ranks", lambda *_, **__: tuple(results))
    return results


def test_equal_images_show_no_difference() -> None:
    assert find_differences(made_results(Job())) == ()


def test_one_flipped_bit_is_found_and_placed() -> None:
    results = made_results(Job(ranks=2))
    results[1] = flip_bit(results[1], "rank-local", (7, 2, 5))
    (found,) = find_differences(results)
    assert (found.rank, found.mode) == (1, "rank-local")
    assert (found.image, found.row, found.column, found.num_pixels) == (7, 2, 5, 1)
    assert found.resident != found.streamed
    assert found.resident.hex() in str(found)
    assert found.streamed.hex() in str(found)


def test_bits_are_compared_and_not_numbers() -> None:
    zero, nan = torch.zeros(1, 1, 1), torch.full((1, 1, 1), float("nan"))
    assert first_difference(zero, -zero, rank=0, mode="gather") is not None
    assert first_difference(nan, nan.clone(), rank=0, mode="gather") is None


def test_a_flipped_bit_fails_the_demo_and_says_where(
    without_ranks: list[RankResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_ranks[1] = flip_bit(without_ranks[1], "gather", (3, 0, 1))
    assert demo(2, 2, True, tmp_path, json=False) == 1
    out, err = capsys.readouterr()
    assert "no (rank 1)" in out
    assert "rank 1, gather mode: 1 pixels differ, first in image 3 at row 0, column 1" in err


def test_table_and_pictures(
    without_ranks: list[RankResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert demo(2, 2, True, tmp_path / "new" / "folder", json=False) == 0
    out = capsys.readouterr().out
    for words in ("whole model", "950 kB", "12.0 … 13.0 ms", "90 %", "bit-identical", "yes"):
        assert words in out
    assert (tmp_path / "new" / "folder" / "digits.png").exists()
    assert (tmp_path / "new" / "folder" / "timeline.png").exists()


@pytest.mark.usefixtures("without_ranks")
def test_json_is_all_that_goes_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(2, 2, True, tmp_path, json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bit_identical"] is True
    assert told["streamed"]["gather"]["ranks"][1]["host_nbytes"] == 950_000
    assert told["streamed"]["rank-local"]["bit_identical"] is True


@pytest.mark.usefixtures("without_ranks")
def test_without_matplotlib_the_demo_says_how_to_get_it_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert demo(2, 2, True, tmp_path, json=False) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no pictures: the pictures need matplotlib; in a clone of dlo: pip install" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "--ranks must be at least 1; got 0"),
        ({"depth": 1}, "depth must be a whole number of at least 2"),
    ],
)
def test_a_bad_option_is_refused_before_anything_starts(
    options: dict[str, int],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*_: Any, **__: Any) -> None:
        pytest.fail("the ranks were started")

    monkeypatch.setattr(run, "run_ranks", never)
    chosen = {"ranks": 2, "depth": 2} | options
    assert demo(chosen["ranks"], chosen["depth"], True, tmp_path, json=False) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("abacus", "no backend for device 'abacus:0'"),
        ("cpu:1", "is one device, and --ranks is 2: each rank needs one of its own"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    device: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(2, 2, True, tmp_path, json=False, device=device) == 2
    assert words in capsys.readouterr().err


def test_each_rank_takes_the_device_of_its_number() -> None:
    assert [Job(device="npu").device_of(rank) for rank in (0, 3)] == ["npu:0", "npu:3"]
    assert [Job(device="cpu").device_of(rank) for rank in (0, 3)] == ["cpu", "cpu"]
    assert Job(device="npu:2").device_of(0) == "npu:2"


def test_an_out_that_is_no_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert demo(2, 2, True, tmp_path / "file", json=False) == 2
    assert "--out must be a folder that can be written to" in capsys.readouterr().err


def test_failed_ranks_are_shown_with_their_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RankError("rank 1 failed (gather): made to fail", tracebacks=("Traceback of rank 1",))

    monkeypatch.setattr(run, "run_ranks", fail)
    assert demo(2, 2, True, tmp_path, json=False) == 1
    err = capsys.readouterr().err
    assert "Traceback of rank 1" in err
    assert "rank 1 failed (gather): made to fail" in err


# Ten seconds on two idle cores, fifty where three other things want them.
@pytest.mark.timeout(180)
@pytest.mark.parametrize("use_allgather", [True, False], ids=["both modes", "rank-local"])
def test_two_ranks_draw_the_same_bits_streamed_as_resident(
    use_allgather: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """End to end, with real processes, the real engine and the real checkpoint."""
    assert demo(2, 2, use_allgather, tmp_path, json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["streamed"]) == ({"gather", "rank-local"} if use_allgather else {"rank-local"})
    for mode, ran in told["streamed"].items():
        assert ran["bit_identical"]
        for rank in ran["ranks"]:
            assert rank["measured_device_nbytes"] == rank["predicted_device_nbytes"]
            assert rank["measured_device_nbytes"] < 0.5 * told["model_nbytes"]
            share = 2 if mode == "gather" else 1
            assert rank["host_nbytes"] < 1.05 * told["model_nbytes"] / share
