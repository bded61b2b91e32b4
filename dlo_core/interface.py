"""What a kind of device gives to dlo: the one contract between the core and a backend.

Streams and events are Protocols, because torch's own classes already satisfy them and the hot
path carries no wrappers. Everything else that a vendor writes is ``Backend`` with its
``PinnedAllocator``, ``Collective`` and ``Check``; a ``Codec`` where there is a fast one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dlo_core.errors import BackendError, HostMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

__all__ = [
    "Backend",
    "Capabilities",
    "Check",
    "Codec",
    "Collective",
    "Event",
    "Graph",
    "HostBuffer",
    "MemoryInfo",
    "PinnedAllocator",
    "Registration",
    "Seal",
    "Stream",
]


class Event(Protocol):
    """A point in a stream's work, as ``torch.Event`` has it.

    An event that was never recorded counts as reached.
    """

    def record(self, stream: Any = None) -> None:
        """Mark the work that ``stream`` (default: the current one) holds so far."""

    def query(self) -> bool:
        """Return whether the marked work is done."""

    def synchronize(self) -> None:
        """Block the host until the marked work is done."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to ``end_event``; both must be timing events."""


class Stream(Protocol):
    """A queue of work that runs in order, as ``torch.Stream`` has it."""

    def wait_event(self, event: Any) -> None:
        """Let all work that is queued from now on wait for ``event``."""

    def record_event(self, event: Any = None) -> Any:
        """Record ``event`` after all work that is queued so far."""

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""


class Graph(Protocol):
    """Work that was recorded once and can be queued as a whole, as a device's graph is."""

    def replay(self) -> None:
        """Queue the recorded work on the current stream."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend's device can do; the core asks for these and never for a vendor.

    Attributes:
        alignment: Bytes to which every tensor of a block and every shard is aligned; a power of
            two and at least 64.
        host_blocks: Whether a wait on the compute stream blocks the calling thread.
        pinned_memory: Whether host memory can be page-locked for asynchronous copies.
        host_registration: Whether memory that exists already can be page-locked in place, by
            ``PinnedAllocator.register``; shared mappings, too.
        readonly_registration: Whether this works for a mapping that must not be written, such as
            the pages of a file.
        lock_limit: Whether the system's limit on locked memory (``ulimit -l``) holds for what
            the backend page-locks; many drivers do not ask it.
        locks_exactly: Whether no more is page-locked than the pages of what is asked for; False:
            the driver rounds up.
        graph_capture: Whether a pass can be captured as one graph and replayed: the backend has
            ``Backend.capture``.
    """

    alignment: int = 256
    host_blocks: bool = False
    pinned_memory: bool = False
    host_registration: bool = False
    readonly_registration: bool = False
    lock_limit: bool = False
    locks_exactly: bool = True
    graph_capture: bool = False

    def __post_init__(self) -> None:
        """Refuse an alignment that is not a power of two of at least 64."""
        if self.alignment < 64 or self.alignment & (self.alignment - 1):
            raise ValueError(
                f"Capabilities.alignment is {self.alignment}; it must be a power of two and at "
                "least 64"
            )


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory in bytes.

    Attributes:
        allocated: Bytes in live tensors, as the backend's allocator counts them.
        reserved: Bytes that the allocator holds; at least ``allocated``.
        free: Bytes that the device still has.
        total: Bytes of the whole device.
    """

    allocated: int
    reserved: int
    free: int
    total: int


class HostBuffer(Protocol):
    """One run of host memory of exactly the size that was asked for."""

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, as a one-dimensional ``uint8`` tensor on the CPU."""

    @property
    def pinned(self) -> bool:
        """Whether the memory really is page-locked."""

    @property
    def locked_nbytes(self) -> int:
        """Bytes that the system locked for this buffer; 0 when it is pageable."""

    def release(self) -> None:
        """Give the memory back; afterwards ``tensor`` must not be used. Idempotent."""


class Registration(Protocol):
    """Memory of somebody else that is page-locked until it is released.

    One that is forgotten, or left when the process ends, sees to itself: copies may be under way,
    so the memory stays locked and mapped until the device rests. ``HostRegistration`` does this.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that the system locked: those of all pages that the memory touches."""

    def release(self) -> None:
        """Unlock the memory, which stays as it is. Idempotent; never raises.

        The caller sees to it that no copy from the memory is under way, and keeps it mapped.
        """


