"""Topologies: who shards with whom by the rules, what is refused, and what is told of it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from parallel_dit import made_topology
from poison import PoisonBackend
from ranks import run_ranks
from toys import AwkwardBlock, Toy, assert_restored, inputs, make_toy, snapshot, twin
from typer.testing import CliRunner

import dlo_core as dlo
from dlo_core.cli import app
from dlo_core.parallel import Dim, Sizes, choose, ranks_along
from dlo_core.topology_report import report_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

WORLD: Any = dist.group


# --- the rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("dp", [1, 2])
def test_dp_shards_else_sp_else_nobody_and_tp_never(dp: int, sp: int, tp: int) -> None:
    want = Dim.DP if dp > 1 else Dim.SP if sp > 1 else None
    chosen = choose(Sizes(dp, sp, tp))
    assert chosen.dim is want
    assert ("TP" in chosen.reason or "only TP" in chosen.reason) == (tp > 1)
    assert choose(Sizes(dp, sp, tp), use_allgather=False).dim is None


def test_hsdp_is_rejected_with_the_all_gather_and_nothing_is_shared_without() -> None:
    for sizes in (Sizes(hsdp=(2, 2)), Sizes(hsdp=(1, 4)), Sizes(sp=2, hsdp=(2, 2))):
        with pytest.raises(dlo.ConfigError, match=r"a second time; pass use_allgather=False"):
            choose(sizes)
        assert choose(sizes, use_allgather=False).dim is None


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 2, "hsdp": (1, 2)}, "HSDP cannot be combined with DP"),
        ({"tp": 2, "hsdp": (1, 2)}, "HSDP cannot be combined with TP"),
        ({"sp": 3, "hsdp": (2, 2)}, "3 must divide 4"),
        ({"dp": 0}, "dp must be a whole number of ranks"),
        ({"sp": 2.0}, "sp must be a whole number"),
        ({"tp": True}, "tp must be a whole number"),
        ({"hsdp": 4}, r"\(1, 4\) is FSDP over 4 ranks"),
        ({"hsdp": (0, 2)}, "hsdp must be a whole number"),
    ],
)
def test_sizes_that_no_setting_allows(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(dlo.ConfigError, match=message):
        Sizes(**sizes)


def test_the_groups_of_a_dimension_are_disjoint_and_cross_the_others_once() -> None:
    """Every rank is in one group of each dimension, and two dimensions meet in that rank alone."""
    for dp, sp, tp in itertools.product((1, 2, 3), repeat=3):
        sizes = Sizes(dp, sp, tp)
        for dim, size in ((Dim.DP, dp), (Dim.SP, sp), (Dim.TP, tp)):
            groups = {ranks_along(sizes, dim, rank) for rank in range(sizes.world)}
            assert sorted(itertools.chain(*groups)) == list(range(sizes.world))
            assert {len(group) for group in groups} == {size}
        for rank in range(sizes.world):
            mine = [set(ranks_along(sizes, dim, rank)) for dim in (Dim.DP, Dim.SP, Dim.TP)]
            for some, others in itertools.combinations(mine, 2):
                assert some & others == {rank}


# --- what is told -----------------------------------------------------------------------------


def test_the_report_names_groups_sizes_and_reasons() -> None:
    report = report_all(Sizes(2, 2), shard_within="node", ranks_per_node=2)
    text = str(report)
    assert "DP2 x SP2: 4 ranks" in text
    assert "gather mode over DP, within each node" in text
    assert [place.shard for place in report.ranks] == [(0,), (1,), (2,), (3,)]
    whole = report_all(Sizes(2, 2)).to_dict()
    assert whole["ranks"][3] == {
        "rank": 3,
        "node": "node0",
        "groups": {"dp": [1, 3], "sp": [2, 3]},
        "shard": [1, 3],
    }
    assert (whole["mode"], whole["dim"], whole["world"]) == ("gather", "dp", 4)
    with pytest.raises(dlo.ConfigError, match="nodes of 3 ranks"):
        report_all(Sizes(4), ranks_per_node=3)


def test_the_command_prints_text_and_json_and_fails_for_what_is_rejected() -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["topology", "--dp", "2", "--tp", "2"])
    assert done.exit_code == 0
    assert "TP ranks hold different weights" in done.stdout
    assert "0     node0  0 2       0 1       2 (1/2 each)" in done.stdout
    done = runner.invoke(app, ["topology", "--hsdp", "2x2", "--no-use-allgather", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["mode"] == "rank-local"
    rejected = (["--hsdp", "2x2"], ["--hsdp", "2x2", "--dp", "2"], ["--hsdp", "2"], ["--dp", "0"])
    for arguments in rejected:
        done = runner.invoke(app, ["topology", *arguments])
        assert done.exit_code == 1
        assert "rejected: " in done.stdout
        done = runner.invoke(app, ["topology", *arguments, "--json"])
        assert done.exit_code == 1
        assert json.loads(done.stdout)["reason"]
    done = runner.invoke(
        app, ["topology", "--dp", "2", "--shard-within", "node", "--no-use-allgather"]
    )
    assert done.exit_code == 1
    assert "leave one of the two out" in done.stdout


def test_importing_dlo_imports_neither_dtensor_nor_fsdp() -> None:
    """They take a second, and most users have neither."""
    code = (
        "import sys, dlo_core; "
        "print([n for n in ('torch.distributed.tensor', 'torch.distributed.fsdp') "
        "if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


# --- from meshes, groups and sizes ------------------------------------------------------------


def test_the_sources_of_a_topology_agree_and_none_but_from_sizes_makes_groups() -> None:
    """A rank's topology from a mesh, from its groups, and as the command prints it."""
    from torch.distributed.device_mesh import init_device_mesh

    def job(rank: int) -> Any:
        made = made_topology(dp=2, sp=2, node="n")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ulysses"))
        # A mesh may make a group when it is first asked for it.
        groups = {name: mesh.get_group(name) for name in ("replicas", "ulysses")}
        dist.barrier()
        count = len(dist.distributed_c10d._world.pg_map)
        others = [
            dlo.Topology.from_mesh(mesh, dp="replicas", sp="ulysses", node="n"),
            dlo.Topology.from_groups(dp=groups["replicas"], sp=groups["ulysses"], node="n"),
        ]
        assert len(dist.distributed_c10d._world.pg_map) == count
        told = [topology.describe().to_dict() for topology in (made, *others)]
        assert told[0] == told[1] == told[2]
        assert all(topology.sizes == Sizes(2, 2) for topology in others)
        assert made.dp is not None
        assert made.shard_group is made.dp
        assert made.group_for(use_allgather=False) is None
        assert repr(made) == "Topology(DP2 x SP2)"
        return told[0]["ranks"][0] | {"node": "node0"}

    whole = report_all(Sizes(2, 2)).to_dict()["ranks"]
    assert run_ranks(job, 4) == whole


