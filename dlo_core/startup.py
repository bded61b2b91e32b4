"""The start: plan, agree, allocate, read and vote, all before a model is touched."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from dlo_core._version import __version__
from dlo_core.agreement import agree_on
from dlo_core.binding import Placeholder
from dlo_core.collective import LoneCollective, release_group
from dlo_core.engine import Engine
from dlo_core.errors import ConfigError
from dlo_core.hooks import offload_of
from dlo_core.plan import Footprint, ModelPlan, plan_model, predict, sample_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dlo_core.agreement import Agreement
    from dlo_core.config import OffloadConfig
    from dlo_core.interface import Backend, Collective
    from dlo_core.progress import LoadProgress

    Path = str | os.PathLike[str]
    Checkpoints = Path | Sequence[Path | None] | None
    Blocks = Sequence[str] | Callable[[nn.Module], Iterable[nn.Module]] | None
    Progress = bool | Callable[[LoadProgress], None]

__all__ = ["Request", "Startup"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What ``enable`` was asked for."""

    models: tuple[nn.Module, ...]
    checkpoint: Checkpoints
    blocks: Blocks
    progress: Progress


@dataclass(frozen=True, slots=True)
class _Decision:
    """What one rank plans.

    Attributes:
        facts: Settings and layouts, which must be the same on every rank.
        digest: Of the layouts.
        footprint: The bytes that it takes.
    """

    facts: dict[str, str]
    digest: bytes
    footprint: Footprint


class Startup:
    """Brings an engine up, on every rank or on none."""

    def __init__(
        self,
        config: OffloadConfig,
        *,
        backend: Backend,
        agreement: Agreement,
    ) -> None:
        """Take the parts that the offload has already."""
        self._config = config
        self._backend = backend
        self._agreement = agreement

    @property
    def gathers(self) -> bool:
        """Whether the weights are sharded over the group."""
        return self._config.use_allgather and self._agreement.size > 1

    def run(self, request: Request, problem: BaseException | None) -> tuple[Engine, Footprint]:
        """Return an engine that is ready to commit, and its footprint.

        Args:
            request: What to offload.
            problem: What this rank knows already to be wrong; every rank then raises.

        Raises:
            DloError: On every rank, when anything is wrong on any; nothing is left behind.
        """
        plans: list[ModelPlan] = []
        decision: _Decision | None = None
        try:
            if problem is None:
                self._plan(request, plans)
                decision = self._decide(plans)
        # Every rank must hear of it, whatever it is.
        except BaseException as error:
            problem = error
        try:
            self._agreement.vote(problem, "offload()")
            assert decision is not None
            agree_on(self._agreement, decision.facts, "offload()")
            return self._build(plans, decision.digest, request.progress), decision.footprint
        except BaseException:
            for plan in plans:
                if plan.checkpoint is not None:
                    plan.checkpoint.close()
            raise

    def _plan(self, request: Request, plans: list[ModelPlan]) -> None:
        """Append a plan for every model."""
        models, progress = request.models, request.progress
        if not (isinstance(progress, bool) or callable(progress)):
            raise ConfigError(f"progress must be True, False or a function; got {progress!r}")
        if not models:
            raise ConfigError("enable() needs at least one model")
        for model in models:
            _check_model(model)
            _check_layouts(model, self._backend)
        if len({id(model) for model in models}) < len(models):
            raise ConfigError("the same model was given twice")
        _check_disjoint(models)
        for model, path in zip(models, _one_each(request.checkpoint, len(models)), strict=True):
            plans.append(
                plan_model(
                    model,
                    self._config,
                    blocks=request.blocks,
                    checkpoint=path,
                    size=self._agreement.size if self.gathers else 1,
                    alignment=self._backend.capabilities.alignment,
                    device_type=self._backend.name,
                )
            )

    def _decide(self, plans: Sequence[ModelPlan]) -> _Decision:
        """Return what the plans come to; in rank-local mode only the mode must be the same."""
        facts = {"dlo": __version__, "use_allgather": str(self._config.use_allgather)}
        if self.gathers:
            facts["device"] = self._backend.name
            facts |= {name: str(value) for name, value in self._config.to_dict().items()}
            for number, plan in enumerate(plans):
                facts |= _facts_of(number, plan)
        digest = hashlib.sha256()
        for plan in plans:
            digest.update(plan.digest())
        return _Decision(facts, digest.digest(), predict(plans, self._config))

    def _build(self, plans: Sequence[ModelPlan], digest: bytes, progress: Progress) -> Engine:
        """Allocate and read, prepare the commit, and vote on it."""
        collective: Collective = LoneCollective()
        engine: Engine | None = None
        problem: BaseException | None = None
        try:
            if self.gathers:
                collective = self._make_collective()
            engine = Engine(
                plans,
                self._config,
                backend=self._backend,
                collective=collective,
                digest=digest,
                progress=progress,
            )
            engine.prepare(self._agreement)
        # Every rank must hear of it, whatever it is.
        except BaseException as error:
            problem = error
        try:
            self._agreement.vote(problem, "loading")
        except BaseException:
            if engine is not None:
                engine.discard()
            collective.close()
            raise
        assert engine is not None
        return engine

    def _make_collective(self) -> Collective:
        """Make the weights group and its collective, or neither."""
        made = self._agreement.new_group(self._backend.comm_library, self._config.timeout_s)
        try:
            return self._backend.collective(made)
        except BaseException:
            release_group(made)
            raise


