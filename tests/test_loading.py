"""Loading under key_map, transforms and post_load: the bits that torch would make, or an error."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from toys import WIDTH, Block, Toy, assert_restored, inputs, make_toy, same_bits, snapshot, twin

import dlo_core as dlo
from dlo_core.cpu import CpuBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.layerwise import LayerwiseOffload

SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0}


class Fused(nn.Module):
    """A block with one fused projection, a gate and an up-projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(5 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all of it."""
        q, k, v = self.qkv(x).chunk(3, -1)
        wide = torch.cat([self.gate(x), self.up(x)], -1)
        out: torch.Tensor = x + q * k.tanh() + v + self.down(wide).tanh()
        return out


class Rope(nn.Module):
    """A table that no checkpoint has, and a plain number."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        blank = torch.empty(WIDTH)
        # Arithmetic on meta imports much of torch.
        table = blank if blank.is_meta else self.make()
        self.register_buffer("table", table, persistent=False)
        self.base = 1

    @staticmethod
    def make() -> torch.Tensor:
        return 1 / torch.arange(1, WIDTH + 1, dtype=torch.float32)

    def reset(self) -> None:
        """Make it again."""
        self.table = self.make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use it."""
        return x * self.table


class RopeToy(Toy):
    """A toy with rotary tables on the root and in each block."""

    scale: torch.Tensor

    def __init__(self, n: int = 3) -> None:
        super().__init__([RopeBlock() for _ in range(n)])
        self.rope = Rope()
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, x: torch.Tensor, skip: Any = ()) -> torch.Tensor:
        """Turn, then as always."""
        return super().forward(self.rope(x) * self.scale, skip)


class RopeBlock(Block):
    """A block with a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Rope()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Turn, then as always."""
        return super().forward(self.rope(x), scale)


class RopeOnly(RopeToy):
    """Has no other buffer than that of its rope."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        for block in self.blocks:
            del block.rope


def fill_scale(model: RopeToy) -> None:
    model.scale.fill_(3.0)


def fill_all(model: RopeToy) -> None:
    """Make every buffer, one in place."""
    model.scale.fill_(3.0)
    for module in model.modules():
        if isinstance(module, Rope):
            module.reset()


def fused_toy() -> Toy:
    torch.manual_seed(5)
    return Toy([Fused() for _ in range(3)]).requires_grad_(False).eval()


def meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make().requires_grad_(False).eval()


def start(model: nn.Module, path: Path, **more: Any) -> LayerwiseOffload:
    group = dist.group.WORLD if dist.is_initialized() else None
    return dlo.offload(
        model, device=CpuBackend(), group=group, checkpoint=path, **{**SHORT, **more}
    )


def save_split(model: Toy, path: Path) -> None:
    """Write the fused toy as another library would have: other names, parts, float32 transposed."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        key = "net." + name.replace("blocks.", "layers.")
        if ".qkv." in name:
            for part, value in zip("qkv", tensor.chunk(3), strict=True):
                tensors[key.replace(".qkv.", f".{part}.")] = value.clone()
        elif ".gate." in name:
            up = model.state_dict()[name.replace(".gate.", ".up.")]
            tensors[key.replace(".gate.", ".gate_up.")] = torch.cat([tensor, up])
        elif ".down." in name:
            tensors[key] = tensor.t().contiguous()
        elif ".up." not in name:
            tensors[key] = tensor
    tensors["vae.weight"] = torch.ones(3)
    save_file(tensors, path)


RULES: list[Any] = [
    dlo.Ignore("vae.*"),
    dlo.StripPrefix("net."),
    lambda key: key.replace("layers.", "blocks."),
    *(
        dlo.Fuse(f"blocks.*.qkv.{kind}", tuple(f"blocks.*.{part}.{kind}" for part in "qkv"))
        for kind in ("weight", "bias")
    ),
    dlo.Split(
        "blocks.*.gate_up.weight",
        ("blocks.*.gate.weight", "blocks.*.up.weight"),
        sizes=(2 * WIDTH, 3 * WIDTH),
    ),
]
TURN = {"blocks.*.down.weight": dlo.Transpose()}


# --- key_map and transforms -----------------------------------------------------------------------


@pytest.mark.parametrize("gathers", [True, False])
def test_another_librarys_checkpoint_gives_the_same_bits(gathers: bool, tmp_path: Path) -> None:
    resident = fused_toy()
    path = tmp_path / "a.safetensors"
    save_split(resident, path)

    def body(rank: int) -> None:
        model = meta(fused_toy)
        offloaded = start(model, path, key_map=RULES, transforms=TURN, use_allgather=gathers)
        with torch.inference_mode():
            for seed in range(2):
                x = inputs(rank + seed)
                assert torch.equal(model(x), resident(x))
        # Restored from the checkpoint, through the same rules.
        offloaded.disable()
        for name, tensor in model.state_dict().items():
            assert same_bits(tensor, resident.state_dict()[name]), name

    run_ranks(body, 3)


def test_a_cast_makes_the_bits_of_tensor_to(tmp_path: Path) -> None:
    stored = make_toy(4)
    path = tmp_path / "a.safetensors"
    save_file(stored.state_dict(), path)
    resident = twin(stored).to(torch.bfloat16)

    def body(rank: int) -> None:
        # One that has values keeps its dtype; one on meta takes what the cast makes.
        for model in (twin(resident), meta(lambda: make_toy(4))):
            offloaded = start(model, path, transforms={"*": dlo.Cast(torch.bfloat16)})
            with torch.inference_mode():
                x = inputs(rank, torch.bfloat16)
                assert torch.equal(model(x), resident(x))
            offloaded.disable()
            for name, tensor in model.state_dict().items():
                assert same_bits(tensor, resident.state_dict()[name]), name

    run_ranks(body, 2)


def test_a_difference_of_dtype_names_both_and_the_transform(tmp_path: Path) -> None:
    save_file(make_toy(2).state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(dlo.CheckpointError) as caught:
        start(make_toy(2, dtype=torch.bfloat16), tmp_path)
    for word in ("torch.float32", "torch.bfloat16", "transforms=", "Cast(torch.bfloat16)"):
        assert word in str(caught.value)


def quantise(weight: torch.Tensor) -> torch.Tensor:
    return (weight / weight.abs().max() * 127).round().to(torch.int8).float() / 127


def test_a_function_of_the_whole_tensor_works_in_rank_local_mode(tmp_path: Path) -> None:
    resident = make_toy(3)
    path = tmp_path / "a.safetensors"
    save_file(resident.state_dict(), path)
    with torch.no_grad():
        for block in resident.blocks:
            linear = block.get_submodule("linear")
            assert isinstance(linear, nn.Linear)
            linear.weight.copy_(quantise(linear.weight))
    model = meta(lambda: make_toy(3))
    convert = {"blocks.*.linear.weight": dlo.Convert(quantise)}
    offloaded = start(model, path, transforms=convert)
    with torch.inference_mode():
        assert torch.equal(model(inputs()), resident(inputs()))
    offloaded.disable()


def test_a_function_of_the_whole_tensor_is_refused_in_gather_mode(tmp_path: Path) -> None:
    save_file(make_toy(3).state_dict(), tmp_path / "a.safetensors")
    calls: list[int] = []

    def count(weight: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return weight

    def body(rank: int) -> None:
        model = meta(lambda: make_toy(3))
        convert = {"blocks.*.linear.weight": dlo.Convert(count)}
        with pytest.raises(dlo.ConfigError) as caught:
            start(model, tmp_path, transforms=convert)
        for word in ("blocks.0.linear.weight", "online quantisation", "use_allgather=False"):
            assert word in str(caught.value)
        assert not calls
        offloaded = start(model, tmp_path, transforms=convert, use_allgather=False)
        offloaded.disable()

    run_ranks(body, 2)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda t: t.half(), "made torch.float16"),
        (lambda t: t[:1], "of shape"),
        (lambda t: None, "made NoneType"),
    ],
)
def test_a_function_that_makes_something_else_is_named(
    function: Any, says: str, tmp_path: Path
) -> None:
    save_file(make_toy(2).state_dict(), tmp_path / "a.safetensors")
    model = make_toy(2)
    before = snapshot(model)
    with pytest.raises(dlo.ConfigError, match=rf"'pre\.weight'.*{says}"):
        start(model, tmp_path, transforms={"pre.weight": dlo.Convert(function)})
    assert_restored(model, before)


def test_ranks_whose_rules_differ_are_refused_on_all(tmp_path: Path) -> None:
    stored = make_toy(2)
    save_file(stored.state_dict(), tmp_path / "a.safetensors")
    swap = {
        "blocks.0.linear.weight": "blocks.1.linear.weight",
        "blocks.1.linear.weight": "blocks.0.linear.weight",
    }

    def body(rank: int) -> None:
        with pytest.raises(dlo.AgreementError, match="layouts"):
            start(meta(lambda: make_toy(2)), tmp_path, key_map=swap if rank == 1 else None)

    run_ranks(body, 2)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"key_map": dlo.AddPrefix("x.")}, "missing from it"),
        ({"transforms": {"nothing": dlo.Cast(torch.half)}}, "'nothing'"),
        ({"transforms": {"pre.weight": dlo.Reshape((-1,))}}, "'pre.weight' has shape"),
        ({"checkpoint": None, "key_map": {"a": "b"}}, "pass checkpoint="),
        ({"checkpoint": None, "transforms": {"*": dlo.Transpose()}}, "pass checkpoint="),
        ({"post_load": {"nowhere": print}}, "no module of that name"),
        ({"post_load": 3}, "must be a function"),
        ({"post_load": {"pre": 3}}, "must be a function"),
        ({"key_map": 3}, "key_map= wants"),
        ({"load_threads": 0}, "load_threads"),
        ({"direct_io": 1}, "direct_io"),
    ],
)
def test_what_cannot_be_honoured_raises_and_the_model_is_as_it_was(
    more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    model = make_toy(2)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    before = snapshot(model)
    with pytest.raises((dlo.ConfigError, dlo.CheckpointError), match=says):
        dlo.offload(model, device="cpu", **{"checkpoint": tmp_path, **more})
    assert_restored(model, before)


def test_several_models_have_rules_of_their_own(tmp_path: Path) -> None:
    first, second = make_toy(2), make_toy(3, seed=1)
    tensors = {f"a.{name}": tensor for name, tensor in first.state_dict().items()}
    tensors |= {f"b.{name}": tensor for name, tensor in second.state_dict().items()}
    path = tmp_path / "both.safetensors"
    save_file(tensors, path)
    models = [meta(lambda: make_toy(2)), meta(lambda: make_toy(3))]
    rules: Any = [
        [dlo.Ignore("b.*"), dlo.StripPrefix("a.")],
        [dlo.Ignore("a.*"), dlo.StripPrefix("b.")],
    ]
    with pytest.raises(dlo.ConfigError, match="sequence of 2 for key_map="):
        dlo.offload(models, device="cpu", checkpoint=[path, path], key_map=dlo.StripPrefix("a."))
    with dlo.offload(models, device="cpu", checkpoint=[path, path], key_map=rules):
        for model, resident in zip(models, (first, second), strict=True):
            with torch.inference_mode():
                assert torch.equal(model(inputs()), resident(inputs()))


def test_not_strict_falls_back_when_a_rule_does_not_fit(tmp_path: Path) -> None:
    model = make_toy(2)
    resident = twin(model)
    save_file(make_toy(2, seed=9).state_dict(), tmp_path / "a.safetensors")
    with pytest.warns(dlo.DloWarning, match="no name begins with it.*own values"):
        offloaded = start(model, tmp_path, key_map=dlo.StripPrefix("z."), strict=False)
    with torch.inference_mode():
        assert torch.equal(model(inputs()), resident(inputs()))
    offloaded.disable()


# --- post_load (B13) ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "post_load",
    [
        fill_all,
        {
            "": fill_scale,
            "rope": Rope.reset,
            **{f"blocks.{n}.rope": Rope.reset for n in range(3)},
        },
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_buffers_of_a_model_on_meta_are_exact(
    post_load: Any, num_ranks: int, tmp_path: Path
) -> None:
    """B13, https://github.com/huggingface/transformers/issues/34234."""
    torch.manual_seed(0)
    resident = RopeToy().requires_grad_(False).eval()
    save_file(resident.state_dict(), tmp_path / "a.safetensors")

    def body(rank: int) -> None:
        model = meta(RopeToy)
        offloaded = start(model, tmp_path, post_load=post_load)
        with torch.inference_mode():
            assert torch.equal(model(inputs(rank)), resident(inputs(rank)))
        assert not [n for n, t in model.named_buffers() if t.is_meta]
        offloaded.disable()
        wanted = dict(resident.named_buffers())
        for name, buffer in model.named_buffers():
            assert same_bits(buffer, wanted[name]), name
        # Still no part of a state dict.
        assert model.state_dict().keys() == resident.state_dict().keys()

    run_ranks(body, num_ranks)


def test_a_buffer_that_nobody_makes_is_named(tmp_path: Path) -> None:
    save_file(RopeToy().state_dict(), tmp_path / "a.safetensors")
    model = meta(RopeToy)
    before = dict(model.named_buffers())
    with pytest.raises(dlo.CheckpointError) as caught:
        start(model, tmp_path, post_load={"rope": Rope.reset})
    assert "'scale'" in str(caught.value)
    assert "'blocks.0.rope.table'" in str(caught.value)
    assert "'rope.table'" not in str(caught.value)
    assert "post_load=" in str(caught.value)
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


def spoil_shape(model: RopeToy) -> None:
    model.rope.table = torch.ones(3)


def spoil_dtype(model: RopeToy) -> None:
    model.rope.table = torch.ones(WIDTH, dtype=torch.float64)


def add_module(model: RopeToy) -> None:
    model.extra = nn.Linear(2, 2)


def add_buffer(model: RopeToy) -> None:
    model.register_buffer("extra", torch.ones(2))


def fail(model: RopeToy) -> None:
    model.rope.base = 7
    raise KeyError("rotary")


def make_stored(model: RopeToy) -> None:
    fill_all(model)
    model.pre.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (spoil_shape, r"'rope.table' as torch.float32 of shape \(3,\)"),
        (spoil_dtype, "'rope.table' as torch.float64"),
        (add_module, "changed the submodules"),
        (add_buffer, "'extra'"),
        (fail, "raised KeyError: 'rotary'"),
        (make_stored, "'pre.weight' is in it, and post_load= made it too"),
    ],
)
def test_a_function_that_does_wrong_is_named_and_the_model_is_as_it_was(
    function: Callable[[RopeToy], None], says: str, tmp_path: Path
) -> None:
    save_file(RopeToy().state_dict(), tmp_path / "a.safetensors")
    model = meta(RopeToy)
    assert isinstance(model, RopeToy)
    before = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    modules = dict(model.named_modules())
    with pytest.raises((dlo.ConfigError, dlo.CheckpointError), match=says):
        start(model, tmp_path, post_load=function)
    after = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert dict(model.named_modules()) == modules
    assert model.rope.base == 1