def test_a_dimension_that_was_flattened_from_several_is_one() -> None:
    """Ring and Ulysses ranks together are one sequence-parallel group."""
    from torch.distributed.device_mesh import init_device_mesh

    def job(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ring", "ulysses"))
        flat = mesh["ring", "ulysses"]._flatten("sp")
        dist.barrier()
        with pytest.raises(dlo.ConfigError, match=r"flattened from several pass the group"):
            dlo.Topology.from_mesh(mesh, dp="dp", sp="sp")
        topology = dlo.Topology.from_groups(dp=mesh.get_group("dp"), sp=flat.get_group())
        assert topology.sizes == Sizes(sp=4)
        return topology.describe().ranks[0].shard

    assert run_ranks(job, 4) == [(0, 1, 2, 3)] * 4


def test_what_is_no_topology_is_refused_on_every_rank() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        part = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        new = dist.new_group([0, 1])
        dist.barrier()
        bad: list[tuple[str, Callable[[], object]]] = [
            ("dp='c' is no dimension", lambda: dlo.Topology.from_mesh(mesh, dp="c")),
            ("hsdp='c' is no dimension", lambda: dlo.Topology.from_mesh(mesh, hsdp=("a", "c"))),
            ("one dimension of the mesh", lambda: dlo.Topology.from_mesh(mesh, dp="a", sp="a")),
            (
                "share the ranks",
                lambda: dlo.Topology.from_groups(dp=part.get_group(), sp=mesh.get_group("b")),
            ),
            ("makes 6 ranks, but the job has 4", lambda: dlo.Topology.from_sizes(dp=2, sp=3)),
            (
                "HSDP cannot be combined with TP",
                lambda: dlo.Topology.from_mesh(mesh, tp="a", hsdp="b"),
            ),
            (
                "must be a torch.distributed.ProcessGroup",
                lambda: dlo.Topology.from_groups(dp=4),  # type: ignore[arg-type]
            ),
        ]
        if rank > 1:
            bad.append(("is not in the group", lambda: dlo.Topology.from_groups(sp=new)))
        for message, make in bad:
            with pytest.raises(dlo.ConfigError, match=message):
                make()
        topology = dlo.Topology.from_mesh(mesh, dp="a", sp="b")
        model = make_toy(2)
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("both given", {"group": WORLD.WORLD, "topology": topology}),
            ("no shard group to narrow", {"shard_within": "node"}),
            ("nobody does", {"topology": topology, "shard_within": "node", "use_allgather": False}),
            ("must be 'node' or None", {"topology": topology, "shard_within": "rack"}),
            ("unknown setting 'shards'", {"topology": topology, "shards": 2}),
        ]
        for message, settings in wrong:
            with pytest.raises(dlo.ConfigError, match=message):
                dlo.offload(model, device="cpu", **settings)
            assert dlo.offloaded(model) is None

    run_ranks(job, 4)
    with pytest.raises(dlo.ConfigError, match="init_process_group"):
        dlo.Topology.from_sizes(dp=1)


