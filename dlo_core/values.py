"""The values of streamed tensors: fetched to the host, and given back to the models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from dlo_core.loader import load_blocks
from dlo_core.restore import give_back, give_back_meta, tensor_from

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlo_core.interface import Backend
    from dlo_core.layout import BlockLayout
    from dlo_core.plan import ModelPlan
    from dlo_core.slots import Pool, Slot
    from dlo_core.streamer import Streamer
    from dlo_core.transfer import Transfer

    # By block number, of all models: its tensors, in host memory of their own.
    Values = dict[int, list[torch.Tensor]]

__all__ = ["fetch_gathered", "fetch_stored", "give_back_blocks", "tensors_in"]


def fetch_stored(plans: Sequence[ModelPlan], threads: int | None) -> Values:
    """Return the values as they are in the checkpoints.

    Args:
        plans: All have a checkpoint.
        threads: As in ``load_shards``.
    """
    values: Values = {}
    for plan in plans:
        assert plan.checkpoint is not None
        try:
            blocks = load_blocks(plan, range(len(plan.layouts)), threads)
        finally:
            plan.checkpoint.give_back_pages()
        for tensors in blocks:
            values[len(values)] = tensors
    return values


def fetch_gathered(
    streamers: Sequence[Streamer],
    pool: Pool,
    transfer: Transfer,
    backend: Backend,
    layouts: Sequence[BlockLayout],
) -> Values:
    """Walk one whole turn of each tape; no weight collective happens outside of it.

    Args:
        streamers: One a model.
        pool: Has the blocks that stay.
        transfer: Fills the slots.
        backend: Of the device.
        layouts: By block number, of all models.

    Raises:
        DloError: A model cannot be used, or a block could not be loaded.
    """
    values: Values = {}

    def fetch(streamer: Streamer, number: int, slot: Slot) -> None:
        if number in values:
            return
        block = number - streamer.first_block
        streamer.wait_for(slot, block)
        run = torch.empty(layouts[number].nbytes, dtype=torch.uint8, device="cpu")
        backend.copy(run, transfer.home(slot).buffer[: run.nbytes])
        backend.current_stream().synchronize()
        # The comparison of the trailers is done by now.
        streamer.check(slot, block)
        transfer.release(slot, number)
        values[number] = tensors_in(layouts[number], run)

    for streamer in streamers:
        streamer.check_usable()
        streamer.tape.walk(partial(fetch, streamer))
        for number in streamer.residents.numbers:
            fetch(streamer, number, pool.residents[number])
    # The prefetches at the end of the walk: every rank has queued them, too.
    transfer.settle()
    return values


def give_back_blocks(plan: ModelPlan, streamer: Streamer, values: Values, to: str) -> None:
    """Put a model's streamed tensors back.

    Args:
        plan: The model.
        streamer: Its own.
        values: What they are; not asked for ``to="meta"``.
        to: ``"cpu"``, or ``"meta"`` for tensors without values.
    """
    parts = zip(plan.inventory.streamed, plan.layouts, streamer.bindings, strict=True)
    for number, (owned, layout, binding) in enumerate(parts, start=streamer.first_block):
        rows = zip(owned, layout.tensors, binding.placeholders, strict=True)
        for index, (item, spec, placeholder) in enumerate(rows):
            if to == "meta":
                give_back_meta(item, spec, ours=_is(placeholder))
            else:
                host, grad = values[number][index], placeholder.requires_grad
                give_back(item, host, ours=_is(placeholder), requires_grad=grad)


def tensors_in(layout: BlockLayout, run: torch.Tensor) -> list[torch.Tensor]:
    """Return a block's tensors, which its ``run`` of bytes on the host holds."""
    return [tensor_from(spec, run) for spec in layout.tensors]


def _is(mine: object) -> Callable[[object], bool]:
    return lambda present: present is mine
