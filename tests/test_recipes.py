"""Recipes: any range of a tensor that is fused, split, transposed or converted has torch's bits."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dlo_core import pieces
from dlo_core.checkpoint import Checkpoint
from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.key_map import AddPrefix, Fuse, Ignore, Split, StripPrefix, map_keys
from dlo_core.layout import TensorSpec
from dlo_core.rawbytes import bytes_of
from dlo_core.recipe import Recipe
from dlo_core.source import StoredTensor, stored_recipes
from dlo_core.transforms import Cast, Convert, Reshape, TransformTable, Transpose, transforms_for

if TYPE_CHECKING:
    from pathlib import Path


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec("t", tensor.dtype, tuple(tensor.shape), tensor.stride())


def read(source: StoredTensor, spec: TensorSpec, start: int, stop: int) -> torch.Tensor:
    out = torch.full((stop - start,), 0xA5, dtype=torch.uint8)
    source.read(spec, start, stop, out)
    return out


def check_ranges(source: StoredTensor, wanted: torch.Tensor, cuts: list[int]) -> None:
    """Compare the whole, and every range between two neighbours of ``cuts``, with ``wanted``."""
    spec = spec_of(wanted)
    assert source.shape == tuple(wanted.shape)
    assert source.dtype == wanted.dtype
    raw = bytes_of(wanted, spec.nbytes)
    assert torch.equal(read(source, spec, 0, spec.nbytes), raw)
    edges = sorted({0, spec.nbytes, *(cut % (spec.nbytes + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(edges):
        assert torch.equal(read(source, spec, start, stop), raw[start:stop]), (start, stop)


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, int, list[Any], list[int], torch.dtype]:
    """Draw how many tensors are fused, along which dimension, and what is done then."""
    count = draw(st.integers(1, 3))
    dim = draw(st.integers(0, 2))
    steps: list[Any] = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "narrow", "cast"]))
        if kind == "transpose":
            steps.append((kind, draw(st.integers(0, 2)), draw(st.integers(0, 2))))
        elif kind == "narrow":
            steps.append((kind, draw(st.integers(0, 2)), draw(st.integers(0, 9)), 0))
        else:
            dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
            steps.append((kind, draw(st.sampled_from(dtypes)), 0))
    cuts = draw(st.lists(st.integers(0, 10_000), max_size=6))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]))
    return count, dim, steps, cuts, dtype


@settings(max_examples=120, deadline=None)
@given(program=programs(), channels_last=st.booleans(), small=st.booleans())
def test_any_range_of_any_recipe_has_the_bits_that_torch_makes(
    tmp_path_factory: pytest.TempPathFactory,
    program: tuple[int, int, list[Any], list[int], torch.dtype],
    channels_last: bool,
    small: bool,
) -> None:
    count, dim, steps, cuts, dtype = program
    gen = torch.Generator().manual_seed(count)
    parts = []
    for number in range(count):
        shape = [4, 3, 5]
        shape[dim] += number
        parts.append((torch.rand(shape, generator=gen) * 200).to(dtype))
    path = tmp_path_factory.mktemp("recipe") / "a.safetensors"
    save_file({f"p{number}": part for number, part in enumerate(parts)}, path)
    with Checkpoint.open(path) as checkpoint, pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(pieces, "LAID_NBYTES", 32)
            patch.setattr(pieces, "_GAP_NBYTES", 8)
        recipes = [Recipe.of(checkpoint.tensors[f"p{number}"]) for number in range(count)]
        recipe, wanted = Recipe.concat(recipes, dim), torch.cat(parts, dim)
        for kind, first, second, *_ in steps:
            if kind == "transpose":
                recipe, wanted = recipe.transpose(first, second), wanted.transpose(first, second)
            elif kind == "narrow":
                start = second % wanted.shape[first]
                length = wanted.shape[first] - start
                recipe = recipe.narrow(first, start, length)
                wanted = wanted.narrow(first, start, length)
            else:
                recipe, wanted = recipe.cast(first), wanted.to(first)
        wanted = wanted.contiguous()
        if channels_last:  # any physical order will do
            wanted = wanted.transpose(0, 2).contiguous().transpose(0, 2)
        check_ranges(StoredTensor(checkpoint, recipe), wanted, cuts)


def test_a_reshape_sees_the_same_elements(tmp_path: Path) -> None:
    weight = torch.rand(6, 4)
    save_file({"w": weight}, tmp_path / "a.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        recipe = Recipe.of(checkpoint.tensors["w"])
        steps = (Reshape((2, -1, 4)), Transpose(0, 1), Cast(torch.bfloat16))
        made, convert = transforms_for("w", recipe, steps)
        assert convert is None
        wanted = weight.reshape(2, 3, 4).transpose(0, 1).bfloat16().contiguous()
        check_ranges(StoredTensor(checkpoint, made), wanted, [7, 13, 22])


def test_only_the_wanted_bytes_are_read_where_that_is_possible(tmp_path: Path) -> None:
    weight = torch.rand(64, 64)
    save_file({"q": weight, "k": weight + 1}, tmp_path / "a.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        fused = Recipe.concat([Recipe.of(checkpoint.tensors[key]) for key in ("q", "k")], 0)
        wanted = torch.cat([weight, weight + 1]).bfloat16()
        spec = spec_of(wanted)
        quarter = spec.nbytes // 4
        out = read(StoredTensor(checkpoint, fused.cast(torch.bfloat16)), spec, 0, quarter)
        assert torch.equal(out, bytes_of(wanted, spec.nbytes)[:quarter])
        # Half the bytes of a quarter of the two, which are twice as wide on disk.
        assert checkpoint.bytes_read == 2 * quarter


def test_a_conversion_needs_little_memory(tmp_path: Path) -> None:
    """The largest scratch is that of a piece, whatever the tensor's size."""
    weight = torch.rand(4096, 1024)
    save_file({"w": weight}, tmp_path / "a.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        recipe = Recipe.of(checkpoint.tensors["w"]).transpose(0, 1).cast(torch.bfloat16)
        wanted = weight.t().bfloat16().contiguous()
        spec = spec_of(wanted)
        out = memoryview(bytearray(spec.nbytes))
        made = list(pieces.pieces_of(recipe, spec, 0, spec.nbytes, out))
        assert max(piece.nbytes for piece in made) <= pieces.LAID_NBYTES
        assert sum(piece.nbytes for piece in made) == weight.nbytes
        assert torch.equal(
            read(StoredTensor(checkpoint, recipe), spec, 0, spec.nbytes),
            bytes_of(wanted, spec.nbytes),
        )


# --- key maps -------------------------------------------------------------------------------------


def stored(folder: Path, **shapes: tuple[int, ...]) -> Checkpoint:
    gen = torch.Generator().manual_seed(0)
    tensors = {
        name.replace("__", "."): torch.rand(shape, generator=gen) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "a.safetensors")
    return Checkpoint.open(folder / "a.safetensors")


def recipes_of(checkpoint: Checkpoint) -> dict[str, Recipe]:
    return {key: Recipe.of(tensor) for key, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize(
    "rule",
    [
        StripPrefix("model."),
        {"model.a": "a", "model.b": "b"},
        lambda key: key[len("model.") :],
        [{"model.a": "x.a", "model.b": "x.b"}, StripPrefix("x.")],
        [StripPrefix("model."), AddPrefix("y."), lambda key: key[2:]],
    ],
)
def test_names_are_changed_by_any_kind_of_rule(tmp_path: Path, rule: Any) -> None:
    checkpoint = stored(tmp_path, model__a=(2,), model__b=(3,))
    made = stored_recipes(checkpoint, rule)
    assert {name: recipe.keys for name, recipe in made.items()} == {
        "a": ("model.a",),
        "b": ("model.b",),
    }


def test_stars_fuse_and_split_every_block(tmp_path: Path) -> None:
    checkpoint = stored(
        tmp_path,
        blocks__0__q=(2, 3),
        blocks__0__k=(4, 3),
        blocks__1__q=(2, 3),
        blocks__1__k=(4, 3),
        up__7__both=(6, 2),
    )
    rules: Any = [
        Fuse("blocks.*.qk", ("blocks.*.q", "blocks.*.k")),
        Split("up.*.both", ("up.*.gate", "up.*.value"), sizes=(4, 2)),
    ]
    made = map_keys(recipes_of(checkpoint), rules)
    assert {name: recipe.shape for name, recipe in made.items()} == {
        "blocks.0.qk": (6, 3),
        "blocks.1.qk": (6, 3),
        "up.7.gate": (4, 2),
        "up.7.value": (2, 2),
    }


def test_what_is_ignored_and_what_a_function_drops_is_gone(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, vae__a=(2,), vae__b__c=(2,), dit__a=(2,))
    assert list(map_keys(recipes_of(checkpoint), Ignore("vae.*"))) == ["dit.a"]
    drop = lambda key: None if key.startswith("vae") else key  # noqa: E731
    assert list(map_keys(recipes_of(checkpoint), drop)) == ["dit.a"]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"nothing": "x"}, "renames 'nothing', which the checkpoint lacks"),
        (StripPrefix("z."), "no name begins with it"),
        (Ignore("z*"), "no such name"),
        (Fuse("x", ("a", "z")), "'z', which is missing"),
        (Fuse("x", ("a", "b"), dim=1), "no dimension 1"),
        (Fuse("x", ("a", "c")), "differ in more than dimension 0"),
        (Fuse("c", ("a", "b")), "'c', which the checkpoint has already"),
        (Fuse("x.*", ("z.*", "b.*")), r"has no 'z\.\*'"),
        (Split("a", ("x", "y")), "3 entries do not make 2 equal parts"),
        (Split("a", ("x", "y"), sizes=(1, 1)), "3 entries are not the 2"),
        (Split("a", ("x", "b"), sizes=(1, 2)), "'b', which the checkpoint has already"),
        (lambda key: "same", "makes 'same' of both 'a' and 'b'"),
    ],
)
def test_a_rule_that_does_not_fit_is_named(tmp_path: Path, rule: Any, says: str) -> None:
    checkpoint = stored(tmp_path, a=(3,), b=(3,), c=(2, 2))
    with pytest.raises(CheckpointError, match=says) as caught:
        stored_recipes(checkpoint, rule)
    assert str(checkpoint.path) in str(caught.value)


