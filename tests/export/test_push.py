"""push: the real client against a hub on localhost."""

import logging
import threading
from pathlib import Path
from typing import Any

import hub_server
import pytest
import tiny
import transformers
from files import snapshot
from huggingface_hub import constants, get_session
from reloads import fork_reloads

from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError, ConfigError, FcsdError
from fcsd.export import final as exporting
from fcsd.export import push as pushing
from fcsd.export.final import export_model
from fcsd.export.push import push_model
from fcsd.export.reload import RECORD

TOKEN = "hf_canary0123456789"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    tiny.model("deepseek_v2").save_pretrained(path / "base", max_shard_size="300KB")
    convert_checkpoint(str(path / "base"), path / "converted", check=False)
    with pytest.MonkeyPatch.context() as patch:
        fork_reloads(patch)
        return export_model(str(path / "converted"), path / "out")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.running() as hub:
        hub_server.connect(hub, monkeypatch, tmp_path / "cache")
        hub.token = TOKEN
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def files_at(hub: hub_server.Hub, repo: str, ref: str = "main") -> dict[str, bytes]:
    found = hub.repos[repo]
    return {name: blob.read(0, blob.size) for name, blob in found.commits[found.refs[ref]].items()}


def local(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != RECORD}


def test_all_of_it_arrives_and_loads(hub, exported: Path, tmp_path: Path) -> None:
    before = snapshot(exported)
    assert push_model(exported, "org/mine", private=True) == f"{hub.url}/org/mine"
    assert snapshot(exported) == before
    there = files_at(hub, "org/mine")
    assert there.pop(".gitattributes") == b""
    assert there == local(exported)
    assert hub.repos["org/mine"].private and not hub.repos["org/mine"].open_pulls
    config = transformers.AutoConfig.from_pretrained("org/mine", token=TOKEN)
    assert config.model_type == "fcsd_deepseek_v2"


def test_main_changes_once_and_last(hub, exported: Path) -> None:
    push_model(exported, "org/mine")
    writes = [line for line in hub.requests if line.startswith(("POST", "PUT"))]
    (merge,) = [number for number, line in enumerate(writes) if line.endswith("/merge")]
    assert merge == len(writes) - 1
    assert not [line for line in writes if line.endswith("/commit/main") and "create_pr" not in line][1:]


def test_a_pull_request_is_left_open(hub, exported: Path) -> None:
    hub.add("org/theirs", {"config.json": b'{"model_type": "llama"}'})
    address = push_model(exported, "org/theirs", create_pr=True)
    assert address == f"{hub.url}/org/theirs/discussions/1"
    assert files_at(hub, "org/theirs").keys() == {"config.json"}
    assert "modeling_fcsd.py" in files_at(hub, "org/theirs", "refs/pr/1")


def test_a_branch_is_made_and_main_left_alone(hub, exported: Path) -> None:
    assert push_model(exported, "org/mine", revision="step-20") == f"{hub.url}/org/mine/tree/step-20"
    assert files_at(hub, "org/mine").keys() == {".gitattributes"}
    assert "modeling_fcsd.py" in files_at(hub, "org/mine", "step-20")


@pytest.mark.parametrize(
    ("call", "fault"),
    [("PUT /lfs/", 403), ("POST .*/commit/", 500), ("POST .*/commit/", ("cut", 3)), ("POST .*/merge", 500)],
)
def test_a_broken_push_resumes(hub, exported: Path, call: str, fault: int | tuple[str, int]) -> None:
    hub.faults[call] = fault
    with pytest.raises(FcsdError) as caught:
        push_model(exported, "org/mine")
    message = f"{caught.value} {caught.value.hint}"
    assert caught.value.hint and "\n" not in message and TOKEN not in message
    assert not hub.faults and files_at(hub, "org/mine").keys() == {".gitattributes"}  # nothing half done

    push_model(exported, "org/mine")
    assert files_at(hub, "org/mine").keys() == local(exported).keys() | {".gitattributes"}
    sent = [line.split()[1] for line in hub.requests if line.startswith("PUT /lfs/")]
    assert len(set(sent)) == len(list(exported.glob("*.safetensors")))
    assert len(sent) == len(set(sent)) + (call == "PUT /lfs/")  # what had arrived was not sent again
    assert hub.repos["org/mine"].pulls == 1 and not hub.repos["org/mine"].open_pulls


