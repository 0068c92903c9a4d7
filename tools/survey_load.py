"""What a load would read and place, without doing it: `python tools/survey_load.py [DIRECTORY] [--mesh fsdp=8 ...]`.

Without a directory it writes a sparse checkpoint in the shape of Gemma 2 27B (54 GB that take no disk). Prints, for
each mesh of 8 simulated devices, whether every tensor is read, the largest single read, and bytes per device.
"""

import argparse
import math
import os
import pathlib
import sys
import tempfile

from synthetic_checkpoint import gemma2_27b_config, write_safetensors

ROOT = pathlib.Path(__file__).resolve().parents[1]
MESHES = ("fsdp=8", "fsdp=4,tensor=2")
SHARD_BYTES = 5e9


def survey(directory, mesh):
    """Follow the recipes of a checkpoint to their reads.

    Args:
        directory: The checkpoint.
        mesh: Fields of a `MeshSpec`.

    Returns:
        Bytes of the tensors and of all reads, names read, the largest read in bytes and the bytes of each device.
    """
    import jax

    from dew.placement import Layout, as_mesh
    from dew.pretrained import describe
    from dew.pretrained.load import abstract_variables, model_recipes
    from dew.pretrained.place import leaf_dtype, planned_reads
    from dew.pretrained.recipe import check_coverage
    from dew.tree import named_leaves

    described = describe(directory)
    abstract = abstract_variables(described.module)
    shardings = named_leaves(Layout().shardings(as_mesh(mesh), abstract))
    recipes = model_recipes(described.family, described.module, abstract)
    source = described.open_source()
    check_coverage(recipes, source, described.family.ignorable, directory)
    per_device, names, total, largest = dict.fromkeys(jax.devices(), 0), set(), 0, 0
    for recipe in recipes:
        sharding, itemsize = shardings[recipe.path], leaf_dtype(recipe, source, None).itemsize
        for device in sharding.device_set:
            per_device[device] += math.prod(sharding.shard_shape(recipe.shape)) * itemsize
        for name, index in planned_reads(recipe, sharding, source):
            nbytes = math.prod(axis.stop - axis.start for axis in index) * source.info(name).dtype.itemsize
            names.add(name)
            total, largest = total + nbytes, max(largest, nbytes)
    stored, left = source.nbytes, set(source.names()) - names
    source.close()
    return {
        "stored_bytes": stored,
        "read_bytes": total,
        "names": names,
        "left": left,
        "largest_read_bytes": largest,
        "device_bytes": list(per_device.values()),
    }


def report(directory, meshes):
    """Print a line for each mesh."""
    on_disk = sum(path.stat().st_blocks * 512 for path in directory.glob("*.safetensors"))
    apparent = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    print(f"{directory}: {apparent / 1e9:.2f} GB of files that take {on_disk / 1e6:.2f} MB of disk")
    titles = (("tensors", 8), ("left", 5), ("stored GB", 10), ("read GB", 8), ("largest MB", 11), ("GB per device", 14))
    print(f"{'mesh':<18} " + " ".join(f"{title:>{width}}" for title, width in titles))
    for text in meshes:
        found = survey(directory, {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))})
        stored, read = found["stored_bytes"] / 1e9, found["read_bytes"] / 1e9
        least, most = min(found["device_bytes"]) / 1e9, max(found["device_bytes"]) / 1e9
        print(
            f"{text:<18} {len(found['names']):>8} {len(found['left']):>5} {stored:>10.3f} {read:>8.3f} "
            f"{found['largest_read_bytes'] / 1e6:>11.2f} {f'{least:.3f} to {most:.3f}':>14}"
        )


def main():
    """Write the checkpoint if none is named, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=pathlib.Path)
    parser.add_argument("--mesh", nargs="+", default=MESHES)
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT))
    if options.directory is not None:
        report(options.directory, options.mesh)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary)
        write_safetensors(directory, gemma2_27b_config(), max_shard_bytes=SHARD_BYTES, sparse=True)
        report(directory, options.mesh)


if __name__ == "__main__":
    main()
