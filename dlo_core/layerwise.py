"""The public object: ``LayerwiseOffload``, from the settings to ``shutdown``."""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from dlo_core.agreement import LoneAgreement
from dlo_core.capture import capture_pass
from dlo_core.errors import ConfigError, DloError, DloWarning, RestoreError, UseError
from dlo_core.refit import Refit, load_state
from dlo_core.registry import resolve
from dlo_core.request import Request
from dlo_core.save import save_state
from dlo_core.shard_group import ShardGroup
from dlo_core.stage_scope import drop_residents, load_residents
from dlo_core.startup import Startup
from dlo_core.tiers import check_tier
from dlo_core.together import begin_together, do_together
from dlo_core.trace import collect_stats

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from dlo_core.agreement import Agreement
    from dlo_core.capture import CapturedPass
    from dlo_core.config import OffloadConfig
    from dlo_core.engine import Engine
    from dlo_core.footprint import Footprint
    from dlo_core.interface import Backend
    from dlo_core.refit import NamedTensors
    from dlo_core.request import (
        Blocks,
        Checkpoints,
        KeyMaps,
        PostLoads,
        Progress,
        TransformsEach,
    )
    from dlo_core.salvage import Salvage
    from dlo_core.shard_group import Group
    from dlo_core.slicing import TpPlan
    from dlo_core.state import ModelState
    from dlo_core.stats import Stats
    from dlo_core.topology import Topology

__all__ = ["LayerwiseOffload"]

_logger = logging.getLogger("dlo")
_SHUT_DOWN = (
    "its offload was shut down and the weights were released; disable(to='meta') makes it a plain "
    "module without values, which can be offloaded again with checkpoint="
)


