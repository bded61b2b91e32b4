"""What one rank does in a run of chaos, and what it says of it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from chaos_plan import LASTS
from leaks import segments
from toys import Block, Toy, inputs, make_toy

import dlo_core as dlo
from dlo_core.cpu import CpuBackend

if TYPE_CHECKING:
    from pathlib import Path

    from chaos_plan import Plan

__all__ = ["Told", "run_rank", "write_checkpoints"]

# Beyond the time of a pass: who loads the machine is somebody else.
_LOAD_S = 20.0


@dataclass(slots=True)
class Told:
    """What a rank says in the end.

    Attributes:
        right: Passes whose output was right.
        wrong: Passes whose output was not.
        local: What the caller's own code raised in a pass, and the loop went on.
        error: Class of dlo's error that ended it; empty: none did.
        text: Of the error.
        culprit: That the error names; -1: none.
        took_s: From the start of the call that raised to the error.
        closing_s: That ``shutdown()`` took.
        again: Class of the error of the next call.
        recovered: Passes that were right in a new offload, with the shards of the old one.
        left: What was left behind.
    """

    right: int = 0
    wrong: int = 0
    local: str = ""
    error: str = ""
    text: str = ""
    culprit: int = -1
    took_s: float = 0.0
    closing_s: float = 0.0
    again: str = ""
    recovered: int = -1
    left: str = ""


def write_checkpoints(folder: Path, plan: Plan) -> None:
    """Write the checkpoint and another one."""
    from safetensors.torch import save_file

    for name, seed in (("mine", 0), ("other", 1)):
        save_file(make_toy(plan.num_blocks, seed).state_dict(), folder / f"{name}.safetensors")


class Victim(Exception):
    """What the victim's block raises."""


