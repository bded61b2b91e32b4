"""The digit transformer: a class-conditional DiT that draws 8x8 handwritten digits.

It has what makes large diffusion transformers awkward to offload, in small: two lists of unequal
blocks that run one after the other, bf16 weights with a few in fp32 between them, and tables that
no checkpoint holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Block",
    "DigitTransformer",
    "ModelConfig",
    "WideBlock",
    "build_meta_model",
    "cast_weights",
]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a digit transformer.

    Attributes:
        image_size: Pixels along one side.
        patch_size: Pixels along one side of a patch; a patch is a token.
        num_classes: Classes; one more embedding stands for "no class".
        width: Features of a token; a multiple of ``4 * num_heads``.
        num_heads: Attention heads.
        num_wide_blocks: Blocks with two attentions and the wider MLP; they run first.
        num_blocks: Plain blocks; they run last.
        wide_mlp_ratio: Hidden features of a wide block's MLP, in widths.
        mlp_ratio: Hidden features of a plain block's MLP, in widths.
    """

    image_size: int = 8
    patch_size: int = 2
    num_classes: int = 10
    width: int = 64
    num_heads: int = 4
    num_wide_blocks: int = 3
    num_blocks: int = 11
    wide_mlp_ratio: int = 4
    mlp_ratio: int = 2

    @property
    def num_tokens(self) -> int:
        """Tokens of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def null_class(self) -> int:
        """The label that stands for "no class"."""
        return self.num_classes


class Attention(nn.Module):
    """Self-attention whose queries and keys are normalised per head."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.norm_q = HeadNorm(width // num_heads)
        self.norm_k = HeadNorm(width // num_heads)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, tokens, width]`` of the same shape."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class HeadNorm(nn.Module):
    """Root-mean-square normalisation that computes, and keeps its scale, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over its last dimension, in the dtype of ``x``."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * scale * self.scale).to(x.dtype)


class Mlp(nn.Sequential):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(
            nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width)
        )


class Modulation(nn.Linear):
    """The adaLN head: shifts, scales and gates for one block, all zero before training."""

    def __init__(self, width: int, num_chunks: int) -> None:
        super().__init__(width, num_chunks * width)
        self.num_chunks = num_chunks

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return ``num_chunks`` tensors ``[n, 1, width]`` from ``condition`` ``[n, width]``."""
        return super().forward(F.silu(condition)).unsqueeze(1).chunk(self.num_chunks, dim=-1)


class Block(nn.Module):
    """One attention and one MLP, each modulated by the condition."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.modulation = Modulation(config.width, 6)
        self.attention = Attention(config.width, config.num_heads)
        self.mlp = Mlp(config.width, config.mlp_ratio * config.width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return the tokens ``[n, tokens, width]`` one block further."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition)
        x = x + gate_a * self.attention(modulate(x, shift_a, scale_a))
        x = x + gate_m * self.mlp(modulate(x, shift_m, scale_m))
        return x


class WideBlock(nn.Module):
    """Two attentions side by side, then an MLP, each modulated by the condition."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.modulation = Modulation(config.width, 9)
        self.attention = Attention(config.width, config.num_heads)
        self.attention_2 = Attention(config.width, config.num_heads)
        self.mlp = Mlp(config.width, config.wide_mlp_ratio * config.width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return the tokens ``[n, tokens, width]`` one block further."""
        (
            (shift_a, scale_a, gate_a),
            (shift_b, scale_b, gate_b),
            (shift_m, scale_m, gate_m),
        ) = threes(self.modulation(condition))
        first = gate_a * self.attention(modulate(x, shift_a, scale_a))
        second = gate_b * self.attention_2(modulate(x, shift_b, scale_b))
        x = x + first + second
        x = x + gate_m * self.mlp(modulate(x, shift_m, scale_m))
        return x


class DigitTransformer(nn.Module):
    """A flow-matching DiT: predicts the velocity from noise to a digit of a wanted class."""

    # Where dlo finds the blocks, in run order.
    dlo_blocks: ClassVar[tuple[str, ...]] = ("wide_blocks", "blocks")

    # The tables of positions and frequencies are no weights: no checkpoint holds them.
    positions: Tensor
    frequencies: Tensor

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ModelConfig()
        pixels = config.patch_size**2
        self.embed = nn.Linear(pixels, config.width)
        self.embed_label = nn.Embedding(config.num_classes + 1, config.width)
        self.embed_time = Mlp(config.width, config.width)
        self.wide_blocks = nn.ModuleList(WideBlock(config) for _ in range(config.num_wide_blocks))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.modulation = Modulation(config.width, 2)
        self.out = nn.Linear(config.width, pixels)
        self.register_buffer("positions", position_table(config), persistent=False)
        self.register_buffer("frequencies", frequency_table(config.width // 2), persistent=False)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the velocity.

        Args:
            images: Noisy images ``[n, size, size]``, fp32.
            times: ``[n]`` from 0 (noise) to 1 (image), fp32.
            labels: Classes ``[n]``; ``config.null_class`` stands for "no class".
        """
        dtype = self.embed.weight.dtype
        patch, grid = self.config.patch_size, self.config.image_size // self.config.patch_size
        tokens = images.unflatten(2, (grid, patch)).unflatten(1, (grid, patch))
        tokens = tokens.transpose(2, 3).flatten(3).flatten(1, 2)
        x = self.embed(tokens.to(dtype)) + self.positions.to(dtype)
        angles = 1000.0 * times[:, None] * self.frequencies
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
        condition = self.embed_time(waves) + self.embed_label(labels)
        for block in self.wide_blocks:
            x = block(x, condition)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)
        pixels: Tensor = self.out(modulate(x, shift, scale)).float()
        pixels = pixels.unflatten(2, (patch, patch)).unflatten(1, (grid, grid))
        return pixels.transpose(2, 3).flatten(3).flatten(1, 2)


def build_meta_model(config: ModelConfig | None = None) -> DigitTransformer:
    """Build the model without weights: parameters on meta, tables real."""
    # The tables name their device, so they are made there in spite of the context.
    with torch.device("meta"):
        model = DigitTransformer(config)
    return cast_weights(model).eval().requires_grad_(False)


def cast_weights(model: DigitTransformer) -> DigitTransformer:
    """Give every weight the dtype that it has in a checkpoint: fp32 in ``HeadNorm``, else bf16."""
    for module in model.modules():
        dtype = torch.float32 if isinstance(module, HeadNorm) else torch.bfloat16
        for weight in module.parameters(recurse=False):
            weight.data = weight.data.to(dtype)
    return model


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return ``x`` normalised over its last dimension, then scaled and shifted."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def threes(chunks: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Return ``chunks`` in groups of three: shift, scale, gate."""
    return [chunks[start : start + 3] for start in range(0, len(chunks), 3)]


def frequency_table(count: int) -> Tensor:
    """Return ``count`` frequencies that fall geometrically from 1 to 1/10000."""
    exponents = torch.arange(count, dtype=torch.float32, device="cpu") / count
    return torch.exp(-math.log(10_000.0) * exponents)


def position_table(config: ModelConfig) -> Tensor:
    """Return sines and cosines of each token's row and column, ``[tokens, width]``."""
    grid = config.image_size // config.patch_size
    place = torch.arange(grid, dtype=torch.float32, device="cpu")
    angles = place[:, None] * frequency_table(config.width // 4)
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1)
    rows = waves[:, None].expand(grid, grid, -1)
    columns = waves[None, :].expand(grid, grid, -1)
    return torch.cat([rows, columns], dim=-1).flatten(0, 1).contiguous()
