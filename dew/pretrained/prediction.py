"""Whether a checkpoint holds layers that predict further tokens, which configs do not say reliably.

Entry point: `counted_layers`. The reference library reads and writes none of them: what it saves may state layers that
are not there, and published configs may state none of those that are.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from dew.pretrained.families import Family
from dew.pretrained.hub import header_names, repository_of
from dew.pretrained.safetensors import INDEX_NAME, SINGLE_NAME
from dew.pretrained.shards import shard_names
from dew.pretrained.source import CheckpointError, TensorSource, contained
from dew.tree import matches


def counted_layers(
    family: Family,
    config: Mapping[str, Any],
    names: Callable[[], Collection[str] | None],
    where: object,
    *,
    wanted: bool,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """State in a config how many such layers are to be read.

    Args:
        family: The checkpoint's family.
        config: Its config.
        names: Gives the names of its tensors; None where they are not known, and the config decides.
        where: The checkpoint, for errors.
        wanted: Whether they are to be read where the checkpoint has them.

    Returns:
        The config, and globs of the tensors that are left out.

    Raises:
        CheckpointError: If they are not wanted and the checkpoint has none.
    """
    tensors, layers = family.prediction, config.get("num_hidden_layers")
    if tensors is None and not wanted:
        raise _nothing_to_leave_out(where)
    stated = None if tensors is None else config.get(tensors.field)
    is_count = stated is None or (type(stated) is int and stated >= 0)
    if tensors is None or type(layers) is not int or not is_count or (wanted and stated == 0):
        return dict(config), ()
    found = names()
    has_layers = bool(stated) if found is None else any(name.endswith(tensors.marker(layers)) for name in found)
    if wanted:
        return {**config, tensors.field: (1 if stated is None else stated) if has_layers else 0}, ()
    globs = further_tensors(family, config)
    if not has_layers and not any(matches(name, globs) for name in found or ()):
        raise _nothing_to_leave_out(where)
    return {**config, tensors.field: 0}, globs


def further_tensors(family: Family, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Give globs of the tensors of such layers.

    Args:
        family: The checkpoint's family.
        config: Its config, whose number of other layers is whole.
    """
    tensors = family.prediction
    return () if tensors is None else tensors.globs(config["num_hidden_layers"], config.get(tensors.field) or 1)


def _nothing_to_leave_out(where: object) -> CheckpointError:
    return CheckpointError(
        f"{where}: prediction_layers=False leaves out layers that predict further tokens, and this checkpoint has "
        "none. Leave the argument out."
    )


def tensor_names(source: str | Path, path: Path, open_source: Callable[[], TensorSource]) -> Collection[str] | None:
    """List the tensors of a checkpoint: from its index, without one from the header of its one file.

    Args:
        source: The checkpoint.
        path: Its directory, which may lack the weights where they are on the Hub.
        open_source: Opens them, which fetches them.

    Returns:
        The names; None where there are no weights that can be read.
    """
    try:
        index = contained(path, INDEX_NAME)
        if index.exists():
            return shard_names(index, ".safetensors").keys()
        repository = repository_of(source)
        if repository is not None and path.is_dir() and not contained(path, SINGLE_NAME).exists():
            names = header_names(repository, path.name)
            if names is not None:
                return names
        weights = open_source()
    except (OSError, CheckpointError):
        return None
    try:
        return list(weights.names())
    finally:
        weights.close()
