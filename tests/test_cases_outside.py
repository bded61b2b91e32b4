"""Public faults seen from outside of a block: discovery, signatures, foreign reads, moves, copies.

Each docstring has the address of the thread; the fault told there must not be ours.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from poison import PoisonBackend
from torch import nn
from toys import WIDTH, Block, Toy, assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def three_equal(model: nn.Module, reference: nn.Module) -> None:
    for seed in range(3):
        assert torch.equal(model(inputs(seed)), reference(inputs(seed)))


# --- discovery ------------------------------------------------------------------------------------


class Core(nn.Module):
    """Holds the blocks two levels below the top."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them."""
        layers: Any = self.layers
        for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
            x = layer(x)
        return x


class Nested(nn.Module):
    """Blocks in ``core.layers``, with a property ``layers`` as some engines want it."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.pre = nn.Linear(WIDTH, WIDTH)
        self.core = Core(layers)

    @property
    def layers(self) -> nn.Module:
        """The blocks."""
        return self.core.layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all."""
        out: torch.Tensor = self.core(self.pre(x))
        return out


def containers() -> list[nn.Module]:
    return [
        nn.ModuleList([Block() for _ in range(6)]),
        nn.ModuleDict({f"b{n}": Block() for n in range(6)}),
        nn.Sequential(*[Block() for _ in range(6)]),
    ]


NESTED: list[Any] = [
    ("layers",),
    ("core.layers",),
    None,
    lambda model: list(model.core.layers.children()),
]


@pytest.mark.parametrize(
    ("blocks", "kind"),
    [
        pytest.param(
            blocks,
            kind,
            id=f"{number}-{name}",
            # Each way and each kind is once among the quick ones.
            marks=() if number % 3 == kind else pytest.mark.slow,
        )
        for number, blocks in enumerate(NESTED)
        for kind, name in enumerate(("list", "dict", "sequential"))
    ],
)
def test_nested_blocks_never_reach_the_device_whole(blocks: Any, kind: int) -> None:
    """Declared by a property, by a path, by a function, or found: two slots are all there is.

    B14, https://github.com/vllm-project/vllm-omni/issues/7186
    """
    torch.manual_seed(0)
    model = Nested(containers()[kind]).requires_grad_(False)
    reference = twin(model)
    block_nbytes = sum(p.nbytes for p in Block().parameters())
    backend = PoisonBackend()
    gc.collect()
    before = backend.memory().allocated
    offloaded = dlo.offload(model, device=backend, blocks=blocks)
    assert len(offloaded.blocks) == 6
    assert all(name.startswith("core.layers.") for name in offloaded.blocks)
    three_equal(model, reference)
    held = backend.memory().allocated - before
    assert held == offloaded.footprint.device_nbytes == offloaded.stats().device_bytes
    aligned = 4 * backend.capabilities.alignment
    assert held <= 2 * (block_nbytes + aligned) + sum(p.nbytes for p in model.pre.parameters()) + (
        2 * backend.capabilities.alignment
    )
    offloaded.disable()
    del offloaded
    gc.collect()
    assert backend.memory().allocated == before


# --- weights used outside of the block's forward --------------------------------------------------


def uses() -> dict[str, Callable[[Any], Any]]:
    """Ways to use the values of a tensor."""
    x = inputs()
    return {
        "x + p": lambda p: x + p,
        "p + x": lambda p: p + x,
        "p * 2": lambda p: p * 2,
        "x @ p": lambda p: torch.ones(WIDTH) @ p,
        "linear": lambda p: nn.functional.layer_norm(x, (WIDTH,), p),
        "sum": lambda p: p.sum(),
        "clone": lambda p: p.clone(),
        "detach": lambda p: p.detach(),
        "index": lambda p: p[0],
        "view": lambda p: p.view(2, -1),
        "t": lambda p: p.reshape(2, 4).t(),
        "float()": lambda p: float(p[0]),
        "tolist": lambda p: p.tolist(),
        "numpy": lambda p: p.numpy(),
        "numpy force": lambda p: p.numpy(force=True),
        "asarray": np.asarray,
        "data": lambda p: p.data,
        "data =": lambda p: setattr(p, "data", torch.zeros(WIDTH)),
        "data_ptr": lambda p: p.data_ptr(),
        "storage": lambda p: p.untyped_storage(),
        "typed storage": lambda p: p.storage(),
        "half": lambda p: p.half(),
        "to dtype": lambda p: p.to(torch.float64),
        "copy_": lambda p: p.copy_(torch.zeros(WIDTH)),
        "zero_": lambda p: p.zero_(),
        "equal": lambda p: torch.equal(p, torch.zeros(WIDTH)),
        "isnan": lambda p: torch.isnan(p).any(),
        "cat": lambda p: torch.cat([torch.zeros(WIDTH), p]),
        "stack of pairs": lambda p: torch.stack([p, p]),
        "out=": lambda p: torch.add(torch.zeros(WIDTH), 1, out=p),
        "bool": lambda p: bool(p.all()),
        "iterate": list,
        "dlpack": torch.utils.dlpack.from_dlpack,
        "deepcopy": copy.deepcopy,
        "pickle": pickle.dumps,
        "save": lambda p: torch.save(p, io.BytesIO()),
        "share_memory_": lambda p: p.share_memory_(),
        "new_tensor from it": lambda p: torch.zeros(1).new_tensor(p),
        "tensor()": torch.tensor,
        "as_tensor": lambda p: torch.as_tensor(p) + 0,
        "Parameter()": lambda p: nn.Parameter(p) + 0,
        "module call": lambda p: torch.func.functional_call(
            nn.LayerNorm(WIDTH), {"weight": p}, (x,)
        ),
    }


