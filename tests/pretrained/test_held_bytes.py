"""What a load and a save hold on the host, and read from the files, measured in processes of their own."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.pretrained.checkpoints import FIXTURES
from tests.processes import ROOT, results, run_pool

SLACK = 40 * 2**20
"""Bytes beside the arrays: threads, pieces under way, and the mapped pages of one tensor of a layer."""
HELD = """
import json, os, pathlib, sys
sys.path.insert(0, "tools")
from benchmark_load import measured, streamed
from synthetic_checkpoint import llama_config, mixtral_config, write_safetensors
import jax
from dew.placement import Layout, MeshSpec, build_mesh
from dew.pretrained import describe, load_pretrained, save_pretrained
folder, kind, axes = pathlib.Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
mesh, configs = build_mesh(MeshSpec(**axes)), {"llama": llama_config, "mixtral": mixtral_config}
sizes = {"hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32_768, **json.loads(sys.argv[4])}
config = configs[kind](4, **sizes)
write_safetensors(folder, config)
# What both take the first time is no part of them.
small = load_pretrained("tests/fixtures/" + kind, mesh=mesh, layout=Layout(min_shard=1, tolerance=1.0))
save_pretrained(folder / "small", small.module, small.variables)
variables, loading = measured(lambda: streamed(folder, mesh, Layout()))
_, saving = measured(lambda: save_pretrained(folder / "out", describe(folder).module, variables, config))
leaves = jax.tree.leaves(variables)
shards = [shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards]
largest = variables["params"]["embed_tokens"]["embedding"].nbytes
print("RESULT " + json.dumps([loading["peak_bytes"], sum(shards), max(shards), saving["peak_bytes"], largest]))
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux' /proc")
@pytest.mark.parametrize(
    "kind, axes, sizes",
    [
        ("llama", {"fsdp": 8}, {"intermediate_size": 4096}),
        ("mixtral", {"expert": 4, "fsdp": 2}, {"intermediate_size": 1024}),
    ],
    ids=["dense", "a tensor for each expert"],
)
def test_a_load_holds_what_is_placed_and_one_shard_and_a_save_holds_one_leaf(tmp_path, kind, axes, sizes):
    # Mapped pages count as resident: pages that are not given back when their leaf has landed would double the load,
    # as loading the whole before placing it would.
    flags = "--xla_force_host_platform_device_count=8"
    # One thread a device: what the allocator keeps for each of many differs from run to run.
    environment = os.environ | {"XLA_FLAGS": flags, "NPROC": "8", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HELD, str(tmp_path), kind, json.dumps(axes), json.dumps(sizes)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ((loading, placed, largest_shard, saving, largest_leaf),) = results([done.stdout])
    assert placed > 180 * 2**20
    assert largest_leaf == 64 * 2**20
    assert loading <= placed + largest_shard + SLACK < 1.5 * placed
    assert saving <= largest_leaf + SLACK < 2 * largest_leaf, saving


READ = """
import json, pathlib, sys
from dew.placement import Layout, initialize
assert initialize()
import jax
from dew.pretrained import load_pretrained, save_pretrained
from dew.pretrained.safetensors import SafetensorsFile
from dew.tree import named_leaves
fixture, out, meshes = sys.argv[1:]
reading, read = SafetensorsFile.read, {}
def counted(self, name, index):
    part = reading(self, name, index)
    read[name] = read.get(name, 0) + part.nbytes
    return part
SafetensorsFile.read = counted
found = []
for mesh, rules in json.loads(meshes):
    read.clear()
    loaded = load_pretrained(fixture, mesh=mesh, layout=Layout(rules=rules, min_shard=1, tolerance=1.0))
    held = {}
    for path, leaf in named_leaves(loaded.variables).items():
        held[path] = sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())
    found.append([held, read.copy()])
save_pretrained(out, loaded.module, loaded.variables)
print("RESULT " + json.dumps(found))
"""
MESHES = [({"fsdp": 4}, {}), ({"fsdp": 2, "tensor": 2}, {}), ({"fsdp": 4}, {"embed": None})]


def test_each_of_two_processes_reads_the_bytes_that_its_devices_hold(tmp_path, tensors):
    want = tensors(FIXTURES / "llama")
    arguments = (str(FIXTURES / "llama"), str(tmp_path / "out"), json.dumps(MESHES))
    for loads in results(run_pool(READ, *arguments)):
        for (_, rules), (held, read) in zip(MESHES, loads, strict=True):
            split_heads = bool(rules)  # then a device holds some columns of every head of o_proj: rows are read whole
            outputs = {name for name in want if split_heads and "o_proj" in name}
            assert all(read.pop(name) == 2 * want[name].nbytes for name in outputs)
            nbytes = sum(size for path, size in held.items() if not (split_heads and "o_proj" in path))
            assert sum(read.values()) == nbytes < 0.7 * sum(tensor.nbytes for tensor in want.values())
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
