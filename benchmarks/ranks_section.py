"""Sections of several ranks: what there is to measure, and how one process measures one of them."""

from __future__ import annotations

import json
import signal
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from child import answer, end_with_parent

if TYPE_CHECKING:
    import argparse

    from dlo_core.bench.model import Shape

__all__ = ["SECTIONS", "Section", "environment", "run_section", "shape_of"]

_PINNING = {
    "PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
}


@dataclass(frozen=True, slots=True)
class Section:
    """What one process measures.

    Attributes:
        limit_s: Seconds that it has.
        contenders: Whom it runs, after the resident run where it has its own.
        kind: ``"steps"``, ``"links"`` or ``"contention"``.
        reference: The section with the resident run that it is held against.
        parallel: ``"dp"`` or ``"sp"``.
        unequal: Whether the model has blocks of two sizes.
        num_lengths: How many of the lengths it runs.
        activity: Whether it says what the devices did, too.
        environment: Variables of its ranks.
        needs: A package without which it is left out.
    """

    limit_s: float
    contenders: tuple[str, ...] = ()
    kind: str = "steps"
    reference: str = "modes"
    parallel: str = "dp"
    unequal: bool = False
    num_lengths: int = 2
    activity: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    needs: str = ""


# In the order of what one wants to know first.
SECTIONS: dict[str, Section] = {
    "links": Section(60, kind="links"),
    "modes": Section(150, ("gather", "gather_copies", "local_shared", "local"), num_lengths=3),
    "activity": Section(
        60, ("gather", "gather_copies"), num_lengths=1, reference="activity", activity=True
    ),
    "fsdp": Section(100, ("fsdp2_cpu_offload",), num_lengths=3, environment=_PINNING),
    "sp": Section(90, ("gather", "gather_copies", "local_shared"), reference="sp", parallel="sp"),
    "unequal": Section(80, ("gather", "local_shared"), reference="unequal", unequal=True),
    "settings": Section(
        110,
        (
            "gather_in_place",
            "gather_in_place_depth3",
            "gather_depth3",
            "gather_residents10",
            "gather_residents20",
        ),
    ),
    "peer_copies": Section(50, ("gather_peer_copies",)),
    "contention": Section(50, kind="contention"),
    "few_channels": Section(50, ("gather",), environment={"NCCL_MAX_CTAS": "4"}),
    "sp_rivals": Section(
        80,
        ("local", "fsdp2_cpu_offload"),
        reference="sp",
        parallel="sp",
        environment=_PINNING,
    ),
    "omni": Section(90, ("omni_distributed",), environment=_PINNING, needs="vllm_omni"),
}
# Ranks begin nothing, are killed and the section is killed so many seconds one after the other.
_LAST_S = 3.0
# New processes for the contenders that are left take so many seconds, a step included.
_AGAIN_S = 25.0
# Ranks tell of every length; who says nothing for so long is stuck.
_SILENCE_S = 45.0


def shape_of(options: argparse.Namespace, *, unequal: bool) -> Shape:
    """Return the shape of the model: 40 blocks of 340 MB, or 19 of them and 38 of half the size."""
    from dlo_core.bench.model import Shape

    dtype = "float32" if options.device.startswith("cpu") else "bfloat16"
    if options.small:
        return Shape(64, 8, 3 if unequal else 5, 2 if unequal else 0, dtype)
    return Shape(3072, 24, 19 if unequal else 40, 2 if unequal else 0, dtype)