def test_what_an_earlier_push_left_is_replaced(hub, exported: Path) -> None:
    old = {
        "config.json": b'{"fcsd": {}}',
        "model-00001-of-00099.safetensors": b"old",
        "old.py": b"old",
        "NOTES": b"kept",
    }
    hub.add("org/mine", old)
    push_model(exported, "org/mine")
    assert files_at(hub, "org/mine").keys() == local(exported).keys() | {"NOTES"}


def answering(monkeypatch: pytest.MonkeyPatch, call: str, answer: Any) -> None:
    """Let the hub answer a call by ``answer(handler, its own answer, arguments)``."""
    own = getattr(hub_server._Handler, call)
    monkeypatch.setattr(
        hub_server._Handler, call, lambda self, **named: answer(self, lambda: own(self, **named), named)
    )


def ignore_all(handler: Any, own: Any, named: dict[str, Any]) -> None:
    json, handler._json = handler._json, lambda value: None
    own()
    handler._json = json
    files = [{"path": name, "uploadMode": "regular", "shouldIgnore": True} for name in asked(handler)]
    json({"files": files, "commitOid": named["repo"].refs["main"]})


def asked(handler: Any) -> list[str]:
    return [file["path"] for file in hub_server.json.loads(handler.body)["files"]]


def keep_other_content(handler: Any, own: Any, named: dict[str, Any]) -> None:
    own()
    [sha] = [named["repo"].refs[ref] for ref in named["repo"].refs if ref.startswith("refs/pr/")]
    files = named["repo"].commits[sha]
    files["config.json"] = hub_server.Blob(files["config.json"].read(0, files["config.json"].size - 1) + b" ")


def keep_earlier_weights(handler: Any, own: Any, named: dict[str, Any]) -> None:
    own()
    [sha] = [named["repo"].refs[ref] for ref in named["repo"].refs if ref.startswith("refs/pr/")]
    named["repo"].commits[sha]["model-00001-of-00099.safetensors"] = hub_server.Blob(b"old")


@pytest.mark.parametrize(
    ("call", "answer", "message"),
    [
        ("_preupload", ignore_all, "refs/pr/1 lacks LICENSE|refs/pr/1 lacks README.md"),
        ("_commit", keep_other_content, "refs/pr/1 differs in config.json$"),
        ("_commit", keep_earlier_weights, "refs/pr/1 still has the earlier model-00001-of-00099.safetensors$"),
        ("_merge", lambda handler, own, named: handler._json({"newStatus": "merged"}), "main lacks .* more$"),
    ],
)
def test_what_the_hub_did_not_take_is_an_error(hub, exported: Path, monkeypatch, call, answer, message) -> None:
    answering(monkeypatch, call, answer)
    monkeypatch.setattr(pushing, "_WAITS", (0.0,))
    with pytest.raises(FcsdError, match=message) as caught:
        push_model(exported, "org/mine")
    assert caught.value.hint and files_at(hub, "org/mine").keys() == {".gitattributes"}


def test_a_pull_request_of_somebody_else_is_not_taken_for_our_own(hub, exported: Path) -> None:
    hub.faults["POST .*/merge"] = 500
    with pytest.raises(FcsdError):
        push_model(exported, "org/mine")
    repo = hub.repos["org/mine"]
    repo.authors[1] = "mallory"
    hub.add("org/mine", {"tokenizer.pkl": b"evil"}, "refs/pr/1")
    push_model(exported, "org/mine")
    assert "tokenizer.pkl" not in files_at(hub, "org/mine") and list(repo.open_pulls) == [1] and repo.pulls == 2


def test_a_hub_that_shows_it_later_is_asked_again(hub, exported: Path, monkeypatch) -> None:
    monkeypatch.setattr(pushing, "_WAITS", (0.0,))
    late = iter([True])

    def empty_at_first(handler: Any, own: Any, named: dict[str, Any]) -> None:
        if named["revision"] == "main" and next(late, False):
            return handler._json([])
        own()

    answering(monkeypatch, "_tree", empty_at_first)
    push_model(exported, "org/mine")
    assert next(late, None) is None and "modeling_fcsd.py" in files_at(hub, "org/mine")


def test_a_second_push_finds_everything_there(hub, exported: Path, monkeypatch) -> None:
    push_model(exported, "org/mine")
    first = dict(hub.repos["org/mine"].refs)

    def known(handler: Any, own: Any, named: dict[str, Any]) -> None:
        repo = named["repo"]
        there = {name: repo.commits[repo.refs["main"]][name] for name in asked(handler)}
        files = [{"path": name, "uploadMode": "lfs" if name.endswith(hub_server.LFS) else "regular",
                  "shouldIgnore": False, "oid": blob.etag if name.endswith(hub_server.LFS) else blob.git}
                 for name, blob in there.items()]  # fmt: skip
        handler._json({"files": files, "commitOid": repo.refs["main"]})

    answering(monkeypatch, "_preupload", known)
    assert push_model(exported, "org/mine") == push_model(exported, "org/mine", create_pr=True) == f"{hub.url}/org/mine"
    assert hub.repos["org/mine"].refs == first


