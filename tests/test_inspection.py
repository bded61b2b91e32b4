"""``dlo inspect``: what a checkpoint holds, what a rank would keep, and why it would be refused."""

from __future__ import annotations

import io
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from toys import AwkwardBlock, Block, Toy, make_toy
from typer.testing import CliRunner

import dlo_core as dlo
from dlo_core import cli
from dlo_core.inspection import inspect_checkpoint
from dlo_core.inspection_table import print_inspection
from dlo_core.plan import Loading, plan_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def save(model: torch.nn.Module, folder: Path, count: int = 1) -> Path:
    """Write the model in ``count`` numbered files, without an index."""
    tensors = {n: t.contiguous() for n, t in model.state_dict().items() if "again" not in n}
    rows = list(tensors.items())
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        save_file(dict(rows[number::count]), folder / name)
    return folder


def ask(*args: Any, code: int = 0) -> str:
    shown = CliRunner().invoke(cli.app, ["inspect", *map(str, args)], env={"COLUMNS": "80"})
    assert shown.exit_code == code, shown.output
    return shown.output


def test_blocks_are_found_by_names_and_have_the_bytes_of_the_real_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = [Block(), Block(), AwkwardBlock(large=300), Block()]
    model = Toy(blocks).requires_grad_(False)
    save(model, tmp_path, 2)
    found = inspect_checkpoint(tmp_path, ranks=(1, 3))
    assert not found.problems
    (stack,) = found.stacks
    assert (stack.name, stack.num_blocks) == ("blocks", 4)
    assert [layout.numbers for layout in stack.layouts] == [("0", "1", "3"), ("2",)]
    assert found.outside_tensors == 6  # two linear layers, a parameter, a buffer
    assert sum(file.num_tensors for file in found.files) == found.num_tensors
    assert sum(found.dtypes.values()) == found.nbytes
    same = make_toy(5)
    (tmp_path / "same").mkdir()
    save(same, tmp_path / "same")
    for row in inspect_checkpoint(tmp_path / "same", ranks=(1, 2, 3)).ranks:
        plan = plan_model(
            same,
            dlo.OffloadConfig(),
            blocks=None,
            loading=Loading(),
            size=row.ranks,
            alignment=256,
            device_type="cpu",
        )
        assert row.host_nbytes == sum(shard.nbytes for shard in plan.shards)
        assert row.slots_nbytes == 2 * max(shard.padded_nbytes for shard in plan.shards)


def test_the_tables_fit_80_columns_and_the_json_says_the_same(tmp_path: Path) -> None:
    save(make_toy(12), tmp_path, 2)
    text = ask(tmp_path, "--ranks", 2, "--ranks", 4)
    assert "12 (0-11)" in text
    assert "no problems" in text
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    told = json.loads(ask(tmp_path, "--ranks", 2, "--json"))
    assert told["stacks"][0]["num_blocks"] == 12
    assert [row["ranks"] for row in told["ranks"]] == [2]
    assert told["problems"] == []


def test_several_stacks_and_small_lists_are_told_apart(tmp_path: Path) -> None:
    tensors = {f"double.{n}.attn.0.w": torch.ones(64, 64) for n in range(3)}
    tensors |= {f"net.single.{n}.w": torch.ones(64, 64).bfloat16() for n in range(11)}
    tensors |= {"embed.0.bias": torch.ones(4), "embed.2.bias": torch.ones(4)}
    save_file(tensors, tmp_path / "a.safetensors")
    found = inspect_checkpoint(tmp_path)
    rows = {stack.name: stack.num_blocks for stack in found.stacks}
    assert rows == {"double": 3, "net.single": 11}
    assert found.stacks[1].layouts[0].numbers == tuple(map(str, range(11)))
    assert found.outside_tensors == 2
    named = inspect_checkpoint(tmp_path, blocks=("embed",))
    assert [stack.name for stack in named.stacks] == ["embed"]
    assert inspect_checkpoint(tmp_path, blocks=("nowhere",)).problems


def test_a_missing_block_is_noted(tmp_path: Path) -> None:
    model = make_toy(5)
    state = {n: t for n, t in model.state_dict().items() if not n.startswith("blocks.3.")}
    save_file(state, tmp_path / "a.safetensors")
    assert "'blocks' has no block 3" in ask(tmp_path)


