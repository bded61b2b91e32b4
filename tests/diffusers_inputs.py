"""Inputs for the tiny diffusers transformers of ``diffusers_zoo``: one function a family."""

from __future__ import annotations

from typing import Any

import torch


class Maker:
    """Makes seeded tensors: the same seed gives the same values in every dtype."""

    def __init__(self, seed: int, batch: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.batch = batch
        self.dtype = dtype

    def randn(self, *shape: int) -> torch.Tensor:
        """Return normal values."""
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        """Return integers below ``high``."""
        return torch.randint(0, high, shape, generator=self._generator)

    def steps(self) -> torch.Tensor:
        """Return training timesteps in 0..999, one a sample."""
        return self.ints(1000, self.batch)

    def sigma(self) -> torch.Tensor:
        """Return flow times in 0..1, one a sample."""
        return torch.rand(self.batch, generator=self._generator).to(self.dtype)

    def ones(self, *shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        """Return a mask that masks nothing."""
        return torch.ones(shape, dtype=dtype)


def grid_ids(*sizes: int) -> torch.Tensor:
    """Return every coordinate of an n-dimensional grid, one row each."""
    axes = [torch.arange(size) for size in sizes]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(sizes)).float()


def flux(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 16, 8),
        "encoder_hidden_states": make.randn(make.batch, 8, 24),
        "pooled_projections": make.randn(make.batch, 20),
        "timestep": make.sigma(),
        "guidance": torch.full((make.batch,), 3.5, dtype=make.dtype),
        "img_ids": grid_ids(1, 4, 4),
        "txt_ids": torch.zeros(8, 3),
    }


def chroma(make: Maker) -> dict[str, Any]:
    kw = flux(make)
    del kw["pooled_projections"], kw["guidance"]
    return kw | {"attention_mask": make.ones(make.batch, 8 + 16)}


def flux2(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 16, 8),
        "encoder_hidden_states": make.randn(make.batch, 8, 24),
        "timestep": make.sigma(),
        "guidance": torch.full((make.batch,), 3.5, dtype=make.dtype),
        "img_ids": grid_ids(1, 4, 4, 1).expand(make.batch, -1, -1),
        "txt_ids": grid_ids(1, 1, 1, 8).expand(make.batch, -1, -1),
    }


def flux3(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 16, 8),
        "encoder_hidden_states": make.randn(make.batch, 8, 24),
        "timestep": make.sigma(),
        "img_ids": grid_ids(1, 4, 4, 1),
        "txt_ids": grid_ids(1, 1, 1, 8),
    }


def sd3(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 8, 8),
        "encoder_hidden_states": make.randn(make.batch, 6, 24),
        "pooled_projections": make.randn(make.batch, 20),
        "timestep": make.steps(),
    }


def auraflow(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 8, 8),
        "encoder_hidden_states": make.randn(make.batch, 6, 24),
        "timestep": make.sigma(),
    }


def wan(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 2, 8, 8),
        "timestep": make.steps(),
        "encoder_hidden_states": make.randn(make.batch, 8, 20),
    }


def wan_i2v(make: Maker) -> dict[str, Any]:
    return wan(make) | {"encoder_hidden_states_image": make.randn(make.batch, 257, 12)}


def hunyuan_video(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 2, 8, 8),
        "timestep": make.steps(),
        "encoder_hidden_states": make.randn(make.batch, 6, 16),
        "encoder_attention_mask": make.ones(make.batch, 6),
        "pooled_projections": make.randn(make.batch, 12),
        "guidance": torch.full((make.batch,), 6.0, dtype=make.dtype),
    }


def hunyuan_video15(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 2, 4, 4),
        "timestep": make.sigma(),
        "encoder_hidden_states": make.randn(make.batch, 6, 16),
        "encoder_attention_mask": make.ones(make.batch, 6),
        "encoder_hidden_states_2": make.randn(make.batch, 4, 8),
        "encoder_attention_mask_2": make.ones(make.batch, 4),
        "image_embeds": torch.zeros(make.batch, 3, 12, dtype=make.dtype),
    }


def hunyuan_dit(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 8, 8),
        "timestep": make.steps().to(make.dtype),
        "encoder_hidden_states": make.randn(make.batch, 4, 8),
        "text_embedding_mask": make.ones(make.batch, 4, dtype=make.dtype),
        "encoder_hidden_states_t5": make.randn(make.batch, 4, 8),
        "text_embedding_mask_t5": make.ones(make.batch, 4, dtype=make.dtype),
        "image_meta_size": torch.tensor([[8, 8, 8, 8, 0, 0]] * make.batch, dtype=make.dtype),
        "style": torch.zeros(make.batch, dtype=torch.long),
        "image_rotary_emb": [torch.ones(16, 8), torch.zeros(16, 8)],
    }


def ltx(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 2 * 4 * 4, 4),
        "encoder_hidden_states": make.randn(make.batch, 8, 12),
        "timestep": make.steps(),
        "encoder_attention_mask": make.ones(make.batch, 8),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def cogview4(make: Maker) -> dict[str, Any]:
    size = torch.tensor([[20, 20]] * make.batch, dtype=make.dtype)
    return {
        "hidden_states": make.randn(make.batch, 4, 8, 8),
        "encoder_hidden_states": make.randn(make.batch, 8, 12),
        "timestep": make.steps(),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros_like(size),
    }


