"""Against a local stand-in of the Hub: what is fetched, from which commit, once; each failure says what to do next."""

import errno
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from dew.pretrained import CheckpointError, describe, load_pretrained
from dew.pretrained.hub import locate
from tests.pretrained.checkpoints import FIXTURES
from tests.pretrained.hub_server import HubServer

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = (FIXTURES / "llama" / "config.json").read_bytes()
WEIGHTS = (FIXTURES / "llama" / "model.safetensors").read_bytes()
CLUTTER = dict.fromkeys(
    ("pytorch_model.bin", "model.onnx", "model-Q8_0.gguf", "README.md", "original/model.safetensors"), b"never fetched"
)
FILES = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "generation_config.json": b"{}", **CLUTTER}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server that holds `org/name`, and an empty cache."""
    server = HubServer()
    server.commit = server.publish("org/name", FILES)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.close()


def test_only_the_needed_files_are_fetched_and_each_once(hub):
    assert describe("hf://org/name").module.vocab_size == 96
    assert sorted(hub.fetched()) == ["config.json", "generation_config.json"]
    load_pretrained("hf://org/name")
    load_pretrained("org/name")
    assert sorted(hub.fetched()) == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("has_layers", [True, False])
def test_names_of_tensors_are_read_from_the_header_of_the_one_file_alone(hub, has_layers):
    values = load_file(FIXTURES / "qwen3_next" / "model.safetensors")
    values |= {"mtp.fc.weight": np.ones((32, 64), np.float32)} if has_layers else {}
    config = (FIXTURES / "qwen3_next" / "config.json").read_bytes()
    hub.publish("org/further", {"config.json": config, "model.safetensors": save(values)})
    described = describe("org/further")
    assert (described.module.prediction is not None) == has_layers
    asked = [headers.get("range") for verb, path, headers in hub.requests if verb == "GET" and "/files/" in path]
    assert [part for part in asked if part] == ["bytes=0-100000"]
    assert hub.fetched().count("model.safetensors") == 1, "a part of it, and no other time whole"
    described.open_source().close()
    before = len(hub.fetched())
    assert (describe("org/further").module.prediction is not None) == has_layers
    assert hub.fetched()[before:] == [], "what is in the cache is read there"


def test_only_the_shards_of_the_index_are_fetched(hub):
    values = load_file(FIXTURES / "llama" / "model.safetensors")
    names = sorted(values)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    files = {shard: save({name: values[name] for name in members}) for shard, members in shards.items()}
    files |= {"config.json": CONFIG, "model.safetensors.index.json": json.dumps(index).encode()}
    hub.publish("org/sharded", {**files, "c.safetensors": b"of another export", **CLUTTER})
    load_pretrained("org/sharded")
    assert sorted(hub.fetched()) == ["a.safetensors", "b.safetensors", "config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/x.safetensors"])
def test_an_index_cannot_name_files_elsewhere(hub, name):
    index = json.dumps({"weight_map": {"a": name}}).encode()
    hub.publish("org/bad", {"config.json": CONFIG, "model.safetensors.index.json": index})
    with pytest.raises(CheckpointError, match="must stay inside its directory"):
        locate("org/bad")


def test_an_index_cannot_ask_by_pattern(hub):
    index = json.dumps({"weight_map": {"a": "*.safetensors"}}).encode()
    hub.publish("org/glob", {**FILES, "model.safetensors.index.json": index})
    locate("org/glob")
    assert "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize("source, options", [("org/name@v1", {}), ("hf://org/name", {"revision": "v1"})])
def test_a_revision_is_the_one_fetched(hub, source, options):
    config = json.dumps({**json.loads(CONFIG), "num_hidden_layers": 1}).encode()
    commit = hub.publish("org/name", {"config.json": config}, branch="v1")
    assert len(describe(source, **options).module.layers) == 1
    assert describe(f"org/name@{commit}").module.layers == describe(source, **options).module.layers
    assert len(describe("org/name").module.layers) == 3


def test_a_branch_that_moves_between_config_and_weights_changes_nothing(hub):
    described = describe("org/name")
    hub.publish("org/name", {**FILES, "model.safetensors": b"of the next commit"})
    described.open_source().close()
    asked = [path for _, path, _ in hub.requests if path.endswith("model.safetensors") and "/resolve/" in path]
    assert asked
    assert all(hub.commit in path for path in asked)


def test_a_cut_connection_is_resumed_where_it_stopped(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.drop_after["model.safetensors"] = 100_000
    load_pretrained("org/name")
    asked = [headers.get("range") for verb, path, headers in hub.requests if verb == "GET" and "/files/" in path]
    assert [part for part in asked if part] == ["bytes=100000-"]


def test_a_failed_download_is_taken_up_again_with_the_files_that_had_arrived(hub, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.file_download.http_get", fail_on_weights(OSError("reset by peer")))
        with pytest.raises(ConnectionError, match=r"could not be fetched: reset by peer\. Run it again"):
            locate("org/name")
    before = len(hub.fetched())
    locate("org/name")
    assert hub.fetched()[before:] == ["model.safetensors"]


def test_a_killed_download_begins_its_file_again_and_no_other(hub, tmp_path):
    # What the library leaves when it is killed in a file: a part under a name of its own that nothing takes up.
    describe("org/name")
    blobs = next((tmp_path / "cache").glob("models--*/blobs"))
    (blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.0123abcd.incomplete").write_bytes(WEIGHTS[:1000])
    before = len(hub.requests)
    load_pretrained("org/name")
    asked = [(path, headers) for verb, path, headers in hub.requests[before:] if verb == "GET" and "/files/" in path]
    assert [(path.rsplit("/", 1)[1], headers.get("range")) for path, headers in asked] == [("model.safetensors", None)]


def fail_on_weights(failure):
    from huggingface_hub.file_download import http_get

    def get(url, *arguments, **options):
        if url.endswith("model.safetensors"):
            raise failure
        return http_get(url, *arguments, **options)

    return get


def test_a_full_disk_says_where_the_cache_lies(hub, monkeypatch):
    failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail_on_weights(failure))
    with pytest.raises(OSError, match=r"No space left while fetching org/name.*set HF_HOME") as refused:
        locate("org/name")
    assert refused.value.errno == errno.ENOSPC


def test_a_gated_repository_asks_for_its_terms_and_a_token_opens_it(hub, monkeypatch):
    hub.publish("org/gated", FILES, token="hf_right", gated=True)
    with pytest.raises(PermissionError, match=r"org/gated is gated: accept its terms.*HF_TOKEN"):
        locate("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert (locate("org/gated") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_private_repository_is_not_there_without_its_token(hub, monkeypatch):
    hub.publish("org/private", FILES, token="hf_right")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        FileNotFoundError, match=r"No repository org/private on the Hub.*If it is private, set HF_TOKEN"
    ):
        locate("org/private")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert (locate("org/private") / "config.json").read_bytes() == CONFIG


def test_what_is_not_there_is_named(hub):
    with pytest.raises(FileNotFoundError, match="No repository org/other on the Hub"):
        locate("org/other")
    with pytest.raises(FileNotFoundError, match="org/name has no revision 'v9'"):
        locate("org/name@v9")
    with pytest.raises(FileNotFoundError, match=r"has no file 'none\.gguf'"):
        locate("hf://org/name/none.gguf")
    hub.publish("org/quantised", {"model-Q8_0.gguf": b"GGUF"})
    with pytest.raises(FileNotFoundError, match=r"no config\.json at its top.*hf://org/quantised/file\.gguf"):
        locate("org/quantised")


def test_pickled_weights_are_fetched_only_when_asked_for(hub):
    hub.publish("org/pickled", {"config.json": CONFIG, "pytorch_model.bin": b"PK", "model.onnx": b""})
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_pretrained("org/pickled")
    assert "pytorch_model.bin" not in hub.fetched()
    with pytest.raises(CheckpointError, match="is not a zip archive"):
        load_pretrained("org/pickled", allow_pickle=True)
    assert hub.fetched()[-1] == "pytorch_model.bin"
    hub.requests.clear()
    locate("org/name", allow_pickle=True)
    assert "pytorch_model.bin" not in hub.fetched(), "safetensors go before pickles"


def test_offline_reads_the_cache_and_says_when_it_is_not_enough(hub, monkeypatch):
    locate("org/name")
    asked = len(hub.requests)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    load_pretrained("org/name")
    with pytest.raises(ConnectionError, match="org/other is not in the cache, and HF_HUB_OFFLINE forbids"):
        locate("org/other")
    with pytest.raises(ConnectionError, match=r"org/name.* is not in the cache, and HF_HUB_OFFLINE"):
        locate("hf://org/name/model-Q8_0.gguf")
    assert len(hub.requests) == asked


def test_a_hub_that_is_away_or_broken_is_told_apart(hub, monkeypatch):
    hub.status = 500
    with pytest.raises(ConnectionError, match="org/name is not in the cache and the Hub answers HTTP 500"):
        locate("org/name")
    hub.status = 403
    with pytest.raises(PermissionError, match=r"refuses access to org/name \(HTTP 403\)"):
        locate("org/name")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"the Hub cannot be reached\. Connect, or pass a local directory"):
        locate("org/name")


def test_a_gguf_file_of_a_repository(hub):
    path = locate("hf://org/name/model-Q8_0.gguf@main")
    assert path.read_bytes() == CLUTTER["model-Q8_0.gguf"]
    assert hub.fetched() == ["model-Q8_0.gguf"]


def test_a_local_path_is_taken_before_a_repository_of_its_name(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert locate("org/name").resolve() == (tmp_path / "org" / "name").resolve()
    assert hub.requests == []
    with pytest.raises(ValueError, match="A local checkpoint has no revisions"):
        locate("org/name", "v1")


@pytest.mark.parametrize("source", ["", "hf://", "org/name/x/y", "org/na me", "./nothing", "org/name@", "a/b@v1@v2"])
def test_what_is_no_name_is_refused(source):
    with pytest.raises(FileNotFoundError, match="No checkpoint at"):
        locate(source)


def test_names_the_hub_does_not_allow_are_refused(hub):
    with pytest.raises(FileNotFoundError, match="cannot be the name of a repository"):
        locate("org/..")


def test_two_revisions_are_refused():
    with pytest.raises(ValueError, match="Two revisions were given"):
        locate("org/name@v1", "v2")


def test_the_environment_chooses_hub_and_cache(hub, tmp_path):
    program = "import sys; from dew.pretrained.hub import locate; print(locate(sys.argv[1]))"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, "org/name"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    path = pathlib.Path(done.stdout.strip())
    assert path.is_relative_to(tmp_path / "home")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
