"""The conformance suite finds planted faults: each faulty backend fails the test that is meant."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from dlo_core import registry
from dlo_core.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).resolve().parent.parent
FAULTY = [ROOT / "tests" / name for name in ("faulty_parts.py", "faulty_backends.py")]

# The class of one of these files, and the test that must fail.
FAULTS = {
    "TestRoundingAllocator": "test_a_buffer_has_the_exact_size",
    "TestSlicingAllocator": "test_a_buffer_has_the_exact_size",
    "TestLyingAllocator": "test_a_buffer_is_honest_about_pinning",
    "TestLeakingAllocator": "test_nothing_leaks",
    "TestRegistrationThatStays": "test_memory_is_locked_where_it_lies_until_it_is_released",
    "TestRegistrationThatDoesNothing": "test_memory_is_locked_where_it_lies_until_it_is_released",
    "TestSilentAllocator": "test_memory_that_cannot_be_had_is_named",
    "TestWaitThatDoesNothing": "test_a_chain_over_three_streams_keeps_every_round_apart",
    "TestWaitForTheLatestRecording": "test_a_wait_means_the_recording_at_the_time_of_the_wait",
    "TestEventThatKeepsItsFirstRecording": "test_an_event_means_its_latest_recording_to_the_host",
    "TestEventThatIsReachedAtOnce": "test_one_stream_waits_for_another",
    "TestComputeThatDoesNotWait": "test_the_current_stream_waits_for_another",
    "TestContextThatStaysAfterAnException": "test_a_context_restores_after_an_exception",
    "TestContextOfAllThreads": "test_the_current_stream_is_per_thread",
    "TestTimesInSeconds": "test_times_are_milliseconds",
    "TestCopyThatIgnoresStrides": "test_a_copy_follows_the_strides_of_both_sides",
    "TestCopyAtOnce": "test_queued_work_does_not_hold_the_host",
    "TestCopyOfWholeWords": "test_a_copy_moves_its_bytes_and_no_others",
    "TestUncountedMemory": "test_memory_counts_what_lives",
    "TestInferenceMemory": "test_memory_made_in_any_grad_mode_is_ordinary_memory",
    "TestDeclaresPinnedMemory": "test_pinned_memory_is_as_declared",
    "TestDeclaresRegistration": "test_host_registration_is_as_declared",
    "TestDeniesPinnedMemory": "test_pinned_memory_is_as_declared",
    "TestDeniesBlocking": "test_waiting_on_the_compute_stream_holds_the_host_as_declared",
    "TestLimitThatIsNone": "test_a_priority_is_accepted",
    "TestCheckThatForgets": "test_a_check_does_not_forget",
    "TestCheckThatWaits": "test_asking_a_check_never_waits",
    "TestCodecAtOnce": "test_a_codec_decodes_rows_in_the_order_of_the_stream",
    "TestCodecThatRounds": "test_a_codec_writes_the_reference_bytes",
    "TestErrorThatIsLost": "test_work_that_cannot_be_done_is_an_error_for_whoever_waits",
    "TestCollectiveWithTheGlobalRank": "test_ranks_of_the_group_need_not_be_those_of_the_job",
    "TestGatherAtOnce": "test_events_of_the_current_stream_order_a_gather",
    "TestGatherBackwards": "test_every_rank_gets_every_shard",
    "TestGatherThatClearsFirst": "test_every_rank_gets_every_shard",
    "TestCloseThatIsACollective": "test_closing_is_no_collective_and_may_be_repeated",
    "TestCloseThatMayNotBeRepeated": "test_closing_is_no_collective_and_may_be_repeated",
}


def classes() -> dict[str, Path]:
    """Return the file of each faulty class."""
    return {
        name: path
        for path in FAULTY
        for name in re.findall(r"^class (Test\w+)", path.read_text(), re.MULTILINE)
    }


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest as a process of its own, from a folder that holds no package."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """Run the tests of the table; return class and test of those that failed.

    Those that passed run a second time: a host that was held up sees work as done which it did not
    wait for.
    """
    folder = tmp_path_factory.mktemp("faults")
    found = failures(folder, FAULTS)
    missed = {name: test for name, test in FAULTS.items() if (name, test) not in found}
    return found | failures(folder, missed) if missed else found


def failures(folder: Path, tests: Mapping[str, str]) -> set[tuple[str, str]]:
    """Run ``tests``, by their faulty classes; return class and test of those that failed."""
    report = folder / "report.xml"
    names = [f"{classes()[name]}::{name}::{test}" for name, test in tests.items()]
    done = run_pytest(folder, f"--junitxml={report}", "--tb=line", *names)
    assert done.returncode in (0, pytest.ExitCode.TESTS_FAILED), done.stdout + done.stderr
    found = set()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None:
            name = case.attrib["name"].partition("[")[0]
            found.add((case.attrib["classname"].rpartition(".")[2], name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_test(failed: set[tuple[str, str]], name: str) -> None:
    assert (name, FAULTS[name]) in failed


def test_every_planted_fault_is_in_the_table() -> None:
    assert classes().keys() == FAULTS.keys()


# --- absent and broken ----------------------------------------------------------------------------


def lookup(error: BackendError) -> Callable[[str], None]:
    """Return what stands for the registry's ``get_backend`` and raises ``error``."""

    def get_backend(device: str) -> None:
        raise error

    return get_backend


@pytest.mark.parametrize("cause", [None, ImportError("no torch_xyz"), OSError("no libxyz.so")])
def test_an_absent_device_skips_with_the_backends_own_reason(
    usable_backend: Callable[[str], object],
    monkeypatch: pytest.MonkeyPatch,
    cause: Exception | None,
) -> None:
    error = BackendError("torch_xyz finds no device on this machine")
    error.__cause__ = cause
    monkeypatch.setattr(registry, "get_backend", lookup(error))
    with pytest.raises(pytest.skip.Exception, match="finds no device on this machine"):
        usable_backend("xyz")


def test_a_broken_plug_in_fails(
    usable_backend: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = BackendError("the backend 'xyz' failed: AttributeError")
    error.__cause__ = AttributeError("a typing mistake")
    monkeypatch.setattr(registry, "get_backend", lookup(error))
    with pytest.raises(pytest.fail.Exception, match="AttributeError"):
        usable_backend("xyz")


def test_require_ends_the_run_when_the_device_is_not_there(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--require", "cpu", "--require", "xyz:1", str(FAULTY[0]))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--require xyz:1: no backend for device 'xyz:1'" in done.stderr
