"""``dlo probe`` and ``dlo bench``: the model, the rates, the report and the commands."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

import dlo_core as dlo
from dlo_core import cli
from dlo_core.bench import probe, run
from dlo_core.bench.job import BenchJob
from dlo_core.bench.launch import Member, RankError, rank_device, run_ranks
from dlo_core.bench.measure import Run, StreamedRank, measure_resident, measure_streamed
from dlo_core.bench.model import Shape, SyntheticTransformer, build, inputs
from dlo_core.bench.report import BenchReport
from dlo_core.cpu import CpuBackend

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = Shape(width=16, num_heads=2, num_blocks=2, num_half_blocks=2, dtype="float32")
JOB = BenchJob(SHAPE, tokens=(4, 9), num_passes=3)


def member() -> Member:
    return Member(0, 1, CpuBackend(), lambda what: None)


def test_the_exposed_time_is_that_of_the_length() -> None:
    job = BenchJob(SHAPE, tokens=(4, 9, 5), num_passes=2, num_warm=1)
    runs = measure_streamed(member(), job).runs
    # Times of one pass told again would be equal to the last bit.
    assert len({run.exposed_ms for run in runs}) == 3


# --- the model ------------------------------------------------------------------------------------


def test_half_blocks_follow_whole_ones_and_are_half_as_large() -> None:
    with torch.device("meta"):
        large = SyntheticTransformer(Shape(width=256, num_heads=2, num_blocks=2, num_half_blocks=2))
    sizes = [sum(p.numel() for p in block.parameters()) for block in large.blocks]
    assert sizes[0] == pytest.approx(18 * 256**2, rel=0.01)
    assert sizes[1] == pytest.approx(9 * 256**2, rel=0.01)
    assert sizes == [sizes[0], sizes[1], sizes[1]] * 2


def test_the_same_seed_gives_the_same_bits_and_no_two_blocks_are_equal() -> None:
    first, second = build(SHAPE), build(SHAPE)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    weights = [block.get_parameter("qkv.weight") for block in first.blocks]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])
    assert torch.isfinite(first(*inputs(SHAPE, 5, "cpu"))).all()


def test_blocks_of_products_alone_multiply_by_all_their_matrices() -> None:
    shape = Shape(width=16, num_heads=2, num_blocks=2, products_only=True)
    model, args = build(shape), inputs(shape, 5, "cpu")
    before = model(*args)
    assert torch.isfinite(before).all()
    for name, parameter in model.blocks[1].named_parameters():
        if name.endswith("weight") and not name.startswith("norm"):
            kept = parameter.clone()
            parameter.neg_()
            assert not torch.equal(model(*args), before), name
            parameter.copy_(kept)
    assert torch.equal(model(*args), before)


def test_another_default_device_changes_nothing() -> None:
    wanted = build(SHAPE)(*inputs(SHAPE, 5, "cpu"))
    with torch.device("meta"):
        made, args = build(SHAPE), inputs(SHAPE, 5, "cpu")
    assert torch.equal(made(*args), wanted)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"width": 0}, "width must be at least 1"),
        ({"num_heads": 3}, "multiple of num_heads"),
        ({"num_half_blocks": -1}, "num_half_blocks"),
        ({"dtype": "nonsense"}, "dtype must name"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(dlo.ConfigError, match=words):
        Shape(**{"width": 16, "num_heads": 2, "num_blocks": 2} | values)


# --- measuring ------------------------------------------------------------------------------------


def test_what_is_measured_adds_up() -> None:
    resident, streamed = measure_resident(member(), JOB), measure_streamed(member(), JOB)
    assert [each.tokens for each in resident] == [4, 9]
    assert all(len(each.steps_ms) == 3 and each.finite for each in (*resident, *streamed.runs))
    assert all(len(each.block_ms) == 6 and min(each.block_ms) > 0 for each in resident)
    assert sum(resident[0].block_ms) > 0
    assert streamed.copied_nbytes == sum(streamed.blocks_nbytes) == streamed.host_nbytes
    assert streamed.gather_gb_s is None
    assert streamed.host_blocks
    report = BenchReport(JOB, [resident], [streamed])
    assert report.bit_identical
    for row, alone, each in zip(report.rows, resident, streamed.runs, strict=True):
        assert row.compute_ms == alone.step_ms
        assert row.step_ms == each.step_ms
        assert row.copy_ms == pytest.approx(streamed.copied_nbytes / streamed.link_gb_s / 1e6)
        assert row.simulated_ms >= 0.999 * row.bound_ms
    assert json.loads(json.dumps(report.to_dict()))["bit_identical"] is True


def test_what_packed_weights_take_is_measured_block_by_block() -> None:
    job = BenchJob(SHAPE, tokens=(4,), settings={"packed": True}, num_passes=2)
    resident, streamed = measure_resident(member(), job), measure_streamed(member(), job)
    assert len(streamed.blocks_decode_ms) == 6
    assert min(streamed.blocks_decode_ms) > 0
    (row,) = BenchReport(job, [resident], [streamed]).rows
    assert row.bit_identical
    assert row.decode_ms == sum(streamed.blocks_decode_ms)
    assert row.simulated_ms >= 0.999 * row.bound_ms


def test_a_model_of_ones_own_brings_its_arguments() -> None:
    job = BenchJob(SHAPE, tokens=(4,), model="bench_models:two_linears", num_passes=2)
    resident, streamed = measure_resident(member(), job), measure_streamed(member(), job)
    report = BenchReport(job, [resident], [streamed])
    assert report.bit_identical
    assert [row.tokens for row in report.rows] == [0]
    assert len(streamed.blocks_nbytes) == 3
    for name, words in (
        ("no_such_module:f", "cannot be found"),
        ("bench_models:nothing", "must return"),
        ("bench_models", "module:function"),
    ):
        with pytest.raises(dlo.ConfigError, match=words):
            measure_resident(member(), BenchJob(SHAPE, tokens=(4,), model=name))


def made_run(step_ms: float, digest: str = "a", **more: Any) -> Run:
    return Run(4, (step_ms,) * 3, (digest,) * 3, True, 10, 20, **more)


def made_streamed(run: Run, *, gather_gb_s: float | None = None) -> StreamedRank:
    sizes = (1_000_000,) * 6
    copied = 3_000_000 if gather_gb_s else 6_000_000
    return StreamedRank((run,), 1.0, sizes, copied, copied, 0, 9, 1.0, gather_gb_s, False)


def test_each_length_is_held_against_the_limits_and_the_simulation() -> None:
    job = BenchJob(SHAPE, tokens=(4,))
    alone = made_run(3.0, block_ms=(0.25,) * 6)
    report = BenchReport(job, [(alone,)], [made_streamed(made_run(6.5, exposed_ms=3.4))])
    (row,) = report.rows
    assert (row.compute_ms, row.copy_ms, row.bound_ms, row.step_ms) == (3.0, 6.0, 6.0, 6.5)
    assert row.simulated_ms == pytest.approx(6.0)
    assert row.exposed_ms == 3.4


def test_of_several_ranks_the_slowest_counts_and_each_copies_its_part() -> None:
    job = BenchJob(SHAPE, tokens=(4,))
    alone = [(made_run(ms, block_ms=(0.5,) * 6),) for ms in (1.0, 2.0)]
    streamed = [made_streamed(made_run(ms), gather_gb_s=100.0) for ms in (5.0, 4.0)]
    (row,) = BenchReport(job, alone, streamed).rows
    assert (row.compute_ms, row.copy_ms, row.step_ms) == (2.0, 3.0, 5.0)
    assert row.simulated_ms == pytest.approx(3.0)


@pytest.mark.parametrize(("ratio", "copy_ms"), [(None, 4.0), (0.5, 2.0)])
def test_blocks_that_stay_are_neither_copied_nor_simulated_as_copied(
    ratio: float | None, copy_ms: float
) -> None:
    """Whether the others travel packed or not."""
    alone = made_run(0.6, block_ms=(0.1,) * 6)
    job = BenchJob(SHAPE, tokens=(4,))
    streamed = dataclasses.replace(
        made_streamed(made_run(4.5)),
        copied_nbytes=int(copy_ms * 1e6),
        num_residents=2,
        packed_ratio=ratio,
        blocks_decode_ms=(0.0,) * 6 if ratio else (),
    )
    (row,) = BenchReport(job, [(alone,)], [streamed]).rows
    assert row.copy_ms == copy_ms
    assert row.simulated_ms == pytest.approx(copy_ms, rel=0.01)


def test_packed_blocks_are_simulated_with_their_decoding() -> None:
    """Five blocks of half the bytes compute in 1 ms and are decoded in 0.5; one stays, raw."""
    alone = made_run(6.0, block_ms=(1.0,) * 6)
    streamed = dataclasses.replace(
        made_streamed(made_run(9.0)),
        copied_nbytes=2_500_000,
        num_residents=1,
        packed_ratio=0.5,
        blocks_decode_ms=(0.5, 0.5, 0.5, 0.0, 0.5, 0.5),
    )
    report = BenchReport(BenchJob(SHAPE, tokens=(4,)), [(alone,)], [streamed])
    (row,) = report.rows
    assert row.decode_ms == 2.5
    assert (row.simulated_ms, row.bound_ms) == pytest.approx((8.5, 8.5))
    assert report.to_dict()["ranks"][0]["decode_ms"] == 2.5


@pytest.mark.parametrize("wrong", [("b", "b", "b"), ("a", "a", "b")])
def test_one_output_that_differs_in_one_pass_is_seen(wrong: tuple[str, ...]) -> None:
    job = BenchJob(SHAPE, tokens=(4,))
    run = Run(4, (1.0,) * 3, wrong, True, 1, 1)
    alone = made_run(1.0, block_ms=(0.1,) * 6)
    report = BenchReport(job, [(alone,)], [made_streamed(run)])
    assert not report.bit_identical


def test_rates_are_bytes_over_time() -> None:
    backend = CpuBackend()
    host = torch.ones(8_000_000, dtype=torch.uint8)
    assert 0.01 < probe.link_rate(backend, host) < 500
    ms = probe.timed_ms(backend, backend.new_stream(), lambda: None)
    assert ms >= 0


# --- the ranks ------------------------------------------------------------------------------------


def test_ranks_share_the_devices_of_a_kind_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [rank_device("brick", rank) for rank in range(3)] == ["brick:0", "brick:1", "brick:0"]
    assert rank_device("brick:5", 1) == "brick:5"
    assert rank_device("cpu", 1) == "cpu"


@pytest.mark.slow
def test_ranks_answer_in_order_and_get_their_environment() -> None:
    told: list[tuple[int, str]] = []
    found = run_ranks(
        bench_target("answer"),
        ("x",),
        device="cpu",
        ranks=2,
        limit_s=60,
        on_tell=lambda rank, what: told.append((rank, what)),
        environment=lambda rank: {"DLO_TEST_RANK": f"r{rank}"},
    )
    assert found == [(0, 2, "x", "r0"), (1, 2, "x", "r1")]
    assert sorted(told) == [(0, "hello"), (1, "hello")]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("raises", r"rank 0 failed: ValueError: on purpose"),
        pytest.param(
            "dies",
            r"rank 0 failed: ended without an answer, exit code 7",
            marks=pytest.mark.slow,
        ),
        pytest.param("hangs", r"rank 0 failed: still running after", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_does_not_answer_is_named(target: str, words: str) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(bench_target(target), (), device="cpu", limit_s=12 if target == "hangs" else 60)


def bench_target(name: str) -> Any:
    import bench_models

    return getattr(bench_models, name)


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank alone run here: a process of its own imports torch anew."""

    def here(measure: Any, arguments: Any, *, device: str, ranks: int = 1, **_: Any) -> list[Any]:
        assert ranks == 1
        return [measure(member(), *arguments)]

    monkeypatch.setattr(run, "run_ranks", here)