def drop_tail(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 10)


def drop_file(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def make_pointer(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").write_text("version https://git-lfs.github.com")


def add_again(folder: Path) -> None:
    save_file({"pre.weight": torch.ones(1), "pre.bias": torch.ones(1)}, folder / "x.safetensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (drop_tail, ["truncated"]),
        (drop_file, ["model-00002-of-00002.safetensors"]),
        (make_pointer, ["git lfs pull"]),
        (add_again, ["'pre.weight'", "'pre.bias' is both"]),
    ],
)
def test_damage_is_told_and_what_is_whole_is_shown(
    damage: Callable[[Path], None], says: list[str], tmp_path: Path
) -> None:
    save(make_toy(4), tmp_path, 2)
    damage(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.num_tensors > 10
    text = "\n".join(found.problems)
    for word in says:
        assert word in text
    assert "problems:" in ask(tmp_path, code=1)
    assert json.loads(ask(tmp_path, "--json", code=1))["problems"] == list(found.problems)


def test_nothing_there_is_a_problem_too(tmp_path: Path) -> None:
    assert "there is no checkpoint" in ask(tmp_path / "nowhere", code=1).replace("\n", " ")
    ask(tmp_path, "--ranks", 0, code=2)


def test_what_would_not_be_read_is_listed(tmp_path: Path) -> None:
    save(make_toy(2), tmp_path)
    (tmp_path / "old.bin").write_bytes(b"pickle")
    index = {
        "weight_map": dict.fromkeys(make_toy(2).state_dict(), "model-00001-of-00001.safetensors")
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"w": torch.ones(1)}, tmp_path / "other.safetensors")
    assert inspect_checkpoint(tmp_path).unread == ("old.bin", "other.safetensors")


def test_odd_dtypes_are_noted(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2).double(), "b": torch.ones(2).to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "a.safetensors")
    text = " ".join(inspect_checkpoint(tmp_path).notes)
    assert "float64" in text
    assert "8-bit" in text
    assert "no blocks" in text


def test_a_pipeline_folder_names_its_components(tmp_path: Path) -> None:
    for name in ("text_encoder", "transformer", "vae"):
        (tmp_path / name).mkdir()
        save(make_toy(2), tmp_path / name)
    (problem,) = inspect_checkpoint(tmp_path).problems
    assert "('transformer', 'text_encoder', 'vae')" in problem
    with pytest.raises(dlo.CheckpointError, match="components of a pipeline"):
        dlo.offload(make_toy(2), device="cpu", checkpoint=tmp_path)


def test_names_are_never_markup(tmp_path: Path) -> None:
    folder = tmp_path / "[red]odd"
    folder.mkdir()
    tensors = {f"[blue]s.{number}.w": torch.ones(64) for number in range(2)}
    save_file(tensors, folder / "a.safetensors")
    out = io.StringIO()
    print_inspection(inspect_checkpoint(folder), Console(file=out, width=80))
    assert "[red]odd" in out.getvalue().replace("\n", "")
    assert "[blue]s" in out.getvalue()


def test_a_model_of_diffusers_is_planned_as_it_would_be(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    config = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 3,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    }
    model = diffusers.WanTransformer3DModel(**config)
    model.save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path, model="WanTransformer3DModel", ranks=(2,))
    assert not found.problems
    assert [(stack.name, stack.num_blocks) for stack in found.stacks] == [("blocks", 3)]
    assert "post_load=" in " ".join(found.notes)
    # With another number of blocks it does not fit.
    config_file = tmp_path / "config.json"
    config_file.write_text(config_file.read_text().replace('"num_layers": 3', '"num_layers": 4'))
    other = inspect_checkpoint(tmp_path, model="WanTransformer3DModel")
    assert "does not fit" in " ".join(other.problems)
    assert "blocks.3." in " ".join(other.problems)
    ask(tmp_path, "--model", "NoSuchModel", code=2)
    config_file.unlink()
    ask(tmp_path, "--model", "WanTransformer3DModel", code=2)
