"""The trained weights of the digit transformer, which dlo ships as package data."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from dlo_core.demo.model import DigitTransformer, build_meta_model

__all__ = ["FOLDER", "INDEX", "load_model"]

FOLDER = Path(__file__).with_name("data")
INDEX = "digits.safetensors.index.json"


def load_model(folder: Path = FOLDER) -> DigitTransformer:
    """Return the digit transformer with all of its trained weights in memory."""
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    weights: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        # A clone lies in memory of its own, aligned as torch aligns; the file's views do not.
        weights |= {name: weight.clone() for name, weight in load_file(folder / file).items()}
    model = build_meta_model()
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False)
