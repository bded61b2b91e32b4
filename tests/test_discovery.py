"""Finding a model's blocks: declared, by the classes that diffusers names, or by the rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from toys import Block, Toy, WideBlock

from dlo_core.discovery import FoundBlock, find_blocks
from dlo_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Leaf(nn.Module):
    """A module of one parameter that is called."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x @ self.weight


class Other(Leaf):
    """The same of another class."""


class Holder(nn.Module):
    """Any modules by name; it declares nothing."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x


def leaves(n: int, width: int = 4) -> nn.ModuleList:
    return nn.ModuleList(Leaf(width) for _ in range(n))


def names(blocks: Iterable[FoundBlock]) -> list[str]:
    return [block.name for block in blocks]


def refusal(model: Any, blocks: Any = None) -> str:
    """Return the message with which this is refused."""
    with pytest.raises(ConfigError) as caught:
        find_blocks(model, blocks)
    return str(caught.value)


# --- declared containers ----------------------------------------------------------------------


def test_names_give_their_children_in_the_order_of_the_names() -> None:
    model = Holder(first=leaves(2), second=leaves(2))
    found = find_blocks(model, ["second", "first"])
    assert names(found) == ["second.0", "second.1", "first.0", "first.1"]
    assert all(block.module is model.get_submodule(block.name) for block in found)


def test_one_name_may_be_a_plain_string() -> None:
    assert names(find_blocks(Holder(first=leaves(1), second=leaves(2)), "first")) == ["first.0"]


@pytest.mark.parametrize(
    ("container", "keys"),
    [
        (leaves(2), ["0", "1"]),
        (nn.ModuleDict({"b": Leaf(), "a": Leaf()}), ["b", "a"]),
        (nn.Sequential(Leaf(), Other()), ["0", "1"]),
    ],
)
def test_every_container_two_levels_down(container: nn.Module, keys: list[str]) -> None:
    model = Holder(core=Holder(trunk=Holder(layers=container)))
    found = find_blocks(model, ["core.trunk.layers"])
    assert names(found) == [f"core.trunk.layers.{key}" for key in keys]


class Wrapped(Holder):
    """Shows its nested blocks as its own, through a property."""

    @property
    def layers(self) -> nn.ModuleList:
        return self.get_submodule("core.layers")  # type: ignore[return-value]

    @property
    def every_second(self) -> list[nn.Module]:
        return list(self.layers)[::2]


def test_a_property_over_a_nested_child_gives_the_registered_names() -> None:
    """B14: names of the property were compared with those of registered children."""
    model = Wrapped(core=Holder(layers=leaves(3)))
    assert names(find_blocks(model, ["layers"])) == [
        "core.layers.0",
        "core.layers.1",
        "core.layers.2",
    ]
    assert names(find_blocks(model, ["every_second"])) == ["core.layers.0", "core.layers.2"]
    assert names(find_blocks(Holder(dit=model), ["dit.layers"]))[0] == "dit.core.layers.0"


def test_a_name_goes_through_list_items_and_dict_keys() -> None:
    model = Holder(stages=nn.ModuleList([leaves(2), leaves(2)]), by=nn.ModuleDict({"x": leaves(1)}))
    assert names(find_blocks(model, ["stages.1", "by.x"])) == ["stages.1.0", "stages.1.1", "by.x.0"]


def test_blocks_may_differ_in_class_and_there_may_be_one() -> None:
    assert names(find_blocks(Holder(a=nn.ModuleList([Leaf(), Other()])), ["a"])) == ["a.0", "a.1"]
    assert names(find_blocks(Holder(a=leaves(1)), ["a"])) == ["a.0"]


def test_children_without_tensors_are_no_blocks() -> None:
    model = Holder(a=nn.ModuleList([Leaf(), nn.Identity(), Leaf(), nn.Dropout()]))
    assert names(find_blocks(model, ["a"])) == ["a.0", "a.2"]


def test_a_module_that_a_list_holds_twice_is_one_block() -> None:
    shared = Leaf()
    assert names(find_blocks(Holder(a=nn.ModuleList([shared, Leaf(), shared])), ["a"])) == [
        "a.0",
        "a.1",
    ]


def test_a_sequential_can_be_a_block_for_it_is_called() -> None:
    model = Holder(a=nn.ModuleList(nn.Sequential(Leaf(), nn.ReLU()) for _ in range(2)))
    assert names(find_blocks(model, ["a"])) == ["a.0", "a.1"]
    assert names(find_blocks(model)) == ["a.0", "a.1"]


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (["layres"], "blocks= names 'layres', but Holder has no such container; perhaps 'layers'"),
        (["tail"], "perhaps 'core.tail'"),
        (["layers.5"], "blocks= names 'layers.5'"),
        ([""], "blocks= names ''"),
        (["proj"], "names 'proj', which is a Leaf; wanted a container of blocks"),
        (["layers.0"], "names 'layers.0', which is a Leaf"),
        (["empty"], "names 'empty', which is empty"),
        (["nested"], "gives 'nested.0' as a block, but a ModuleList has no forward"),
        (["layers", "layers"], "block 'layers.0' is given twice"),
        (["layers", "core.tail", "layers"], "given twice"),
        ([], "blocks= gives no block of Holder; name the containers"),
        ([5], "blocks= wants dotted names of containers"),
        (5, "blocks= wants dotted names of containers"),
        ([leaves(1)], "blocks= wants dotted names of containers"),
        (leaves(1), "blocks= wants dotted names of containers"),
        (["idle"], "the blocks of Holder hold no tensors"),
    ],
)
def test_names_that_give_no_blocks_are_refused(blocks: Any, says: str) -> None:
    model = Holder(
        layers=leaves(2),
        core=Holder(tail=leaves(2)),
        nested=nn.ModuleList([leaves(2), leaves(2)]),
        empty=nn.ModuleList(),
        proj=Leaf(),
        idle=nn.ModuleList([nn.Identity()]),
    )
    assert says in refusal(model, blocks)


def test_blocks_inside_blocks_are_refused() -> None:
    outer = nn.ModuleList(Holder(inner=leaves(2)) for _ in range(2))
    message = refusal(Holder(outer=outer), ["outer", "outer.1.inner"])
    assert "block 'outer.1.inner.0' lies inside block 'outer.1'; blocks must not overlap" in message


# --- declared by a function -------------------------------------------------------------------


def test_a_function_gives_blocks_in_its_order() -> None:
    model = Holder(a=leaves(2), b=nn.ModuleDict({"x": Leaf()}), c=Leaf())

    def give(root: nn.Module) -> Iterable[nn.Module]:
        assert root is model
        yield model.get_submodule("c")
        yield from reversed(list(model.get_submodule("a").children()))

    assert names(find_blocks(model, give)) == ["c", "a.1", "a.0"]
    assert names(find_blocks(model, lambda root: root.get_submodule("b"))) == ["b.x"]  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (lambda model: None, "must return an iterable of modules; it returned a NoneType"),
        (lambda model: model.proj, "must return an iterable of modules; it returned a Leaf"),
        (lambda model: [], "blocks= gives no block of Holder"),
        (lambda model: ["layers"], "gives a str as a block; wanted a registered submodule"),
        (lambda model: [Leaf()], "gives a Leaf as a block; wanted a registered submodule"),
        (lambda model: [model], "gives the model itself as a block"),
        (
            lambda model: [model.layers],
            "gives 'layers' as a block, but a ModuleList has no forward",
        ),
        (lambda model: [model.proj, model.proj], "block 'proj' is given twice"),
    ],
)
def test_functions_that_give_no_blocks_are_refused(give: Any, says: str) -> None:
    assert says in refusal(Holder(layers=leaves(2), proj=Leaf()), give)


def test_an_error_in_the_function_is_the_callers_own() -> None:
    def give(model: nn.Module) -> Iterable[nn.Module]:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        find_blocks(Holder(), give)


# --- declared by the class --------------------------------------------------------------------


class Declared(Holder):
    """Declares the second list."""

    dlo_blocks: Any = ("second",)


def test_the_class_may_declare_its_blocks() -> None:
    model = Declared(first=leaves(2), second=leaves(2))
    assert names(find_blocks(model)) == ["second.0", "second.1"]
    assert names(find_blocks(model, ["first"])) == ["first.0", "first.1"]


def test_the_class_may_declare_a_function_a_method_or_a_property() -> None:
    class ByMethod(Holder):
        def dlo_blocks(self) -> Iterable[nn.Module]:
            return list(self.get_submodule("second").children())

    class ByFunction(Holder):
        dlo_blocks = staticmethod(lambda model: list(model.second))

    class ByProperty(Holder):
        @property
        def dlo_blocks(self) -> tuple[str, ...]:
            return ("second",)

    for kind in (ByMethod, ByFunction, ByProperty):
        model = kind(first=leaves(2), second=leaves(2))
        assert names(find_blocks(model)) == ["second.0", "second.1"]


def test_a_wrong_declaration_is_named_by_its_class() -> None:
    assert "Declared.dlo_blocks names 'second', but Declared has no such" in refusal(Declared())


# --- declared by diffusers' class names -------------------------------------------------------


class Repeated(Holder):
    """Declares as diffusers does."""

    _repeated_blocks: Any = ("Leaf",)
    _no_split_modules: Any = ("Other",)


def test_repeated_blocks_win_over_no_split_modules() -> None:
    lists = {"other": nn.ModuleList([Other()]), "leaf": leaves(1)}
    assert names(find_blocks(Repeated(**lists))) == ["leaf.0"]
    assert names(find_blocks(Repeated(other=lists["other"]))) == ["other.0"]


def test_only_the_outermost_in_a_container_count() -> None:
    outer = Holder(inner=leaves(2))
    outer.__class__ = type("Leaf", (Holder,), {})
    model = Repeated(alone=Leaf(), mixed=nn.ModuleList([outer, Other(), Leaf()]))
    assert names(find_blocks(model)) == ["mixed.0", "mixed.2"]


@pytest.mark.parametrize("empty", [None, [], set(), ["Nothing"]])
def test_the_rule_is_used_where_no_named_class_is_found(empty: Any) -> None:
    model = Repeated(a=leaves(2))
    model._repeated_blocks = empty
    assert names(find_blocks(model)) == ["a.0", "a.1"]


# --- the rule ---------------------------------------------------------------------------------


def test_all_lists_above_the_share_count_in_registration_order() -> None:
    model = Holder(a=leaves(2), proj=Leaf(), b=leaves(3), few=leaves(2, 1), big=Leaf(30))
    assert names(find_blocks(model)) == ["a.0", "a.1", "b.0", "b.1", "b.2"]


def test_the_rule_needs_no_values() -> None:
    with torch.device("meta"):
        model = Holder(a=leaves(2), proj=Leaf())
    assert names(find_blocks(model)) == ["a.0", "a.1"]


def test_a_list_of_lists_is_no_list_of_blocks() -> None:
    """ConsisID's facial extractor: its lists of lists are never called."""
    model = Holder(extractor=nn.ModuleList(leaves(2) for _ in range(2)), blocks=leaves(2))
    assert names(find_blocks(model)) == [
        "extractor.0.0",
        "extractor.0.1",
        "extractor.1.0",
        "extractor.1.1",
        "blocks.0",
        "blocks.1",
    ]


