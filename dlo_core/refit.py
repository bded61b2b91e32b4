"""Refitting: new values for weights that are offloaded, in place.

[Note: old or new]
Between two passes, with every rank at the same place on its tape: the device is waited for on all
ranks, then each rank overwrites its part of each given tensor, and what the slots hold is
forgotten. What was given as a whole (a mapping, a list) is checked and compared between the ranks
before a byte is changed. An iterable is checked as it comes, so an error can come late: then the
tensors that were written are *torn*. Every later use of the model raises and names one, until an
update on all ranks that covers all of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA
from torch.nn.modules.module import _IncompatibleKeys

from dlo_core.agreement import Problem, agree_on
from dlo_core.dtensor import local_of
from dlo_core.errors import ConfigError, UseError
from dlo_core.rawbytes import bytes_of
from dlo_core.together import begin_together, do_together

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dlo_core.agreement import Agreement
    from dlo_core.engine import Engine
    from dlo_core.state import Named

    NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

__all__ = ["Refit", "load_state"]

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_WHAT = "update_weights()"
_SHOWN = 5


@dataclass(slots=True)
class _Told:
    """What one update has seen so far.

    Attributes:
        digests: Of the values, by the first name of each tensor.
        written: First names of the tensors that it began to write.
        unknown: Names that the model has not.
    """

    digests: dict[str, str] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a rank tells the others at the end: what went wrong, and what it wrote."""

    problem: Problem | None
    written: tuple[str, ...]