def test_buffers_with_values_can_be_made_anew_and_the_old_ones_stay_untouched(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    resident = RopeToy().requires_grad_(False).eval()
    save_file(resident.state_dict(), tmp_path / "a.safetensors")
    model = RopeToy().requires_grad_(False).eval()
    model.scale.fill_(8.0)
    held = model.scale
    with pytest.raises(dlo.CheckpointError):  # after post_load has run
        start(model, tmp_path, post_load=fill_all, key_map=dlo.AddPrefix("x."))
    assert held is model.scale
    assert held.item() == 8.0
    offloaded = start(model, tmp_path, post_load=fill_all)
    with torch.inference_mode():
        assert torch.equal(model(inputs()), resident(inputs()))
    offloaded.disable()
    assert held is model.scale
    assert held.item() == 3.0


class PlainTable(Toy):
    """Keeps a table as a plain attribute, which no ``to_empty`` and no checkpoint reaches."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(2)])
        self.freqs = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor, skip: Any = ()) -> torch.Tensor:
        """Use it."""
        return super().forward(x + self.freqs, skip)


def test_a_plain_tensor_on_meta_is_named_or_made(tmp_path: Path) -> None:
    torch.manual_seed(0)
    resident = PlainTable().requires_grad_(False).eval()
    save_file(resident.state_dict(), tmp_path / "a.safetensors")
    model = meta(PlainTable)
    with pytest.raises(dlo.CheckpointError, match=r"'freqs' is a tensor on meta.*post_load="):
        start(model, tmp_path)
    assert isinstance(model, PlainTable)
    assert model.freqs.is_meta

    def make(model: PlainTable) -> None:
        model.freqs = torch.ones(WIDTH)

    offloaded = start(model, tmp_path, post_load=make)
    with torch.inference_mode():
        assert torch.equal(model(inputs()), resident(inputs()))
    offloaded.disable()


def test_post_load_can_make_a_parameter_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    resident = make_toy(3)
    state = resident.state_dict()
    lacking = {"table": state.pop("table"), "blocks.1.norm.bias": state.pop("blocks.1.norm.bias")}
    save_file(state, tmp_path / "a.safetensors")

    def make(model: Any) -> None:
        model.table = nn.Parameter(lacking["table"].clone())
        model.blocks[1].norm.bias = nn.Parameter(lacking["blocks.1.norm.bias"].clone())

    def body(rank: int) -> None:
        model = meta(lambda: make_toy(3))
        offloaded = start(model, tmp_path, post_load=make)
        with torch.inference_mode():
            assert torch.equal(model(inputs()), resident(inputs()))
        offloaded.disable()
        for name, tensor in model.state_dict().items():
            assert same_bits(tensor, resident.state_dict()[name]), name

    run_ranks(body, 2)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("settings", [{}, {"use_allgather": False, "host": "shared"}])
def test_ranks_that_make_other_values_are_refused_where_they_would_be_mixed(
    settings: dict[str, Any], stored: bool, tmp_path: Path
) -> None:
    """A value far from what a sample sees; each of the ranks gives a part of it to the others."""
    path = tmp_path / "toy.safetensors"

    def build() -> Any:
        model = make_toy(3)
        extra = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
        model.blocks[1].register_parameter("extra", extra)
        return model

    save_file({k: v for k, v in build().state_dict().items() if "extra" not in k}, path)

    def job(rank: int) -> str:
        def make(module: Any, value: float) -> None:
            module.extra = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
            module.extra[20, 20] = value

        def offload(different: bool) -> None:
            dlo.offload(
                build(),
                device="cpu",
                group=dist.group.WORLD,
                checkpoint=path if stored else None,
                post_load={"blocks.1": lambda module: make(module, rank * different)},
                **settings,
            ).shutdown()

        with pytest.raises(dlo.AgreementError) as caught:
            offload(True)
        offload(False)
        return str(caught.value)

    for text in run_ranks(job, 2):
        assert "blocks.1.extra" in text if not settings else "models differ" in text


@pytest.mark.parametrize("where", ["within a block", "with the outside"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tied_names_with_different_bytes_are_refused(
    where: str, num_ranks: int, tmp_path: Path
) -> None:
    """They are of a model without the tie; the first would win, and nobody would know."""

    def build() -> Any:
        model: Any = make_toy(3)
        if where == "within a block":
            model.blocks[1].linear.register_parameter("twin", model.blocks[1].linear.weight)
        else:
            model.twin = model.blocks[1].linear.weight
        return model

    first = "blocks.1.linear.weight"
    second = "blocks.1.linear.twin" if where == "within a block" else "twin"
    torch.manual_seed(0)
    state = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    save_file(state, tmp_path / "same.safetensors")
    other = state[second].clone()
    other[-1, -1] += 1
    save_file({**state, second: other}, tmp_path / "other.safetensors")

    def body(rank: int) -> None:
        wanted, model = build(), build()
        path = tmp_path / "other.safetensors"
        one, two = sorted((first, second), key=[n for n, _ in _named(model)].index)
        with pytest.raises(dlo.CheckpointError, match=f"'{two}' and '{one}' are one tensor"):
            start(model, path)
        with pytest.warns(dlo.DloWarning, match="are one tensor in the model"):
            start(model, path, strict=False).disable()
        for offloaded in (
            start(model, tmp_path / "same.safetensors"),
            start(build(), path, key_map=dlo.Ignore(second)),
        ):
            mine = offloaded.models[0]
            with torch.inference_mode():
                assert torch.equal(mine(inputs(rank)), wanted(inputs(rank)))

    run_ranks(body, num_ranks)


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters(remove_duplicate=False))


# --- the page -------------------------------------------------------------------------------------


def test_the_snippets_of_the_page_run(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "loading.md").read_text()
    resident = fused_toy()
    save_split(resident, tmp_path / "other.safetensors")
    save_file(RopeToy().state_dict(), tmp_path / "rope.safetensors")
    resident = resident.to(torch.bfloat16)
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == 2
    for code in snippets:
        local = code.replace('"cuda"', '"cpu"').replace("path/to/", f"{tmp_path}/")
        space: dict[str, Any] = {
            "torch": torch,
            "dlo": dlo,
            "model": meta(fused_toy),
            "MyTransformer": RopeOnly,
        }
        exec(compile(local, "loading.md", "exec"), space)
        if "Fuse" in code:
            x = inputs(0, torch.bfloat16)
            with torch.inference_mode():
                assert torch.equal(space["model"](x), resident(x))
        space["offloaded"].disable()


# --- B33 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("direct_io", [True, False])
def test_nothing_stays_on_meta_whatever_way_is_chosen(
    num_ranks: int, gathers: bool, direct_io: bool, tmp_path: Path
) -> None:
    """B33, https://github.com/vllm-project/vllm-omni/pull/6213: who decides is who reads."""
    torch.manual_seed(0)
    resident = RopeToy().requires_grad_(False).eval()
    save_file(resident.state_dict(), tmp_path / "a.safetensors")
    if direct_io:
        skip_without_direct_reads(tmp_path)

    def body(rank: int) -> None:
        model = meta(RopeToy)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            offloaded = start(
                model, tmp_path, post_load=fill_all, use_allgather=gathers, direct_io=direct_io
            )
        tensors = [*model.named_parameters(), *model.named_buffers()]
        assert not [name for name, tensor in tensors if tensor.device.type == "meta"]
        with torch.inference_mode():
            assert torch.equal(model(inputs(rank)), resident(inputs(rank)))
        offloaded.disable()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        assert not [name for name, tensor in tensors if tensor.is_meta]

    run_ranks(body, num_ranks)


def skip_without_direct_reads(folder: Path) -> None:
    from dlo_core.file_reads import check_direct

    try:
        check_direct(next(folder.glob("*.safetensors")))
    except dlo.ConfigError:
        pytest.skip("the file system of the temporary folder takes no direct reads")
