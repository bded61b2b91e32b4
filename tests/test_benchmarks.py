"""The scripts in benchmarks/: they run here on the CPU, and they say what goes wrong."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

import dlo_core
from dlo_core.bench.model import Shape, build

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that imports a script's module, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def run_script(
    name: str, *arguments: str, limit_s: float = 170
) -> subprocess.CompletedProcess[str]:
    """Run a script on the dlo that is tested here."""
    environment = os.environ | {"PYTHONPATH": str(Path(dlo_core.__file__).parent.parent)}
    # The scripts' helpers lie beside them.
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def test_a_clone_declares_the_backends_that_its_project_declares(scripts: Any) -> None:
    folder = scripts("checkout")._entry_points()
    text = (folder / "dlo-0.dist-info" / "entry_points.txt").read_text()
    assert text.splitlines() == [
        "[dlo]",
        "cpu = dlo_core.cpu",
        "cuda = dlo_cuda",
        "npu = dlo_ascend",
    ]


def test_the_checkout_is_python_for_a_clone() -> None:
    code = "import dlo_core, sys; print(dlo_core.__version__); sys.exit(3)"
    done = run_script("checkout.py", "-c", code)
    assert done.stdout.strip() == dlo_core.__version__
    assert done.returncode == 3


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("answer(path, {'a': 1})", {"a": 1}),
        ("answer(path, {'a': 1}); sys.exit(3)", {"a": 1, "error": "exit code 3"}),
        ("answer(path, {'error': 'mine'}); sys.exit(1)", {"error": "mine"}),
        ("pass", {"error": "no answer"}),
        ("answer(path, {'a': 1}); time.sleep(60)", {"a": 1, "error": "killed after 8 s"}),
    ],
)
def test_a_child_answers_or_says_how_it_ended(
    scripts: Any, tmp_path: Path, body: str, expected: dict[str, Any]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys, time
            sys.path.insert(0, {str(FOLDER)!r})
            from child import answer
            path = sys.argv[sys.argv.index("--answer") + 1]
            print("said before the end")
            sys.stdout.flush()
            {body}
        """)
    )
    start = time.monotonic()
    found = scripts("child").run_child(str(script), [], limit_s=8.0 if "sleep" in body else 30.0)
    assert time.monotonic() - start < 30
    assert found.pop("seconds") >= 0
    log = found.pop("log", None)
    assert found == expected
    assert (log is not None and "said before" in log) == ("error" in expected)


