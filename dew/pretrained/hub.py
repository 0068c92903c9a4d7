"""Where a checkpoint comes from: a directory, a GGUF file, or a repository of the Hugging Face Hub.

Entry points: `locate`; `header_names` for the names of tensors alone. From the Hub only what is needed is fetched,
through `huggingface_hub` with its cache, tokens and offline mode; it resumes a file within a process, whole files
across processes.
"""

import errno
import glob
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from dew.data.tokenizers.directory import SLOW_TOKENIZER_FILES
from dew.pretrained.safetensors import INDEX_NAME, SINGLE_NAME
from dew.pretrained.shards import shard_names
from dew.pretrained.source import CheckpointError, contained
from dew.pretrained.torch_pickle import PICKLE_INDEX_NAME, PICKLE_SINGLE_NAME

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


def locate(
    source: str | Path, revision: str | None = None, *, weights: bool = True, allow_pickle: bool = False
) -> Path:
    """Find a checkpoint on this machine, fetching it from the Hub when it is named there.

    Args:
        source: A directory, a `.gguf` file, `org/name[@revision]` or `hf://org/name[/file.gguf][@revision]`. A path
            that exists is taken before a repository of the same name.
        revision: Branch, tag or commit of the repository.
        weights: Whether the weights are needed too; without them a download is a few megabytes.
        allow_pickle: Whether to fetch pickled `.bin` weights where the repository has no safetensors.

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
    repository = match["repository"]
    if match["file"]:
        path = _fetch(repository, revision, (match["file"],)) / match["file"]
        if not path.exists():
            raise FileNotFoundError(
                f"The repository {repository} has no file {match['file']!r}; see its list of files."
            )
        return path
    directory = _fetch(repository, revision, CONFIG_FILES)
    # The snapshot's folder is named by its commit: the rest comes from the commit that the config came from.
    commit = directory.name
    if not (directory / "config.json").exists():
        raise FileNotFoundError(
            f"The repository {repository} has no config.json at its top. If it holds GGUF files, name one: "
            f"hf://{repository}/file.gguf"
        )
    if not contained(directory, "tokenizer.json").exists():
        _fetch(repository, commit, (*SLOW_TOKENIZER_FILES, "config.json"))
    if weights:
        _fetch_weights(repository, directory, allow_pickle=allow_pickle)
    return directory


def repository_of(source: str | Path) -> str | None:
    """Name the repository that `locate` fetches a directory from; None where it is on this machine.

    Args:
        source: As `locate`.
    """
    text = str(source)
    is_local = not text.startswith("hf://") and Path(text).expanduser().exists()
    return None if is_local else text.removeprefix("hf://").split("@")[0]


def header_names(repository: str, commit: str) -> Collection[str] | None:
    """List the tensors in the one weight file of a repository, fetching its header alone.

    Args:
        repository: The repository.
        commit: Its commit.

    Returns:
        The names; None where there is no such file, it is damaged, or the Hub gives no answer.
    """
    from huggingface_hub import HfApi, errors

    try:
        return HfApi().parse_safetensors_file_metadata(repository, SINGLE_NAME, revision=commit).tensors.keys()
    except (OSError, errors.HTTPError, errors.EntryNotFoundError, errors.SafetensorsParsingError):
        return None


def _fetch_weights(repository: str, directory: Path, *, allow_pickle: bool) -> None:
    commit = directory.name
    names = _weight_names(directory, INDEX_NAME, SINGLE_NAME)
    # The library warns when nothing matches; the config is there already and always does.
    _fetch(repository, commit, (*names, "config.json"))
    if allow_pickle and not all((directory / name).exists() for name in names):
        _fetch(repository, commit, (PICKLE_INDEX_NAME, "config.json"))
        _fetch(repository, commit, _weight_names(directory, PICKLE_INDEX_NAME, PICKLE_SINGLE_NAME))


def _weight_names(directory: Path, index_name: str, single_name: str) -> tuple[str, ...]:
    index = contained(directory, index_name)
    suffix = Path(single_name).suffix
    names = sorted(set(shard_names(index, suffix).values())) if index.exists() else [single_name]
    for name in names:
        contained(directory, name)
    return tuple(names)


def _fetch(repository: str, revision: str | None, files: Sequence[str]) -> Path:
    """Download files of a repository into the cache and return the snapshot's directory."""
    from huggingface_hub import errors, snapshot_download

    where = repository if revision is None else f"{repository}@{revision}"
    # A name is a name, not a pattern: an index may not ask for what it does not list.
    names = [glob.escape(name) for name in files]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=names))
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
    except errors.HFValidationError as error:
        raise FileNotFoundError(f"{repository!r} cannot be the name of a repository: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(where, error) from error
    except (OSError, errors.HTTPError) as error:
        raise _failed(where, error) from error


def _unreachable(where: str, error: Exception) -> OSError:
    """What to do about a Hub that gave no answer, or a bad one, for something that is not in the cache."""
    from huggingface_hub import errors

    reason = error.__cause__
    status = getattr(getattr(reason, "response", None), "status_code", None)
    if isinstance(reason, errors.OfflineModeIsEnabled):
        return ConnectionError(
            f"{where} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it. Unset HF_HUB_OFFLINE, or pass a "
            "local directory."
        )
    if status in (401, 403):
        return PermissionError(
            f"The Hub refuses access to {where} (HTTP {status}). Set HF_TOKEN to a token that has it."
        )
    if status is not None:
        return ConnectionError(f"{where} is not in the cache and the Hub answers HTTP {status}. Try again later.")
    told = str(reason or error).split("\n", 1)[0][:200]
    return ConnectionError(
        f"{where} is not in the cache and the Hub cannot be reached. Connect, or pass a local directory. ({told})"
    )


def _failed(where: str, error: Exception) -> OSError:
    """What to do about a download that stopped half-way."""
    if getattr(error, "errno", None) == errno.ENOSPC:
        return OSError(
            errno.ENOSPC,
            f"No space left while fetching {where}. Free some, or set HF_HOME to a folder on a larger disk; what "
            "has arrived is kept.",
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return PermissionError(
            f"The Hub refuses access to {where} (HTTP {status}). Set HF_TOKEN to a token that has it."
        )
    return ConnectionError(f"{where} could not be fetched: {error}. Run it again: files that have arrived are kept.")
