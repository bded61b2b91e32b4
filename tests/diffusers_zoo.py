"""The zoo: tiny random diffusion transformers of real diffusers classes, without downloads.

Every entry of ``ZOO`` names a class, the settings of a small instance, the function that makes its
inputs, and what a block streamer must know: the stacks of blocks in the order in which forward()
runs them, and how that order relates to registration order. Checked with diffusers 0.42.1.
"""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import diffusers_inputs as inputs
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ZOO", "Order", "ZooModel", "build", "cast_", "forward", "make_inputs", "stacked_blocks"]


class Order(enum.Enum):
    """How forward() visits the blocks of the stacks."""

    SEQUENTIAL = "stack after stack, each block once, in the order of its index"
    INTERLEAVED = "the blocks of two stacks take turns"
    REPEATED = "some block runs more than once"
    CONDITIONAL = "a stack is skipped for some inputs"


@dataclass(frozen=True)
class ZooModel:
    """One tiny transformer.

    Attributes:
        class_name: Of the class in diffusers.
        config: Arguments of its constructor.
        make_inputs: Makes the keyword arguments of forward().
        stacks: Dotted names of the containers of blocks, in run order.
        order: How forward() visits them.
        reordered: Whether registration order differs from run order.
        reads_outside: Prefixes of block parameters that forward() reads outside of the block.
        note: What else is odd about it.
    """

    class_name: str
    config: dict[str, Any]
    make_inputs: Callable[[inputs.Maker], dict[str, Any]]
    stacks: tuple[str, ...]
    order: Order = Order.SEQUENTIAL
    reordered: bool = False
    reads_outside: tuple[str, ...] = ()
    note: str = ""


