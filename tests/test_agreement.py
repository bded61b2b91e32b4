"""Agreement: exchanges and votes, ranks that do not come or come late, fills that never end."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from leaks import holdings
from poison import PoisonBackend
from ranks import run_ranks
from toys import assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo
from dlo_core.agreement import GroupAgreement, LoneAgreement, agree_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

N = 4


def world() -> Any:
    return dist.group.WORLD


# --- exchanges and votes --------------------------------------------------------------------------


def test_an_exchange_returns_every_ranks_value_in_order() -> None:
    """Values of any kind and of unequal length."""

    def job(rank: int) -> list[Any]:
        agreement = GroupAgreement(world(), 20)
        assert (agreement.rank, agreement.size) == (rank, 3)
        values: list[Any] = [None, rank, "x" * 1000 * rank, {"rank": (rank, [torch.float32])}]
        answers = [agreement.exchange(value, "test") for value in values]
        agreement.close()
        agreement.close()
        with pytest.raises(dlo.AgreementError, match="closed"):
            agreement.exchange(1, "test")
        return answers

    for answers in run_ranks(job, 3):
        assert answers[0] == [None] * 3
        assert answers[1] == [0, 1, 2]
        assert answers[2] == ["", "x" * 1000, "x" * 2000]
        assert answers[3] == [{"rank": (rank, [torch.float32])} for rank in range(3)]


def test_one_rank_agrees_with_itself() -> None:
    agreement = LoneAgreement()
    assert agreement.exchange(5, "test") == [5]
    agreement.vote(None, "test")
    with pytest.raises(KeyError, match="mine"):
        agreement.vote(KeyError("mine"), "test")
    agree_on(agreement, {"a": "1"}, "test")
    agreement.close()


ERRORS: list[tuple[BaseException, type[BaseException]]] = [
    (dlo.ConfigError("bad depth"), dlo.ConfigError),
    (dlo.CheckpointError("bad file"), dlo.CheckpointError),
    (dlo.HostMemoryError("no memory"), dlo.HostMemoryError),
    (dlo.BackendError("no device"), dlo.BackendError),
    (dlo.UseError("wrong use"), dlo.UseError),
    (dlo.FillError("no fill", rank=1, block="b", fill=3), dlo.AgreementError),
    (ValueError("from a callback"), dlo.AgreementError),
    (KeyboardInterrupt("enough"), dlo.AgreementError),
]


def test_a_vote_raises_on_every_rank_and_names_the_one_that_failed() -> None:
    """The failed rank raises its own error; the others one of its class where it is ours."""

    def job(rank: int) -> list[Any]:
        agreement = GroupAgreement(world(), 20)
        agreement.vote(None, "loading")
        seen = []
        for error, _ in ERRORS:
            mine = error if rank == 1 else None
            try:
                agreement.vote(mine, "loading")
            except BaseException as raised:  # what was voted on, whatever it is
                seen.append((type(raised), str(raised), raised is mine))
        agreement.vote(None, "loading")
        agreement.close()
        return seen

    answers = run_ranks(job, 3)
    for rank, seen in enumerate(answers):
        assert len(seen) == len(ERRORS)
        for (error, expected), (kind, text, same) in zip(ERRORS, seen, strict=True):
            if rank == 1:
                assert same
                continue
            assert kind is expected
            assert text.startswith("loading failed on rank 1, so it was refused on all 3: ")
            assert f"{type(error).__name__}: {error}" in text


class TwoArguments(dlo.CheckpointError):
    """Somebody's own error, of one of dlo's kinds, that cannot be made of a text."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file} is bad in line {line}")


def test_an_error_that_cannot_be_sent_reaches_the_others_with_its_text() -> None:
    """A class that is local, a text that raises, a constructor of its own."""

    class Local(Exception):
        pass

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    def job(rank: int) -> list[tuple[str, str]]:
        agreement = GroupAgreement(world(), 20)
        seen = []
        for error in (Local("on purpose"), Mute(), TwoArguments("a.bin", 3)):
            with pytest.raises((Local, Mute, dlo.DloError)) as caught:
                agreement.vote(error if rank == 1 else None, "loading")
            assert rank == 0 or caught.value is error
            seen.append((type(caught.value).__name__, str(caught.value) if rank == 0 else ""))
        agreement.vote(None, "loading")
        agreement.close()
        return seen

    before = "loading failed on rank 1, so it was refused on all 2: "
    assert run_ranks(job, 2)[0] == [
        ("AgreementError", before + "Local: on purpose"),
        ("AgreementError", before + "Mute: (no text: ValueError)"),
        ("CheckpointError", before + "TwoArguments: a.bin is bad in line 3"),
    ]


