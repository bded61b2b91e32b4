"""Compiling: keeping ``torch.compile`` out of what moves weights, without importing it.

[Note: outside of the graph]
A compiled block lies inside of its wrapper, so its graph holds computation alone. A compiled *root*
calls the wrappers while it is traced, and their streams, locks and events must not be traced. So
they begin with ``if is_dynamo_compiling(): torch._dynamo.skip_frame(msg=OUTSIDE)``: the compiler,
which alone takes the branch, leaves that frame as it is (in the frame itself, for in a helper it
would only break the graph there). ``aside`` does so for a function with everything that it calls.
What a left frame calls is compiled again, so each block's own forward is one graph of its own. The
compiler is a second's import and nobody loads it who does not compile: while it traces it is there.

Where the compiler looks at nothing that this thread calls, there is nothing to keep from it. Its
own way to look aside, which takes as long as a dozen calls, is left out then.

A compiler that traces a call of a module goes straight to its ``forward`` when it sees nothing in
between, and it does not look at the wrapper. An instance's own ``__call__``, which Python itself
never asks for, makes it look.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OUTSIDE", "aside"]

P = ParamSpec("P")
R = TypeVar("R")

OUTSIDE = "dlo moves weights here, outside of the graph"


# What the compiler does with the frames of this thread; None: nothing. A torch that does not tell
# counts as one that looks.
_looks_at: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", bool
)


def aside(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` as one that no compiler looks into."""
    # See [Note: outside of the graph].
    hidden: list[Callable[P, R]] = []

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            torch._dynamo.skip_frame(msg=OUTSIDE)
        if "torch._dynamo" not in sys.modules or _looks_at() is None:
            return function(*args, **kwargs)
        if not hidden:
            hidden.append(torch.compiler.disable(function, reason=OUTSIDE))
        return hidden[0](*args, **kwargs)

    return run