def qwen(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 16, 16),
        "encoder_hidden_states": make.randn(make.batch, 8, 20),
        "encoder_hidden_states_mask": torch.ones(make.batch, 8, dtype=torch.long),
        "timestep": make.sigma(),
        "img_shapes": [(1, 4, 4)] * make.batch,
    }


def qwen21(make: Maker) -> dict[str, Any]:
    slots = torch.zeros(make.batch, 8 + 4, dtype=torch.bool)
    slots[:, 8:] = True  # 4 vision slots of 2x2 latent tokens after 8 text tokens
    return {
        "hidden_states": make.randn(make.batch, 16, 16),
        "encoder_hidden_states": make.randn(make.batch, 8, 20),
        "timestep": make.sigma(),
        "img_shapes": [[(1, 4, 4)]] * make.batch,
        "img_mask": slots,
    }


def z_image(make: Maker) -> dict[str, Any]:
    return {
        "x": [make.randn(4, 1, 8, 8) for _ in range(make.batch)],
        "t": make.sigma(),
        "cap_feats": [make.randn(8, 12) for _ in range(make.batch)],
    }


def pixart(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 8, 8),
        "encoder_hidden_states": make.randn(make.batch, 6, 16),
        "timestep": make.steps(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def dit(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 8, 8),
        "timestep": make.steps(),
        "class_labels": make.ints(8, make.batch),
    }


def sana(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 8, 8),
        "encoder_hidden_states": make.randn(make.batch, 6, 12),
        "timestep": make.steps(),
    }


def sana_video(make: Maker) -> dict[str, Any]:
    return sana(make) | {"hidden_states": make.randn(make.batch, 4, 2, 8, 8)}


def cosmos(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 2, 8, 8),
        "timestep": make.steps(),
        "encoder_hidden_states": make.randn(make.batch, 8, 16),
        "fps": 24,
    }


def lumina2(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 8, 8),
        "timestep": make.sigma(),
        "encoder_hidden_states": make.randn(make.batch, 8, 20),
        "encoder_attention_mask": make.ones(make.batch, 8),
    }


def kandinsky5(make: Maker) -> dict[str, Any]:
    # Its time embedding broadcasts over the sample, so the batch is 1.
    return {
        "hidden_states": make.randn(1, 2, 8, 8, 4),
        "encoder_hidden_states": make.randn(1, 6, 16),
        "timestep": torch.tensor([500.0], dtype=make.dtype),
        "pooled_projections": make.randn(1, 12),
        "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)],
        "text_rope_pos": torch.arange(6),
    }


def latte(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 2, 8, 8),
        "timestep": make.steps(),
        "encoder_hidden_states": make.randn(make.batch, 6, 12),
    }


def stable_audio(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 16),
        "timestep": make.steps(),
        "encoder_hidden_states": make.randn(make.batch, 6, 12),
        "global_hidden_states": make.randn(make.batch, 1, 12),
        "rotary_embedding": (torch.ones(17, 4), torch.zeros(17, 4)),
    }


def wan_vace(make: Maker) -> dict[str, Any]:
    return wan(make) | {"control_hidden_states": make.randn(make.batch, 6, 2, 8, 8)}


def wan_animate(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 12, 3, 8, 8),
        "timestep": make.steps(),
        "encoder_hidden_states": make.randn(make.batch, 8, 20),
        "encoder_hidden_states_image": make.randn(make.batch, 9, 12),
        "pose_hidden_states": make.randn(make.batch, 4, 2, 8, 8),
        "face_pixel_values": make.randn(make.batch, 3, 9, 16, 16),
    }


def mochi(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 2, 8, 8),
        "encoder_hidden_states": make.randn(make.batch, 6, 16),
        "timestep": make.steps(),
        "encoder_attention_mask": make.ones(make.batch, 6),
    }


def cogvideox(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 2, 4, 8, 8),
        "encoder_hidden_states": make.randn(make.batch, 6, 12),
        "timestep": make.steps(),
    }


def consisid(make: Maker) -> dict[str, Any]:
    return cogvideox(make) | {
        "id_cond": make.randn(make.batch, 2),
        "id_vit_hidden": [make.randn(make.batch, 2, 2)],
    }


def allegro(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 2, 8, 8),
        "encoder_hidden_states": make.randn(make.batch, 6, 12),
        "timestep": make.steps(),
    }


def hidream(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 8, 8),
        "timesteps": make.steps(),
        "encoder_hidden_states_t5": make.randn(make.batch, 6, 12),
        "encoder_hidden_states_llama3": make.randn(2, make.batch, 6, 12),
        "pooled_embeds": make.randn(make.batch, 16),
    }


def prx(make: Maker) -> dict[str, Any]:
    return {
        "hidden_states": make.randn(make.batch, 4, 8, 8),
        "timestep": make.sigma(),
        "encoder_hidden_states": make.randn(make.batch, 6, 12),
    }


def bria(make: Maker) -> dict[str, Any]:
    kw = flux(make)
    del kw["pooled_projections"], kw["guidance"]
    return kw