def test_a_model_that_is_a_sequential_is_its_own_list() -> None:
    assert names(find_blocks(nn.Sequential(Block(), Block()))) == ["0", "1"]


def test_a_list_of_several_classes_is_looked_into() -> None:
    mixed = nn.ModuleList([Holder(inner=leaves(2)), Leaf()])
    assert names(find_blocks(Holder(mixed=mixed))) == ["mixed.0.inner.0", "mixed.0.inner.1"]


def test_a_wrapper_around_the_model_changes_the_names_only() -> None:
    model = Declared(first=leaves(2), second=leaves(2))
    compiled: Any = torch.compile(model, backend="eager")
    assert names(find_blocks(compiled)) == ["_orig_mod.second.0", "_orig_mod.second.1"]
    assert names(find_blocks(compiled, ["first"])) == ["_orig_mod.first.0", "_orig_mod.first.1"]


def test_a_module_in_two_lists_is_one_block() -> None:
    a, b, c = Leaf(), Leaf(), Leaf()
    model = Holder(up=nn.ModuleList([a, b]), down=nn.ModuleList([b, c]))
    assert names(find_blocks(model)) == ["up.0", "up.1", "down.1"]


def test_uninitialised_parameters_are_not_counted() -> None:
    model = Holder(lazy=nn.LazyLinear(3), a=leaves(2))
    assert names(find_blocks(model)) == ["a.0", "a.1"]