class PinnedAllocator(ABC):
    """Makes host buffers from which the device can copy asynchronously."""

    @abstractmethod
    def allocate(self, nbytes: int) -> HostBuffer:
        """Return a buffer of exactly ``nbytes`` bytes, page-locked where the device can.

        Raises:
            HostMemoryError: The memory cannot be had; names the bytes and the limit.
        """

    def register(self, memory: torch.Tensor, *, readonly: bool = False) -> Registration:
        """Page-lock host memory that exists already, where it lies.

        Called only where ``Capabilities.host_registration`` says so, and with ``readonly`` only
        where ``Capabilities.readonly_registration`` does. What is registered may be mapped by
        other processes, which register it, too.

        Args:
            memory: ``uint8``, contiguous, on the CPU; begins at a page.
            readonly: Whether the mapping must not be written; then it is a shared mapping of a
                file (``MAP_SHARED``, ``PROT_READ``), never a private one.

        Raises:
            HostMemoryError: The memory cannot be locked; names the bytes and the limit. Nothing is
                locked then, and no error of the device is left behind.
        """
        raise HostMemoryError(
            f"{type(self).__name__} cannot page-lock {memory.nbytes:,} bytes that exist already: "
            "the backend has no host registration"
        )


class Collective(ABC):
    """The all-gather of one group of ranks, over a process group of dlo's own."""

    rank: int
    size: int

    @abstractmethod
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Queue the gather of every rank's ``shard`` into ``out`` on the current stream.

        Args:
            out: ``uint8``, contiguous, ``size * shard.numel()`` bytes.
            shard: ``uint8``, contiguous; may be this rank's own part of ``out``.
        """

    def memory(self) -> AbstractContextManager[Any]:
        """Return a context in which ``Backend.empty`` gives memory that gathers land in.

        Entered before the first gather. The default changes nothing.
        """
        return nullcontext()

    def settle_memory(self) -> None:  # noqa: B027 - most have nothing to settle
        """Make what was allocated in ``memory`` known to the group; does nothing by default.

        All ranks call this when all of them have allocated, alike and in the same order; it may
        wait for them.
        """

    def stuck(self) -> bool:
        """Return whether a gather under way does not end and cannot be given up; False by default.

        May look for a few seconds whether it ends. Where it is stuck, ``close`` must not wait for
        it, and the core keeps all memory that it touches.
        """
        return False

    def abort(self, error: BaseException) -> None:
        """Give up the gathers that are under way, so that nobody waits for them any more.

        Called from any thread, once, when the offload has failed; never waits for another rank.
        ``close`` comes later. Where it does nothing, who waits gets on when the comm library's own
        timeout is over.

        Args:
            error: What to raise to a host that waits for one of them, as the cause of an error of
                the backend's own.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Give the process group back without entering a collective. Idempotent.

        Gathers that are under way are given up: afterwards the device touches none of their memory.
        """


class Check(ABC):
    """Compares bytes on the device and remembers a difference, without a host wait."""

    @abstractmethod
    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Queue the comparison of two ``uint8`` device tensors on the current stream."""

    @abstractmethod
    def failed(self) -> bool:
        """Return whether any comparison that is done so far found a difference. Never waits."""


