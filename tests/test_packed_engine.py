"""Packed weights in the engine: bits, bytes, what is read back and written, what is refused."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from toys import TOYS, assert_restored, inputs, same_bits, snapshot, twin

import dlo_core as dlo
from dlo_core.checkpoint import Checkpoint
from dlo_core.coder import Coder
from dlo_core.cpu import CpuBackend
from dlo_core.errors import ConfigError, DloError, UseError
from dlo_core.pack import pack_checkpoint
from dlo_core.packed_cut import PackedCut

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0}
WIDTH = 96


class Wide(nn.Module):
    """A block of bf16 matrices of several chunks, a float32 norm, noise, odd sizes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden, dtype=torch.bfloat16)
        self.down = nn.Linear(hidden, WIDTH, dtype=torch.bfloat16)
        noise = torch.randint(-32768, 32767, (5001,), dtype=torch.int16)
        self.noise = nn.Parameter(noise.view(torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what no other block returns."""
        y = self.down(self.up(self.norm(x).bfloat16()).relu())
        z: torch.Tensor = x + y.float() + self.noise[-WIDTH:].view(torch.int16).float() * 1e-6
        return z


class Model(nn.Module):
    """Blocks of two sizes, and a matrix outside of them."""

    dlo_blocks = ("blocks",)

    def __init__(self, num_blocks: int, hidden: int = 251) -> None:
        super().__init__()
        torch.manual_seed(num_blocks)
        self.blocks = nn.ModuleList(Wide(hidden + 40 * (n % 2)) for n in range(num_blocks))
        self.out = nn.Linear(WIDTH, 3)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.out(x)
        return out


def data() -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))


def new_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return other values of the same kind."""
    return {name: value.roll(1, 0) for name, value in model.state_dict().items()}


def whole_life(rank: int, settings: dict[str, Any], num_blocks: int = 4) -> float:
    """Use a model in every way; return the ratio."""
    model = Model(num_blocks)
    resident, before = twin(model), snapshot(model)
    group = torch.distributed.group.WORLD if settings.get("ranks", 1) > 1 else None
    gc.collect()
    held = CpuBackend().memory().allocated
    given = {name: value for name, value in settings.items() if name != "ranks"}
    offloaded = dlo.offload(model, device="cpu", group=group, packed=True, **given, **SHORT)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(data()), resident(data()))
    state = offloaded.state_dict()
    assert state is not None
    assert all(same_bits(state[name], value) for name, value in resident.state_dict().items())
    stats, footprint = offloaded.stats(), offloaded.footprint
    if settings.get("ranks", 1) == 1:
        gc.collect()
        assert CpuBackend().memory().allocated - held <= stats.device_bytes
    assert stats.device_bytes == footprint.device_nbytes
    assert stats.host_bytes == footprint.host_nbytes
    ratio = stats.packed_ratio
    assert ratio is not None
    assert stats.copied_bytes < stats.passes * footprint.blocks_nbytes * 1.5
    values = new_values(resident)
    offloaded.update_weights(values)
    resident.load_state_dict(values)
    with torch.inference_mode():
        assert torch.equal(model(data()), resident(data()))
    offloaded.update_weights(before := {k: v.roll(-1, 0) for k, v in values.items()})
    resident.load_state_dict(before)
    offloaded.disable()
    assert all(same_bits(model.state_dict()[k], v) for k, v in resident.state_dict().items())
    with torch.inference_mode():
        assert torch.equal(model(data()), resident(data()))
    return ratio


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"depth": 3, "resident_layers": 2},
        pytest.param({"resident_layers": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_alone_has_the_bits_in_every_use(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    # Some chunks are noise, and small tensors take one each.
    assert whole_life(0, settings) < 0.95


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {}),
        (2, {"stages": 0, "resident_layers": 1}),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(4, {"depth": 3}, marks=pytest.mark.slow),
        pytest.param(3, {"stages": 0, "resident_layers": 2}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_gather_packed_bytes_have_the_bits_in_every_use(
    ranks: int, settings: dict[str, Any]
) -> None:
    run_ranks(partial(whole_life, settings=settings | {"ranks": ranks}), ranks)


@pytest.mark.parametrize("name", TOYS)
def test_any_model_computes_the_same_bits_and_comes_back(name: str) -> None:
    torch.set_num_threads(1)
    model = TOYS[name]()
    resident, before = twin(model), snapshot(model)
    try:
        offloaded = dlo.offload(model, device="cpu", packed=True)
    except ConfigError:
        pytest.skip("no model to offload")
    with torch.inference_mode():
        for number in range(2):
            assert torch.equal(model(inputs(number)), resident(inputs(number)))
    offloaded.disable()
    assert_restored(model, before)


def refuse(*_: object) -> None:
    raise AssertionError("nothing is to be coded")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("packed_file", [False, True])
def test_a_checkpoint_is_loaded_saved_and_restored(
    tmp_path: Path, packed_file: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    if packed_file:
        # Its chunks travel as they lie in the file.
        monkeypatch.setattr(Coder, "encode", refuse)
        monkeypatch.setattr(Coder, "measure", refuse)
    source = tmp_path / "model.safetensors"
    expected = Model(3)
    save_file(expected.state_dict(), source)
    path = pack_checkpoint(source).path if packed_file else source

    def child(rank: int) -> None:
        with torch.device("meta"):
            model = Model(3)
        group = torch.distributed.group.WORLD if ranks > 1 else None
        settings: dict[str, Any] = {"group": group, "packed": True, "checkpoint": path, **SHORT}
        offloaded = dlo.offload(model, device="cpu", **settings)
        with torch.inference_mode():
            assert torch.equal(model(data()), expected(data()))
        offloaded.save(tmp_path / "saved.safetensors")
        offloaded.disable()
        assert all(same_bits(model.state_dict()[k], v) for k, v in expected.state_dict().items())

    if ranks == 1:
        child(0)
    else:
        run_ranks(child, ranks)
    saved = load_file(tmp_path / "saved.safetensors")
    assert all(same_bits(saved[k], v) for k, v in expected.state_dict().items())


def test_a_packed_file_is_right_where_tensors_are_aligned_to_more_than_a_chunk(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    expected = Model(2)
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    path = pack_checkpoint(tmp_path / "model.safetensors").path
    backend = CpuBackend()
    backend.capabilities = replace(backend.capabilities, alignment=65536)
    with torch.device("meta"):
        model = Model(2)
    offloaded = dlo.offload(model, device=backend, checkpoint=path, packed=True)
    with torch.inference_mode():
        assert torch.equal(model(data()), expected(data()))
    offloaded.disable()
    assert all(same_bits(model.state_dict()[k], v) for k, v in expected.state_dict().items())


def test_a_packed_file_is_read_raw_too(tmp_path: Path) -> None:
    expected = Model(2)
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    path = pack_checkpoint(tmp_path / "model.safetensors").path
    with torch.device("meta"):
        model = Model(2)
    offloaded = dlo.offload(model, device="cpu", checkpoint=path)
    assert "mapped" not in offloaded.engine.store.tiers  # type: ignore[union-attr]
    with torch.inference_mode():
        assert torch.equal(model(data()), expected(data()))
    offloaded.disable()
    with pytest.raises(ConfigError, match="packed in the checkpoint"):
        dlo.offload(model.to("meta"), device="cpu", checkpoint=path, host="mapped")


def test_ranks_of_a_node_share_one_packed_copy(tmp_path: Path) -> None:
    expected = Model(3)
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    paths = (tmp_path / "model.safetensors", pack_checkpoint(tmp_path / "model.safetensors").path)

    def child(rank: int) -> None:
        for path in paths:
            with torch.device("meta"):
                model = Model(3)
            settings: dict[str, Any] = {"group": torch.distributed.group.WORLD, **SHORT}
            settings |= {"use_allgather": False, "host": "shared", "packed": True}
            offloaded = dlo.offload(model, device="cpu", checkpoint=path, **settings)
            assert offloaded.engine is not None
            assert set(offloaded.engine.store.tiers) == {"shared"}
            with torch.inference_mode():
                assert torch.equal(model(data()), expected(data()))
            values = new_values(expected)
            offloaded.update_weights(values)
            with torch.inference_mode():
                model(data())
            offloaded.disable()
            assert all(same_bits(model.state_dict()[k], v) for k, v in values.items())

    run_ranks(child, 2)


def test_a_rank_does_not_read_shared_memory_that_another_one_writes() -> None:
    torch.set_num_threads(1)
    offloaded = dlo.offload(Model(2), device="cpu", packed=True)
    assert offloaded.engine is not None
    store = offloaded.engine.store
    # As on the second of two ranks, with a shard that the first one has half written.
    store.part = 1, 2
    shard = store.parts(0)[0][1].fill_(0xEE)
    store.write(0, 0, torch.zeros(8, dtype=torch.uint8))
    store.flush()
    assert bool((shard == 0xEE).all())
    offloaded.shutdown()


def test_damage_in_a_packed_file_is_noticed_while_loading(tmp_path: Path) -> None:
    save_file(Model(2).state_dict(), tmp_path / "model.safetensors")
    path = pack_checkpoint(tmp_path / "model.safetensors").path
    with Checkpoint.open(path) as checkpoint:
        stored = checkpoint.tensors["blocks.1.up.weight"]
    raw = bytearray(path.read_bytes())
    with torch.device("meta"):
        model = Model(2)
    # Among the blobs, and in the second entry's sizes.
    for at, text in ((stored.packed_nbytes // 2, "'blocks.1'"), (64 + 16 + 7, f"{stored.name!r}")):
        raw[stored.offset + at] ^= 4
        path.write_bytes(raw)
        with pytest.raises(DloError, match=f"{text}: .*damaged"):
            dlo.offload(model, device="cpu", checkpoint=path, packed=True)
        raw[stored.offset + at] ^= 4


def test_damage_in_a_raw_chunk_of_a_packed_tensor_is_noticed_too(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential()
    model.blocks = nn.ModuleList(nn.Linear(64, 640, dtype=torch.bfloat16) for _ in range(2))
    model.dlo_blocks = ("blocks",)  # type: ignore[assignment]
    noise = torch.randint(-32768, 32767, (64, 64), dtype=torch.int16).view(torch.bfloat16)
    # One chunk of ten.
    model.get_parameter("blocks.0.weight").data[64:128] = noise
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    path = pack_checkpoint(tmp_path / "model.safetensors").path
    raw = bytearray(path.read_bytes())
    at = raw.index(bytes(noise.view(torch.uint8).flatten().tolist()))
    raw[at + 100] ^= 4
    path.write_bytes(raw)
    with pytest.raises(DloError, match=r"'blocks.0'.*checksum of chunk \d+ .*damaged"):
        dlo.offload(model.to("meta"), device="cpu", checkpoint=path, packed=True)


def test_what_cannot_be_had_is_refused() -> None:
    model = Model(2)
    with pytest.raises(ConfigError, match="host='mapped' cannot be had with packed=True"):
        dlo.offload(model, device="cpu", packed=True, host="mapped")
    with pytest.raises(ConfigError, match="packed must be True, False, 'auto' or None; got 1"):
        dlo.offload(model, device="cpu", packed=1)
    assert not any(p.is_meta for p in model.parameters())


def test_a_state_dict_decodes_each_block_once_and_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    real, decoded = Coder.decode, []

    def decode(self: Coder, *args: Any) -> torch.Tensor:
        run = real(self, *args)
        decoded.append(weakref.ref(run))
        return run

    monkeypatch.setattr(Coder, "decode", decode)
    model = Model(3)
    resident = twin(model)
    with dlo.offload(model, device="cpu", packed=True) as offloaded:
        values = new_values(resident)

        def change(*_: Any) -> None:
            # In the middle of it: the rest must be the new values.
            offloaded.update_weights(values)

        for state in (offloaded.state_dict(), model.state_dict()):
            assert state is not None
            assert all(same_bits(state[k], v) for k, v in resident.state_dict().items())
        assert len(decoded) == 6
        assert all(run() is None for run in decoded)
        hook = model.get_submodule("blocks.1.down").register_state_dict_pre_hook(change)
        state = model.state_dict()
        hook.remove()
        assert state is not None
        resident.load_state_dict(values)
        for name, value in resident.state_dict().items():
            if name.startswith(("blocks.1.down", "blocks.2", "out")):
                assert same_bits(state[name], value), name


def test_new_values_that_take_too_much_are_refused_and_named() -> None:
    torch.set_num_threads(1)
    model = Model(2)
    resident = twin(model)
    offloaded = dlo.offload(model, device="cpu", packed=True)
    weight = model.get_parameter("blocks.1.up.weight")
    noise = torch.randint(-32768, 32767, tuple(weight.shape), dtype=torch.int16)
    given = {"blocks.1.up.weight": noise.view(torch.bfloat16)}
    with pytest.raises(UseError, match=r"'blocks.1' take [\d,]+ bytes packed"):
        offloaded.update_weights(given)
    with torch.inference_mode(), pytest.raises(UseError, match="failed half-way"):
        model(data())
    offloaded.update_weights({"blocks.1.up.weight": resident.state_dict()["blocks.1.up.weight"]})
    with torch.inference_mode():
        assert torch.equal(model(data()), resident(data()))
    offloaded.disable()


def test_a_device_without_a_codec_of_its_own_is_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(CpuBackend, "codec", lambda _: None)
    model = Model(2)
    resident = twin(model)
    with pytest.warns(dlo.DloWarning, match="has no codec of its own"):
        offloaded = dlo.offload(model, device="cpu", packed=True)
    with torch.inference_mode():
        assert torch.equal(model(data()), resident(data()))
    offloaded.shutdown()


@pytest.mark.parametrize(("sums", "text"), [(True, "checksum"), (False, "as they went in")])
def test_a_fault_of_the_codec_is_noticed_while_loading(
    sums: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CpuBackend.codec

    def faulty(self: CpuBackend) -> Any:
        codec = real(self)
        write, count = codec.write, codec.count

        def wrong(run: torch.Tensor, ranks: torch.Tensor, row: torch.Tensor) -> None:
            write(run, ranks, row)
            row[row.numel() // 2] ^= 1

        def blind(run: torch.Tensor, ranks: torch.Tensor, table_of: torch.Tensor) -> torch.Tensor:
            counts = count(run, ranks, table_of)
            counts[:, 3] *= sums
            return counts

        codec.count = blind  # type: ignore[method-assign]
        codec.write = wrong  # type: ignore[method-assign]
        return codec

    monkeypatch.setattr(CpuBackend, "codec", faulty)
    torch.set_num_threads(1)
    model = Model(2)
    with pytest.raises(DloError, match=text):
        dlo.offload(model, device="cpu", packed=True)
    offloaded = dlo.offload(model, device="cpu", packed=True, verify_packed=False)
    offloaded.shutdown()


def test_a_damaged_shard_is_noticed_when_it_is_read_back() -> None:
    torch.set_num_threads(1)
    offloaded = dlo.offload(Model(2), device="cpu", packed=True)
    assert offloaded.engine is not None
    shard = offloaded.engine.store.parts(1)[0][1]
    shard[shard.numel() // 2] ^= 0x10
    with pytest.raises(DloError, match=r"block 'blocks.1': .*damaged"):
        offloaded.state_dict()
    offloaded.shutdown()


def test_parts_are_whole_chunks_and_cover_the_run() -> None:
    for run, size in ((8192, 1), (8192, 4), (100 * 8192, 3), (5, 2)):
        cut = PackedCut.cut(run, size, 256)
        pieces = [piece for rank in range(size) for piece in cut.pieces(rank)]
        assert [p.start for p in pieces] == [0, *[p.stop for p in pieces[:-1]]]
        assert pieces[-1].stop == run
        assert cut.part_nbytes % 8192 == 0
        measured = cut.measured(1000)
        assert measured.nbytes % 256 == 0
        assert measured.nbytes >= 1000 + measured.trailer_nbytes


def test_the_coder_uses_the_memory_of_its_largest_run_only() -> None:
    backend = CpuBackend()
    coder = Coder(backend, verify=True)
    runs: list[Callable[[], object]] = []
    for count in (3, 1, 2):
        run = torch.zeros(count * 8192, dtype=torch.uint8)
        runs.append(partial(coder.encode, run, [(0, run.numel())], 65536))
    gc.collect()
    before = backend.memory().allocated
    for run_it in runs:
        run_it()
    assert backend.memory().allocated - before <= 2 * 3 * 8192 + 65536
    coder.release()
    gc.collect()
    assert backend.memory().allocated == before