def test_tensors_of_two_dtypes_are_never_fused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2).half()}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is torch.float32 but 'b' is torch.float16"):
        stored_recipes(Checkpoint.open(tmp_path), Fuse("x", ("a", "b")))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Fuse("x", ("a",)), "at least two names"),
        (lambda: Fuse("x.*", ("a", "b")), "as many \\*"),
        (lambda: Split("x", ("a", "a")), "a name twice"),
        (lambda: Split("x", ("a", "b"), sizes=(1,)), "2 names got 1 sizes"),
        (lambda: Split("x", ("a", "b"), dim="0"), "dim="),  # type: ignore[arg-type]
        (lambda: StripPrefix(""), "non-empty"),
        (lambda: Ignore(3), "non-empty"),  # type: ignore[arg-type]
        (lambda: map_keys({}, 3), "key_map= wants"),  # type: ignore[arg-type]
        (lambda: map_keys({}, {"a": 3}), "non-empty"),  # type: ignore[dict-item]
        (lambda: Cast("bf16"), "torch.dtype"),  # type: ignore[arg-type]
        (lambda: Transpose(0, None), "whole numbers"),  # type: ignore[arg-type]
        (lambda: Reshape("ab"), "whole numbers"),  # type: ignore[arg-type]
        (lambda: Convert(3), "wants a function"),  # type: ignore[arg-type]
        (lambda: TransformTable([Cast(torch.half)]), "must be a mapping"),  # type: ignore[arg-type]
        (lambda: TransformTable({"a": torch.relu}), "wrap a function in Convert"),  # type: ignore[dict-item]
        (lambda: TransformTable({3: Cast(torch.half)}), "names of tensors"),  # type: ignore[dict-item]
    ],
)
def test_what_is_no_rule_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([Transpose(0, 2)], "Transpose.* does not fit: .* no dimension 2"),
        ([Reshape((5, -1))], "cannot be seen as"),
        ([Transpose(), Reshape((-1,))], "without moving elements"),
        ([Convert(torch.relu), Cast(torch.half)], "Convert must be the last"),
    ],
)
def test_a_transform_that_does_not_fit_is_named(tmp_path: Path, steps: Any, says: str) -> None:
    checkpoint = stored(tmp_path, a=(3, 4))
    with pytest.raises(ConfigError, match=f"transforms= of 'w'.*{says}"):
        transforms_for("w", Recipe.of(checkpoint.tensors["a"]), steps)


def test_a_cast_that_drops_imaginary_parts_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.complex64)}, tmp_path / "a.safetensors")
    recipe = Recipe.of(Checkpoint.open(tmp_path).tensors["a"])
    with pytest.raises(ConfigError, match="imaginary"):
        transforms_for("w", recipe, [Cast(torch.float32)])


def test_an_exact_name_goes_before_a_pattern_and_unused_ones_are_told() -> None:
    table = TransformTable(
        {"*": Cast(torch.half), "a.b": Cast(torch.bfloat16), "x.*": Transpose(), "y": Transpose()}
    )
    assert table.of(["a.b"]) == (Cast(torch.bfloat16),)
    assert table.of(["a.c"]) == (Cast(torch.half),)
    assert table.unused() == ["y", "x.*"]