class Codec(ABC):
    """Packs and unpacks weights on the device, on the current stream.

    The format is specified in docs/packed.md. All tensors are contiguous and on the device; runs,
    rows and outputs are ``uint8``. A run has whole chunks of 8192 bytes.
    """

    @abstractmethod
    def count(self, run: torch.Tensor, ranks: torch.Tensor, table_of: torch.Tensor) -> torch.Tensor:
        """Return what coding would give: ``int32``, four numbers a chunk.

        Args:
            run: What is packed.
            ranks: ``uint8``, one row of 256 a table: the rank of each exponent; 255: it has none.
            table_of: ``int32``, the table of each chunk; negative: it is to be raw, and only the
                checksum counts.

        Returns:
            Codes of the second level, codes of the third level, patches, and the checksum.
        """

    @abstractmethod
    def write(self, run: torch.Tensor, ranks: torch.Tensor, row: torch.Tensor) -> None:
        """Write the blobs of a run's chunks into ``row``.

        Args:
            run: What is packed.
            ranks: As in ``count``.
            row: Has header, entries and tables already, and zeros where the blobs go.
        """

    @abstractmethod
    def decode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Decode packed rows; touches nothing outside of ``rows`` and ``out``, whatever they hold.

        Args:
            rows: One a rank, each beginning with a segment.
            out: Gets what they hold, one behind the other; whole chunks, equally many of each row.

        Raises:
            ValueError: The rows cannot hold so many chunks.
        """


class Seal(ABC):
    """Spoils what a pass returned, if gathers were given up before the device came to its end.

    The host may have left the model's call by then, so nothing can be raised there.
    """

    @abstractmethod
    def apply(self, tensors: Iterable[torch.Tensor]) -> None:
        """Queue, on the current stream: if ``give_up`` was called by now, fill them with NaN."""

    @abstractmethod
    def give_up(self) -> None:
        """Spoil what the device has not yet come to the end of. From any thread; never waits."""


class Backend(ABC):
    """One kind of device: all that a vendor has to write.

    Attributes:
        name: The torch device type (``"cpu"``, for example), which is also the entry point's name.
        device: The device whose memory holds slots and stages.
        comm_library: Name of the ``torch.distributed`` backend that moves this device's bytes.
        capabilities: What the device can do.
        allocator: Makes the host buffers.
    """

    name: str
    device: torch.device
    comm_library: str
    capabilities: Capabilities
    allocator: PinnedAllocator

    @abstractmethod
    def new_stream(self, priority: int = 0) -> Stream:
        """Return a new stream; a lower ``priority`` number goes first where the device can."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which this thread's work is queued now."""

    @abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which ``stream`` is this thread's current stream."""

    @abstractmethod
    def new_event(self, *, timing: bool = False) -> Event:
        """Return a new event; only a ``timing`` event has ``elapsed_time``."""

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` uninitialised bytes of device memory as a ``uint8`` tensor."""

    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a copy between equally shaped ``uint8`` tensors on the current stream.

        Asynchronous when the host side is pinned (or the backend's host memory always is as good
        as pinned); both tensors stay alive until it is done.
        """

    @abstractmethod
    def new_check(self) -> Check:
        """Return a new comparison of device bytes."""

    def new_seal(self) -> Seal | None:
        """Return a new seal, where the host runs ahead of the device; None: it need not have one.

        Needed where ``Collective.abort`` lets streams go on with bytes that never came.
        """
        return None

    def group_environment(self) -> Mapping[str, str]:
        """Return what the environment must say while a group for gathers is made.

        For comm libraries whose binding ends the process, or writes at length, where a gather
        fails: the offload's watch closes it instead. Nothing by default. Others' groups keep what
        the environment says outside.
        """
        return {}

    @abstractmethod
    def collective(self, group: ProcessGroup) -> Collective:
        """Return the all-gather over ``group``, which becomes the collective's own."""

    def copies_refusal(self) -> str | None:
        """Return why this backend cannot gather by copies of the device's copy engines, or None.

        What is missing, as the end of a sentence. Starts nothing.
        """
        return f"{type(self).__name__} gathers by its comm library's kernels only"

    def copies_options(self, timeout_s: float) -> Any | None:
        """Return the ``pg_options`` of a group that gathers by copies, or None.

        Args:
            timeout_s: Seconds after which an operation of the group gives up.
        """
        return None

    def copies_collective(self, group: ProcessGroup) -> Collective:
        """Return the all-gather by copies over ``group``, which becomes the collective's own.

        Called only where ``copies_refusal`` gives no reason, with a group that was made with
        ``copies_options``.

        Raises:
            BackendError: The backend has none.
        """
        raise BackendError(f"{type(self).__name__} has no gather by copies")

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Return the device's memory as this process sees it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all work of this backend is done."""

    def capture(self) -> AbstractContextManager[Graph]:
        """Return a context in which work is recorded and not run; it gives the graph.

        Recorded is what is queued on the current stream, which the context sets, and on streams
        that wait for it; these must be waited for before the end. Called only where
        ``Capabilities.graph_capture`` says so.

        Raises:
            BackendError: The backend has no graphs.
        """
        raise BackendError(f"{type(self).__name__} captures no graphs")

    def recording(self) -> bool:
        """Return whether work of the current stream is recorded, by ``capture`` or anybody else."""
        return False

    def may_wait(self) -> bool:
        """Return whether the host may wait for the device where nobody asked for it.

        False where it is told to report or to refuse such waits, in order to find them.
        """
        return True

    def settings(self) -> Mapping[str, str]:
        """Return what of this environment decides speed or memory, for ``dlo info``.

        Returns:
            Names and values, with a remark where a value costs something. Nothing is started.
        """
        return {}

    def has_codec(self) -> bool:
        """Return whether ``codec`` gives one, as far as can be told without loading it."""
        return False

    def codec(self) -> Codec | None:
        """Return a fast codec for packed weights; None: the one in torch's operations is used."""
        return None

    def refusal(self, tensor: torch.Tensor) -> str | None:
        """Return why the bytes of a tensor of this device mean nothing elsewhere, or None.

        Args:
            tensor: Of a model that is about to be offloaded.
        """
        return None

    def __repr__(self) -> str:
        """Show the kind and the device."""
        return f"{type(self).__name__}(device={str(self.device)!r})"
