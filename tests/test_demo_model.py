"""The digit transformer, its weights and its sampler."""

from __future__ import annotations

import json

import pytest
import torch

from dlo_core.demo.job import Job
from dlo_core.demo.model import DigitTransformer, ModelConfig, build_meta_model
from dlo_core.demo.sampler import sample
from dlo_core.demo.weights import FOLDER, INDEX, load_model


@pytest.fixture(scope="module")
def model() -> DigitTransformer:
    return load_model()


def test_meta_model_has_weights_on_meta_and_real_tables() -> None:
    model = build_meta_model()
    real = DigitTransformer()
    assert all(weight.is_meta for weight in model.parameters())
    assert [name for name, _ in model.named_buffers()] == ["positions", "frequencies"]
    assert torch.equal(model.positions, real.positions)
    assert torch.equal(model.frequencies, real.frequencies)


def test_blocks_are_declared_in_run_order_and_of_two_sizes(model: DigitTransformer) -> None:
    lists = [model.get_submodule(name) for name in DigitTransformer.dlo_blocks]
    blocks = [block for blocks in lists for block in blocks.children()]
    ran: list[torch.nn.Module] = []
    handles = [
        block.register_forward_pre_hook(lambda module, _: ran.append(module)) for block in blocks
    ]
    model(torch.zeros(1, 8, 8), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    for handle in handles:
        handle.remove()
    assert len(blocks) >= 12
    assert ran == blocks
    assert len({sum(weight.nbytes for weight in block.parameters()) for block in blocks}) == 2


def test_checkpoint_holds_exactly_the_model() -> None:
    weights = load_model().state_dict()
    wanted = build_meta_model().state_dict()
    assert list(weights) == list(wanted)
    for name, weight in weights.items():
        assert weight.shape == wanted[name].shape, name
        assert weight.dtype == wanted[name].dtype, name
        assert weight.isfinite().all(), name


def test_checkpoint_is_sharded_indexed_and_small() -> None:
    index = json.loads((FOLDER / INDEX).read_text())
    files = set(index["weight_map"].values())
    assert len(files) >= 2
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 2_000_000
    weights = load_model().state_dict()
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())


def test_patches_keep_their_place() -> None:
    """Each pixel's velocity depends on its own token when the blocks pass tokens through."""
    torch.manual_seed(0)
    model = DigitTransformer(ModelConfig(width=16, num_wide_blocks=1, num_blocks=1))
    for block in (*model.wide_blocks, *model.blocks):
        torch.nn.init.zeros_(block.modulation.weight)
        torch.nn.init.zeros_(block.modulation.bias)
    images = torch.randn(1, 8, 8)
    changed = images.clone()
    changed[0, 5, 2] += 1.0
    times, labels = torch.zeros(1), torch.zeros(1, dtype=torch.long)
    moved = (model(images, times, labels) - model(changed, times, labels))[0].abs() > 0
    wanted = torch.zeros(8, 8, dtype=torch.bool)
    wanted[4:6, 2:4] = True
    assert torch.equal(moved, wanted)


def test_sampling_is_deterministic_and_follows_its_seed(model: DigitTransformer) -> None:
    labels = torch.tensor([3, 1, 4])
    steps: list[int] = []
    first = sample(model, labels, seed=1, num_steps=3, guidance=2.0, on_step=steps.append)
    again = sample(model, labels, seed=1, num_steps=3, guidance=2.0)
    other = sample(model, labels, seed=2, num_steps=3, guidance=2.0)
    assert first.shape == (3, 8, 8)
    assert first.dtype == torch.float32
    assert steps == [1, 2, 3]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["wide_blocks.0.mlp.0.weight", "blocks.10.attention.out.bias"])
def test_one_wrong_bit_in_one_weight_changes_the_images(model: DigitTransformer, name: str) -> None:
    """So that equal images prove something about the weights."""
    wrong = load_model()
    weight = wrong.get_parameter(name).view(torch.int16)
    weight.view(-1)[0] ^= 1
    labels = torch.arange(10)
    right_images = sample(model, labels, seed=1, num_steps=2, guidance=2.0)
    wrong_images = sample(wrong, labels, seed=1, num_steps=2, guidance=2.0)
    assert not torch.equal(right_images, wrong_images)


def test_drawn_digits_look_like_their_class(model: DigitTransformer) -> None:
    """Images of one class lie closer together than images of different classes."""
    labels = torch.arange(10).repeat(4)
    images = sample(model, labels, seed=3, num_steps=12, guidance=2.0).clamp(-1, 1).flatten(1)
    means = torch.stack([images[labels == digit].mean(0) for digit in range(10)])
    nearest = torch.cdist(images, means).argmin(1)
    assert (nearest == labels).float().mean() >= 0.9


def test_each_rank_draws_every_digit_in_an_order_and_with_a_seed_of_its_own() -> None:
    job = Job(ranks=3)
    labels = [job.labels(rank).tolist() for rank in range(3)]
    assert all(sorted(row) == list(range(10)) for row in labels)
    assert labels[0] != labels[1] != labels[2]
    assert len({job.seed(rank) for rank in range(3)}) == 3
    assert Job(num_images=13).labels(0).shape == (13,)