class Refit:
    """One update of the weights of one model."""

    def __init__(
        self,
        engine: Engine,
        model: int,
        agreement: Agreement,
        *,
        strict: bool,
        complete: bool = False,
    ) -> None:
        """Take the parts.

        Args:
            engine: The running parts.
            model: Number of the model.
            agreement: The ranks whose weights must stay alike.
            strict: Whether a name that the model has not is an error.
            complete: Whether a tensor that is not given is an error; for what is given as a whole.
        """
        self._engine = engine
        self._model = model
        self._agreement = agreement
        self._together = agreement.size > 1
        self._strict = strict
        self._complete = complete
        self._streamer = engine.streamers[model]
        self._state = engine.states[model]
        self._targets: dict[str, Named] = {}
        self._tied: frozenset[str] = frozenset()

    def run(self, given: NamedTensors) -> tuple[str, ...]:
        """Update the weights and return the names that were skipped.

        Raises:
            ConfigError: A name, shape or dtype does not fit.
            UseError: It cannot be done now, or not at all with this kind of host memory.
            AgreementError: The ranks were given different values, or did something else.
        """
        entered: list[bool] = []

        def check() -> tuple[_Told | None, dict[str, str]]:
            self._streamer.enter(repair=True)
            entered.append(True)
            return self._check(given)

        try:
            with torch.inference_mode(False), torch.no_grad():
                checked = begin_together(self._agreement, _WHAT, check)
                choice = self._engine.choice
                # An iterator may run the model.
                with nullcontext() if choice is None else choice.held():
                    return self._update(given, checked)
        finally:
            if entered:
                self._streamer.leave()

    def _check(self, given: NamedTensors) -> tuple[_Told | None, dict[str, str]]:
        """Look at what can be known before anything is changed."""
        engine = self._engine
        if engine.pool.busy:
            raise UseError(
                f"busy: {_WHAT} was called while a block computes (or while an iterator of "
                "named_tensors() is not at its end); call it between passes"
            )
        self._state.check_no_parts(_WHAT)
        if (reason := engine.store.why_read_only) is not None:
            raise UseError(f"{_WHAT} cannot write the weights: {reason}")
        named = self._state.named()
        self._targets = {one.name: one for one in named}
        names = Counter(one.first for one in named)
        self._tied = frozenset(name for name, count in names.items() if count > 1)
        checked: _Told | None = None
        facts = {"call": _WHAT, "model": str(self._model), **self._state.readback.facts()}
        if isinstance(given, Mapping | list | tuple):
            checked = _Told()
            for name, value in _pairs(given):
                self._accept(name, value, checked)
            missing = self.missing(given) if self._complete else []
            if missing:
                raise ConfigError(
                    f"load_state_dict(): {', '.join(map(repr, missing[:_SHOWN]))} missing "
                    f"({len(missing)} in all); strict=False, or update_weights(), takes what is "
                    "given"
                )
            facts |= {f"value of {name!r}": digest for name, digest in checked.digests.items()}
        elif self._together and not self._state.gathers:
            raise UseError(
                f"{_WHAT} was given an iterator, but the ranks of this node share one copy of the "
                "weights (host='shared'), and what the iterator reads one rank may have written "
                "already: give a mapping or a list"
            )
        facts["given as"] = "an iterator" if checked is None else "a whole"
        return checked, facts if self._together else {}

    def _update(self, given: NamedTensors, checked: _Told | None) -> tuple[str, ...]:
        # Together: a rank that shares its memory must not write while another one copies from it.
        do_together(self._agreement, _WHAT, self._stand_still)
        if (choice := self._engine.choice) is not None:
            # New values may not fit where the old ones lie packed. It has exchanges of its own.
            self._streamer.guarded(choice.make_way, "the weights were updated")
            do_together(self._agreement, _WHAT, self._stand_still)
        # A state dict may be half made.
        self._state.readback.rest()
        told = _Told()
        problem: BaseException | None = None
        try:
            for name, value in _pairs(given):
                target = self._accept(name, value, told, hashed=checked is None)
                if target is not None:
                    self._write(target, value, told)
            self._engine.store.flush()
            self._state.readback.rest()
        # Every rank must hear of it, whatever it is.
        except BaseException as error:
            problem = error
        self._end(told, problem, compare=checked is None)
        # Also what named_tensors() filled meanwhile, if the new values were made of it.
        self._streamer.tape.forget()
        self._streamer.check_usable()
        residents = self._streamer.residents
        self._streamer.guarded(residents.renew, self._blocks_of(told.written))
        self._engine.pool.owner.prefetch()
        return tuple(told.unknown)

    def _stand_still(self) -> None:
        owner = self._engine.pool.owner
        if owner.open:
            # So that every rank has queued the same fills, which are about to be waited for.
            owner.end_pass()
        # The device may be behind the host: a shard must not change under a copy that a forward
        # still waits for, nor a resident tensor under a kernel.
        self._streamer.stand_still()

    def _blocks_of(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the blocks that have one of these tensors."""
        places = [self._targets[name].place for name in names]
        return sorted({place[0] for place in places if place is not None})

    def _end(self, told: _Told, problem: BaseException | None, *, compare: bool) -> None:
        """Vote; what was begun is whole when every rank wrote the same, and torn otherwise."""
        mine = None if problem is None else Problem.of(problem)
        torn = self._engine.pool.torn
        torn.update({(self._model, name): name for name in told.written})
        answers = self._agreement.exchange(_Outcome(mine, tuple(told.written)), _WHAT)
        for answer in answers:
            torn.update({(self._model, name): name for name in answer.written})
        if problem is not None:
            raise problem
        for rank, answer in enumerate(answers):
            if answer.problem is not None:
                raise answer.problem.error(f"{_WHAT} failed on rank {rank}: ")
        if compare and self._together:
            facts = {f"value of {name!r}": digest for name, digest in told.digests.items()}
            agree_on(self._agreement, facts, _WHAT)
        for name in told.written:
            torn.pop((self._model, name), None)

    def _accept(
        self, name: object, value: object, told: _Told, *, hashed: bool = True
    ) -> Named | None:
        """Return where ``value`` goes; None: nowhere, or it is there under another name.

        Raises:
            ConfigError: It does not fit; names what was got and what is wanted.
        """
        if not isinstance(name, str):
            raise ConfigError(f"{_WHAT} wants names and tensors; got {name!r:.80} as a name")
        target = self._targets.get(name)
        if target is None:
            if self._strict:
                raise ConfigError(f"{_WHAT}: {name!r} is no tensor of the model{self._like(name)}")
            told.unknown.append(name)
            return None
        dense = _plain(name, value, target)
        if hashed and (self._together or target.first in self._tied):
            digest = _digest(dense)
            known = told.digests.setdefault(target.first, digest)
            if known != digest:
                raise ConfigError(
                    f"{_WHAT}: {name!r} is tied to {target.first!r}, but was given other values; "
                    "give both the same, or one of them"
                )
        return target

    def missing(self, given: Iterable[object]) -> list[str]:
        """Return the names of tensors that are not given under any of their names."""
        known = set(given)
        there = {one.first for name, one in self._targets.items() if name in known}
        return [name for name, one in self._targets.items() if one.first not in there]

    def _like(self, name: str) -> str:
        last = name.rpartition(".")[2]
        close = [known for known in self._targets if known.rpartition(".")[2] == last][:_SHOWN]
        hint = f", which has {', '.join(map(repr, close))}" if close else ""
        return f"{hint}; strict=False skips such names"

    def _write(self, target: Named, value: torch.Tensor, told: _Told) -> None:
        engine = self._engine
        engine.edited = True
        told.written.append(target.first)
        if target.place is None:
            local_of(target.tensor).detach().copy_(value)
            return
        number, index = target.place
        spec = self._state.readback.layout(number).tensors[index]
        run = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
        run.copy_(value)
        raw = bytes_of(run, spec.nbytes)
        for piece in engine.shards[number].pieces(engine.collective.rank):
            low = max(piece.start, spec.offset)
            high = min(piece.stop, spec.offset + spec.nbytes)
            if low < high:
                part = raw[low - spec.offset : high - spec.offset]
                engine.store.write(number, piece.at + low - piece.start, part)


def load_state(
    engine: Engine,
    model: int,
    agreement: Agreement,
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    assign: bool,
) -> Any:
    """Load a state dict into an offloaded model, as its ``load_state_dict()`` would; all ranks.

    Returns:
        Missing and unexpected keys, as torch returns them.

    Raises:
        DloError: As ``Refit.run`` does; nothing was changed. Extra state is set last: when a module
            refuses its own, the tensors are new.
    """

    extras: list[tuple[nn.Module, Any]] = []
    unknown: list[str] = []
    given: dict[str, Any] = {}

    def check() -> None:
        if assign:
            raise UseError(
                "load_state_dict(assign=True) cannot be honoured on an offloaded model, whose "
                "weights keep their places; load without it, or disable(), load and offload again"
            )
        if not isinstance(state_dict, Mapping):
            raise ConfigError(
                f"load_state_dict() wants a mapping of names; got a {type(state_dict).__name__}"
            )

        modules = dict(engine.states[model].model.named_modules(remove_duplicate=False))
        for name, value in state_dict.items():
            path, _, last = name.rpartition(".") if isinstance(name, str) else ("", "", "")
            if last != _EXTRA:
                given[name] = value
            elif path in modules:
                extras.append((modules[path], value))
            else:
                unknown.append(name)
        if unknown and strict:
            raise ConfigError(f"load_state_dict(): {unknown[0]!r} is for no module of the model")

    def set_extras() -> None:
        for module, value in extras:
            module.set_extra_state(value)

    do_together(agreement, "load_state_dict()", check)
    refit = Refit(engine, model, agreement, strict=strict, complete=strict)
    unexpected = refit.run(given)
    # The module's own code, which may fail on one rank: the others must hear of it.
    do_together(agreement, "load_state_dict()", set_extras)
    return _IncompatibleKeys(refit.missing(given), [*unexpected, *unknown])


def _pairs(given: NamedTensors) -> Iterator[tuple[Any, Any]]:
    for pair in given.items() if isinstance(given, Mapping) else given:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(f"{_WHAT} wants pairs of a name and a tensor; got {pair!r:.80}")
        yield pair[0], pair[1]


def _plain(name: str, value: object, target: Named) -> torch.Tensor:
    """Return ``value`` as a detached tensor, when it fits ``target`` exactly."""
    if type(value) not in _PLAIN:
        kind = type(value)
        raise ConfigError(
            f"{_WHAT}: the value of {name!r} must be a plain tensor with its full shape; got a "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    assert isinstance(value, torch.Tensor)
    wanted = target.tensor
    if tuple(value.shape) != tuple(wanted.shape) or value.dtype != wanted.dtype:
        raise ConfigError(
            f"{_WHAT}: {name!r} was given {_form(value)}, the model has {_form(wanted)}; convert "
            "it yourself (nothing is cast or reshaped here)"
        )
    if value.is_meta or value.layout != torch.strided:
        where = "is on meta" if value.is_meta else f"has layout {value.layout}"
        raise ConfigError(f"{_WHAT}: the value of {name!r} {where} and has no dense values")
    overlaps = any(
        step == 0 and n > 1 for n, step in zip(wanted.shape, wanted.stride(), strict=True)
    )
    if overlaps or wanted.is_meta or (target.place is None and wanted.is_inference()):
        raise ConfigError(
            f"{_WHAT}: {name!r} cannot be written: its elements overlap, or it is on meta, or it "
            "was made under torch.inference_mode()"
        )
    return value.detach()


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _digest(value: torch.Tensor) -> str:
    """Return a sha256 over the bytes of a tensor, row-major."""
    dense = value.cpu().resolve_conj().resolve_neg().contiguous()
    nbytes = dense.numel() * dense.dtype.itemsize
    array: Any = bytes_of(dense, nbytes).numpy()
    return hashlib.sha256(memoryview(array)).hexdigest()[:24]