# --- on groups whose ranks are not the job's --------------------------------------------------


def equal(model: nn.Module, rank: int, **settings: Any) -> dlo.LayerwiseOffload:
    """Compare a model under a topology with its twin, and restore it."""
    reference, before = twin(model), snapshot(model)
    offloaded = dlo.offload(model, device=PoisonBackend(), **settings)
    for number in range(3):
        x = inputs(10 * rank + number)
        assert torch.equal(model(x), reference(x))
    offloaded.disable()
    assert_restored(model, before)
    return offloaded


def test_every_dtype_travels_within_subgroups() -> None:
    """float8, uint16, bool, bfloat16, complex: a block is bytes. DP groups are [0, 2] and [1, 3].

    B34, https://github.com/nvidia-cosmos/cosmos-rl/pull/722
    """

    def job(rank: int) -> None:
        topology = made_topology(dp=2, sp=2)
        torch.manual_seed(rank % 2)
        model = Toy([AwkwardBlock(seed=3 * number + rank % 2) for number in range(3)])
        offloaded = equal(model.requires_grad_(False), rank, topology=topology)
        assert (offloaded.rank, offloaded.size) == (rank // 2, 2)
        assert offloaded.group is topology.dp
        assert offloaded.topology is topology

    run_ranks(job, 4)


def test_a_topology_of_groups_that_cross_shards_by_group_rank() -> None:
    """DP over [0, 3] and [1, 2], SP over [0, 2] and [1, 3]: no rank is its own group rank.

    B35, https://github.com/meta-pytorch/torchrec/pull/4601
    """

    def job(rank: int) -> int:
        dp = [dist.new_group(ranks) for ranks in ([3, 0], [2, 1])]
        sp = [dist.new_group(ranks) for ranks in ([0, 2], [3, 1])]
        topology = dlo.Topology.from_groups(dp=dp[int(rank in (1, 2))], sp=sp[rank % 2])
        offloaded = equal(make_toy(4, seed=int(rank in (1, 2))), rank, topology=topology)
        alone = dlo.Topology.from_groups(sp=sp[rank % 2])
        assert equal(make_toy(3, seed=rank % 2), rank, topology=alone).size == 2
        assert offloaded.size == 2
        return offloaded.rank

    assert run_ranks(job, 4) == [0, 0, 1, 1]


def test_a_different_block_in_one_subgroup_is_refused_in_that_subgroup_alone() -> None:
    """Rank 3 has a block fewer: it and rank 1, who would share with it, raise; 0 and 2 run.

    B37, https://github.com/tier4/Diffusion-Planner/pull/336
    """

    def job(rank: int) -> str:
        topology = made_topology(dp=2, sp=2)
        if rank % 2 == 0:
            equal(make_toy(4), rank, topology=topology)
            return ""
        model = make_toy(3 if rank == 3 else 4)
        before = snapshot(model)
        with pytest.raises(dlo.AgreementError, match="differ in") as caught:
            dlo.offload(model, device=PoisonBackend(), topology=topology, load_timeout_s=20)
        assert_restored(model, before)
        equal(make_toy(4), rank, topology=topology)
        return str(caught.value)

    texts = run_ranks(job, 4)
    assert texts[1] == texts[3]
    assert "rank 0 has 4, rank 1 has 3" in texts[1]
    assert texts[0] == texts[2] == ""


def test_a_rank_that_fails_in_a_block_strands_nobody_in_its_subgroup_or_beside_it() -> None:
    """Rank 3 raises inside block 1; rank 1, who shares with it, gets its weights all the same.

    B37, https://github.com/tier4/Diffusion-Planner/pull/336
    """

    def job(rank: int) -> None:
        topology = made_topology(dp=2, sp=2)
        model = make_toy(4)
        reference = twin(model)
        with dlo.offload(model, device=PoisonBackend(), topology=topology, timeout_s=10):
            for number in range(3):
                if rank == 3 and number == 1:
                    handle = model.blocks[1].register_forward_pre_hook(fail)
                    with pytest.raises(RuntimeError, match="on purpose"):
                        model(inputs())
                    handle.remove()
                    continue
                x = inputs(10 * rank + number)
                assert torch.equal(model(x), reference(x))

    run_ranks(job, 4)


def fail(module: nn.Module, args: Any) -> None:
    raise RuntimeError("on purpose")


def several(model: nn.Module) -> None:
    for _ in range(3):
        model(inputs())


def test_a_rank_that_stays_in_a_block_is_an_error_in_its_subgroup_alone() -> None:
    """Rank 3 hangs; rank 1 is told within the timeout, by group rank; 0 and 2 go on.

    B37, https://github.com/tier4/Diffusion-Planner/pull/336
    """

    def job(rank: int) -> int:
        topology = made_topology(dp=2, sp=2)
        model = make_toy(6)
        offloaded = dlo.offload(model, device=PoisonBackend(), topology=topology, timeout_s=2.0)
        model(inputs())
        if rank % 2 == 0:
            model(inputs())
            model(inputs())
            offloaded.disable()
            return -1
        if rank == 3:
            model.blocks[1].register_forward_pre_hook(lambda module, args: time.sleep(6))
        with pytest.raises(dlo.DloError) as caught:
            several(model)
        offloaded.shutdown()
        return caught.value.rank if isinstance(caught.value, dlo.FillError) else -2

    ranks = run_ranks(job, 4)
    assert ranks[0] == ranks[2] == -1
    assert ranks[1] == 0


# --- within a node ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "shares"),
    [
        ("aabb", [(0, 2), (1, 2), (0, 2), (1, 2)]),
        pytest.param("abab", [(0, 2), (0, 2), (1, 2), (1, 2)], marks=pytest.mark.slow),
        # The rank that is alone on its node keeps all.
        ("aaab", [(0, 3), (1, 3), (2, 3), (0, 1)]),
        pytest.param("abcd", [(0, 1)] * 4, marks=pytest.mark.slow),
    ],
)
def test_weights_are_shared_within_each_node(nodes: str, shares: list[tuple[int, int]]) -> None:
    def job(rank: int) -> tuple[int, int]:
        topology = made_topology(dp=4, node=nodes[rank])
        model = make_toy(4)
        config = dlo.OffloadConfig(shard_within="node")
        offloaded = dlo.LayerwiseOffload(config, device=PoisonBackend(), topology=topology)
        reference, before = twin(model), snapshot(model)
        for _ in range(2):
            offloaded.enable(model)
            for number in range(2):
                x = inputs(10 * rank + number)
                assert torch.equal(model(x), reference(x))
            held = offloaded.footprint.host_nbytes
            assert held >= offloaded.footprint.blocks_nbytes / offloaded.size
            assert (offloaded.stats().gathered_bytes > 0) == (offloaded.size > 1)
            offloaded.disable()
            assert_restored(model, before)
        return offloaded.rank, offloaded.size

    assert run_ranks(job, 4) == shares