class LayerwiseOffload:
    """Streams the blocks of one or more models through a few slots on the device.

    Models that are enabled together share the slots. As a context manager it disables at the end,
    or shuts down after an exception.
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        device: str | torch.device | Backend,
        group: Group | None = None,
        topology: Topology | None = None,
    ) -> None:
        """Find the backend and agree with the ranks of the shard group, which must all call this.

        Args:
            config: The settings.
            device: A device, or a backend.
            group: The ranks that shard the weights; it says who takes part and never carries dlo's
                traffic. None: this process alone.
            topology: The parallel groups of the job, from which the shard group follows; instead
                of ``group``. All ranks of its DP group, or of its SP group where there is no DP,
                must call this in rank-local mode, too: so ranks in different modes are told.

        Raises:
            ConfigError: This process is not in ``group``, the topology rejects the settings, or the
                backend cannot honour one.
            BackendError: There is no usable backend for ``device``.
            AgreementError: A rank did not answer.
        """
        self._config = config
        self._topology = topology
        self._shard_group = ShardGroup.of(config, group, topology)
        self._shard_group.compare(config.load_timeout_s)
        agreement = self._shard_group.meet(config.load_timeout_s, config.timeout_s)
        self._agreement: Agreement | None = agreement
        self._rank, self._size = agreement.rank, agreement.size
        self._engine: Engine | None = None
        self._models: tuple[nn.Module, ...] = ()
        self._footprint: Footprint | None = None
        self._shut_down = False
        self._closing = threading.RLock()
        self._salvage: Salvage | None = None
        self._backend = self._find_backend(device, agreement)
        alone = group is None and topology is None
        if alone and config.use_allgather and _world_size() > 1:
            warnings.warn(
                f"offload() without group= in a job of {_world_size()} ranks: every rank keeps all "
                "of its weights on the host; pass group= or topology= to shard them, or "
                "use_allgather=False to say so",
                DloWarning,
                stacklevel=3,
            )

    @property
    def config(self) -> OffloadConfig:
        """The settings."""
        return self._config

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._backend.device

    @property
    def backend(self) -> Backend:
        """The backend of that device."""
        return self._backend

    @property
    def group(self) -> Group | None:
        """The shard group, as it was given or as the topology has it; None: this process alone."""
        return self._shard_group.group

    @property
    def topology(self) -> Topology | None:
        """The topology as it was given."""
        return self._topology

    @property
    def rank(self) -> int:
        """Rank in the shard group."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks in the shard group."""
        return self._size

    @property
    def blocks(self) -> tuple[str, ...]:
        """Dotted names of the blocks, in registration order, model after model; residents too."""
        if self._engine is None:
            return ()
        return tuple(layout.name for layout in self._engine.layouts)

    @property
    def footprint(self) -> Footprint:
        """The bytes that the offload takes, predicted from layouts alone.

        Raises:
            UseError: Nothing was enabled yet.
        """
        if self._footprint is None:
            raise UseError("footprint is known once enable() was called")
        return self._footprint

    @property
    def failed(self) -> bool:
        """Whether something closed the offload for good; ``failure`` says what.

        Then every later call raises, but ``shutdown()``, ``stats()`` and ``disable()``, which
        works where it needs no other rank. ``offload(..., reuse=this)`` begins anew.
        """
        return self.failure is not None

    @property
    def failure(self) -> BaseException | None:
        """What closed the offload for good, or None; a ``FillError`` names rank and block."""
        return None if self._engine is None else self._engine.pool.failure

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The enabled models."""
        return self._models

    @property
    def agreement(self) -> Agreement:
        """How the ranks of the shard group agree; internal.

        Raises:
            UseError: The offload was disabled or shut down.
        """
        if self._agreement is None:
            raise UseError("this offload is not enabled")
        return self._agreement

    @property
    def engine(self) -> Engine | None:
        """The running parts, or None; internal."""
        return self._engine

    def enable(
        self,
        *models: nn.Module,
        checkpoint: Checkpoints = None,
        blocks: Blocks = None,
        tp_plan: TpPlan | None = None,
        key_map: KeyMaps = None,
        transforms: TransformsEach = None,
        post_load: PostLoads = None,
        progress: Progress = False,
        reuse: LayerwiseOffload | None = None,
    ) -> LayerwiseOffload:
        """Offload ``models``: all ranks succeed, or all raise and every model is as it was.

        Args:
            models: One or more; they share the slots.
            checkpoint: Path of a safetensors file, folder or index with the weights, one a model (a
                sequence for several); None: the models' own values.
            blocks: Names of the containers of blocks in run order, or a function from the model to
                its
                blocks; None: the model's own declaration, else found.
            tp_plan: Which part of each tensor of the checkpoint a tensor-parallel rank has:
                ``"placements"``, as the model's DTensors say; or by dotted name, with ``*`` for
                anything, the dimension that is cut, or (dimension, parts) where so many equal
                parts (query, key and value, say) lie in the tensor one behind the other. Tensors
                that it does not name are whole on every rank.
            key_map: From the checkpoint's names to the model's: ``StripPrefix``, ``AddPrefix``,
                ``Fuse``, ``Split``, ``Ignore``, a mapping, a function, or a sequence of these (one
                a model for several, as all three).
            transforms: What is done to the checkpoint's tensors: a mapping from the model's names,
                in which ``*`` stands for any text, or a function of the name, to ``Cast``,
                ``Transpose``, ``Reshape``, ``Convert`` or a sequence of them.
            post_load: A function of the model, or functions by the dotted names of its modules,
                that make what no checkpoint has: non-persistent buffers of models on meta.
            progress: True for a bar on a terminal, or a function that is given ``LoadProgress``; an
                exception from it cancels on every rank.
            reuse: An offload that failed: its models are taken off it, and its host shards are used
                where they are what would be read (the same layouts and values, the same rank of as
                many, unchanged). A rank where they are not, or that has none, reads. When this
                raises, it can be given again.

        Raises:
            ConfigError: A setting or a model cannot be honoured.
            CheckpointError: A checkpoint is damaged or does not fit.
            HostMemoryError: Host memory cannot be had.
            AgreementError: The ranks differ, or one did not answer.
        """
        problem: Exception | None = self._why_not_enable()
        if self._shut_down:
            raise UseError("this offload was shut down; make a new one")
        agreement = self._agreement = self._agreement or self._shard_group.meet(
            self._config.load_timeout_s, self._config.timeout_s
        )
        salvage: Salvage | None = None
        if problem is None and reuse is not None:
            try:
                salvage = _salvage_of(reuse, self)
            # Every rank must hear of it, whatever it is.
            except Exception as error:
                problem = error
        startup = Startup(self._config, backend=self._backend, agreement=agreement)
        request = Request(
            models,
            checkpoint,
            blocks,
            progress,
            key_map,
            transforms,
            post_load,
            tp_plan,
            self._tp(),
            salvage,
        )
        engine, self._footprint = startup.run(request, problem)
        engine.commit(self)
        self._models = models
        self._engine = engine
        self._log_enabled()
        return self

    def disable(self, to: str = "cpu") -> None:
        """Make the models plain modules again, with the same Parameter objects, dtypes and strides.

        In gather mode without a checkpoint all ranks must call it: the values come from the next
        turn of the tape. Otherwise it is local. Does nothing when nothing is enabled.

        Args:
            to: ``"cpu"``, or ``"meta"`` for modules without values.

        Raises:
            ConfigError: ``to`` is something else.
            RestoreError: The values cannot be had; the placeholders stay and say why.
        """
        if to not in ("cpu", "meta"):
            raise ConfigError(f"disable(to=...) must be 'cpu' or 'meta'; got {to!r}")
        engine = self._engine
        if engine is None:
            return
        if self._shut_down and to != "meta":
            raise RestoreError(f"the weights cannot be given back: {_SHUT_DOWN}")
        if not self._shut_down:
            self._restore(engine, to)
            engine.release("the offload was disabled")
            self._close_agreement()
        else:
            engine.detach()
        self._engine = None
        names = ", ".join(type(model).__name__ for model in self._models)
        self._models = ()
        _logger.info(
            "disabled %s%s; weights are on %s", names, self._where(), to, extra=self._extra
        )

    def shutdown(self) -> None:
        """Release all memory without restoring and without a collective.

        Any thread may call it at any time, and again. A forward that another thread is in ends
        with an error. Afterwards the models raise when they are called; ``disable(to="meta")``
        makes them plain.
        """
        with self._closing:
            if self._salvage is not None:
                self._salvage.release()
            if self._engine is not None and not self._shut_down:
                self._engine.release(_SHUT_DOWN)
                _logger.info("shut down%s", self._where(), extra=self._extra)
            self._shut_down = True
            self._close_agreement()

    def salvage(self) -> Salvage:
        """Shut down, but keep the host shards for ``reuse=``; internal.

        Raises:
            UseError: There are none, or a forward is under way.
        """
        with self._closing:
            if self._salvage is None:
                engine = self._present()
                host = (self._config.host, self._config.pin_budget_bytes)
                self._salvage = engine.salvage(_SHUT_DOWN, host)
                self._engine, self._models = None, ()
                self._shut_down = True
                self._close_agreement()
            return self._salvage

    def load_resident_layers(self) -> None:
        """Load the resident layers that were dropped, before the next forward does.

        The loads are queued; each block's first call waits for its own. In gather mode all ranks
        must call it alike, between passes. Does nothing where they are there.

        Raises:
            UseError: Nothing is enabled, a block computes now, or a rank has not the device memory;
                then nothing of that model was loaded on any.
            AgreementError: The ranks did not call it alike.
            FillError: A load could not be queued; the offload is closed.
        """
        load_residents(self._running(), self._sharing_agreement())

    def offload_resident_layers(self) -> None:
        """Give the resident layers' device memory back, for what runs between two denoise stages.

        Waits until the device is idle and copies nothing back: the host has their weights. The next
        forward loads them again when it begins, unless ``load_resident_layers()`` did. In gather
        mode all ranks must call it alike, between passes.

        Raises:
            ConfigError: ``resident_scope`` is ``"permanent"``.
            UseError: Nothing is enabled, or a block computes now.
            AgreementError: The ranks did not call it alike.
            FillError: A transfer went wrong; the offload is closed.
        """
        engine = self._running()
        if self._config.resident_scope == "permanent":
            raise ConfigError(
                "offload_resident_layers() needs resident_scope='stage': permanent residents stay"
            )
        drop_residents(engine, self._sharing_agreement())

    def refresh(self) -> None:
        """Accept modules and tensors that appeared in or vanished from the models; place new ones.

        New tensors go to the device and stay there. Call it between passes, on every rank that
        changed its model.

        Raises:
            UseError: Nothing is enabled, or a block computes now.
            ConfigError: A new tensor cannot be handled.
        """
        self._running().refresh()

    def state_dict(
        self, model: nn.Module | None = None, *, to_rank: int | None = None
    ) -> dict[str, Any] | None:
        """Return the whole ``state_dict()`` of an offloaded model, read block by block.

        Copies on the host, as ``model.state_dict()`` orders and names them. In gather mode all
        ranks must call it alike, between passes; each that receives holds one copy of the model,
        the others nothing. In rank-local mode it is local.

        Args:
            model: Which model, where several are enabled; None: the only one.
            to_rank: The rank that receives; the others return None. None: every rank.

        Raises:
            UseError: Nothing is enabled, a block computes now, or an update failed half-way.
            ConfigError: An argument cannot be honoured.
            FillError: A block could not be gathered; the offload is closed.
            AgreementError: The ranks did not call it alike.
        """
        state, agreement, receive = self._reading(model, to_rank, "state_dict()")
        return do_together(agreement, "state_dict()", state.collect if receive else state.serve)

    def named_tensors(
        self, model: nn.Module | None = None, *, to_rank: int | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and values of an offloaded model, a block in memory at a time.

        First what stays on the device, then the blocks in the order in which they run; copies on
        the host; tied names give the same tensor. In gather mode all ranks must iterate alike,
        between passes. Until the end, or until the iterator is closed, the model is busy; one that
        is closed early still serves the other ranks.

        Args:
            model: Which model, where several are enabled; None: the only one.
            to_rank: The rank that receives; on the others the iterator yields nothing, but must
                be iterated. None: every rank.

        Raises:
            DloError: As ``state_dict()``, when the iteration begins or goes on.
        """
        state, _, receive = self._reading(model, to_rank, "named_tensors()")
        if receive:
            with closing(state.tensors()) as tensors:
                yield from tensors
        else:
            state.serve()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        to_rank: int = 0,
        max_shard_bytes: int | None = None,
        progress: Progress = False,
    ) -> Path:
        """Save an offloaded model's weights as safetensors, a block in memory at a time.

        With a ``group`` all of its ranks must call it alike, between passes, in both modes; one
        writes. Nothing that exists is overwritten; whatever goes wrong on any rank, every rank
        raises and nothing is left on the disk.

        Args:
            path: A folder, which gets the file names that diffusers or transformers look for, or
                the name of a ``.safetensors`` file.
            model: Which model, where several are enabled; None: the only one.
            to_rank: The rank that writes.
            max_shard_bytes: Most bytes of tensors in one file, a single larger tensor excepted;
                several files get an index. None: one file.
            progress: As for ``enable``, on the rank that writes.

        Returns:
            The path of the file, or of the index: what ``checkpoint=`` takes.

        Raises:
            ConfigError: An argument cannot be honoured, or there is a checkpoint already.
            CheckpointError: The disk is full or cannot be written.
            DloError: As ``state_dict()``.
        """
        agreement = self._living_agreement()
        engine, number = self._chosen(model, to_rank, agreement, "save()")
        return save_state(
            engine.states[number],
            path,
            agreement=agreement,
            to_rank=to_rank,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )

    def update_weights(
        self,
        named_tensors: NamedTensors,
        *,
        model: nn.Module | None = None,
        strict: bool = True,
    ) -> tuple[str, ...]:
        """Give tensors new values in place: refit, or a merged adapter.

        In gather mode all ranks must call it alike, between passes, with the same full tensors;
        each keeps its part. In rank-local mode it is local. A mapping or a list is checked and
        compared before anything is changed. An iterator is never held whole, and is checked as it
        comes: when it fails half-way, every later use of the model raises until an update that
        covers what was written. Afterwards ``disable()`` gives the new values back, so in gather
        mode it needs all ranks even if a checkpoint was given.

        Args:
            named_tensors: Names as in ``state_dict()``, with full tensors of the same shape and
                dtype, on any device. ``named_tensors()`` of this offload may be read meanwhile.
            model: Which model, where several are enabled; None: the only one.
            strict: Whether a name that the model has not is an error.

        Returns:
            The names that were skipped; none when ``strict``.

        Raises:
            ConfigError: A name, shape or dtype does not fit.
            UseError: Nothing is enabled, a block computes now, or the host memory of the weights
                cannot be written.
            AgreementError: The ranks were given different values or did not call it alike.
        """
        agreement = self._writing_agreement()
        engine, number = self._chosen(model, None, agreement, "update_weights()")
        refit = Refit(engine, number, agreement, strict=strict)
        return refit.run(named_tensors)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        *,
        model: nn.Module | None = None,
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load a whole state dict; what ``load_state_dict()`` of an offloaded model does.

        As ``update_weights()``: on all ranks in gather mode, and with no cast. All is checked
        before anything is changed.

        Args:
            state_dict: Names and values.
            model: Which model, where several are enabled; None: the only one.
            strict: Whether a missing or unknown name is an error.
            assign: Must be False: the weights keep their places.

        Returns:
            The missing and the unexpected keys, as torch returns them.

        Raises:
            DloError: As ``update_weights()``.
        """
        agreement = self._writing_agreement()
        engine, number = self._chosen(model, None, agreement, "load_state_dict()")
        return load_state(engine, number, agreement, state_dict, strict=strict, assign=assign)

    def run_pass(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Return a context that is one pass, for engines that call blocks and not the root.

        With nothing in it, it is an idle pass: in gather mode this rank serves its shards to the
        others.

        Args:
            model: Which model, where several are enabled; None: the only one.

        Raises:
            UseError: Nothing is enabled.
            ConfigError: The model is not one of the enabled ones, or must be named.
        """
        return self._running().streamers[self._number_of(model)].run_pass()

    def capture(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> CapturedPass:
        """Record one pass as a graph of the device, whose replay costs the host one call.

        The call is run twice as it is, then once to be recorded. The graph reads copies of the
        arguments' tensors. It holds the copies of all blocks, and is right as long as the offload
        lasts, also beside ordinary passes and after ``update_weights()``; not after
        ``offload_resident_layers()``, which moves weights.

        Args:
            call: The model; or, where no other is enabled, a function that runs it once.
            args: Arguments of ``call``.
            kwargs: The same by name.

        Returns:
            The pass; call it with new values of the arguments to replay it.

        Raises:
            ConfigError: It cannot be captured: the device has no graphs, the number of blocks is
                no multiple of that of the slots, blocks are gathered, or the host reads them for
                each copy. Or several models are enabled and ``call`` is none of them.
            UseError: Nothing is enabled; or ``call`` does not run the model once, skips blocks, or
                makes the host wait.
        """
        engine = self._running()
        model = next((mine for mine in self._models if mine is call), None)
        if model is None and len(self._models) > 1:
            raise ConfigError(
                "several models are enabled: say which one is captured by giving capture() the "
                "model itself, and not a function that runs it"
            )
        number = self._number_of(model)
        return capture_pass(
            engine, self._backend, engine.streamers[number], call, args=args, kwargs=kwargs
        )

    def stats(self) -> Stats:
        """Return what is held, moved and waited for; milliseconds of the last pass with times.

        Raises:
            UseError: Nothing is enabled.
        """
        return collect_stats(self._present())

    def __enter__(self) -> LayerwiseOffload:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Disable; after an exception shut down, which enters no collective."""
        if kind is None:
            self.disable()
        self.shutdown()

    def __repr__(self) -> str:
        """Show the state."""
        if self._shut_down:
            state = "shut down"
        elif self._engine is None:
            state = "not enabled"
        else:
            failure = self._engine.pool.failure
            names = ", ".join(type(model).__name__ for model in self._models)
            state = f"failed: {failure}" if failure else f"{names}, {len(self.blocks)} blocks"
        mode = "gather" if self._gathers else "rank-local"
        tiers = f", host: {self._tiers()}" if self._engine and not self._shut_down else ""
        return (
            f"LayerwiseOffload({state}, device={str(self.device)!r}, {mode}, rank {self.rank} of "
            f"{self.size}, depth={self._config.depth}{tiers})"
        )

    @property
    def _gathers(self) -> bool:
        return self._config.use_allgather and self._size > 1

    @property
    def _extra(self) -> dict[str, int]:
        return {"rank": self.rank}

    def _tp(self) -> tuple[int, int]:
        """Return the rank in the tensor-parallel group, and its size."""
        topology = self._topology
        return (0, 1) if topology is None else (topology.tp_rank, topology.sizes.tp)

    def _tiers(self) -> str:
        """Return the bytes of host memory by tier."""
        assert self._engine is not None
        host = self._engine.store.account
        kinds = {
            "pinned": host.pinned,
            "shared": host.shared,
            "pageable": host.pageable,
            "staging": host.staging,
            "mapped": host.mapped,
        }
        return ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in kinds.items() if nbytes)

    def _number_of(self, model: nn.Module | None) -> int:
        if model is None and len(self._models) > 1:
            raise ConfigError(
                "several models are enabled: say which one this call is for with model="
            )
        for number, mine in enumerate(self._models):
            if model is None or mine is model:
                return number
        raise ConfigError(f"this {type(model).__name__} is not one of the enabled models")

    def _chosen(
        self, model: nn.Module | None, to_rank: int | None, agreement: Agreement, what: str
    ) -> tuple[Engine, int]:
        """Return the engine and the model's number, when the arguments are right on all ranks."""
        engine = self._running()

        def check() -> int:
            _check_rank(to_rank, self._size)
            return self._number_of(model)

        return engine, do_together(agreement, what, check)

    def _living_agreement(self) -> Agreement:
        self._running()
        assert self._agreement is not None
        return self._agreement

    def _sharing_agreement(self) -> Agreement:
        """Return those whose weights must stay alike: the ranks that gather, or this one alone."""
        return self._living_agreement() if self._gathers else LoneAgreement()

    def _writing_agreement(self) -> Agreement:
        """Return those whose weights change together: who gathers or shares memory, or this one."""
        shares = self._engine is not None and self._engine.shares
        return self._living_agreement() if self._gathers or shares else LoneAgreement()

    def _reading(
        self, model: nn.Module | None, to_rank: int | None, what: str
    ) -> tuple[ModelState, Agreement, bool]:
        """Agree on reading the values; the last: whether this rank receives them."""
        engine = self._running()
        agreement = self._sharing_agreement()

        def check() -> tuple[ModelState, Mapping[str, str]]:
            _check_rank(to_rank, self._size)
            number = self._number_of(model)
            state = engine.states[number]
            state.check_no_parts(what)
            with state.readback.entered():
                facts = {"call": what, "model": str(number), "to_rank": str(to_rank)}
                return state, facts | state.readback.facts()

        return begin_together(agreement, what, check), agreement, to_rank in (None, self._rank)

    def _where(self) -> str:
        return f" on rank {self.rank} of {self.size}" if self.size > 1 else ""

    def _running(self) -> Engine:
        """Return the running parts; raise when they have failed, and ask nobody about it."""
        engine = self._present()
        engine.streamers[0].check_alive()
        return engine

    def _present(self) -> Engine:
        if self._engine is None or self._shut_down:
            state = "was shut down" if self._shut_down else "is not enabled"
            raise UseError(f"this offload {state}")
        return self._engine

    def _find_backend(self, device: str | torch.device | Backend, agreement: Agreement) -> Backend:
        backend: Backend | None = None
        problem: BaseException | None = None
        try:
            backend = resolve(device)
            check_tier(self._config.host, backend.name, backend.capabilities)
        # Every rank must hear of it, whatever it is.
        except BaseException as error:
            problem = error
        try:
            agreement.vote(problem, "offload()")
        except BaseException:
            agreement.close()
            raise
        assert backend is not None
        return backend

    def _close_agreement(self) -> None:
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.close()

    def _why_not_enable(self) -> ConfigError | None:
        if self._engine is None:
            return None
        return ConfigError("this offload is enabled already; disable() first, or make another one")

    def _restore(self, engine: Engine, to: str) -> None:
        try:
            engine.restore(to)
        except (DloError, RuntimeError, MemoryError) as error:
            raise RestoreError(
                f"the weights cannot be given back{self._where()}: {error}; the model keeps its "
                "placeholders: repair the cause and call disable() again, or shutdown() and load "
                "anew"
            ) from error

    def _log_enabled(self) -> None:
        print_ = self._footprint
        assert print_ is not None
        assert self._engine is not None
        needs_all = self._gathers and any(plan.checkpoint is None for plan in self._engine.plans)
        mode = (
            f"gather mode, rank {self.rank} of {self.size}" if self._gathers else "rank-local mode"
        )
        _logger.info(
            "enabled %s in %s: %d blocks, %d of them resident, %d bytes; device %d bytes (slots "
            "%d, stages %d, residents %d, remainder %d), host %d bytes (%s)%s",
            ", ".join(type(model).__name__ for model in self._models),
            mode,
            len(self.blocks),
            len(self._engine.pool.residents),
            print_.blocks_nbytes,
            print_.device_nbytes,
            print_.slots_nbytes,
            print_.stages_nbytes,
            print_.residents_nbytes,
            print_.remainder_nbytes,
            print_.host_nbytes,
            self._tiers(),
            "; no checkpoint to restore from: disable() needs all ranks" if needs_all else "",
            extra=self._extra,
        )


def _salvage_of(reuse: object, mine: LayerwiseOffload) -> Salvage:
    if not isinstance(reuse, LayerwiseOffload) or reuse is mine:
        raise ConfigError(
            f"reuse= must be an earlier LayerwiseOffload; got {type(reuse).__name__}"
            + (" itself" if reuse is mine else "")
        )
    salvage = reuse.salvage()
    salvage.check()
    return salvage


def _check_rank(to_rank: object, size: int) -> None:
    whole = isinstance(to_rank, int) and not isinstance(to_rank, bool)
    if to_rank is not None and not (whole and 0 <= to_rank < size):  # type: ignore[operator]
        raise ConfigError(f"to_rank must be a rank of the group, 0 to {size - 1}; got {to_rank!r}")


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
