"""The documents: their snippets run, and they name the install command that is ours."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cells import CELLS, cell_id
from ranks import run_ranks
from safetensors.torch import save_file
from toys import inputs, make_toy

import dlo_core
from dlo_core._install import INSTALL, install_command

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    ROOT / "README.md",
    ROOT / "docs" / "getting-started.md",
    ROOT / "docs" / "parallelism.md",
    ROOT / "docs" / "saving.md",
]
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_readme_and_the_messages_have_one_install_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert install_command("cuda") in text
    assert INSTALL.format(extra="[cuda]") == install_command("cuda")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_installs_the_other_project_of_that_name(page: Path) -> None:
    assert not re.search(r"pip install +dlo\b(?!.* @ )", page.read_text())


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_no_page_has_a_stand_in_for_an_address(page: Path) -> None:
    assert not re.search(r"URL-of|git\+|example\.(com|org)", page.read_text())


@pytest.mark.skipif(not (ROOT / "dlo_core").is_dir(), reason="the packages are installed, not here")
def test_contributing_lists_every_module_of_the_core_with_a_line() -> None:
    spec = importlib.util.spec_from_file_location(
        "module_table", ROOT / "tools" / "module_table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text, wanted = tool.page()
    assert text == wanted, "run: python tools/module_table.py"
    listed = re.findall(r"^\| `(\w+)/?` \| \S.{10,} \|$", text, re.MULTILINE)
    assert sorted(listed) == sorted(tool.modules())
    assert len(listed) > 60


def test_every_fault_that_other_systems_had_has_its_test() -> None:
    """Public faults, numbered B01 to B44 in the docstrings of the tests that show them."""
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    named = set(re.findall(r"\bB\d\d\b", "\n".join(texts)))
    assert {f"B{number:02}" for number in range(1, 45)} <= named


def test_every_public_name_has_a_docstring_and_is_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for name in dlo_core.__all__:
        thing = getattr(dlo_core, name)
        if name.startswith("__"):
            continue
        assert thing.__doc__ or name == "hookimpl", name
        is_error = isinstance(thing, type) and issubclass(thing, Exception)
        documented = re.search(rf"::: dlo_core\.(\w+\.)?{name}\n", page)
        in_interface = name in {"Backend", "Capabilities"}
        assert documented or is_error or in_interface, name


def run_snippets(rank: int, page: str, folder: str) -> int:
    """Run every snippet of ``page`` on the CPU, with a toy for the reader's model."""
    checkpoint = Path(folder) / "transformer.safetensors"
    toy = make_toy(4)
    if rank == 0:
        save_file(dict(toy.state_dict()), checkpoint)
    torch.distributed.barrier()
    warnings.simplefilter("ignore", dlo_core.DloWarning)
    count = 0
    for code in CODE.findall(Path(page).read_text()):
        space: dict[str, Any] = {
            "torch": torch,
            "dlo": dlo_core,
            "MyTransformer": lambda: make_toy(4),
            "model": make_toy(4),
            "x": inputs(),
            "on_meta": on_meta,
        }
        exec(compile(localised(code, checkpoint, rank), page, "exec"), space)
        count += 1
        model = space["model"]
        if dlo_core.offloaded(model) is not None:
            dlo_core.offloaded(model).disable()  # type: ignore[union-attr]
    return count


def localised(code: str, checkpoint: Path, rank: int) -> str:
    """Return the snippet with the reader's device, names and paths replaced by the test's."""
    for theirs, ours in {
        '"cuda"': '"cpu"',
        "path/to/transformer": str(checkpoint),
        "path/to/saved": str(checkpoint.parent / f"saved-{rank}"),
        "dist.init_process_group()": "",
        '"double_blocks", "single_blocks"': '"blocks"',
        "model.layers[2:]": "model.blocks[2:]",
        "blocks.0.scale_table": "blocks.0.norm.weight",
        # No C++ compiler is needed to try it.
        "compile(fullgraph=True)": 'compile(fullgraph=True, backend="eager")',
        # The toy has buffers, which the reader is told to keep real.
        'with torch.device("meta"):\n    model = MyTransformer()': META,
    }.items():
        code = code.replace(theirs, ours)
    return code


META = "model = on_meta(MyTransformer())"


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """Put the parameters, and no buffer, on meta."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(
                    parameter.to("meta"), requires_grad=False
                )
    return model


@pytest.mark.parametrize("page", SNIPPETS, ids=lambda page: page.name)
def test_the_snippets_run_on_two_ranks(page: Path, tmp_path: Path) -> None:
    counts = run_ranks(run_snippets, 2, str(page), str(tmp_path))
    assert min(counts) >= 2


def test_the_planners_snippet_says_what_its_comments_say() -> None:
    page = ROOT / "docs" / "benchmarks.md"
    (code,) = CODE.findall(page.read_text())
    space: dict[str, Any] = {"print": lambda *_: None}
    exec(compile(code, str(page), "exec"), space)
    assert f"{space['alone'].step_ms:.1f} and {space['alone'].exposed_ms:.1f}:" in code
    assert space["spread"].step_ms < space["leading"].step_ms


@pytest.mark.parametrize("number", range(3))
def test_the_snippets_of_the_testing_kit_run(number: int) -> None:
    page = ROOT / "docs" / "correctness.md"
    codes = [code.replace('"cuda"', '"cpu"') for code in CODE.findall(page.read_text())]
    space = {"MyTransformer": lambda: make_toy(4), "x": inputs()}
    exec(compile(codes[number], str(page), "exec"), space)
    assert len(codes) == 3


def test_the_table_of_parallelisms_has_a_row_for_every_cell() -> None:
    """What the rows say is checked by tools/parallel_table.py, where all cells ran."""
    page = (ROOT / "docs" / "parallelism.md").read_text()
    for cell in CELLS:
        mode = "yes" if cell.use_allgather else "no"
        said = f"rejected: {cell.rejected}" if cell.rejected else "rank-local"
        said = said if cell.shares < 2 else f"shared by {cell.shares}"
        assert f"| {cell.name} | our DiT | {mode} | {said} |" in page
        assert f"`test_parallel_matrix[{cell_id(cell)}]`" in page
