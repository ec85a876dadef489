"""MODEL as a hub id: the real client against a hub on localhost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sparse_checkpoint
import tiny
from huggingface_hub import constants

from fcsd.checkpoint import inspect_checkpoint, open_checkpoint
from fcsd.errors import BadInputError, DiskError


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.model("qwen3_moe").save_pretrained(path, max_shard_size="300KB")
    (path / "pytorch_model.bin").write_bytes(b"the same again, for someone else")
    return path


def refused(model: str) -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value) and caught.value.hint
    return caught.value


def test_resolve_pins_the_revision_and_caches(hub, saved, monkeypatch):
    first = hub.add("org/model", saved)
    source = open_checkpoint("org/model")
    assert (source.repo_id, source.revision) == ("org/model", first)
    assert source.path.name == first and not (source.path / "pytorch_model.bin").exists()
    for file in saved.glob("*.safetensors"):
        assert (source.path / file.name).read_bytes() == file.read_bytes()

    second = hub.add("org/model", {"config.json": b"{}", "model.safetensors": b""})
    assert open_checkpoint(f"org/model@{first}") == source
    assert open_checkpoint("org/model@main").revision == second
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint(f"org/model@{first}").path == source.path
    assert open_checkpoint("org/model@main").revision == second


def test_cut_download_resumes(hub, saved, monkeypatch):
    """The connection breaks inside a shard; what had arrived is not asked for again."""
    hub.add("org/model", saved)
    shard = max(saved.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    hub.faults[f"GET .*{shard.name}"] = ("cut", 100_000)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    path = open_checkpoint("org/model").path
    assert (path / shard.name).read_bytes() == shard.read_bytes()
    ranges = [line for line in hub.requests if line.startswith("GET") and shard.name in line]
    assert len(ranges) == 2 and ranges[1].endswith("bytes=100000-")


def test_hub_errors_are_one_line(hub, saved, monkeypatch):
    hub.add("org/model", saved)
    hub.add("org/gated", saved, gated="manual")
    hub.add("org/private", saved, private=True)
    hub.add("org/pickle", {"config.json": b"{}", "pytorch_model.bin": b""})
    assert "org/none: is neither a directory here nor" in str(refused("org/none"))
    assert "org/no--ne: is neither a directory here nor a hub id" in str(refused("org/no--ne"))
    assert "org/private: is neither" in str(refused("org/private"))
    assert "has no revision 'old'" in str(refused("org/model@old"))
    assert f"Accept its terms at {hub.url}/org/gated" in (refused("org/gated").hint or "")
    pickled = refused("org/pickle")
    assert "pickled weights" in str(pickled) and "save it with save_pretrained" in (pickled.hint or "")
    hub.faults["GET /api/models/org/model"] = 503
    assert "cannot be reached" in str(refused("org/model"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "cannot be reached" in str(refused("org/model"))


def test_token_opens_the_gate_and_is_not_shown(hub, saved, monkeypatch, capfd):
    hub.token = "hf_canary"
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.add("org/gated", saved, gated="manual")
    assert inspect_checkpoint("org/gated").gated
    monkeypatch.setenv("HF_TOKEN", "hf_canary_wrong")
    error = refused("org/gated@none")
    captured = capfd.readouterr()
    assert "hf_canary" not in f"{error} {error.hint} {captured.out} {captured.err}"


def test_inspect_fetches_headers_only(hub, saved):
    hub.add("org/model", saved)
    report = inspect_checkpoint("org/model")
    local = json.loads(inspect_checkpoint(str(saved)).to_json())
    remote = json.loads(report.to_json())
    assert remote.pop("revision") == hub.repos["org/model"].refs["main"]
    assert (remote.pop("model"), local.pop("revision"), local.pop("model")) == ("org/model", None, str(saved))
    assert remote == local and not report.problems


def test_unreachable_hub_fails_fast_and_directories_still_work(saved):
    """A fresh process, nothing listening at the endpoint: the whole command, imports included."""
    program = "import sys; from fcsd.checkpoint import open_checkpoint; print(open_checkpoint(sys.argv[1]).path)"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}

    def run(model: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, model]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert run(str(saved)).stdout.strip() == str(saved)
    assert "of this name is not (completely) in the cache" in run("org/model").stderr


def test_a_misspelt_directory_is_not_taken_for_a_hub_id_alone(hub, saved, tmp_path, monkeypatch):
    (tmp_path / "models" / "mixtral").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    error = refused("models/mixtrl")
    assert "neither a directory here" in str(error) and error.hint.startswith("Did you mean models/mixtral? ")


def test_inspect_of_109b_downloads_megabytes(hub, tmp_path):
    hub.add("org/scout", sparse_checkpoint.scout(tmp_path / "scout", shards=20))
    report = inspect_checkpoint("org/scout")
    assert not report.problems and report.bytes > 200e9
    assert sum(size for name, size in hub.sent.items() if name.endswith(".safetensors")) < 20e6


def test_full_disk_under_the_cache(hub, saved, tmp_path):
    hub.add("org/model", saved)
    (tmp_path / "cache").symlink_to("/dev/full")
    with pytest.raises(DiskError, match="cannot be written"):
        open_checkpoint("org/model")
