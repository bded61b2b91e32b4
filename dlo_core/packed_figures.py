"""The figures of a pass: what it takes with raw and with packed weights, and which is faster; pure.

[Note: three forms]
Packed weights take less of the link's time and add the decoding to the computation. So they are
faster where the link is the bound, and slower where the computation is. A block that stays on the
device has no need of the link, so it stays raw when the others are packed, and nothing of it is
decoded. But the memory of two raw blocks holds three packed ones: where the computation has room
for the decoding of all of them, more blocks stay, and the link has less to carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Figures", "Form"]

# A gain that is worth the switch, and a loss that is.
_GAIN = 0.97
_LOSS = 0.99


class Form(Enum):
    """The form of the weights. See [Note: three forms]."""

    RAW = "raw"
    """As they compute."""
    PACKED = "packed"
    """Blocks that stream are packed, those that stay are raw."""
    ALL = "packed, resident blocks too"
    """All blocks are packed, and as many stay as the memory of the raw ones holds."""


_BY_PACKING = (Form.RAW, Form.PACKED, Form.ALL)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a pass takes.

    Attributes:
        compute_ms: Computation of all blocks.
        link_ms: Copies or gathers of the blocks that stream while the weights are raw, raw.
        decode_ms: Decoding of these blocks.
        ratio: Bytes packed to bytes raw.
        stay_decode_ms: Decoding of the blocks that stay while the weights are raw.
        spared: Part of ``link_ms`` that falls to blocks which stay when all are packed.
        gathers_ms: Raw gathers of each block of ``link_ms``; nothing where nothing is gathered. A
            rank's own has the wait for the others in it.
    """

    compute_ms: float
    link_ms: float
    decode_ms: float
    ratio: float
    stay_decode_ms: float = 0.0
    spared: float = 0.0
    gathers_ms: tuple[float, ...] = ()

    @classmethod
    def slowest(cls, ranks: Sequence[Figures]) -> Figures:
        """Return what bounds ranks that go through their passes together.

        The last to come to a gather waits for nobody, so the shortest time of each is its own.
        """
        gathers = [min(times) for times in zip(*(rank.gathers_ms for rank in ranks), strict=True)]
        return cls(
            compute_ms=max(rank.compute_ms for rank in ranks),
            link_ms=max(sum(gathers), *(rank.link_ms for rank in ranks)),
            decode_ms=max(rank.decode_ms for rank in ranks),
            ratio=max(rank.ratio for rank in ranks),
            stay_decode_ms=max(rank.stay_decode_ms for rank in ranks),
            spared=min(rank.spared for rank in ranks),
        )

    @property
    def raw_ms(self) -> float:
        """The limit of a pass with raw weights."""
        return max(self.compute_ms, self.link_ms)

    @property
    def packed_ms(self) -> float:
        """The limit of a pass with packed weights, where blocks that stay are raw."""
        return max(self.compute_ms + self.decode_ms, self.link_ms * self.ratio)

    @property
    def all_ms(self) -> float:
        """The limit of a pass with all weights packed, and more blocks that stay."""
        decode_ms = self.decode_ms + self.stay_decode_ms
        return max(self.compute_ms + decode_ms, self.link_ms * self.ratio * (1 - self.spared))

    def limit_ms(self, form: Form) -> float:
        """Return the limit of a pass in ``form``."""
        return {Form.RAW: self.raw_ms, Form.PACKED: self.packed_ms, Form.ALL: self.all_ms}[form]

    def choose(self, form: Form) -> Form:
        """Return the form that the weights should have, given the one that they have."""
        best = min(_BY_PACKING, key=self.limit_ms)
        more = _BY_PACKING.index(best) > _BY_PACKING.index(form)
        worth = self.limit_ms(best) < (_GAIN if more else _LOSS) * self.limit_ms(form)
        return best if worth else form

    def __str__(self) -> str:
        """Say what was compared."""
        stay = ""
        if self.spared:
            stay = (
                f"; with all packed {self.stay_decode_ms:.2f} ms more of decoding and "
                f"{self.link_ms * self.ratio * self.spared:.2f} ms less of the link"
            )
        return (
            f"computation {self.compute_ms:.2f} ms, link {self.link_ms:.2f} ms raw and "
            f"{self.link_ms * self.ratio:.2f} ms packed, decoding {self.decode_ms:.2f} ms a pass"
            f"{stay}"
        )