def test_a_vote_with_several_failures_counts_them() -> None:
    def job(rank: int) -> str:
        agreement = GroupAgreement(world(), 20)
        with pytest.raises(dlo.ConfigError) as caught:
            agreement.vote(dlo.ConfigError(f"from {rank}") if rank else None, "loading")
        agreement.close()
        return str(caught.value)

    texts = run_ranks(job, 3)
    assert "failed on rank 1 (and 1 more ranks)" in texts[0]
    assert texts[1:] == ["from 1", "from 2"]


def test_facts_that_differ_are_named_with_every_ranks_value() -> None:
    def job(rank: int) -> str:
        agreement = GroupAgreement(world(), 20)
        agree_on(agreement, {"depth": "2", "order": "abc"}, "offload()")
        facts = {"same": "1", "depth": str(2 + rank % 2), **({"extra": "x"} if rank == 2 else {})}
        with pytest.raises(dlo.AgreementError) as caught:
            agree_on(agreement, facts, "offload()")
        agreement.close()
        return str(caught.value)

    texts = run_ranks(job, 3)
    assert len(set(texts)) == 1
    assert "depth: rank 0 has 2, rank 1 has 3, rank 2 has 2" in texts[0]
    assert "extra: rank 0 has nothing, rank 1 has nothing, rank 2 has x" in texts[0]
    assert "same" not in texts[0].partition("differ in")[2].partition(". Give")[0]


def test_two_agreements_of_the_same_ranks_do_not_mix() -> None:
    def job(rank: int) -> list[Any]:
        agreements = [GroupAgreement(world(), 20) for _ in range(3)]
        answers = [a.exchange((n, rank), "test") for n, a in enumerate(agreements)]
        for agreement in agreements:
            agreement.close()
        return answers

    for answers in run_ranks(job, 2):
        assert answers == [[(n, 0), (n, 1)] for n in range(3)]


def test_nothing_is_said_on_the_callers_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says who takes part; its own traffic may be under way at any moment."""

    def job(rank: int) -> int:
        used = []
        whole: dict[str, Callable[..., Any]] = {}
        for name in (
            "all_gather",
            "all_gather_object",
            "all_gather_single",
            "barrier",
            "broadcast",
        ):
            if not hasattr(dist, name):
                continue
            whole[name] = getattr(dist, name)

            def watch(*args: Any, name: str = name, **kwargs: Any) -> Any:
                if kwargs.get("group") in (None, dist.group.WORLD):
                    used.append(name)
                return whole[name](*args, **kwargs)

            setattr(dist, name, watch)
        model = make_toy(N)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world())
        model(inputs())
        offloaded.disable()
        return len(used)

    assert run_ranks(job, 2) == [0, 0]


# --- ranks that do not come, or late --------------------------------------------------------------


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_that_never_comes_is_named_within_the_timeout(absent: int) -> None:
    """On all the others, by group rank and global rank, with the model as it was."""

    def job(rank: int) -> Any:
        if rank == absent:
            dist.barrier()
            return None
        model = make_toy(N)
        before = snapshot(model)
        start = time.monotonic()
        with pytest.raises(dlo.AgreementError) as caught:
            dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=2.0)
        seconds = time.monotonic() - start
        dist.barrier()
        assert_restored(model, before)
        return seconds, str(caught.value)

    for rank, answer in enumerate(run_ranks(job, 3)):
        if rank != absent:
            seconds, text = answer
            assert 1.9 < seconds < 10
            assert f"rank {absent} (global rank {absent}) did not come" in text
            assert "load_timeout_s" in text


def test_after_a_rank_did_not_come_all_can_try_again() -> None:
    """B35's family: what the first attempt left in the store does not confuse the second."""

    def job(rank: int) -> bool:
        model = make_toy(N)
        reference = twin(model)
        if rank != 1:
            with pytest.raises(dlo.AgreementError):
                dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=0.8)
        dist.barrier()
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), load_timeout_s=20)
        equal = torch.equal(model(inputs(rank)), reference(inputs(rank)))
        offloaded.disable()
        return equal

    assert run_ranks(job, 3) == [True] * 3