@pytest.mark.usefixtures("in_this_process")
def test_probe_prints_every_rate() -> None:
    done = CliRunner().invoke(cli.app, ["probe", "--device", "cpu", "--size-mb", "2"])
    assert done.exit_code == 0, done.output
    for words in (
        "host to device, alone",
        "all-gather",
        "512 × 512 float32 product",
        "rank 0, cpu",
    ):
        assert words in done.output
    done = CliRunner().invoke(cli.app, ["probe", "--device", "cpu", "--size-mb", "2", "--json"])
    (rates,) = json.loads(done.stdout)["ranks"]
    assert rates["nbytes"] == 2_000_000
    assert rates["link_gb_s"] > 0
    assert rates["gather_gb_s"] is None


@pytest.mark.usefixtures("in_this_process")
def test_bench_prints_times_and_bytes_and_writes_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--width", "16", "--heads", "2", "--blocks", "3", "--tokens", "4,8", "--passes", "2"]
    command = ["bench", "--device", "cpu", *options, "--setting", "timeout_s=30"]
    done = CliRunner().invoke(cli.app, [*command, "--out", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    for words in ("3 blocks", "rank-local mode", "T_c", "exposed", "same", "reserved"):
        assert words in done.output
    assert (tmp_path / "new" / "bench.png").stat().st_size > 10_000
    done = CliRunner().invoke(cli.app, [*command, "--json"])
    found = json.loads(done.stdout)
    assert found["bit_identical"] is True
    assert [row["tokens"] for row in found["rows"]] == [4, 8]
    assert found["job"]["settings"]["timeout_s"] == 30


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("stay", "count"),
    [
        (["--resident-layers", "1"], 1),
        (["--setting", "resident_layers=1"], 1),
        (["--resident-layers", "auto", "--device-budget-bytes", "150000"], 4),
    ],
)
def test_bench_knows_the_blocks_that_stay(stay: list[str], count: int) -> None:
    options = ["--width", "16", "--heads", "2", "--blocks", "4", "--tokens", "4", "--passes", "1"]
    done = CliRunner().invoke(cli.app, ["bench", "--device", "cpu", *options, *stay, "--json"])
    found = json.loads(done.stdout)
    (rank,) = found["ranks"]
    block = sum(rank["blocks_nbytes"]) / 4
    assert rank["num_residents"] == count
    assert rank["residents_nbytes"] == pytest.approx(count * block, rel=0.1)
    assert rank["copied_nbytes"] == pytest.approx((4 - count) * block, rel=0.1)
    assert found["bit_identical"] is True


@pytest.mark.usefixtures("in_this_process")
def test_bench_fails_when_a_bit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BenchReport, "bit_identical", False)
    options = ["--width", "16", "--heads", "2", "--blocks", "3", "--tokens", "4", "--passes", "1"]
    done = CliRunner().invoke(cli.app, ["bench", "--device", "cpu", *options])
    assert done.exit_code == 1
    assert "differ" in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["probe", "--device", "nothing"], "no backend for device 'nothing'"),
        (["probe", "--device", "cpu", "--ranks", "0"], "--ranks must be at least 1"),
        (["probe", "--device", "cpu", "--size-mb", "-3"], "--size-mb"),
        (["bench", "--device", "cpu", "--tokens", "a"], "--tokens must be lengths"),
        (["bench", "--device", "cpu", "--tokens", "0"], "tokens must be lengths"),
        (["bench", "--device", "cpu", "--setting", "x"], "NAME=VALUE"),
        (["bench", "--device", "cpu", "--setting", "x=1"], "unknown setting 'x'"),
        (["bench", "--device", "cpu", "--depth", "1"], "depth must be"),
    ],
)
def test_options_that_cannot_be_honoured_exit_with_2(command: list[str], words: str) -> None:
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 2
    assert words in done.stderr.replace("\n", " ")


def test_a_rank_that_fails_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> list[Any]:
        raise RankError("rank 0 failed: on purpose")

    monkeypatch.setattr(run, "run_ranks", fail)
    for command in ("probe", "bench"):
        done = CliRunner().invoke(cli.app, [command, "--device", "cpu"])
        assert done.exit_code == 1
        assert "on purpose" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_ranks_gather_in_processes_of_their_own() -> None:
    options = ["--width", "32", "--heads", "2", "--blocks", "4", "--tokens", "4", "--passes", "2"]
    command = ["bench", "--device", "cpu", "--ranks", "2", *options, "--json"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["bit_identical"] is True
    assert all(rank["gather_gb_s"] > 0 for rank in found["ranks"])
    assert found["ranks"][0]["copied_nbytes"] < 0.6 * sum(found["ranks"][0]["blocks_nbytes"])
    done = CliRunner().invoke(
        cli.app, ["probe", "--device", "cpu", "--ranks", "2", "--size-mb", "4", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert all(rank["link_all_gb_s"] > 0 for rank in json.loads(done.stdout)["ranks"])
