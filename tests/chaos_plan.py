"""What goes wrong in one run of chaos: drawn from a seed, the same every time."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["FAULTS", "LASTS", "Plan"]

# What happens, and in words for the table.
FAULTS = {
    "kill": "`kill -9`",
    "kill in a block": "`kill -9` while a block computes",
    "stop": "SIGSTOP",
    "stop in a block": "SIGSTOP while a block computes",
    "exception": "exception in a block, caught, the loop goes on",
    "exception, away": "exception in a block, the rank does not come back",
    "exception, exit": "exception in a block, the process ends",
    "interrupt": "KeyboardInterrupt in a block, the rank shuts down",
    "delay": "a block takes long, less than the deadline",
    "stall": "a block takes longer than the deadline",
    "order": "the blocks run in another order on one rank",
    "pass more": "one pass more on one rank",
    "pass less": "one pass less on one rank",
    "other checkpoint": "another checkpoint of the same layout",
    "other settings": "another depth",
    "other model": "a block fewer",
    "group destroyed": "`destroy_process_group()` on one rank",
    "shutdown": "`shutdown()` on one rank",
}
# After these every rank is there again and may offload anew.
LASTS = frozenset({"stall", "exception, away", "interrupt", "order", "pass more", "pass less"})


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        seed: What it was drawn from.
        fault: What happens.
        size: Ranks.
        victim: The rank to which it happens.
        at_pass: In which of its passes.
        block: In or before which block.
        passes: That every rank makes.
        num_blocks: Of the model.
        stages: Of the offload.
        depth: Likewise.
        store: ``"file"``, ``"launcher"`` or ``"rank 0"``: who keeps the store of the job.
        from_checkpoint: Whether the weights are read from one.
        timeout_s: The deadline.
    """

    seed: int
    fault: str
    size: int
    victim: int
    at_pass: int
    block: int
    passes: int
    num_blocks: int
    stages: int
    depth: int
    store: str
    from_checkpoint: bool
    timeout_s: float

    @classmethod
    def of(cls, seed: int, timeout_s: float, faults: tuple[str, ...] = tuple(FAULTS)) -> Plan:
        """Return the plan of ``seed``; the faults take turns."""
        draw = random.Random(seed)
        size = draw.choice((2, 2, 3, 4))
        num_blocks = draw.choice((3, 4, 6))
        fault = faults[seed % len(faults)]
        return cls(
            seed=seed,
            fault=fault,
            size=size,
            victim=draw.randrange(size),
            at_pass=draw.randrange(5),
            block=draw.randrange(num_blocks),
            passes=6,
            num_blocks=num_blocks,
            stages=draw.choice((0, 2)),
            depth=draw.choice((2, 2, 3)),
            store=draw.choice(("file", "launcher", "rank 0")),
            from_checkpoint=fault == "other checkpoint" or draw.random() < 0.5,
            timeout_s=timeout_s,
        )

    @property
    def sleep_s(self) -> float:
        """How long the victim's block takes, if it takes long."""
        return self.timeout_s * (0.3 if self.fault == "delay" else 2.0)