def test_a_rank_that_is_missing_is_named_by_group_rank_too() -> None:
    """B35, https://github.com/meta-pytorch/torchrec/pull/4601"""

    def job(rank: int) -> str:
        group = dist.new_group([1, 3])
        if rank != 1:
            time.sleep(2 if rank == 3 else 0)
            return ""
        with pytest.raises(dlo.AgreementError) as caught:
            dlo.offload(make_toy(N), device=PoisonBackend(0), group=group, load_timeout_s=0.8)
        return str(caught.value)

    assert "rank 1 (global rank 3) did not come" in run_ranks(job, 4)[1]


def test_a_rank_that_is_slow_is_waited_for() -> None:
    """Longer than the caller's own group would: its timeout is not ours.

    B38, https://github.com/huggingface/transformers/pull/48228
    """

    def job(rank: int) -> bool:
        calls: list[dlo.LoadProgress] = []

        def slow(progress: dlo.LoadProgress) -> None:
            if not calls:
                time.sleep(2.6)
            calls.append(progress)

        model = make_toy(N)
        reference = twin(model)
        time.sleep(0.2 * rank)
        offloaded = dlo.offload(
            model,
            device=PoisonBackend(0),
            group=world(),
            progress=slow if rank == 1 else False,
            timeout_s=2.0,
        )
        equal = torch.equal(model(inputs(rank)), reference(inputs(rank)))
        offloaded.disable()
        return equal

    assert run_ranks(job, 2, timeout_s=1.0) == [True, True]


def test_a_rank_that_stops_loading_is_named() -> None:
    def job(rank: int) -> str:
        told: list[dlo.LoadProgress] = []

        def stuck(progress: dlo.LoadProgress) -> None:
            if not told:
                time.sleep(3)
            told.append(progress)

        if rank == 1:
            with pytest.raises(dlo.DloError):
                dlo.offload(
                    make_toy(1),
                    device=PoisonBackend(0),
                    group=world(),
                    progress=stuck,
                    load_timeout_s=1.5,
                )
            return ""
        backend = PoisonBackend(0)
        model = make_toy(1)
        before, held = snapshot(model), holdings(backend)
        with pytest.raises(dlo.AgreementError) as caught:
            dlo.offload(model, device=backend, group=world(), load_timeout_s=1.5)
        assert_restored(model, before)
        text = str(caught.value)
        del caught
        after = holdings(backend)
        assert (after["groups"], after["device bytes"]) == (held["groups"], held["device bytes"])
        return text

    text = run_ranks(job, 2)[0]
    assert "loading: the ranks could not agree within 1.5 s" in text
    assert "rank 1 (global rank 1) did not come" in text


def test_an_exchange_that_is_given_up_keeps_nobody_waiting() -> None:
    """gloo's own group waits for its operation when it is destroyed: not in our close()."""

    def job(rank: int) -> float:
        agreement = GroupAgreement(world(), 15)
        if rank == 1:
            dist.barrier()
            return 0.0

        def enough() -> None:
            raise KeyboardInterrupt

        def burn() -> None:
            raise dlo.FillError("the disk burns", rank=0, block="blocks.0", fill=1)

        began = time.monotonic()
        # What says why goes as it is.
        with pytest.raises(dlo.FillError, match="the disk burns"):
            agreement.exchange(1, "test", meanwhile=burn)
        with pytest.raises(KeyboardInterrupt):
            agreement.exchange(1, "test", meanwhile=enough)
        agreement.close()
        del agreement
        gc.collect()
        took_s = time.monotonic() - began
        dist.barrier()
        return took_s

    assert run_ranks(job, 2)[0] < 3