# torch advises against copy construction, which is not what is tested.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated|To copy construct from a tensor")
@pytest.mark.parametrize("use", uses())
def test_a_weight_used_outside_of_its_block_raises_and_names_it(use: str) -> None:
    """Before, between and after forwards; with and without grad mode.

    B18, https://github.com/deepspeedai/DeepSpeed/issues/930
    """
    weight = attrgetter("blocks.2.norm.weight")
    model = make_toy(4)
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend())
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode(), pytest.raises(dlo.UseError, match=r"blocks\.2\.norm\.weight"):
            uses()[use](weight(model))
        assert torch.equal(model(inputs()), reference(inputs()))
    offloaded.disable()
    assert torch.equal(weight(model), weight(reference))


class Reader(Toy):
    """Reads other blocks' weights on its way, as told."""

    facts: list[Any]
    reads: tuple[int, ...] = ()
    facts_of: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        """Run the blocks; before each look at some."""
        self.facts = []
        for block in self.blocks:
            for number in self.facts_of:
                p = attrgetter(f"blocks.{number}.linear.weight")(self)
                facts = p.shape, p.dtype, p.device, p.stride(), p.ndim, p.numel(), p.is_contiguous()
                self.facts.append((*facts, p.element_size(), p.nbytes, p.requires_grad, len(p)))
            for number in self.reads:
                x = x + attrgetter(f"blocks.{number}.norm.weight")(self)
            x = block(x)
        return x


def test_facts_about_a_weight_are_true_wherever_it_is() -> None:
    """B18, https://github.com/deepspeedai/DeepSpeed/issues/930"""
    model = Reader([Block() for _ in range(3)]).requires_grad_(False)
    model.facts_of = (0, 2)
    reference = twin(model)
    assert isinstance(reference, Reader)
    dlo.offload(model, device=PoisonBackend())
    three_equal(model, reference)
    assert model.facts == reference.facts
    assert model.facts[0][2] == torch.device("cpu")


def test_a_parent_that_adds_a_childs_weight_gets_an_error_or_the_right_value() -> None:
    """The error names the remedy, and with the remedy the value is right.

    B18, https://github.com/deepspeedai/DeepSpeed/issues/930
    """
    model = Reader([Block() for _ in range(3)]).requires_grad_(False)
    model.reads = (1,)
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend())
    with pytest.raises(dlo.UseError, match=r"resident=\('blocks\.1\.norm',\)"):
        model(inputs())
    model.reads = ()
    assert model(inputs()) is not None
    offloaded.disable()
    model.reads = (1,)
    dlo.offload(model, device=PoisonBackend(), resident=("blocks.1.norm",))
    three_equal(model, reference)


# --- seen by pipelines and step caches ------------------------------------------------------------