def _facts_of(number: int, plan: ModelPlan) -> dict[str, str]:
    facts = {f"blocks of model {number}": str(len(plan.layouts))}
    for layout in plan.layouts:
        key = f"layout of block {layout.name!r} of model {number}"
        facts[key] = f"{layout.nbytes} bytes, {layout.digest().hex()[:12]}"
    facts[f"all layouts of model {number}"] = plan.digest().hex()[:12]
    if plan.checkpoint is None:
        facts[f"values of model {number} (a sample)"] = sample_values(plan).hex()[:12]
    return facts


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"offload() needs a torch.nn.Module; got {type(model).__name__}")
    for path, module in model.named_modules():
        if offload_of(module) is not None:
            what = f"its submodule {path!r}" if path else "it"
            raise ConfigError(
                f"{type(model).__name__} cannot be offloaded: {what} is offloaded already (or was "
                "shut down); call dlo_core.offloaded(model).disable() first"
            )
    for name, tensor in model.named_parameters():
        if isinstance(tensor, Placeholder):
            raise ConfigError(
                f"{type(model).__name__} cannot be offloaded: {name!r} belongs to a model that is "
                "offloaded already (or was shut down); disable() that one first"
            )


def _check_layouts(model: nn.Module, backend: Backend) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (reason := backend.refusal(tensor)) is not None:
            raise ConfigError(f"{name!r} cannot be offloaded: {reason}")


def _check_disjoint(models: Sequence[nn.Module]) -> None:
    seen: dict[int, str] = {}
    for number, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            first = seen.setdefault(id(tensor), f"{number}:{name}")
            if not first.startswith(f"{number}:"):
                other = first.partition(":")[2]
                raise ConfigError(
                    f"{name!r} of model {number} is also {other!r} of another model; models that "
                    "share tensors cannot be offloaded together: offload one, or untie them"
                )


def _one_each(checkpoint: Checkpoints, count: int) -> list[Path | None]:
    if checkpoint is None:
        return [None] * count
    if isinstance(checkpoint, str | os.PathLike):
        if count > 1:
            raise ConfigError(
                f"{count} models need a sequence of {count} checkpoints; got one path "
                f"{str(checkpoint)!r}"
            )
        return [checkpoint]
    given = checkpoint if isinstance(checkpoint, list | tuple) else [checkpoint]
    paths: list[Path | None] = []
    for path in given:
        if path is not None and not isinstance(path, str | os.PathLike):
            raise ConfigError(
                f"checkpoint= must be a path, or a sequence with one a model; got {checkpoint!r}"
            )
        paths.append(path)
    if len(paths) != count:
        raise ConfigError(f"{count} models need {count} checkpoints; got {len(paths)}")
    return paths
