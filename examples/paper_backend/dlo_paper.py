"""The device "paper": host memory that poses as device memory; each side stream is a thread."""
import contextlib, ctypes, functools, math, mmap, os, threading, time, weakref  # noqa: E401
from concurrent import futures
import torch, torch.distributed as dist  # noqa: E401
from dlo_core import interface
from dlo_core.errors import BackendError, ConfigError, HostMemoryError
from dlo_core.registry import hookimpl

TOTAL = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE

def _map(nbytes):
    """Return fresh pages, and a tensor over them; the last view of it that dies unmaps them."""
    try:
        if not 0 <= nbytes <= TOTAL:  # Linux may promise it, and kill who touches it
            raise OSError(f"the machine has {TOTAL}")
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise HostMemoryError(f"{nbytes} bytes of host memory cannot be had: {error}") from error
    with torch.inference_mode(False):
        return pages, torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]

def _mark(moment, error=None):
    """Return a mark that is reached. Marks are places in a stream's work: futures of (time, error)."""
    (mark := futures.Future()).set_result((moment, error))
    return mark

def _wait(mark):
    if (error := mark.result()[1]) is not None:
        raise BackendError(f"work on the device failed: {error}") from error

class PaperBuffer:
    def __init__(self, nbytes):
        self.tensor, mlock = _map(nbytes)[1], ctypes.CDLL(None).mlock
        self.pinned = mlock(ctypes.c_void_p(self.tensor.data_ptr()), ctypes.c_size_t(nbytes)) == 0 < nbytes
        self.locked_nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE if self.pinned else 0
    def release(self):
        self.__dict__.pop("tensor", None)  # the memory lives as long as views of it do
        self.pinned, self.locked_nbytes = False, 0

class PaperEvent:
    def __init__(self, backend, timing):
        self._backend, self._timing, self.mark = backend, timing, _mark(math.nan)
    def record(self, stream=None):
        self.mark = (stream or self._backend.current_stream()).put(lambda: None)
    def query(self): return (mark := self.mark).done() and _wait(mark) is None
    def synchronize(self): _wait(self.mark)
    def elapsed_time(self, end_event):
        if not (self._timing and end_event._timing and self.query() and end_event.query()):
            raise BackendError("elapsed_time is between two events made with timing=True and reached")
        return (end_event.mark.result()[0] - self.mark.result()[0]) * 1000

class PaperStream:
    """A queue of work: a thread, or for compute the calling thread, where work is done at once."""
    def __init__(self, backend, *, side):
        self._backend, self._error = backend, None
        self._thread = futures.ThreadPoolExecutor(1, "paper") if side else None
    def put(self, task):
        task = torch.inference_mode()(task)  # in this mode any tensor may be written
        if self._thread is None:
            task()
            return _mark(time.perf_counter())
        self._backend.pending.add(mark := self._thread.submit(self._run, task))
        mark.add_done_callback(self._backend.pending.discard)
        return mark
    def _run(self, task):
        try:
            self._error or task()  # after an error nothing is done, and all that comes later has it
        except BaseException as error:
            self._error = error.with_traceback(None)  # whose frames hold tensors
            self._backend.errors.append(error)
        return time.perf_counter(), self._error
    def record_event(self, event=None):
        (event := event or self._backend.new_event()).record(self)
        return event
    def wait_event(self, event): self.put(functools.partial(_wait, event.mark))
    def synchronize(self): _wait(self.put(lambda: None))

class PaperCheck(interface.Check):
    def __init__(self, backend): self._backend, self._found = backend, []
    def compare(self, actual, expected):
        self._backend.current_stream().put(lambda: torch.equal(actual, expected) or self._found.append(1))
    def failed(self): return bool(self._found)

class PaperCollective(interface.Collective):
    """Gathers run one by one on a stream of the group's own, so that every rank has one order."""
    def __init__(self, backend, group):
        self._backend, self._group, self.rank, self.size = backend, group, group.rank(), group.size()
        self._stream, self._lock, self._idle = backend.new_stream(), threading.Lock(), threading.Event()
        self._idle.set()
    def all_gather(self, out, shard):
        stream = self._backend.current_stream()
        self._stream.wait_event(stream.record_event())
        self._stream.put(lambda: self._gather(out, shard) if shard.numel() else None)
        stream.wait_event(self._stream.record_event())
    def _open(self):
        if self._group is None: raise BackendError("the collective was closed before its gather was done")
    def _gather(self, out, shard):
        with self._lock, torch.inference_mode(False):
            self._open()
            flat, mine = torch.empty_like(out), shard.clone()  # gloo never sees the caller's memory
            work = dist.all_gather(list(flat.chunk(self.size)), mine, self._group, async_op=True)
            self._idle.clear()
            work.get_future().add_done_callback(lambda _: self._idle.set())
        while not self._idle.wait(0.01):
            self._open()
        with self._lock: self._open(), work.wait(), out.copy_(flat)
    def close(self):
        with self._lock: group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(ValueError):  # the job's groups may be gone already
                dist.destroy_process_group(group)
            # Its destructor waits for gloo: a thread keeps it until the gather under way is over.
            threading.Thread(target=lambda keep=group: self._idle.wait(), daemon=True).start()

class PaperBackend(interface.Backend, interface.PinnedAllocator):
    name, device, comm_library = "paper", torch.device("cpu"), "gloo"
    def __init__(self, device="paper"):
        self.allocator, self.pending, self.errors, self._live = self, set(), [], {}
        self._local, self._compute = threading.local(), PaperStream(self, side=False)
        self.capabilities = interface.Capabilities(host_blocks=True, pinned_memory=self.allocate(1).pinned)
    def allocate(self, nbytes): return PaperBuffer(nbytes)
    def new_stream(self, priority=0): return PaperStream(self, side=True)
    def new_event(self, *, timing=False): return PaperEvent(self, timing)
    def new_check(self): return PaperCheck(self)
    def collective(self, group): return PaperCollective(self, group)
    def current_stream(self): return getattr(self._local, "stream", self._compute)
    @contextlib.contextmanager
    def stream(self, stream):
        before, self._local.stream = self.current_stream(), stream
        try: yield stream
        finally: self._local.stream = before
    def empty(self, nbytes):
        pages, tensor = _map(nbytes)
        self._live[key := object()] = nbytes
        weakref.finalize(pages, self._live.pop, key)
        return tensor
    def copy(self, dst, src):
        if dst.shape != src.shape or not dst.dtype == src.dtype == torch.uint8:
            raise ConfigError(f"cannot copy {src.dtype} {src.shape} to {dst.dtype} {dst.shape}")
        self.current_stream().put(lambda: dst.copy_(src))
    def memory(self):
        live = sum(list(self._live.values()))
        return interface.MemoryInfo(live, live, TOTAL - live, TOTAL)
    def synchronize(self):
        futures.wait(list(self.pending))
        _wait(_mark(0.0, self.errors.pop(0) if self.errors else None))  # each is told once, the oldest first

@hookimpl
def dlo_backend(device): return PaperBackend(device)
