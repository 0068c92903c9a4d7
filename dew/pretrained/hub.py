"""Where a checkpoint comes from: a directory, a GGUF file, or a repository of the Hugging Face Hub.

Entry point: `locate`. From the Hub only the files that are needed are fetched, through `huggingface_hub` with its
cache, tokens, resumption and offline mode.
"""

import errno
import re
from collections.abc import Sequence
from pathlib import Path

from dew.pretrained.safetensors import INDEX_NAME, SINGLE_NAME, shard_names
from dew.pretrained.source import CheckpointError, contained

CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_NAME,
)
_REPOSITORY = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[^@]+))?")
ACCEPTED = "a directory, a .gguf file, 'org/name[@revision]' or 'hf://org/name[/file.gguf][@revision]'"


def locate(source: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """Find a checkpoint on this machine, fetching it from the Hub when it is named there.

    Args:
        source: A directory, a `.gguf` file, `org/name[@revision]` or `hf://org/name[/file.gguf][@revision]`. A path
            that exists is taken before a repository of the same name.
        revision: Branch, tag or commit of the repository.
        weights: Whether the weights are needed too; without them a download is a few megabytes.

    Returns:
        A directory or a `.gguf` file.

    Raises:
        FileNotFoundError: If there is no such file, directory or repository.
        CheckpointError: If a link or an index entry leaves the checkpoint.
        ConnectionError: If the Hub cannot be reached.
        PermissionError: If the repository asks for a token with access.
        OSError: If the disk is full.
    """
    text = str(source)
    if text and not text.startswith("hf://"):
        path = Path(text).expanduser()
        if path.exists():
            if revision is not None:
                raise ValueError(
                    f"A local checkpoint has no revisions. Received: source={text!r}, revision={revision!r}"
                )
            if path.is_file() and path.suffix != ".gguf":
                raise CheckpointError(f"A checkpoint is {ACCEPTED}. Received: source={text!r}")
            return path
    match = _REPOSITORY.fullmatch(text.removeprefix("hf://"))
    if match is None or text.startswith((".", "/", "~")):
        raise FileNotFoundError(f"No checkpoint at {text!r}. Expected {ACCEPTED}.")
    if revision is not None and match["revision"] not in (None, revision):
        raise ValueError(f"Two revisions were given. Received: source={text!r}, revision={revision!r}")
    revision = revision or match["revision"]
    if match["file"]:
        return _fetch(match["repository"], revision, (match["file"],)) / match["file"]
    directory = _fetch(match["repository"], revision, CONFIG_FILES)
    if weights:
        index = contained(directory, INDEX_NAME)
        names = sorted(set(shard_names(index).values())) if index.exists() else [SINGLE_NAME]
        for name in names:
            contained(directory, name)
        # The snapshot's folder is named by its commit: weights come from the commit that the config came from.
        directory = _fetch(match["repository"], directory.name, tuple(names))
    return directory


def _fetch(repository: str, revision: str | None, files: Sequence[str]) -> Path:
    """Download files of a repository into the cache and return the snapshot's directory."""
    from huggingface_hub import errors, snapshot_download

    where = repository if revision is None else f"{repository}@{revision}"
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(files)))
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{where} is gated: accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{repository} has no revision {revision!r}.") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"No repository {where} on the Hub, nor a local path of that name. If it is private, set HF_TOKEN."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ConnectionError(
            f"{where} is not in the cache and the Hub cannot be reached (offline, or HF_HUB_OFFLINE is set). Connect, "
            "or pass a local directory."
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                errno.ENOSPC, f"No space left while fetching {where}; HF_HOME says where the cache lies."
            ) from error
        raise ConnectionError(f"{where} could not be fetched: {error}") from error