def test_endless_pages_of_pull_requests_end(hub, exported: Path, monkeypatch) -> None:
    monkeypatch.setattr(pushing, "_MOST_PULLS", 3)
    other = {"num": 7, "title": "another", "author": {"name": "org"}, "createdAt": "2026-01-01T00:00:00.000Z"}
    other |= {"status": "open", "isPullRequest": True, "repo": {"name": "org/mine", "type": "model"}}
    page = {"discussions": [other], "count": 10**9, "start": 0}
    answering(monkeypatch, "_discussions", lambda handler, own, named: handler._json(page))
    push_model(exported, "org/mine")
    assert sum(line.endswith("/discussions") for line in hub.requests) == 3
    answering(monkeypatch, "_discussions", lambda handler, own, named: handler._json({"discussions": 3}))
    with pytest.raises(FcsdError, match="list of pull requests cannot be read"):
        push_model(exported, "org/mine")


def test_a_silent_hub_is_not_waited_for(hub, exported: Path, monkeypatch) -> None:
    over = threading.Event()
    answering(monkeypatch, "_create", lambda handler, own, named: over.wait(60))
    monkeypatch.setattr(pushing, "_SILENCE", 0.2)
    before = get_session().timeout
    try:
        with pytest.raises(FcsdError, match=r"broke off \(ReadTimeout: .+\)") as caught:
            push_model(exported, "org/mine")
    finally:
        over.set()
    assert caught.value.hint and get_session().timeout == before


def test_what_may_not_be_pushed_is_refused_before_a_request(hub, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=RECORD):
        push_model(exported.parent / "converted", "org/mine")
    with pytest.raises(ConfigError, match="exclude each other"):
        push_model(exported, "org/mine", create_pr=True, revision="x")
    assert hub.requests == []


def test_another_model_or_a_public_repository_is_not_taken(hub, exported: Path) -> None:
    hub.add("org/base", {"config.json": b'{"model_type": "llama"}'})
    with pytest.raises(ConfigError, match="holds another model, of type 'llama'"):
        push_model(exported, "org/base")
    with pytest.raises(ConfigError, match="exists already and is public"):
        push_model(exported, "org/base", private=True)
    assert len(hub.repos["org/base"].commits) == 1


def test_who_may_not_write_is_told(hub, exported: Path, monkeypatch) -> None:
    with pytest.raises(FcsdError, match="the hub answered 401") as caught:
        push_model(exported, "org/mine", token="hf_another0123456789")
    assert "hf_" not in f"{caught.value} {caught.value.hint}".replace("hf auth", "")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match="no hub token"):
        push_model(exported, "org/mine")
    with pytest.raises(ConfigError, match="'mine' is not ORG/NAME"):  # a token would not help
        push_model(exported, "mine")
    with pytest.raises(ConfigError, match="no hub token"):  # before anything is written
        export_model(exported.parent / "converted", exported.parent / "unsent", push="org/mine")
    assert not (exported.parent / "unsent").exists()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="offline mode is on"):
        push_model(exported, "org/mine")


def test_export_pushes_when_asked_only_and_never_unproven(
    hub, exported: Path, tmp_path: Path, monkeypatch, caplog, capfd
) -> None:
    fork_reloads(monkeypatch)
    caplog.set_level(logging.DEBUG)
    converted = str(exported.parent / "converted")
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "prove_reload", lambda *args: {"layers": 1, "of": 1})
        export_model(converted, tmp_path / "quiet")
    assert hub.requests == []

    def fail(*args: object) -> None:
        raise FcsdError("not proven")

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "prove_reload", fail)
        with pytest.raises(FcsdError, match="not proven"):
            export_model(converted, tmp_path / "failed", push="org/mine")
    assert hub.requests == []

    out = export_model(converted, tmp_path / "out", push="org/mine")
    assert files_at(hub, "org/mine").keys() == local(out).keys() | {".gitattributes"}
    assert "# org/mine" in (out / "README.md").read_text()
    shown = capfd.readouterr()
    assert TOKEN not in caplog.text + shown.out + shown.err
    assert TOKEN.encode() not in b"".join(local(out).values())