def test_a_child_is_heard_while_it_runs(scripts: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys, time
            sys.path.insert(0, {str(FOLDER)!r})
            from child import answer
            path = sys.argv[sys.argv.index("--answer") + 1]
            answer(path, {{"step": 1}})
            time.sleep(2)
            answer(path, {{"step": 2}})
        """)
    )
    heard: list[Any] = []
    found = scripts("child").run_child(str(script), [], limit_s=30.0, on_answer=heard.append)
    assert found["step"] == 2
    assert {"step": 1} in heard


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """And so does what the child started: it would stay on the device."""
    (tmp_path / "child_script.py").write_text(
        textwrap.dedent(f"""
            import os, subprocess, sys, time
            sys.path.insert(0, {str(FOLDER)!r})
            from child import end_with_parent
            end_with_parent()
            started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            pids = f"{{os.getpid()}} {{started.pid}}"
            open({str(tmp_path / "pids.new")!r}, "w").write(pids)
            os.rename({str(tmp_path / "pids.new")!r}, {str(tmp_path / "pids")!r})
            time.sleep(60)
        """)
    )
    parent = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            f"import sys; sys.path.insert(0, {str(FOLDER)!r}); from child import run_child; "
            f"run_child({str(tmp_path / 'child_script.py')!r}, [], limit_s=60)",
        ]
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_what_a_killed_process_wrote_is_swept_up_and_nothing_else(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scripts("scratch")
    monkeypatch.setattr(made, "SHARED_MEMORY", tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f"dlo-scratch-{gone.pid}-abc").mkdir()
    (tmp_path / "dlo-scratch-other").mkdir()
    with made.scratch(tmp_path) as mine:
        (mine / "file").write_text("x")
        made.sweep()
        assert {path.name for path in tmp_path.iterdir()} == {mine.name, "dlo-scratch-other"}
    assert not mine.exists()


def test_a_file_is_kept_whole_or_not_at_all(scripts: Any, tmp_path: Path) -> None:
    keep, path = scripts("child").keep, tmp_path / "file"
    keep(path, "first")
    with pytest.raises(TypeError):
        keep(path, None)
    assert path.read_text() == "first"


def made_results() -> dict[str, Any]:
    def contender(step_ms: float, digest: str = "x") -> dict[str, Any]:
        runs = {"8": {"step_ms": step_ms, "digests": [digest]}}
        return {"runs": runs, "setup_s": 1.5, "seconds": 3}

    resident = contender(10.0) | {"link_gb_s": 50.0, "blocks_gb": 1.0}
    return {
        "machine": {"torch": "9"},
        "contenders": {
            "resident": resident,
            "dlo": contender(21.0),
            "other": contender(42.0),
            "wrong": contender(20.0, "y"),
            "absent": {"skipped": "absent is not installed", "seconds": 0},
        },
    }


def test_contenders_are_held_against_the_limit_and_the_fastest_peer(scripts: Any) -> None:
    peers, results = scripts("peers_report"), made_results()
    for found in results["contenders"].values():
        peers.compare(found, results["contenders"]["resident"])
    text = peers.table(results, [8])
    # A copy of 1 GB over 50 GB/s is the longer of the two.
    assert "8 tokens 20.0 ms" in text
    assert "| dlo | 21.0 (1.050) |" in text
    assert "| wrong | 20.0 (1.000) | – | – | – | 1.5 | **no** |" in text
    assert "absent is not installed" in text
    assert "dlo takes 1.050 of the fastest peer's time (wrong)" in text


def test_bits_are_unknown_where_the_resident_run_has_no_such_length(scripts: Any) -> None:
    peers, resident = scripts("peers_report"), {"runs": {"8": {"digests": ["x"]}}}

    def same(**digests: str) -> Any:
        found = {"runs": {name[1:]: {"digests": [digest]} for name, digest in digests.items()}}
        peers.compare(found, resident)
        return found["bit_identical"]

    assert same(n8="x") is True
    assert same(n8="y") is False
    assert same(n8="x", n32="x") is None
    assert same(n8="y", n32="x") is False
    assert same(n32="x") is None


KIND = {"torch": "2", "code": "a", "gpu": "G", "date": "then"}


def test_earlier_results_are_those_of_the_same_code_machine_and_options(
    scripts: Any, tmp_path: Path
) -> None:
    peers, path = scripts("peers"), tmp_path / "peers.json"
    run = {"complete": True, "runs": {"8": {}}}
    before = {
        "machine": KIND,
        "shape": {},
        "passes": 6,
        "contenders": {"resident": run, "dlo": run, "mmgp": {"skipped": "out of budget"}},
    }

    def known(then: dict[str, Any] = KIND, now: dict[str, Any] = KIND, **other: Any) -> set[str]:
        path.write_text(json.dumps(before | {"machine": then}))
        results = {"machine": now, "shape": {}, "passes": 6} | other
        assert set(peers.known_results(tmp_path, results)) == set(
            peers.known_results(path, results)
        )
        return set(peers.known_results(path, results))

    assert known() == {"resident", "dlo"}
    assert known(now=KIND | {"date": "now", "kernel": "k"}) == {"resident", "dlo"}
    # What a clone without its history calls its commit says nothing.
    assert known(now=KIND | {"code": "b"}) == {"resident"}
    nothing = {key: value for key, value in KIND.items() if key != "code"}
    assert known(then=nothing, now=nothing) == {"resident"}
    for other in ({"torch": "3"}, {"gpu": "H"}, {"cores": 2}, {"diffusers": "1"}):
        assert known(now=KIND | other) == set()
    assert known(passes=5) == known(shape={"width": 1}) == set()
    path.write_text(path.read_text()[:20])
    assert peers.known_results(path, {}) == {}


class Killed(BaseException):
    """The whole run ends here."""


@pytest.mark.parametrize("point", range(1, 8))
def test_a_run_that_is_killed_goes_on_where_it_stopped(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    """At any point: nothing is left out, nothing measured twice, and no figure lost."""
    peers = scripts("peers")
    lengths, asked = ["8", "32"], ["resident", "dlo", "fsdp2_cpu_offload"]
    measured: list[tuple[str, str]] = []
    left = [point]

    def run_child(script: str, arguments: list[str], *, limit_s: float, on_answer: Any) -> Any:
        name = arguments[arguments.index("--run") + 1]
        # The last one counts.
        tokens = arguments[-1].split(",")
        found: dict[str, Any] = {"runs": {}, "setup_s": 1.0}
        for each in tokens:
            left[0] -= 1
            if not left[0]:
                raise Killed
            measured.append((name, each))
            found["runs"][each] = {"step_ms": 10.0, "digests": ["x"]}
            on_answer(json.loads(json.dumps(found)))
        return found | {"complete": True, "seconds": 1}

    monkeypatch.setattr(peers, "run_child", run_child)
    monkeypatch.setattr(peers, "machine", lambda _: dict(KIND))
    monkeypatch.setattr(peers, "grow", lambda *_, **__: {})
    arguments = ["--device", "cpu", "--small", "--out", str(tmp_path), "--resume"]
    every, part = ",".join(asked), "fsdp2_cpu_offload"
    codes = []
    # Of some only, in the second run: what is known of the others stays.
    for contenders in (every, part, every):
        monkeypatch.setattr(sys, "argv", ["peers.py", *arguments, "--contenders", contenders])
        try:
            codes.append(peers.run_all(peers.parse()))
        except Killed:
            continue
    assert codes[-1] == 0
    assert sorted(measured) == sorted((name, tokens) for name in asked for tokens in lengths)
    # All is known now, and kept where the results of this run go.
    elsewhere = tmp_path / "elsewhere"
    arguments = ["peers.py", "--device", "cpu", "--small", "--contenders", every]
    arguments += ["--resume", str(tmp_path), "--out", str(elsewhere)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert peers.run_all(peers.parse()) == 0
    found = json.loads((elsewhere / "peers.json").read_text())["contenders"]
    assert len(measured) == len(asked) * len(lengths)
    assert list(found) == asked
    assert all(set(each["runs"]) == set(lengths) for each in found.values())
    assert all(each["bit_identical"] for each in found.values())


def test_a_contender_is_begun_when_there_is_time_for_it_and_who_failed_is_last(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, contenders = scripts("peers"), scripts("contenders")
    monkeypatch.setattr(sys, "argv", ["peers.py", "--contenders", "dlo,fsdp2_cpu_offload"])
    monkeypatch.setattr(peers, "run_child", lambda *_, **__: {"complete": True, "runs": {}})
    options = peers.parse()
    needs = contenders.needs_s("fsdp2_cpu_offload", options.lengths, options.passes)
    assert contenders.needs_s("dlo", options.lengths, options.passes) < needs < options.limit
    for left, begun in ((needs - 1, False), (needs + 1, True)):
        found = peers.run_one(
            "fsdp2_cpu_offload", options, peers.Rest(options.lengths), left, print
        )
        assert ("out of budget" not in found.get("skipped", "")) == begun
    known = {"resident": {"error": "killed"}, "dlo": {"runs": {"4096": {}}, "error": "killed"}}
    left_over = peers.what_is_left(known, options)
    assert list(left_over) == ["fsdp2_cpu_offload", "resident", "dlo"]
    assert left_over["dlo"] == options.lengths[1:]
    assert contenders.needs_s("dlo", [4096], 5, 0.1) < contenders.needs_s("dlo", [4096], 5)
    # Every contender has an estimate.
    assert all(contenders.needs_s(name, [4096], 5) > 0 for name in contenders.CONTENDERS)


def test_a_section_is_in_order_only_when_it_came_to_its_end(scripts: Any) -> None:
    verdict = scripts("gpu_check").verdict
    good, bad = {"ok": True}, {"ok": False}
    assert verdict({"checks": [good], "complete": True}) == "ok"
    assert verdict({"checks": [good]}) == "failed"
    assert verdict({"checks": [good, bad], "complete": True}) == "failed"
    assert verdict({"checks": [good], "complete": True, "error": "exit code 1"}) == "failed"
    assert verdict({"skipped": "no GPU"}) == "skipped"


def test_a_section_that_is_left_out_in_its_middle_keeps_what_was_wrong(scripts: Any) -> None:
    verdict = scripts("gpu_check").verdict
    assert verdict({"skipped": "no room", "checks": [{"ok": True}]}) == "skipped"
    assert verdict({"skipped": "no room", "checks": [{"ok": False}]}) == "failed"


@pytest.mark.parametrize("error", [RuntimeError("device lost"), dlo_core.HostMemoryError("no")])
@pytest.mark.parametrize("limit", [0.0, 8.0])
def test_a_way_to_enable_that_fails_is_a_failure_and_no_more(
    scripts: Any, error: Exception, limit: float
) -> None:
    """What may be refused by its own error, and has no rate to reach, may be absent."""
    checks, check_start = scripts("checks"), scripts("check_start")
    options = checks.Options("cpu", True, 60.0, lambda _: None)
    found = checks.Findings(options)

    def make(**settings: Any) -> Any:
        raise error

    check_start._Enabling(options, found, (), torch.zeros(1)).check("this_way", limit, make)
    refused = isinstance(error, dlo_core.DloError) and not limit
    assert [check.ok for check in found.checks] == [refused]
    assert str(error) in found.facts["this_way"]


def test_a_step_of_a_start_that_fails_costs_its_own_figure_only(scripts: Any) -> None:
    checks, check_start = scripts("checks"), scripts("check_start")
    found = checks.Findings(checks.Options("cpu", True, 60.0, lambda _: None))
    steps = check_start._Steps(found, 10)
    assert steps.rate("wrong", {}.popitem) is None
    assert steps.rate("right", lambda: 5) == 5
    assert steps.num_failed == 1
    assert "KeyError" in found.facts["wrong"]
    assert "gb_s" in found.facts["right"]


def test_every_section_of_the_gpu_check_is_documented(scripts: Any) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in scripts("gpu_check").SECTIONS)
    assert all(f"`{name}`" in text for name in scripts("contenders").CONTENDERS)


def test_the_hosts_time_of_a_block_is_priced_part_by_part(scripts: Any) -> None:
    checks, check_host = scripts("checks"), scripts("check_host")
    options = checks.Options("cpu", True, 60.0, lambda _: None)
    found = checks.Findings(options)
    with torch.inference_mode():
        check_host._HostBench(options, found, Shape(32, 4, 3, 0, "float32")).measure("_x")
    prices = found.facts["prices_us_x"]
    failed = {name: price for name, price in prices.items() if isinstance(price, str)}
    assert not failed
    assert {"bind and unbind", "copy of a block, copy_", "fill of a slot"} <= set(prices)
    # The parts are those of an engine that goes on as before.
    for name in ("profile_x", "engine_profile_x"):
        text = "\n".join(found.facts[name])
        assert "tottime" in text
        assert "streamer.py" in text
    assert {"host_us_a_block_x", "engine_us_a_block_x", "engine_us_a_block_resident_x"} <= set(
        found.facts
    )


class Lanes:
    """A backend of lanes that have a clock each, and no device."""

    def __init__(self, copy_ms: float) -> None:
        self.copy_ms = copy_ms
        self.main, self.side = Lane(), Lane()
        self.now = self.main
        self.copied: list[tuple[int, int]] = []

    def new_stream(self) -> Lane:
        return self.side

    def new_event(self) -> dict[str, float]:
        return {"at": 0.0}

    def current_stream(self) -> Lane:
        return self.now

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextmanager
    def stream(self, lane: Lane) -> Iterator[None]:
        before, self.now = self.now, lane
        yield
        self.now = before

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copied.append((dst.data_ptr(), src.data_ptr()))
        dst.copy_(src)
        self.now.ms += self.copy_ms


@dataclass
class Lane:
    """A stream whose work takes what it says."""

    ms: float = 0.0

    def record_event(self, event: dict[str, float]) -> None:
        event["at"] = self.ms

    def wait_event(self, event: dict[str, float]) -> None:
        self.ms = max(self.ms, event["at"])


@pytest.mark.parametrize(("compute_ms", "step_ms"), [(20.0, 20.0), (12.0, 15.0)])
def test_a_pass_beside_copies_takes_as_long_as_the_longer_of_both(
    scripts: Any, compute_ms: float, step_ms: float
) -> None:
    lanes = Lanes(3.0)

    def model(x: float) -> float:
        assert lanes.now is lanes.main
        lanes.main.ms += compute_ms
        return 2 * x

    sources = [torch.full((nbytes,), nbytes, dtype=torch.uint8) for nbytes in (5, 4, 3, 5, 4)]
    beside = scripts("check_turns").Beside(model, sources, lanes)
    ends = []
    for _ in range(4):
        assert beside(1.5) == 3.0
        ends.append(lanes.main.ms)
    # The first pass ends before its copies do; the next ones wait for them.
    assert [after - before for before, after in pairwise(ends)] == [step_ms] * 3
    # Copies begin with their own pass and not before.
    assert lanes.side.ms == 3 * step_ms + 15.0
    assert [source for _, source in lanes.copied] == [each.data_ptr() for each in sources] * 4
    first, second = (place for place, _ in lanes.copied[:2])
    assert first != second
    assert [place for place, _ in lanes.copied[:5]] == [first, second, first, second, first]


def test_the_bytes_that_stream_are_those_of_the_blocks_that_do_not_stay(scripts: Any) -> None:
    shape = Shape(32, 4, 5, 0, "float32")
    model, same = build(shape), build(shape)
    offloaded = dlo_core.offload(model, device="cpu", resident_layers=2, packed=False)
    bytes_of_each = scripts("check_turns").streamed_bytes(offloaded)
    stay = dlo_core.residency.resident_positions(5, 2)
    blocks = [block for number, block in enumerate(same.blocks) if number not in stay]
    assert len(bytes_of_each) == len(blocks) == 3
    for there, block in zip(bytes_of_each, blocks, strict=True):
        weight = block.get_parameter("up.weight").view(-1).view(torch.uint8)
        assert bytes(weight.tolist()) in bytes(there.tolist())
    offloaded.shutdown()


def test_steps_are_compared_over_all_places_of_a_round(scripts: Any) -> None:
    """Whoever comes third in a round is slow; no ratio may show it."""
    check_turns = scripts("check_turns")
    rows = check_turns.Rows(copies=10)
    slower = (0.98, 1.0, 1.03, 0.99)
    steps = {"resident": 120.0, "beside": 122.4, "pass": 123.6, "replay": 121.2}
    for turn in range(check_turns._ROUNDS):
        places = {name: (n - turn) % 4 for n, name in enumerate(steps)}
        rows.add(10.0, {name: steps[name] * slower[places[name]] for name in steps})
    assert rows.ms["link"] == [100.0] * check_turns._ROUNDS
    assert rows.of_limit("resident") == pytest.approx(1.0)
    assert rows.ratios() == {
        "beside / limit": 1.02,
        "pass / limit": 1.03,
        "replay / limit": 1.01,
        "pass / beside": 1.0098,
        "replay / beside": 0.9902,
    }
    for name in steps:
        rows.ms[name] = [ms / 2 for ms in rows.ms[name]]
    assert rows.of_limit("pass") == pytest.approx(123.6 / 2 / 100)


def test_each_contender_comes_in_each_place_of_the_rounds(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_turns = scripts("check_turns")
    seen: list[str] = []

    def step_ms(call: str, args: tuple[()], num: int) -> float:
        seen.append(call)
        return 0.0

    monkeypatch.setattr(check_turns, "_step_ms", step_ms)
    calls: Any = {"a": "a", "b": "b", "c": "c"}
    for turn in range(4):
        check_turns._round(calls, (), turn)
    assert "".join(seen) == "abcbcacababc"


def test_the_calls_of_the_readme_name_what_there_is(scripts: Any) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    known = {
        "gpu_check": scripts("gpu_check").SECTIONS,
        "packed_check": scripts("packed_check").SECTIONS,
        "several_gpus": scripts("several_gpus").SECTIONS,
    }
    asked = re.findall(r"benchmarks/(\w+)\.py [^`;\n]*--sections ([\w,]+)", text)
    assert {script for script, _ in asked} == set(known)
    for script, names in asked:
        assert set(names.split(",")) <= set(known[script]), (script, names)
    tests = re.findall(r"tests/test_\w+\.py", text)
    assert tests
    assert all((FOLDER.parent / name).exists() for name in tests)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gpu_check_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ["--device", "cpu", "--small", "--out", str(out)]
    done = run_script("gpu_check.py", *arguments, limit_s=580)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads(out.read_text())["sections"]
    needs_cuda = {"pinned", "sync", "compiled", "graph", "context", "sanitizer"}
    for name, found in sections.items():
        if name in needs_cuda:
            assert "CUDA" in found["skipped"]
        elif "skipped" not in found:
            assert found["complete"]
            assert all(check["ok"] for check in found["checks"])
    assert {"bits", "equal", "unequal", "rates", "flat", "nccl"} <= {
        name for name, found in sections.items() if found.get("checks")
    }


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_peers_script_runs_on_a_cpu(tmp_path: Path) -> None:
    """The peers that are not installed here are left out and said so."""
    options = ["--device", "cpu", "--small", "--out", str(tmp_path)]
    contenders = "dlo,fsdp2_cpu_offload,dlo_registered,accelerate_cpu_offload,mmgp"
    done = run_script("peers.py", *options, "--contenders", contenders)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())["contenders"]
    assert list(found) == ["resident", *contenders.split(",")]
    assert found["dlo_registered"]["bit_identical"]
    assert found["dlo"]["bit_identical"]
    assert found["fsdp2_cpu_offload"]["bit_identical"]
    assert "not installed" in found["mmgp"]["skipped"]
    assert (tmp_path / "peers.md").read_text() in done.stdout


@pytest.mark.parametrize("script", ["gpu_check.py", "peers.py"])
def test_a_name_that_is_unknown_is_refused_with_the_known_ones(script: str) -> None:
    option = "--sections" if script == "gpu_check.py" else "--contenders"
    done = run_script(script, option, "nonsense")
    assert done.returncode == 2
    assert "unknown" in done.stderr
    assert ("equal" if script == "gpu_check.py" else "diffusers_block") in done.stderr