def test_an_exchange_that_is_closed_under_way_stays_off_the_callers_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By another thread; without a group the second half would run over the default one."""

    def job(rank: int) -> list[int]:
        agreement = GroupAgreement(world(), 15)
        gather = agreement._gather

        def close_after(*args: Any) -> list[torch.Tensor]:
            parts = gather(*args)
            agreement.close()
            return parts

        if rank == 0:
            monkeypatch.setattr(agreement, "_gather", close_after)
        answers = agreement.exchange(rank, "test")
        dist.barrier()
        agreement.close()
        with pytest.raises(dlo.AgreementError, match="control group is closed"):
            agreement.exchange(rank, "test")
        return answers

    assert run_ranks(job, 2) == [[0, 1]] * 2


# --- fills that never end -------------------------------------------------------------------------


def run_until_it_fails(model: nn.Module) -> None:
    for _ in range(4):
        model(inputs())


@pytest.mark.parametrize("stages", [2, 0])
@pytest.mark.parametrize("use", ["forward", "pass", "disable"])
def test_a_peer_that_stops_is_an_error_within_the_timeout_and_closes_the_offload(
    use: str, stages: int
) -> None:
    """Then every call says so, disable() is a RestoreError, and shutdown() is quick."""

    def job(rank: int) -> Any:
        model = make_toy(6)
        offloaded = dlo.offload(
            model, device=PoisonBackend(0), group=world(), timeout_s=0.6, stages=stages
        )
        model(inputs())
        if rank == 1:
            dist.barrier()
            return None

        def passes() -> None:
            for _ in range(4):
                with offloaded.run_pass():
                    pass
                model.blocks[0](inputs())

        start = time.monotonic()
        if use == "disable":
            with pytest.raises(dlo.RestoreError) as caught:
                offloaded.disable()
        else:
            with pytest.raises(dlo.FillError) as caught:  # type: ignore[assignment]
                run_until_it_fails(model) if use == "forward" else passes()
        waited = time.monotonic() - start
        for call in (lambda: model(inputs()), lambda: model.blocks[2](inputs()), offloaded.refresh):
            with pytest.raises(dlo.UseError, match="closed"):
                call()
        with pytest.raises(dlo.RestoreError):
            offloaded.disable()
        assert "failed" in repr(offloaded)
        start = time.monotonic()
        offloaded.shutdown()
        closing = time.monotonic() - start
        offloaded.disable(to="meta")
        dist.barrier()
        error = caught.value
        facts = (error.rank, error.block, error.fill) if isinstance(error, dlo.FillError) else None
        return waited, closing, str(error), type(error).__name__, facts

    waited, closing, text, kind, facts = run_ranks(job, 2)[0]
    assert waited < 8
    assert closing < 5
    assert "blocks." in text
    if use != "disable":
        assert kind in ("FillTimeout", "FillError")
        rank, block, fill = facts
        assert rank == 0
        assert block in text
        assert f"fill {fill}" in text


def test_a_timeout_is_told_from_a_broken_connection() -> None:
    """FillTimeout where the peer is silent, FillError where it is gone."""

    def job(rank: int) -> str:
        model = make_toy(6)
        dlo.offload(model, device=PoisonBackend(0), group=world(), timeout_s=0.6)
        model(inputs())
        if rank == 1:
            dist.barrier()
            return ""
        with pytest.raises(dlo.FillError) as caught:
            run_until_it_fails(model)
        dist.barrier()
        return type(caught.value).__name__

    assert run_ranks(job, 2)[0] == "FillTimeout"


def test_ranks_that_mix_up_their_fills_are_an_error_and_not_a_picture() -> None:
    """A rank whose tape is moved on by hand: the trailers tell."""

    def job(rank: int) -> str:
        model = make_toy(6)
        reference = twin(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=world(), timeout_s=1.5)
        assert torch.equal(model(inputs()), reference(inputs()))
        if rank == 1:
            engine = offloaded.engine
            assert engine is not None
            engine.streamers[0].tape.issued += 1
        with pytest.raises(dlo.DloError) as caught:
            run_until_it_fails(model)
        return str(caught.value)

    texts = run_ranks(job, 2)
    assert any("another block" in text or "could not be loaded" in text for text in texts)