def run_section(options: argparse.Namespace) -> int:
    """Run the ranks of one section and hand over what they tell, as they tell it.

    Who fails, dies or says nothing for long is the last in its processes; the contenders after it
    get new ones.
    """
    end_with_parent()
    section = SECTIONS[options.run]
    found: dict[str, Any] = {"contenders": {}, "ranks": {}, "reference": options.reference}
    answer(options.answer, found)
    left = contenders_of(options, section)
    while True:
        error = run_once(options, section, left, found)
        left = tuple(name for name in left if not is_done(found, name, options.ranks))
        if error and left:
            blamed, *rest = left
            found["contenders"].setdefault(blamed, {}).setdefault("0", {})["errors"] = [error]
            error, left = "", tuple(rest)
        answer(options.answer, found)
        if not left or options.until - time.time() < _AGAIN_S:
            break
    for name in left:
        found["contenders"].setdefault(name, {"0": {}})["0"]["skipped"] = "out of time"
    answer(options.answer, found | ({"error": error} if error else {"complete": True}))
    return 1 if error else 0


def run_once(
    options: argparse.Namespace, section: Section, names: tuple[str, ...], found: dict[str, Any]
) -> str:
    """Run these contenders in one process a rank; return what ended it before its end."""
    from dlo_core.bench.launch import run_ranks

    def hear(_: int, what: str) -> None:
        signal.setitimer(signal.ITIMER_REAL, silence_s)
        told = json.loads(what)
        kept = found["ranks"]
        if told["name"]:
            kept = found["contenders"].setdefault(told["name"], {})
        kept.setdefault(str(told["rank"]), {}).update(told["found"])
        answer(options.answer, found)

    def too_silent(*_: object) -> None:
        raise TimeoutError(f"no rank said anything for {silence_s:.0f} s")

    # 0: for ever. On a CPU a pass of the large model may take minutes.
    silence_s = _SILENCE_S if options.small or not options.device.startswith("cpu") else 0.0
    measure, job = job_of(options, section, names)
    before = signal.signal(signal.SIGALRM, too_silent)
    try:
        signal.setitimer(signal.ITIMER_REAL, silence_s)
        run_ranks(
            measure,
            (job,),
            device=options.device,
            ranks=options.ranks,
            limit_s=max(options.until - time.time() - _LAST_S, 1.0),
            on_tell=hear,
            environment=lambda rank: environment(options, section, rank),
        )
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:3000]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return ""


def contenders_of(options: argparse.Namespace, section: Section) -> tuple[str, ...]:
    """Return whom a section runs: those asked for, after the resident run where it has its own."""
    if section.kind != "steps":
        return ()
    asked = options.contenders or section.contenders
    contenders = tuple(name for name in section.contenders if name in asked)
    return ("resident", *contenders) if options.run == options.reference else contenders


def is_done(found: dict[str, Any], name: str, ranks: int) -> bool:
    """Return whether every rank is done with a contender."""
    told = found["contenders"].get(name, {})
    return all(told.get(str(rank), {}).get("done") for rank in range(ranks))


def job_of(
    options: argparse.Namespace, section: Section, contenders: tuple[str, ...]
) -> tuple[Any, Any]:
    """Return what each rank runs, and with what."""
    from ranks_links import LinksJob, measure_contention, measure_links
    from ranks_steps import StepsJob, measure_steps

    shape = shape_of(options, unequal=section.unequal)
    if section.kind != "steps":
        block = 18 * shape.width**2 * 2
        job = LinksJob(
            weights=options.weights,
            block_nbytes=block,
            copy_nbytes=block if options.small else 1 << 30,
            gemm_size=128 if options.small else 8192,
        )
        return (measure_links if section.kind == "links" else measure_contention), job
    runs = tuple(zip(options.lengths, options.passes, strict=False))[: section.num_lengths]
    # What is told at the end must be heard before the ranks are killed.
    until = options.until - 2 * _LAST_S
    return measure_steps, StepsJob(
        options.weights, shape, section.parallel, runs, contenders, until, section.activity
    )


def environment(options: argparse.Namespace, section: Section, rank: int) -> dict[str, str]:
    """Return a rank's variables."""
    made = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if ":" in options.device:
        # NCCL refuses two ranks on one GPU, unless it takes them for two hosts.
        made["NCCL_HOSTID"] = f"host{rank}"
    return made | section.environment
