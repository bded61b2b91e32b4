"""torch.compile: regional and of the root, before and after enabling; bits, graphs, recompiles."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from toys import WIDTH, Block, assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Odd, so that with two slots every block lies in either one.
N = 5


class Counting:
    """A compiler backend that compiles nothing and keeps the graphs."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        self.graphs.append(graph.code)
        return graph.forward


class Straight(nn.Module):
    """Calls its blocks one by one, without a loop, so that its own parts are graphs, too."""

    dlo_blocks = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pre = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the three blocks."""
        x = self.blocks[0](self.pre(x).sin())
        x = self.blocks[1](x).cos()
        out: torch.Tensor = self.blocks[2](x).tan()
        return out


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def by_function(model: nn.Module, backend: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend)


def by_method(model: nn.Module, backend: Any) -> Callable[..., Any]:
    model.compile(backend=backend)
    return model


def check(call: Callable[..., Any], reference: nn.Module, passes: int = 4) -> None:
    for seed in range(passes):
        assert torch.equal(call(inputs(seed)), reference(inputs(seed)))


@pytest.mark.parametrize("first", ["compile", "enable"])
@pytest.mark.parametrize("how", [by_function, by_method])
def test_a_compiled_root_streams_bit_for_bit_with_one_graph_for_equal_blocks(
    how: Callable[..., Callable[..., Any]], first: str
) -> None:
    """No warning either: in this suite a warning is an error."""
    model, counting = make_toy(N), Counting()
    reference, before = twin(model), snapshot(model)
    if first == "compile":
        call = how(model, counting)
    offloaded = dlo.offload(model, device="cpu")
    if first == "enable":
        call = how(model, counting)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        check(call, reference)
    assert len(counting.graphs) == 1
    assert "linear" in counting.graphs[0]
    stats = offloaded.stats()
    assert (stats.passes, stats.fills) == (4, 4 * N + 1)
    offloaded.disable()
    with torch.no_grad():
        check(call, reference)
    model._compiled_call_impl = None
    assert_restored(model, before)


def test_what_lies_between_the_blocks_of_a_compiled_root_is_compiled_too() -> None:
    """Nor is a block traced through its placeholders, past its wrapper."""
    model, counting = Straight(), Counting()
    reference = twin(model)
    with dlo.offload(model, device="cpu"), torch.no_grad():
        check(torch.compile(model, backend=counting), reference)
    functions = ("sin", "cos", "tan", "layer_norm")
    found = sorted(name for code in counting.graphs for name in functions if f"{name}(" in code)
    assert found == sorted(functions)


def test_a_root_that_was_compiled_and_called_before_streams_after_enabling() -> None:
    model = make_toy(N)
    reference = twin(model)
    call = torch.compile(model, backend="eager")
    with torch.no_grad():
        check(call, reference)
        with dlo.offload(model, device="cpu"):
            check(call, reference)
        check(call, reference)


def test_a_compiled_module_around_the_root_streams_bit_for_bit() -> None:
    model = make_toy(N)
    reference = twin(model)
    with dlo.offload(model, device="cpu"), torch.no_grad():
        check(torch.compile(nn.Sequential(nn.Identity(), model), backend="eager"), reference)


def test_a_root_in_one_graph_is_refused_with_the_reason() -> None:
    model = make_toy(N)
    reference = twin(model)
    with dlo.offload(model, device="cpu"), torch.no_grad():
        call = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="dlo moves weights here, outside of the graph"):
            call(inputs())
        check(model, reference)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", ["compile", "enable"])
def test_equal_blocks_compiled_one_by_one_share_a_graph_and_never_recompile(
    first: str, mode: Callable[[], Any]
) -> None:
    """B25, https://github.com/vllm-project/vllm-omni/pull/6073"""
    model, counting = make_toy(N), Counting()
    reference = twin(model)

    def compile_blocks() -> None:
        for block in model.blocks:
            block.compile(backend=counting, fullgraph=True)

    if first == "compile":
        compile_blocks()
    with dlo.offload(model, device="cpu"):
        if first == "enable":
            compile_blocks()
        with mode(), torch._dynamo.config.patch(error_on_recompile=True):
            check(model, reference)
    assert len(counting.graphs) == 1


@pytest.mark.parametrize("first", ["compile", "enable"])
def test_blocks_that_stay_share_the_graph_of_those_that_stream(first: str) -> None:
    """Also when they were dropped and lie elsewhere after the next load."""
    model, counting = make_toy(N), Counting()
    reference = twin(model)

    def compile_blocks() -> None:
        for block in model.blocks:
            block.compile(backend=counting, fullgraph=True)

    if first == "compile":
        compile_blocks()
    settings: dict[str, Any] = {"resident_layers": 2, "resident_scope": "stage"}
    with dlo.offload(model, device="cpu", **settings) as offloaded:
        if first == "enable":
            compile_blocks()
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            check(model, reference)
            offloaded.offload_resident_layers()
            check(model, reference)
    assert len(counting.graphs) == 1


def test_a_compiled_root_of_compiled_blocks_streams_bit_for_bit() -> None:
    model, counting = make_toy(N), Counting()
    reference = twin(model)
    with dlo.offload(model, device="cpu"), torch.no_grad():
        for block in model.blocks:
            block.compile(backend=counting, fullgraph=True)
        check(torch.compile(model, backend="eager"), reference)
    assert len(counting.graphs) == 1


def test_an_exception_in_a_compiled_root_strands_nothing() -> None:
    model = make_toy(N)
    reference = twin(model)
    with dlo.offload(model, device="cpu"), torch.no_grad():
        call = torch.compile(model, backend="eager")
        with pytest.raises(RuntimeError):
            call(torch.ones(3, WIDTH + 1))
        with pytest.raises(dlo.UseError, match="argument requires one"), torch.enable_grad():
            call(inputs().requires_grad_())
        check(call, reference)


def test_who_does_not_compile_does_not_load_the_compiler() -> None:
    script = """
        import sys
        import torch
        import dlo_core as dlo

        class Model(torch.nn.Module):
            dlo_blocks = ("blocks",)
            def __init__(self):
                super().__init__()
                self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return x

        model = Model().requires_grad_(False)
        with dlo.offload(model, device="cpu") as offloaded:
            model(torch.ones(1, 4))
        print("torch._dynamo" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        timeout=40, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_ranks_that_compile_their_roots_gather_bit_for_bit() -> None:
    def job(rank: int) -> int:
        model, counting = make_toy(N), Counting()
        reference = twin(model)
        with dlo.offload(model, device="cpu", group=dist.group.WORLD), torch.no_grad():
            check(torch.compile(model, backend=counting), reference)
        return len(counting.graphs)

    assert run_ranks(job, 2) == [1, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ here")
@pytest.mark.timeout(300)
def test_the_real_compiler_gives_what_it_gives_without_dlo() -> None:
    model = make_toy(N)
    reference = twin(model)
    for block in reference.blocks:  # type: ignore[union-attr]
        block.compile(fullgraph=True)
    with dlo.offload(model, device="cpu"), torch.no_grad():
        for block in model.blocks:
            block.compile(fullgraph=True)
        check(model, reference)