def test_ranks_that_differ_in_the_setting_are_told_so() -> None:
    def job(rank: int) -> str:
        topology = made_topology(dp=2)
        within = "node" if rank else None
        with pytest.raises(dlo.AgreementError, match="differ in shard_within") as caught:
            dlo.offload(make_toy(2), device="cpu", topology=topology, shard_within=within)
        equal(make_toy(2), rank, topology=topology)
        return str(caught.value)

    texts = run_ranks(job, 2)
    assert texts[0] == texts[1]
    assert "rank 0 has None, rank 1 has node" in texts[0]


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"sp": 2}])
@pytest.mark.parametrize(
    ("name", "mine", "other"),
    [
        ("use_allgather", {}, {"use_allgather": False}),
        (
            "host='shared'",
            {"use_allgather": False},
            {"use_allgather": False, "host": "shared"},
        ),
    ],
)
def test_ranks_in_different_modes_are_told_at_once(
    sizes: dict[str, int], name: str, mine: dict[str, Any], other: dict[str, Any]
) -> None:
    """On all ranks, also where one goes alone and would not come to the others' meeting."""

    def job(rank: int) -> str:
        topology = made_topology(**sizes)
        model = make_toy(2)
        before = snapshot(model)
        settings = other if rank == 1 else mine
        start = time.monotonic()
        with pytest.raises(dlo.AgreementError, match="Give every rank the same") as caught:
            dlo.offload(model, device="cpu", topology=topology, load_timeout_s=20, **settings)
        assert time.monotonic() - start < 10
        assert_restored(model, before)
        equal(model, rank, topology=topology)
        return str(caught.value)

    texts = run_ranks(job, 2)
    values = ("False", "True") if name.startswith("host") else ("True", "False")
    assert len(set(texts)) == 1
    assert f"differ in {name}: rank 0 has {values[0]}, rank 1 has {values[1]}" in texts[0]


def test_a_bad_setting_of_one_rank_is_told_to_those_that_narrow() -> None:
    def job(rank: int) -> None:
        topology = made_topology(dp=2)
        settings: dict[str, Any] = {"depth": 1} if rank else {}
        with pytest.raises(dlo.ConfigError, match="depth must be a whole number"):
            dlo.offload(
                make_toy(2), device="cpu", topology=topology, shard_within="node", **settings
            )

    run_ranks(job, 2)


def test_a_group_is_narrowed_by_host_name() -> None:
    """Here all are on one host, so all share."""

    def job(rank: int) -> int:
        return equal(make_toy(3), rank, group=WORLD.WORLD, shard_within="node").size

    assert run_ranks(job, 2) == [2, 2]