def test_nothing_found_lists_what_was_looked_at_and_the_remedy() -> None:
    class Strange(Repeated):
        pass

    model = Strange(
        one=nn.ModuleList([Block()]),
        mixed=nn.ModuleList([Block(), WideBlock()]),
        tiny=nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]),
        idle=nn.Sequential(nn.Identity(), nn.Identity()),
        empty=nn.ModuleDict(),
        nested=nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block()])]),
        big=nn.Linear(20, 20),
    )
    message = refusal(model)
    assert message.splitlines()[0] == "no blocks were found in Strange. Looked at:"
    for line in (
        "_repeated_blocks = ['Leaf']: no container holds one",
        "_no_split_modules = ['Other']: no container holds one",
        "'one': 1 x Block, 6.",
        "fewer than two children",
        "'mixed': 2 x Block or WideBlock",
        "children of several classes",
        "'tiny': 2 x Linear, 0.3% of the parameters; less than 1%",
        "'idle': 2 x Identity, 0.0% of the parameters; a child has no parameters",
        "'empty': 0 x nothing",
        "'nested': 2 x ModuleList",
        "its children have no forward",
        "To go on, name the containers of its blocks in run order, blocks=('name', ...)",
    ):
        assert line in message


def test_the_list_of_what_was_looked_at_is_short() -> None:
    model = Holder(**{f"list{n}": leaves(1) for n in range(30)})
    message = refusal(model)
    assert "and 20 smaller ones" in message
    assert len(message.splitlines()) == 13


def test_a_model_without_containers_or_parameters() -> None:
    assert "no ModuleList, ModuleDict or Sequential in it" in refusal(Leaf())
    assert "no blocks were found" in refusal(Holder(a=nn.ModuleList([nn.ReLU(), nn.ReLU()])))


@pytest.mark.parametrize("value", [None, "model", 5, Toy, {"w": 1}])
def test_what_is_not_a_module_is_refused(value: Any) -> None:
    assert "offload() needs a torch.nn.Module; got a " in refusal(value)


def test_a_pipeline_is_told_which_modules_it_has() -> None:
    pipeline = SimpleNamespace(transformer=Leaf(), vae=Leaf(), scheduler=5)
    assert "got a SimpleNamespace, which has the modules transformer, vae" in refusal(pipeline)
