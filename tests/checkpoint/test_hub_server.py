"""The hub on localhost answers what the real client asks when it writes, as the other tests that use it assume."""

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError


def test_branch_upload_pull_request_merge(hub, tmp_path):
    hub.token = "hf_writer"
    api = HfApi(token=hub.token)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * 100_000)

    assert api.create_repo("org/new", private=True).repo_id == "org/new"
    assert hub.repos["org/new"].private
    api.create_branch("org/new", branch="upload", exist_ok=True)
    api.create_branch("org/new", branch="upload", exist_ok=True)
    api.upload_folder(repo_id="org/new", folder_path=folder, revision="upload")
    assert set(api.list_repo_files("org/new")) == {".gitattributes"}
    assert set(api.list_repo_files("org/new", revision="upload")) == {
        ".gitattributes",
        "config.json",
        "model.safetensors",
    }
    pull = api.upload_folder(repo_id="org/new", folder_path=folder, create_pr=True)
    assert pull.pr_num == 1
    uploads = [line for line in hub.requests if line.startswith("PUT /lfs/")]
    assert len(uploads) == 1  # the second upload found the content already there
    api.merge_pull_request("org/new", 1)
    assert "model.safetensors" in api.list_repo_files("org/new")
    api.delete_branch("org/new", branch="upload")
    assert [branch.name for branch in api.list_repo_refs("org/new").branches] == ["main"]


def test_who_may_not_write(hub):
    hub.token = "hf_writer"
    hub.add("org/theirs", {"config.json": b"{}"})
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(token="hf_other").create_repo("org/new")
    with pytest.raises(HfHubHTTPError, match="403"):
        HfApi(token="hf_other").create_branch("org/theirs", branch="x")


def test_faults_fire_once(hub):
    hub.token = "hf_writer"
    hub.add("org/model", {"config.json": b"{}"})
    hub.faults["POST .*/commit/"] = 500
    api = HfApi(token=hub.token)
    arguments = dict(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id="org/model")
    with pytest.raises(HfHubHTTPError, match="500"):
        api.upload_file(**arguments)
    assert api.list_repo_files("org/model") == ["config.json"]
    api.upload_file(**arguments)
    assert "x.txt" in api.list_repo_files("org/model")
