"""Saving: an offloaded model's tensors to safetensors files, block by block.

[Note: nothing left behind]
Tensors go to hidden files beside the final names. When all bytes are on the disk and no rank has
a problem, the files get their names, the index last. Whatever goes wrong before, on any rank, the
hidden files are removed, and so are folders that were made. Nothing that existed is ever replaced.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.progress import reporting
from dlo_core.rawbytes import bytes_of
from dlo_core.save_plan import SavePlan
from dlo_core.together import begin_together, do_together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch
    from torch import nn

    from dlo_core.agreement import Agreement
    from dlo_core.progress import LoadProgress
    from dlo_core.state import ModelState

__all__ = ["base_name", "save_state"]

_WRITE_NBYTES = 64 << 20


def base_name(model: nn.Module) -> str:
    """Return how the weights files of ``model`` are called in a folder, for its own loader."""
    origins = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return "diffusion_pytorch_model" if "diffusers" in origins else "model"


def save_state(
    state: ModelState,
    path: str | os.PathLike[str],
    *,
    agreement: Agreement,
    to_rank: int,
    max_shard_bytes: int | None,
    progress: bool | Callable[[LoadProgress], None],
) -> Path:
    """Write the tensors of a model on one rank; all ranks of ``agreement`` alike.

    Args:
        state: Of the model.
        path: A folder, or the name of a ``.safetensors`` file.
        agreement: The ranks.
        to_rank: The rank that writes.
        max_shard_bytes: Most bytes of tensors in one file; None: one file.
        progress: As for loading; on the rank that writes.

    Returns:
        What ``checkpoint=`` takes.

    Raises:
        ConfigError: An argument cannot be honoured, or there is a checkpoint already.
        CheckpointError: The files cannot be written.
        DloError: Anything is wrong on any rank; nothing is left on the disk.
    """

    def check() -> tuple[SavePlan, Mapping[str, str]]:
        if not (isinstance(progress, bool) or callable(progress)):
            raise ConfigError(f"progress must be True, False or a function; got {progress!r}")
        state.check_no_parts("save()")
        with state.readback.entered():
            plan = SavePlan.make(
                path,
                state.named(),
                base=base_name(state.model),
                max_shard_bytes=max_shard_bytes,
            )
        if agreement.rank == to_rank:
            plan.check_target()
        return plan, {"to_rank": str(to_rank), **state.readback.facts()}

    plan = begin_together(agreement, "save()", check)
    if agreement.rank != to_rank:
        for work in (_nothing, state.serve, _nothing):
            do_together(agreement, "save()", work)
        return plan.result
    writer = _Writer(plan)
    steps = (writer.open, partial(_write, state, writer, plan, progress), writer.commit)
    try:
        for work in steps:
            do_together(agreement, "save()", partial(_or_discard, writer, work))
    except BaseException:
        writer.discard()
        raise
    return plan.result


def _nothing() -> None:
    pass


def _or_discard(writer: _Writer, work: Callable[[], None]) -> None:
    """Clean up before the other ranks hear of an error, so that nobody sees what is left."""
    try:
        work()
    except BaseException:
        writer.discard()
        raise


def _write(
    state: ModelState,
    writer: _Writer,
    plan: SavePlan,
    progress: bool | Callable[[LoadProgress], None],
) -> None:
    begun = False
    try:
        with reporting(progress, plan.nbytes, "saving") as report:
            begun = True
            # However it ends, a turn of the tape is made whole, which the other ranks wait for.
            with closing(state.tensors()) as tensors:
                for name, tensor in tensors:
                    report.add(writer.write(name, tensor))
            report.finish()
        writer.finish()
    except BaseException as error:
        if not begun:
            state.serve()
        if isinstance(error, OSError):
            raise _cannot(plan, error) from error
        raise


def _cannot(plan: SavePlan, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot save to {str(plan.folder)!r}: {error.strerror or error}; nothing was left there: "
        "free some room, or save elsewhere"
    )


class _Writer:
    """Writes the files of a plan under hidden names; see [Note: nothing left behind]."""

    def __init__(self, plan: SavePlan) -> None:
        self._plan = plan
        token = uuid4().hex[:8]
        finals = [file.path for file in plan.files]
        if plan.index_path is not None:
            finals.append(plan.index_path)
        self._hidden = {final: final.with_name(f".{final.name}.{token}.part") for final in finals}
        self._places = {
            name: (self._hidden[file.path], *place)
            for file in plan.files
            for name, place in file.places.items()
        }
        self._named: list[Path] = []
        self._folders: list[Path] = []

    def open(self) -> None:
        """Make the folder and the files with their headers.

        Raises:
            CheckpointError: They cannot be made.
        """
        folder = self._plan.folder
        try:
            for new in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
                new.mkdir()
                self._folders.append(new)
            for file in self._plan.files:
                self._make(self._hidden[file.path], file.header)
        except OSError as error:
            raise _cannot(self._plan, error) from error

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Write one tensor and return its bytes."""
        if name not in self._places:
            raise CheckpointError(f"{name!r} is new; change nothing in the model during save()")
        path, offset, nbytes = self._places.pop(name)
        dense = tensor.contiguous()
        array: Any = bytes_of(dense, nbytes).numpy()
        with _opened(path, os.O_WRONLY) as number:
            _write_all(number, memoryview(array), offset)
        return nbytes

    def finish(self) -> None:
        """Bring everything to the disk.

        Raises:
            CheckpointError: A tensor was not written.
        """
        if self._places:
            raise CheckpointError(
                f"{next(iter(self._places))!r} was not there to be saved; change nothing in the "
                "model meanwhile"
            )
        if self._plan.index_path is not None:
            self._make(self._hidden[self._plan.index_path], self._plan.index())
        for hidden in self._hidden.values():
            with _opened(hidden, os.O_WRONLY) as number:
                os.fsync(number)

    def commit(self) -> None:
        """Give the files their names, the index last.

        Raises:
            CheckpointError: Somebody else made one of them meanwhile, or it cannot be done.
        """
        try:
            for final, hidden in self._hidden.items():
                if os.path.lexists(final):
                    raise CheckpointError(
                        f"{str(final)!r} was made by somebody else meanwhile; save elsewhere"
                    )
                hidden.rename(final)
                self._named.append(final)
            with _opened(self._plan.folder, os.O_RDONLY) as number:
                os.fsync(number)
        except OSError as error:
            raise _cannot(self._plan, error) from error

    def discard(self) -> None:
        """Remove all that was made."""
        for path in (*self._hidden.values(), *self._named):
            with suppress(OSError):
                path.unlink()
        for folder in reversed(self._folders):
            with suppress(OSError):
                folder.rmdir()

    def _make(self, path: Path, content: bytes) -> None:
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as number:
            _write_all(number, memoryview(content), 0)


class _opened:
    """An open file as a context."""

    def __init__(self, path: Path, flags: int) -> None:
        self._number = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> int:
        return self._number

    def __exit__(self, *exc: object) -> None:
        os.close(self._number)


def _write_all(number: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(number, data[done : done + _WRITE_NBYTES], offset + done)
