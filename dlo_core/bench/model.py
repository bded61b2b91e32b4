"""The synthetic transformer: a diffusion transformer of any size, with weights from one seed.

It computes what large ones compute (modulation, fused attention, normalised queries and keys, a
wide MLP), so its blocks have real sizes and real work. The weights are random, but every tensor of
every block is another stretch of one pool, so a block that holds another one's bytes shows in the
output; and filling gigabytes takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_core.errors import ConfigError

__all__ = ["Shape", "SyntheticTransformer", "build", "inputs"]

_CHANNELS, _TIME = 64, 256
_STD = 0.02
_STRIDE = 4099


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a synthetic transformer.

    Attributes:
        width: Features of a token; a multiple of ``num_heads``.
        num_heads: Attention heads.
        num_blocks: Whole blocks, of ``18 * width ** 2`` weights each.
        num_half_blocks: Blocks of half the size that follow each whole one.
        dtype: Name of the weights' dtype.
        products_only: Whether a block multiplies by all its matrices and does nearly nothing else,
            no attention in particular.
    """

    width: int
    num_heads: int
    num_blocks: int
    num_half_blocks: int = 0
    dtype: str = "bfloat16"
    products_only: bool = False

    def __post_init__(self) -> None:
        """Refuse a shape that cannot be built.

        Raises:
            ConfigError: Names the value.
        """
        for name in ("width", "num_heads", "num_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.num_half_blocks < 0:
            raise ConfigError(f"num_half_blocks must be at least 0; got {self.num_half_blocks}")
        if self.width % self.num_heads:
            raise ConfigError(
                f"width must be a multiple of num_heads; got {self.width} and {self.num_heads}"
            )
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ConfigError(f"dtype must name a dtype of torch; got {self.dtype!r}")


class Block(nn.Module):
    """One attention and one MLP, modulated by the condition; a half block has smaller of both."""

    def __init__(self, shape: Shape, *, half: bool) -> None:
        """Make the layers.

        Args:
            shape: Of the transformer.
            half: Whether the block has half the weights.
        """
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.num_chunks = 3 if half else 6
        self.modulation = nn.Linear(width, self.num_chunks * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm_q = nn.RMSNorm(width // shape.num_heads, eps=1e-6)
        self.norm_k = nn.RMSNorm(width // shape.num_heads, eps=1e-6)
        self.out = nn.Linear(width, width)
        hidden = width if half else 4 * width
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return the tokens ``[n, tokens, width]`` one block further."""
        chunks = self.modulation(condition).unsqueeze(1).chunk(self.num_chunks, -1)
        (shift_a, scale_a, gate_a), (shift_m, scale_m, gate_m) = chunks[:3], chunks[-3:]
        width = (x.shape[-1],)
        heads = self.qkv(F.layer_norm(x, width) * (1 + scale_a) + shift_a)
        q, k, v = heads.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.attend(self.norm_q(q), self.norm_k(k), v)
        x = x + gate_a * self.out(mixed.transpose(1, 2).flatten(2))
        wide = F.gelu(self.up(F.layer_norm(x, width) * (1 + scale_m) + shift_m), approximate="tanh")
        out: Tensor = x + gate_m * self.down(wide)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention over all tokens, ``[n, heads, tokens, features]`` as its arguments."""
        return F.scaled_dot_product_attention(q, k, v)


class Products(Block):
    """The matrices of a block, and nearly nothing else."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return the tokens ``[n, tokens, width]`` one block further."""
        shift, *others = self.modulation(condition).unsqueeze(1).chunk(self.num_chunks, -1)
        width = (x.shape[-1],)
        q, k, v = self.qkv(F.layer_norm(x, width) + shift).chunk(3, -1)
        x = x + self.out(q + k + v)
        out: Tensor = x + self.down(self.up(F.layer_norm(x, width) + sum(others)))
        return out


class SyntheticTransformer(nn.Module):
    """Blocks between an embedding and a projection."""

    dlo_blocks: ClassVar[tuple[str, ...]] = ("blocks",)
    # The same declaration for diffusers.
    _repeated_blocks: ClassVar[list[str]] = ["Block"]
    block_class: ClassVar[type[Block]] = Block

    def __init__(self, shape: Shape) -> None:
        """Make the layers; make it on meta and ``build`` it where the weights shall be."""
        super().__init__()
        self.embed = nn.Linear(_CHANNELS, shape.width)
        self.time = nn.Linear(_TIME, shape.width)
        halves = ([False] + [True] * shape.num_half_blocks) * shape.num_blocks
        kind = Products if shape.products_only else self.block_class
        self.blocks = nn.ModuleList(kind(shape, half=half) for half in halves)
        self.project = nn.Linear(shape.width, _CHANNELS)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return ``[n, tokens, channels]`` from the same and a time ``[n, 256]``."""
        x, condition = self.embed(x), F.silu(self.time(time))
        for block in self.blocks:
            x = block(x, condition)
        out: Tensor = self.project(x)
        return out


def build(shape: Shape, device: torch.device | str = "cpu", seed: int = 1) -> SyntheticTransformer:
    """Return a transformer whose weights are on ``device``, with equal bits wherever it is."""
    with torch.inference_mode(False), torch.no_grad():
        return _build(shape, device, seed)


def _build(shape: Shape, device: torch.device | str, seed: int) -> SyntheticTransformer:
    with torch.device("meta"):
        model = SyntheticTransformer(shape).to(getattr(torch, shape.dtype))
    model.to_empty(device=device)
    parameters = list(model.parameters())
    largest = max(parameter.numel() for parameter in parameters)
    generator = torch.Generator("cpu").manual_seed(seed)
    num = largest + _STRIDE * len(parameters)
    pool = torch.randn(num, generator=generator, device="cpu").mul_(_STD)
    pool = pool.to(getattr(torch, shape.dtype)).to(device)
    for number, parameter in enumerate(parameters):
        start = number * _STRIDE
        parameter.view(-1).copy_(pool[start : start + parameter.numel()])
    return model.requires_grad_(False).eval()


def inputs(
    shape: Shape, tokens: int, device: torch.device | str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the arguments of a forward over so many tokens, equal bits on every device."""
    generator = torch.Generator("cpu").manual_seed(1_000_003 * seed + tokens)
    dtype = getattr(torch, shape.dtype)
    # Somebody may have set another default device.
    x = torch.randn(1, tokens, _CHANNELS, generator=generator, device="cpu").to(dtype)
    time = torch.randn(1, _TIME, generator=generator, device="cpu").to(dtype)
    return x.to(device), time.to(device)