# Heads are 4 wherever the class has a context- or tensor-parallel plan, so that 2- and 4-way splits
# work; several inner sizes are no multiples of 4, so that flat shards need padding.
# The formatter would make 500 lines of this table.
# fmt: off
ZOO: dict[str, ZooModel] = {
    "flux": ZooModel(
        "FluxTransformer2DModel",
        {"patch_size": 1, "in_channels": 8, "num_layers": 2, "num_single_layers": 3,
         "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 24,
         "pooled_projection_dim": 20, "guidance_embeds": True, "axes_dims_rope": (2, 2, 4)},
        inputs.flux, ("transformer_blocks", "single_transformer_blocks"),
        note="ContextParallel and TensorParallel plans",
    ),
    "flux2": ZooModel(
        "Flux2Transformer2DModel",
        {"patch_size": 1, "in_channels": 8, "num_layers": 2, "num_single_layers": 4,
         "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 24,
         "timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2)},
        inputs.flux2, ("transformer_blocks", "single_transformer_blocks"),
        note="modulation shared by all blocks sits outside them; CP and TP plans",
    ),
    "flux3": ZooModel(
        "Flux3Transformer2DModel",
        {"in_channels": 8, "cond_in_channels": 8, "num_layers": 2, "num_single_layers": 3,
         "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 24,
         "timestep_channels": 16, "axes_dims_rope": (2, 2, 2, 2)},
        inputs.flux3, ("txt_mode_blocks", "mode_blocks.image", "single_transformer_blocks"),
        order=Order.CONDITIONAL,
        reordered=True,
        note="mode_blocks is a ModuleDict of lists; mode_blocks.image_cond runs only with a "
             "reference image",
    ),
    "chroma": ZooModel(
        "ChromaTransformer2DModel",
        {"patch_size": 1, "in_channels": 8, "num_layers": 2, "num_single_layers": 3,
         "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 24,
         "axes_dims_rope": (2, 2, 4), "approximator_num_channels": 8,
         "approximator_hidden_dim": 12, "approximator_layers": 2},
        inputs.chroma, ("transformer_blocks", "single_transformer_blocks"),
        note="distilled_guidance_layer has two parallel lists (layers, norms): keep it resident",
    ),
    "sd3": ZooModel(
        "SD3Transformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 3,
         "attention_head_dim": 8, "num_attention_heads": 3, "joint_attention_dim": 24,
         "caption_projection_dim": 24, "pooled_projection_dim": 20, "out_channels": 4,
         "pos_embed_max_size": 8},
        inputs.sd3, ("transformer_blocks",),
        note="the last block is context_pre_only: another parameter layout; skip_layers= "
             "skips blocks",
    ),
    "sd35": ZooModel(
        "SD3Transformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 4,
         "attention_head_dim": 8, "num_attention_heads": 3, "joint_attention_dim": 24,
         "caption_projection_dim": 24, "pooled_projection_dim": 20, "out_channels": 4,
         "pos_embed_max_size": 8, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
        inputs.sd3, ("transformer_blocks",),
        note="dual-attention blocks, plain blocks and the last one: three layouts in one list",
    ),
    "auraflow": ZooModel(
        "AuraFlowTransformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 2,
         "num_single_dit_layers": 3, "attention_head_dim": 8, "num_attention_heads": 3,
         "joint_attention_dim": 24, "caption_projection_dim": 24, "out_channels": 4,
         "pos_embed_max_size": 64},
        inputs.auraflow, ("joint_transformer_blocks", "single_transformer_blocks"),
    ),
    "wan": ZooModel(
        "WanTransformer3DModel",
        {"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 6,
         "in_channels": 4, "out_channels": 4, "text_dim": 20, "freq_dim": 16, "ffn_dim": 44,
         "num_layers": 3, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
         "rope_max_seq_len": 32},
        inputs.wan, ("blocks",),
        note="fp32 scale_shift_table parameter in every block; CP plan",
    ),
    "wan_i2v": ZooModel(
        "WanTransformer3DModel",
        {"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 6,
         "in_channels": 4, "out_channels": 4, "text_dim": 20, "freq_dim": 16, "ffn_dim": 44,
         "num_layers": 3, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
         "rope_max_seq_len": 32, "image_dim": 12, "added_kv_proj_dim": 24},
        inputs.wan_i2v, ("blocks",),
    ),
    "skyreels_v2": ZooModel(
        "SkyReelsV2Transformer3DModel",
        {"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 6,
         "in_channels": 4, "out_channels": 4, "text_dim": 20, "freq_dim": 16, "ffn_dim": 44,
         "num_layers": 3, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
         "rope_max_seq_len": 32},
        inputs.wan, ("blocks",),
    ),
    "hunyuan_video": ZooModel(
        "HunyuanVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10,
         "num_layers": 2, "num_single_layers": 3, "num_refiner_layers": 2, "mlp_ratio": 2.0,
         "patch_size": 2, "patch_size_t": 1, "guidance_embeds": True, "text_embed_dim": 16,
         "pooled_projection_dim": 12, "rope_axes_dim": (2, 4, 4)},
        inputs.hunyuan_video,
        ("context_embedder.token_refiner.refiner_blocks", "transformer_blocks",
         "single_transformer_blocks"),
    ),
    "hunyuan_video15": ZooModel(
        "HunyuanVideo15Transformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
         "num_layers": 3, "num_refiner_layers": 2, "mlp_ratio": 2.0, "patch_size": 1,
         "patch_size_t": 1, "text_embed_dim": 16, "text_embed_2_dim": 8, "image_embed_dim": 12,
         "rope_axes_dim": (2, 2, 4), "target_size": 16, "task_type": "t2v"},
        inputs.hunyuan_video15,
        ("context_embedder.token_refiner.refiner_blocks", "transformer_blocks"),
    ),
    "hunyuan_dit": ZooModel(
        "HunyuanDiT2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 4,
         "attention_head_dim": 8, "num_attention_heads": 2, "cross_attention_dim": 8,
         "cross_attention_dim_t5": 8, "pooled_projection_dim": 4, "hidden_size": 16,
         "text_len": 4, "text_len_t5": 4},
        inputs.hunyuan_dit, ("blocks",),
        note="U-shaped: late blocks have skip layers, another layout",
    ),
    "ltx": ZooModel(
        "LTXVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 6,
         "cross_attention_dim": 24, "num_layers": 3, "caption_channels": 12},
        inputs.ltx, ("transformer_blocks",),
        note="CP plan",
    ),
    "cogview4": ZooModel(
        "CogView4Transformer2DModel",
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 3,
         "attention_head_dim": 4, "num_attention_heads": 4, "text_embed_dim": 12,
         "time_embed_dim": 10, "condition_dim": 4},
        inputs.cogview4, ("transformer_blocks",),
    ),
    "qwen_image": ZooModel(
        "QwenImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 3,
         "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 20,
         "axes_dims_rope": (2, 2, 4)},
        inputs.qwen, ("transformer_blocks",),
        note="CP and TP plans",
    ),
    "qwen_image21": ZooModel(
        "QwenImage21Transformer2DModel",
        {"patch_size": 1, "in_channels": 16, "out_channels": 4, "num_layers": 3,
         "attention_head_dim": 8, "num_attention_heads": 4, "context_in_dim": 20,
         "axes_dims_rope": (2, 2, 4)},
        inputs.qwen21, ("transformer_blocks",),
        note="one modulation for all blocks, outside them; TP plan",
    ),
    "z_image": ZooModel(
        "ZImageTransformer2DModel",
        {"all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 24,
         "n_layers": 3, "n_refiner_layers": 2, "n_heads": 2, "n_kv_heads": 2, "qk_norm": True,
         "cap_feat_dim": 12, "axes_dims": [4, 4, 4], "axes_lens": [64, 16, 16]},
        inputs.z_image, ("noise_refiner", "context_refiner", "layers"),
        note="takes and returns lists of tensors; refiners without modulation have another layout",
    ),
    "pixart": ZooModel(
        "PixArtTransformer2DModel",
        {"sample_size": 8, "num_layers": 3, "patch_size": 2, "attention_head_dim": 8,
         "num_attention_heads": 3, "in_channels": 4, "cross_attention_dim": 24,
         "out_channels": 8, "caption_channels": 16, "use_additional_conditions": False},
        inputs.pixart, ("transformer_blocks",),
    ),
    "dit": ZooModel(
        "DiTTransformer2DModel",
        {"sample_size": 8, "num_layers": 3, "patch_size": 2, "attention_head_dim": 8,
         "num_attention_heads": 3, "in_channels": 4, "out_channels": 8, "num_embeds_ada_norm": 8},
        inputs.dit, ("transformer_blocks",),
        reads_outside=("transformer_blocks.0.norm1.emb",),
        note="the output layer calls block 0's embedding: that part must stay resident",
    ),
    "sana_video": ZooModel(
        "SanaVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12,
         "num_layers": 3, "num_cross_attention_heads": 2, "cross_attention_head_dim": 12,
         "cross_attention_dim": 24, "caption_channels": 12, "sample_size": 8,
         "patch_size": (1, 2, 2), "rope_max_seq_len": 32},
        inputs.sana_video, ("transformer_blocks",),
    ),
    "cosmos": ZooModel(
        "CosmosTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12,
         "num_layers": 3, "mlp_ratio": 2.0, "text_embed_dim": 16, "adaln_lora_dim": 6,
         "max_size": (4, 16, 16), "patch_size": (1, 2, 2), "concat_padding_mask": False,
         "extra_pos_embed_type": "learnable"},
        inputs.cosmos, ("transformer_blocks",),
        note="concat_padding_mask=True needs torchvision, which the CPU wheel of torch 2.13 "
             "has no match for",
    ),
    "lumina2": ZooModel(
        "Lumina2Transformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 3,
         "num_refiner_layers": 2, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2,
         "axes_dim_rope": (4, 2, 2), "axes_lens": (32, 16, 16), "cap_feat_dim": 20},
        inputs.lumina2, ("context_refiner", "noise_refiner", "layers"),
        reordered=True,
    ),
    "kandinsky5": ZooModel(
        "Kandinsky5Transformer3DModel",
        {"in_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 12, "time_dim": 16,
         "out_visual_dim": 4, "patch_size": (1, 2, 2), "model_dim": 24, "ff_dim": 40,
         "num_text_blocks": 2, "num_visual_blocks": 3, "axes_dims": (4, 4, 4)},
        inputs.kandinsky5, ("text_transformer_blocks", "visual_transformer_blocks"),
    ),
    "latte": ZooModel(
        "LatteTransformer3DModel",
        {"sample_size": 8, "num_layers": 3, "patch_size": 2, "attention_head_dim": 6,
         "num_attention_heads": 2, "caption_channels": 12, "in_channels": 4,
         "cross_attention_dim": 12, "out_channels": 8, "attention_bias": True,
         "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000,
         "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-06,
         "video_length": 2},
        inputs.latte, ("transformer_blocks", "temporal_transformer_blocks"),
        order=Order.INTERLEAVED,
    ),
    "stable_audio": ZooModel(
        "StableAudioDiTModel",
        {"sample_size": 16, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8,
         "num_attention_heads": 4, "num_key_value_attention_heads": 2, "out_channels": 4,
         "cross_attention_dim": 16, "time_proj_dim": 16, "global_states_input_dim": 12,
         "cross_attention_input_dim": 12},
        inputs.stable_audio, ("transformer_blocks",),
    ),
    "wan_vace": ZooModel(
        "WanVACETransformer3DModel",
        {"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 6,
         "in_channels": 4, "out_channels": 4, "text_dim": 20, "freq_dim": 16, "ffn_dim": 44,
         "num_layers": 4, "cross_attn_norm": True, "rope_max_seq_len": 32,
         "vace_layers": [0, 2], "vace_in_channels": 6},
        inputs.wan_vace, ("vace_blocks", "blocks"),
        reordered=True,
    ),
    "wan_animate": ZooModel(
        "WanAnimateTransformer3DModel",
        {"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 6,
         "in_channels": 12, "latent_channels": 4, "out_channels": 4, "text_dim": 20,
         "freq_dim": 16, "ffn_dim": 44, "num_layers": 4, "cross_attn_norm": True,
         "image_dim": 12, "rope_max_seq_len": 32,
         "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_encoder_size": 16,
         "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16,
         "face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2,
         "inject_face_latents_blocks": 2, "motion_encoder_batch_size": 3},
        inputs.wan_animate, ("motion_encoder.res_blocks", "blocks", "face_adapter"),
        order=Order.REPEATED,
        note="the motion encoder runs once for every 3 of 18 face images; its blocks have buffers; "
             "face_adapter and blocks take turns",
    ),
    "mochi": ZooModel(
        "MochiTransformer3DModel",
        {"patch_size": 2, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3,
         "pooled_projection_dim": 16, "in_channels": 4, "text_embed_dim": 16,
         "time_embed_dim": 4, "max_sequence_length": 6},
        inputs.mochi, ("transformer_blocks",),
        note="the last block is context_pre_only: another parameter layout",
    ),
    "cogvideox": ZooModel(
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4,
         "out_channels": 4, "time_embed_dim": 4, "text_embed_dim": 12, "num_layers": 3,
         "sample_width": 8, "sample_height": 8, "sample_frames": 8, "patch_size": 2,
         "temporal_compression_ratio": 4, "max_text_seq_length": 6},
        inputs.cogvideox, ("transformer_blocks",),
    ),
    "consisid": ZooModel(
        "ConsisIDTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4,
         "out_channels": 4, "time_embed_dim": 4, "text_embed_dim": 12, "num_layers": 4,
         "sample_width": 8, "sample_height": 8, "sample_frames": 8, "patch_size": 2,
         "temporal_compression_ratio": 4, "max_text_seq_length": 6, "is_train_face": True,
         "cross_attn_interval": 2, "cross_attn_dim_head": 8, "cross_attn_num_heads": 2,
         "LFE_id_dim": 2, "LFE_vit_dim": 2, "LFE_depth": 5, "LFE_dim_head": 8,
         "LFE_num_heads": 2, "LFE_num_id_token": 1, "LFE_num_querie": 3, "LFE_output_dim": 10,
         "LFE_ff_mult": 1, "LFE_num_scale": 1},
        inputs.consisid, ("transformer_blocks", "perceiver_cross_attention"),
        order=Order.INTERLEAVED,
        note="local_facial_extractor.layers is a list of lists, which are never called",
    ),
    "allegro": ZooModel(
        "AllegroTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
         "out_channels": 4, "num_layers": 3, "cross_attention_dim": 24, "sample_width": 8,
         "sample_height": 8, "sample_frames": 8, "caption_channels": 12},
        inputs.allegro, ("transformer_blocks",),
    ),
    "sana": ZooModel(
        "SanaTransformer2DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
         "attention_head_dim": 12, "num_layers": 3, "num_cross_attention_heads": 2,
         "cross_attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": 12,
         "sample_size": 8},
        inputs.sana, ("transformer_blocks",),
    ),
    "hidream": ZooModel(
        "HiDreamImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 3,
         "caption_channels": [12, 12], "text_emb_dim": 16, "num_routed_experts": 4,
         "num_activated_experts": 2, "axes_dims_rope": (4, 2, 2), "max_resolution": (8, 8),
         "llama_layers": [0, 1, 1, 0], "force_inference_output": True},
        inputs.hidream, ("double_stream_blocks", "single_stream_blocks"),
        note="which experts of a block run depends on the data",
    ),
    "prx": ZooModel(
        "PRXTransformer2DModel",
        {"in_channels": 4, "patch_size": 2, "context_in_dim": 12, "hidden_size": 24,
         "mlp_ratio": 2.0, "num_heads": 3, "depth": 3, "axes_dim": [4, 4]},
        inputs.prx, ("blocks",),
    ),
    "bria": ZooModel(
        "BriaTransformer2DModel",
        {"patch_size": 1, "in_channels": 8, "num_layers": 2, "num_single_layers": 3,
         "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 24,
         "axes_dims_rope": [2, 2, 4]},
        inputs.bria, ("transformer_blocks", "single_transformer_blocks"),
    ),
}
# fmt: on


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model in eval mode, frozen, every weight random.

    Args:
        family: Key in ``ZOO``.
        seed: Of the weights.
        dtype: As ``cast_`` gives it, and from_pretrained().
    """
    entry = ZOO[family]
    torch.manual_seed(seed)
    model: nn.Module = getattr(importlib.import_module("diffusers"), entry.class_name)(
        **entry.config
    )
    _randomize(model, seed)
    cast_(model, dtype)
    return model.eval().requires_grad_(False)


def cast_(model: nn.Module, dtype: torch.dtype) -> None:
    """Give floating tensors a dtype, but for the modules that the class keeps in float32."""
    keep = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not keep & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)


def make_inputs(
    family: str, seed: int = 0, batch: int = 2, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return keyword arguments of the model's forward()."""
    return ZOO[family].make_inputs(inputs.Maker(seed, batch, dtype))


@torch.inference_mode()
def forward(model: nn.Module, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of the model's output, in order."""
    return _tensors(model(**kwargs))


def stacked_blocks(family: str, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return name and module of all blocks in the stacks, stack after stack."""
    return [
        (f"{stack}.{key}", block)
        for stack in ZOO[family].stacks
        for key, block in model.get_submodule(stack).named_children()
    ]


def _randomize(model: nn.Module, seed: int) -> None:
    """Give every floating parameter seeded values that are not constant.

    Constructors leave gates and output projections at zero, which would hide a wrong block weight;
    norms keep a mean of one.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.copy_(float(name.endswith("weight")) + 0.1 * noise)
            else:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in _tensors(item)]
    return []
