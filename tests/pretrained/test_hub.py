"""Only the files that are needed are fetched, from one commit, and each failure of the Hub has its own message."""

import errno
import json
import types

import huggingface_hub
import pytest
from huggingface_hub import errors
from safetensors.numpy import load_file, save_file

from dew.pretrained import CheckpointError, describe, load_pretrained
from dew.pretrained.hub import locate
from tests.pretrained.checkpoints import FIXTURES

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository in a cache laid out as the library's, and the list of what was asked of it."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((FIXTURES / "llama" / "config.json").read_bytes())
    asked = []

    def download(repository, *, revision, allow_patterns):
        asked.append((repository, revision, tuple(allow_patterns)))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return snapshot, asked


def test_describing_fetches_no_weights(hub):
    _, asked = hub
    assert describe("hf://org/name").module.vocab_size == 96
    assert [(repository, revision) for repository, revision, _ in asked] == [("org/name", None)]
    assert not any(pattern.endswith(".safetensors") for pattern in asked[0][2])


@pytest.mark.parametrize("source, options", [("org/name@v1", {}), ("hf://org/name", {"revision": "v1"})])
def test_weights_come_from_the_commit_of_the_config(hub, source, options):
    snapshot, asked = hub
    (snapshot / "model.safetensors").write_bytes((FIXTURES / "llama" / "model.safetensors").read_bytes())
    load_pretrained(source, **options)
    assert asked[0][1] == "v1"
    assert asked[-1] == ("org/name", COMMIT, ("model.safetensors",))


def test_a_branch_that_moves_between_the_two_downloads_changes_nothing(hub):
    _, asked = hub
    locate("org/name@main")
    assert [revision for _, revision, _ in asked] == ["main", COMMIT]


def test_only_the_shards_of_the_index_are_fetched(hub):
    snapshot, asked = hub
    values = load_file(FIXTURES / "llama" / "model.safetensors")
    names = sorted(values)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: values[name] for name in members}, snapshot / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load_pretrained("org/name")
    assert asked[-1][2] == ("a.safetensors", "b.safetensors")


def test_an_index_cannot_name_files_elsewhere(hub):
    snapshot, asked = hub
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../x.safetensors"}}))
    with pytest.raises(CheckpointError, match="must stay inside its directory"):
        locate("org/name")
    assert len(asked) == 1


def test_a_gguf_file_of_a_repository(hub):
    snapshot, asked = hub
    assert locate("hf://org/name/model-Q8_0.gguf@main") == snapshot / "model-Q8_0.gguf"
    assert asked == [("org/name", "main", ("model-Q8_0.gguf",))]


def test_a_local_path_is_taken_before_a_repository_of_its_name(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert locate("org/name").resolve() == (tmp_path / "org" / "name").resolve()
    assert hub[1] == []
    with pytest.raises(ValueError, match="A local checkpoint has no revisions"):
        locate("org/name", "v1")


def test_two_revisions_are_refused(hub):
    with pytest.raises(ValueError, match="Two revisions were given"):
        locate("org/name@v1", "v2")


RESPONSE = types.SimpleNamespace(headers={}, request=None, status_code=404)
FAILURES = [
    (errors.GatedRepoError("no", response=RESPONSE), PermissionError, "org/name is gated: accept its terms"),
    (errors.RepositoryNotFoundError("no", response=RESPONSE), FileNotFoundError, "No repository org/name on the Hub"),
    (errors.RevisionNotFoundError("no", response=RESPONSE), FileNotFoundError, "org/name has no revision"),
    (errors.LocalEntryNotFoundError("no"), ConnectionError, "not in the cache and the Hub cannot be reached"),
    (OSError(errno.ENOSPC, "full"), OSError, "No space left while fetching org/name"),
    (OSError("reset by peer"), ConnectionError, "could not be fetched: reset by peer"),
]


@pytest.mark.parametrize("failure, kind, text", FAILURES, ids=lambda value: type(value).__name__)
def test_each_failure_says_what_to_do(monkeypatch, failure, kind, text):
    def fail(*args, **options):
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=text):
        locate("org/name")