class First(nn.Module):
    """Its first parameter lies in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block().bfloat16() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def test_the_first_parameter_names_the_compute_device_and_dtype() -> None:
    """Before, between, inside and after forwards, with a backend that calls its memory cuda:0.

    B19, https://github.com/sgl-project/sglang/pull/33864
    """
    model = First().requires_grad_(False)
    reference = twin(model)
    backend = PoisonBackend()
    backend.device = torch.device("cuda", 0)
    offloaded = dlo.offload(model, device=backend)

    def check() -> None:
        for p in model.parameters():
            assert (p.device, p.dtype) == (torch.device("cuda", 0), torch.bfloat16)
            assert isinstance(p, nn.Parameter)

    check()
    for seed in range(3):
        x = inputs(seed, torch.bfloat16)
        assert torch.equal(model(x), reference(x))
        check()
    offloaded.disable()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_signatures_and_classes_stay() -> None:
    """A step cache that inspects a block finds what it knows.

    B19's family, B17, https://github.com/vllm-project/vllm-omni/pull/1786
    """

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(
            self, hidden: torch.Tensor, *rest: int, scale: float = 2.0, flag: bool = False
        ) -> tuple[torch.Tensor, dict[str, Any]]:
            """Return a tuple with a dict."""
            return self.linear(hidden) * scale, {"rest": rest, "flag": flag}

    model = nn.ModuleDict({"blocks": nn.ModuleList([Many(), Many(), Many()])}).requires_grad_(False)
    block = attrgetter("blocks.1")(model)
    reference = twin(block)
    signature, forward = inspect.signature(block.forward), block.forward
    dlo.offload(model, device=PoisonBackend(), blocks=("blocks",))
    assert inspect.signature(block.forward) == signature
    assert block.forward == forward
    assert type(block) is Many
    assert [name for name, _ in block.named_parameters()] == ["linear.weight", "linear.bias"]
    got, facts = block(inputs(), 4, 5, scale=3.0, flag=True)
    assert torch.equal(got, reference(inputs(), scale=3.0)[0])
    assert facts == {"rest": (4, 5), "flag": True}


# --- enabled twice, moved, saved, copied ----------------------------------------------------------

MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to device": lambda m: m.to("cpu"),
    "to dtype": lambda m: m.to(torch.float16),
    "to like": lambda m: m.to(torch.zeros(1, dtype=torch.float64)),
    "to meta": lambda m: m.to("meta"),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "cuda": lambda m: m.cuda(),
    "type": lambda m: m.type(torch.float16),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "_apply": lambda m: m._apply(lambda t: t),
}


@pytest.mark.parametrize("where", ["model", "blocks", "block", "leaf"])
@pytest.mark.parametrize("move", MOVES)
def test_moving_and_converting_is_refused_and_changes_nothing(move: str, where: str) -> None:
    """A torch without CUDA refuses ``leaf.cuda()`` by itself, before it asks the weights.

    B21, https://github.com/huggingface/diffusers/pull/7448
    """
    model = make_toy(4)
    reference, before = twin(model), snapshot(model)
    offloaded = dlo.offload(model, device=PoisonBackend())
    parts: dict[str, Any] = {
        "model": model,
        "blocks": model.blocks,
        "block": model.blocks[1],
        "leaf": model.blocks[1].linear,
    }
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(dlo.UseError if (move, where) != ("cuda", "leaf") else Exception):
            MOVES[move](parts[where])
        assert {name: p.dtype for name, p in model.named_parameters()} == dtypes
        assert torch.equal(model(inputs()), reference(inputs()))
    offloaded.disable()
    assert_restored(model, before)


def test_enabling_twice_is_refused_and_copies_nothing_twice() -> None:
    """By the same offload, by another, by one of the parent, and of a part.

    B21, https://github.com/huggingface/diffusers/pull/7448
    """
    model = make_toy(5)
    reference = twin(model)
    backend = PoisonBackend()
    offloaded = dlo.offload(model, device=backend)
    three_equal(model, reference)
    copies = backend.num_copies
    three_equal(model, reference)
    assert backend.num_copies - copies == 3 * 5
    pipeline = nn.ModuleDict({"text": nn.Linear(2, 2), "dit": model})
    attempts: list[Callable[[], Any]] = [
        lambda: offloaded.enable(model),
        lambda: offloaded.enable(make_toy(2)),
        lambda: dlo.offload(model, device=backend),
        lambda: dlo.offload(model, device=PoisonBackend(), depth=3),
        lambda: dlo.offload(pipeline, device=backend),
        lambda: dlo.offload([make_toy(2), model], device=backend),
        lambda: dlo.offload(model.blocks, device=backend, blocks=lambda m: list(m.children())),
    ]
    for attempt in attempts:
        with pytest.raises(dlo.ConfigError, match="offload"):
            attempt()
        assert dlo.offloaded(model) is offloaded
        copies = backend.num_copies
        three_equal(model, reference)
        assert backend.num_copies - copies == 3 * 5


def test_a_state_dict_is_whole() -> None:
    """While enabled, half-way, of a part and through a parent; after disable all is there.

    B23, https://github.com/huggingface/transformers/pull/39280
    """
    model = make_toy(4)
    reference, before = twin(model), snapshot(model)
    offloaded = dlo.offload(model, device=PoisonBackend())

    def parts(root: Any) -> list[nn.Module]:
        pipeline = nn.ModuleDict({"text": nn.Linear(2, 2), "dit": root})
        leaf = attrgetter("blocks.3.linear")(root)
        nn.init.ones_(attrgetter("text.weight")(pipeline))
        nn.init.ones_(attrgetter("text.bias")(pipeline))
        return [root, pipeline, root.blocks, root.blocks[0], root.blocks[3], leaf, root.pre]

    def all_equal() -> None:
        for mine, theirs in zip(parts(model), parts(reference), strict=True):
            saved, wanted = mine.state_dict(), theirs.state_dict()
            assert list(saved) == list(wanted)
            assert all(torch.equal(saved[key], wanted[key]) for key in wanted)

    for _ in range(2):
        all_equal()
        model(inputs())
    offloaded.disable()
    assert_restored(model, before)
    all_equal()


@pytest.mark.parametrize("strict", [False, True])
def test_a_loaded_state_dict_changes_the_next_forward(strict: bool) -> None:
    """By the model itself; not by a part, a parent or with ``assign``, which change nothing.

    B23, https://github.com/huggingface/transformers/pull/39280
    """
    model = make_toy(4)
    other = make_toy(4, seed=1).state_dict()
    reference = twin(model)
    offloaded = dlo.offload(model, device=PoisonBackend())
    with pytest.raises(dlo.UseError, match=r"disable\(\), load"):
        model.load_state_dict(other, strict=strict, assign=True)
    for assign in (False, True):
        with pytest.raises(dlo.UseError, match=r"disable\(\), load"):
            model.blocks.load_state_dict(
                make_toy(4, seed=1).blocks.state_dict(), strict=strict, assign=assign
            )
        pipeline = nn.ModuleDict({"dit": model})
        with pytest.raises(dlo.UseError, match=r"disable\(\), load"):
            pipeline.load_state_dict(
                {f"dit.{key}": value for key, value in other.items()}, strict=strict, assign=assign
            )
    three_equal(model, reference)
    model.load_state_dict(other, strict=strict)
    three_equal(model, make_toy(4, seed=1))
    offloaded.disable()
    three_equal(model, make_toy(4, seed=1))
    model.load_state_dict(reference.state_dict())
    three_equal(model, reference)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_into_a_part_of_a_block_is_never_silent(assign: bool) -> None:
    """B23, https://github.com/huggingface/transformers/pull/39280"""
    model = make_toy(4)
    dlo.offload(model, device=PoisonBackend())
    leaf: Any = model.blocks[1].linear

    def load_and_run() -> None:
        leaf.load_state_dict(nn.Linear(WIDTH, WIDTH).state_dict(), assign=assign)
        model(inputs())

    with pytest.raises(RuntimeError, match=r"blocks\.1\.linear"):
        load_and_run()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda m: torch.save(m, io.BytesIO()),
}


@pytest.mark.parametrize("where", ["model", "pipeline", "blocks", "block"])
@pytest.mark.parametrize("how", COPIES)
def test_copying_and_pickling_is_refused_and_changes_nothing(how: str, where: str) -> None:
    """A copy that computes with the original's weights is the fault.

    B24, https://github.com/huggingface/accelerate/issues/1835
    """
    model = make_toy(4)
    reference, before = twin(model), snapshot(model)
    offloaded = dlo.offload(model, device=PoisonBackend())
    parts: dict[str, Any] = {
        "model": model,
        "pipeline": nn.ModuleDict({"text": nn.Linear(2, 2), "dit": model}),
        "blocks": model.blocks,
        "block": model.blocks[1],
    }
    with pytest.raises(dlo.UseError, match=r"disable\(\)"):
        COPIES[how](parts[where])
    three_equal(model, reference)
    offloaded.disable()
    assert_restored(model, before)
    copied = copy.deepcopy(model)
    attrgetter("blocks.0.linear.weight")(copied).fill_(5.0)
    assert torch.equal(model(inputs()), reference(inputs()))
    assert not torch.equal(copied(inputs()), reference(inputs()))
