"""Train the demo's digit transformer on scikit-learn's handwritten digits.

Needs scikit-learn beside dlo, for the 1,797 images; no accelerator. The checkpoint that dlo ships
was made by ``python examples/train_digits.py`` with the defaults below, which takes some twenty
minutes on one core. The run is seeded, but the last bits depend on the machine and on torch.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor

from dlo_core.demo.model import DigitTransformer, ModelConfig, cast_weights
from dlo_core.demo.sampler import sample
from dlo_core.demo.weights import FOLDER

SHARD_NBYTES = 1_000_000
LABEL_DROP = 0.1
EMA_DECAY = 0.999
console = Console()


@dataclass(frozen=True, slots=True)
class Digits:
    """The training set.

    Attributes:
        images: ``[n, 8, 8]`` in fp32, -1 for paper and 1 for ink.
        labels: ``[n]``.
    """

    images: Tensor
    labels: Tensor


def load_digits() -> Digits:
    """Return scikit-learn's digits, whose pixels run from 0 to 16."""
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError:
        raise SystemExit("training needs scikit-learn: pip install scikit-learn") from None
    data = load()
    images = torch.from_numpy(data.images).float() / 8.0 - 1.0
    return Digits(images, torch.from_numpy(data.target).long())


def flow_loss(model: DigitTransformer, digits: Digits, picks: Tensor) -> Tensor:
    """Return the mean squared error of the velocity for the images ``picks``.

    The path from noise to image is straight; times are logit-normal, so most of them lie in the
    middle, where the velocity is hard to tell.
    """
    images, labels = digits.images[picks], digits.labels[picks]
    labels = labels.masked_fill(torch.rand(len(labels)) < LABEL_DROP, model.config.null_class)
    times = torch.randn(len(images)).sigmoid()
    noise = torch.randn_like(images)
    noisy = torch.lerp(noise, images, times[:, None, None])
    velocity: Tensor = model(noisy, times, labels)
    return (velocity - (images - noise)).square().mean()


def zero_gates(model: DigitTransformer) -> None:
    """Start each block as the identity (adaLN-zero), and the velocity at zero."""
    heads = [block.modulation for block in (*model.wide_blocks, *model.blocks)]
    for head in (*heads, model.modulation, model.out):
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return a linear warm-up over 200 steps, then a cosine down to zero."""
    warm = min(1.0, (step + 1) / 200)
    return peak * warm * 0.5 * (1.0 + math.cos(math.pi * step / steps))


@torch.no_grad()
def average(mean: DigitTransformer, model: DigitTransformer, step: int) -> None:
    """Move the averaged weights towards the trained ones; faster in the first steps."""
    decay = min(EMA_DECAY, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 1.0 - decay)


def train(digits: Digits, *, steps: int, batch_size: int, peak: float) -> DigitTransformer:
    """Return a model with averaged weights, in fp32."""
    model = DigitTransformer(ModelConfig())
    zero_gates(model)
    mean = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=steps, loss=float("nan"))
        recent: list[float] = []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = learning_rate(step, steps, peak)
            picks = torch.randint(len(digits.images), (batch_size,))
            loss = flow_loss(model, digits, picks)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average(mean, model, step)
            recent = [*recent[-199:], loss.item()]
            progress.update(task, advance=1, loss=sum(recent) / len(recent))
            if (step + 1) % 500 == 0:
                console.print(f"step {step + 1}: loss {sum(recent) / len(recent):.4f}")
    return mean


def save(model: DigitTransformer, folder: Path) -> None:
    """Write the weights as safetensors files of at most ``SHARD_NBYTES`` each, with an index."""
    files: list[dict[str, Tensor]] = [{}]
    room = SHARD_NBYTES
    for name, weight in model.state_dict().items():
        if weight.nbytes > room:
            files.append({})
            room = SHARD_NBYTES
        files[-1][name] = weight
        room -= weight.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, weights in enumerate(files, start=1):
        file = f"digits-{number:05}-of-{len(files):05}.safetensors"
        save_file(weights, folder / file, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read; this one goes into a wheel.
        (folder / file).chmod(0o644)
        weight_map.update(dict.fromkeys(weights, file))
    total = sum(weight.nbytes for weight in model.state_dict().values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "digits.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def recognised(model: DigitTransformer, digits: Digits, *, num_images: int) -> float:
    """Return the share of drawn digits that a classifier of the real digits reads as meant."""
    from sklearn.svm import SVC

    reader = SVC(gamma="scale").fit(digits.images.flatten(1).numpy(), digits.labels.numpy())
    labels = torch.arange(num_images) % model.config.num_classes
    images = sample(model, labels, seed=1, num_steps=20, guidance=2.0).clamp(-1.0, 1.0)
    return float((reader.predict(images.flatten(1).numpy()) == labels.numpy()).mean())


def main(
    *,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = 8000,
    batch_size: Annotated[int, typer.Option(help="Images a step.", min=1)] = 64,
    peak: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and batches.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = FOLDER,
) -> None:
    """Train the digit transformer and write its checkpoint."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    digits = load_digits()
    model = cast_weights(train(digits, steps=steps, batch_size=batch_size, peak=peak))
    save(model, out)
    console.print(f"wrote {out}")
    share = recognised(model, digits, num_images=500)
    console.print(f"a classifier trained on the real digits reads {share:.1%} of 500 as meant")


if __name__ == "__main__":
    typer.run(main)