class Rank:
    """One rank of one run."""

    def __init__(self, plan: Plan, rank: int, folder: Path) -> None:
        self.plan, self.rank, self.folder = plan, rank, folder
        self.mine = rank == plan.victim
        self.fault = plan.fault if self.mine else ""
        self.told = Told()
        self.reference = make_toy(plan.num_blocks)
        self.model = self._make_model()
        self.armed = False
        self.began = time.monotonic()

    def _make_model(self) -> Toy:
        plan = self.plan
        count = plan.num_blocks - (self.fault == "other model")
        model = make_toy(count)
        if plan.from_checkpoint:
            position = model.position
            with torch.device("meta"):
                model = Toy([Block() for _ in range(count)]).requires_grad_(False).eval()
            model.position = position
        return model

    def offload(self, **more: Any) -> dlo.LayerwiseOffload:
        plan = self.plan
        name = "other" if self.fault == "other checkpoint" else "mine"
        return dlo.offload(
            self.model,
            device=CpuBackend(),
            group=dist.group.WORLD,
            checkpoint=self.folder / f"{name}.safetensors" if plan.from_checkpoint else None,
            timeout_s=plan.timeout_s,
            load_timeout_s=_LOAD_S,
            stages=plan.stages,
            depth=plan.depth + (self.fault == "other settings"),
            **more,
        )

    # --- the fault --------------------------------------------------------------------------------

    def strike_between(self, number: int, offloaded: dlo.LayerwiseOffload) -> bool:
        """Do to this rank what happens between passes; return whether it ends its loop."""
        self.armed = self.mine and number == self.plan.at_pass
        if not self.armed:
            return False
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "group destroyed":
            dist.destroy_process_group()
        if self.fault == "shutdown":
            offloaded.shutdown()
        return self.fault == "pass less"

    def strike_in_block(self, module: Any, args: Any) -> None:
        """Do to this rank what happens in a block; a hook."""
        if not self.armed:
            return
        self.armed = False
        if self.fault == "kill in a block":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stop in a block":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault.startswith("exception"):
            raise Victim("a block of the victim is broken")
        if self.fault == "interrupt":
            raise KeyboardInterrupt
        if self.fault in ("delay", "stall"):
            time.sleep(self.plan.sleep_s)

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> Told:
        """Offload, make the passes, and see what became of them."""
        offloaded: dlo.LayerwiseOffload | None = None
        try:
            offloaded = self.offload()
            with suppress(IndexError):
                hooked = self.model.blocks[self.plan.block]
                hooked.register_forward_pre_hook(self.strike_in_block)
            self._passes(offloaded)
        except dlo.DloError as error:
            self._note(error)
        except Victim as error:
            self.told.local = f"Victim: {error}"
            if self.fault == "exception, exit":
                raise SystemExit(3) from None
            time.sleep(2 * self.plan.timeout_s)
        except KeyboardInterrupt:
            self.told.local = "KeyboardInterrupt"
        if offloaded is not None:
            self._end(offloaded)
        return self.told

    def _passes(self, offloaded: dlo.LayerwiseOffload) -> None:
        more = self.fault == "pass more"
        for number in range(self.plan.passes + more):
            if self.strike_between(number, offloaded):
                break
            # In the first pass the order is learnt, and agreed on.
            other = self.fault == "order" and number == max(self.plan.at_pass, 1)
            self.began = time.monotonic()
            try:
                out = self._forward(number, other_order=other)
            except Victim as error:
                self.told.local = f"Victim: {error}"
                if self.fault != "exception":
                    raise
                continue
            expected = self._expected(number, other_order=other)
            self.told.right += bool(torch.equal(out, expected))
            self.told.wrong += not torch.equal(out, expected)
        # Stay until the others had their time: a rank that leaves is another fault.
        time.sleep(1.5 * self.plan.timeout_s if self.plan.fault in ("order", "pass more") else 0)
        if self.fault in ("pass less", "group destroyed"):
            time.sleep(1.5 * self.plan.timeout_s)

    def _forward(self, number: int, *, other_order: bool) -> torch.Tensor:
        x = inputs(number + self.rank)
        if not other_order:
            out: torch.Tensor = self.model(x)
            return out
        with dlo.offloaded(self.model).run_pass():  # type: ignore[union-attr]
            for block in reversed(self.model.blocks):
                x = block(x)
        return x

    def _expected(self, number: int, *, other_order: bool) -> torch.Tensor:
        x = inputs(number + self.rank)
        if not other_order:
            out: torch.Tensor = self.reference(x)
            return out
        for block in reversed(self.reference.blocks):
            x = block(x)
        return x

    def _note(self, error: dlo.DloError) -> None:
        self.told.error, self.told.text = type(error).__name__, str(error)
        missing = getattr(error, "missing", ())
        self.told.culprit = getattr(error, "culprit", next(iter(missing), -1))
        self.told.took_s = time.monotonic() - self.began

    def _end(self, offloaded: dlo.LayerwiseOffload) -> None:
        if self.told.error or offloaded.failed:
            try:
                self.model(inputs())
                self.told.again = "nothing"
            except dlo.DloError as error:
                self.told.again = type(error).__name__
        if self._recovers(offloaded):
            self._recover(offloaded)
        began = time.monotonic()
        offloaded.shutdown()
        offloaded.shutdown()
        self.told.closing_s = time.monotonic() - began
        self.told.left = self._left()

    def _recovers(self, offloaded: dlo.LayerwiseOffload) -> bool:
        """Return whether all ranks offload anew: they are all there, and one has failed."""
        if self.plan.fault not in LASTS:
            return False
        failed: list[Any] = [None] * self.plan.size
        dist.all_gather_object(failed, offloaded.failed or self.fault == "interrupt")
        return any(failed)

    def _recover(self, old: dlo.LayerwiseOffload) -> None:
        self.fault = ""
        self.told.recovered = 0
        new = self.offload(reuse=old)
        for number in range(3):
            out = self.model(inputs(number))
            good = torch.equal(out, self.reference(inputs(number)))
            self.told.recovered += good
            self.told.wrong += not good
        new.disable()
        old.shutdown()

    def _left(self) -> str:
        """Return what of dlo is still there."""
        deadline = time.monotonic() + 3.0
        while True:
            names = [each.name for each in threading.enumerate() if each.name.startswith("dlo")]
            names = [name for name in names if not name.startswith(self._held())]
            shared = len(segments())
            if not names and not shared:
                return ""
            if time.monotonic() > deadline:
                return f"threads {names}, segments {shared}"
            time.sleep(0.05)

    def _held(self) -> tuple[str, ...]:
        """Return the names of threads that are not ours to end.

        What gloo holds ends with gloo's own deadline; what a stopped store holds, with the store.
        """
        stopped = self.plan.fault.startswith("stop") and self.plan.victim == 0
        return ("dlo-stream", *(("dlo-store",) if stopped and self.plan.store == "rank 0" else ()))


def run_rank(plan: Plan, rank: int, folder: Path, address: str) -> None:
    """Run one rank in this process; what it says is in ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=address,
        rank=rank,
        world_size=plan.size,
        timeout=timedelta(seconds=60),
    )
    dist.barrier()
    told = Rank(plan, rank, folder).run()
    path = folder / f"told-{rank}"
    path.with_suffix(".new").write_text(json.dumps(asdict(told)), encoding="utf-8")
    path.with_suffix(".new").rename(path)
