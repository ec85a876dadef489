"""A hub on localhost that answers the model, file, commit and pull-request calls of the real huggingface_hub client.

The state is in memory: a repository has refs (branch or ``refs/pr/N`` -> commit) and commits (-> files). A test asks
for faults: ``hub.faults`` maps a regular expression over ``METHOD /path`` to a status code, or to a number of bytes
after which the connection is cut. Each fault happens once.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS = (".safetensors", ".bin")


@dataclass(frozen=True)
class Blob:
    """A file's content, in memory or, for large files, on disk. The etag is its SHA-256 unless the file is large."""

    content: bytes | Path

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @property
    def etag(self) -> str:
        text = self.content if isinstance(self.content, bytes) else f"{self.content} {self.size}".encode()
        return hashlib.sha256(text).hexdigest()

    @property
    def git(self) -> str:
        """The name that git gives to the content; of a large file, another one."""
        if not isinstance(self.content, bytes):
            return self.etag[:40]
        return hashlib.sha1(f"blob {self.size}\0".encode() + self.content).hexdigest()

    def read(self, start: int, end: int) -> bytes:
        if isinstance(self.content, bytes):
            return self.content[start:end]
        with self.content.open("rb") as file:
            file.seek(start)
            return file.read(end - start)


@dataclass
class Repo:
    gated: str | bool = False
    private: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    pulls: int = 0
    open_pulls: dict[int, str] = field(default_factory=dict)  # number -> title
    authors: dict[int, str] = field(default_factory=dict)  # number -> who opened it, if not ``org``

    def commit(self, files: dict[str, Blob], ref: str = "main") -> str:
        """Make a commit on ``ref`` whose content is exactly ``files``."""
        listing = json.dumps([len(self.commits), ref, *((name, blob.etag) for name, blob in sorted(files.items()))])
        sha = hashlib.sha1(listing.encode()).hexdigest()
        self.commits[sha] = files
        self.refs[ref] = sha
        return sha

    def sha(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Hub:
    url: str = ""
    token: str | None = None  # a client that sends it may read gated and private repositories, and may write
    repos: dict[str, Repo] = field(default_factory=dict)
    uploads: dict[str, Blob] = field(default_factory=dict)  # LFS objects by SHA-256
    faults: dict[str, int | tuple[str, int]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # "METHOD /path range", in order of arrival
    sent: dict[str, int] = field(default_factory=dict)  # path -> bytes of its content sent

    def add(self, repo_id: str, files: dict[str, bytes] | Path, ref: str = "main", **settings: Any) -> str:
        """Put a directory or ``{name: content}`` into a repository, which is created if needed. Returns the commit."""
        repo = self.repos.setdefault(repo_id, Repo(**settings))
        if isinstance(files, Path):
            return repo.commit({str(f.relative_to(files)): Blob(f) for f in files.rglob("*") if f.is_file()}, ref)
        return repo.commit({name: Blob(content) for name, content in files.items()}, ref)


def connect(hub: Hub, monkeypatch: Any, cache: Path) -> None:
    """Make huggingface_hub in this process, imported or not, use ``hub`` and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@contextmanager
def running() -> Iterator[Hub]:
    """Serve an empty hub on a free port of localhost until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message}


# Pattern of "METHOD path" -> name of the handler; the groups of the pattern are the handler's arguments.
_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_ROUTES = {
    rf"GET /api/models/{_REPO}(/revision/(?P<revision>[^/]+))?": "info",
    rf"GET /api/models/{_REPO}/tree/(?P<revision>[^/]+)(/.*)?": "tree",
    rf"POST /api/models/{_REPO}/paths-info/(?P<revision>[^/]+)": "paths",
    rf"GET /api/models/{_REPO}/refs": "refs",
    rf"(GET|HEAD) /{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": "file",
    r"GET /api/whoami-v2": "whoami",
    r"POST /api/validate-yaml": "valid",
    r"POST /api/repos/create": "create",
    rf"POST /api/models/{_REPO}/preupload/(?P<revision>[^/]+)": "preupload",
    rf"POST /{_REPO}\.git/info/lfs/objects/batch": "lfs_batch",
    r"PUT /lfs/(?P<oid>\w+)": "lfs_put",
    rf"POST /api/models/{_REPO}/commit/(?P<revision>[^/]+)": "commit",
    rf"POST /api/models/{_REPO}/branch/(?P<branch>[^/]+)": "branch",
    rf"DELETE /api/models/{_REPO}/branch/(?P<branch>[^/]+)": "delete_branch",
    rf"GET /api/models/{_REPO}/discussions": "discussions",
    rf"POST /api/models/{_REPO}/discussions/(?P<number>\d+)/merge": "merge",
}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        address = urlsplit(self.path)
        call = f"{self.command} {address.path}"
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.query = parse_qs(address.query)
        self.hub.requests.append(f"{call} {self.headers.get('Range', '')}".strip())
        self.cut: int | None = None
        for pattern in [p for p in self.hub.faults if re.search(p, call)]:
            fault = self.hub.faults.pop(pattern)
            if isinstance(fault, int):
                return self._reply(fault, b"")
            self.cut = fault[1]
        for pattern, name in _ROUTES.items():
            if match := re.fullmatch(pattern, call):
                arguments = {k: unquote(v) for k, v in match.groupdict().items() if v is not None}
                try:
                    if "repo" in arguments:
                        arguments["repo"] = self._repo(arguments["repo"])
                    return getattr(self, f"_{name}")(**arguments)
                except _Refused as refusal:
                    return self._reply(refusal.status, b"", refusal.headers)
        self._reply(501, call.encode())

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _authorized(self) -> bool:
        return self.hub.token is not None and self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _repo(self, repo_id: str) -> Repo:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and not self._authorized()):
            raise _Refused(404 if self._authorized() else 401, "RepoNotFound", "Repository not found")
        self.repo_id = repo_id
        if self.command in ("POST", "DELETE") and not self._authorized() and "paths-info" not in self.path:
            raise _Refused(403, "", "You don't have the rights")
        return repo

    def _at(self, repo: Repo, revision: str) -> tuple[str, dict[str, Blob]]:
        sha = repo.sha(revision)
        if sha is None:
            raise _Refused(404, "RevisionNotFound", "Invalid rev id")
        return sha, repo.commits[sha]

    def _reply(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content if self.cut is None else content[: self.cut])
        if self.cut is not None:
            self.close_connection = True

    def _json(self, value: Any) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    # Reading

    def _info(self, repo: Repo, revision: str = "main") -> None:
        sha, files = self._at(repo, revision)
        siblings: list[dict[str, Any]] = []
        for name, blob in files.items():
            siblings.append({"rfilename": name, "size": blob.size, "blobId": blob.git})
            if name.endswith(LFS):
                siblings[-1]["lfs"] = {"sha256": blob.etag, "size": blob.size, "pointerSize": 134}
        self._json({"id": self.repo_id, "sha": sha, "private": repo.private, "gated": repo.gated, "siblings": siblings})

    def _tree(self, repo: Repo, revision: str) -> None:
        _, files = self._at(repo, revision)
        self._json([_entry(name, blob) for name, blob in files.items()])

    def _paths(self, repo: Repo, revision: str) -> None:
        _, files = self._at(repo, revision)
        wanted = parse_qs(self.body.decode()).get("paths", [])
        self._json([_entry(name, files[name]) for name in wanted if name in files])

    def _refs(self, repo: Repo) -> None:
        refs = [
            {"name": n, "ref": f"refs/heads/{n}", "targetCommit": sha} for n, sha in repo.refs.items() if "/" not in n
        ]
        self._json({"branches": refs, "converts": [], "tags": [], "pullRequests": []})

    def _file(self, repo: Repo, revision: str, path: str) -> None:
        sha, files = self._at(repo, revision)
        if repo.gated and not self._authorized():
            raise _Refused(403, "GatedRepo", "Access to this model is restricted")
        if path not in files:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        blob = files[path]
        headers = {"ETag": f'"{blob.etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            return self._reply(200, b"", {**headers, "Content-Length": str(blob.size)})
        start, end, status = 0, blob.size, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end, status = int(wanted[1]), min(int(wanted[2] or end - 1) + 1, end), 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{blob.size}"
        self.hub.sent[path] = self.hub.sent.get(path, 0) + end - start
        self._reply(status, blob.read(start, end), headers)

    # Writing

    def _whoami(self) -> None:
        if not self._authorized():
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        self._json({"type": "user", "name": "org", "auth": {"accessToken": {"role": "write"}}})

    def _valid(self) -> None:
        self._json({"errors": [], "warnings": []})

    def _create(self) -> None:
        if not self._authorized():
            raise _Refused(401, "", "Invalid username or password.")
        wanted = json.loads(self.body)
        repo_id = f"{wanted.get('organization') or 'org'}/{wanted['name']}"
        if repo_id in self.hub.repos:
            text = json.dumps({"error": "You already created this model repo", "url": f"{self.hub.url}/{repo_id}"})
            return self._reply(409, text.encode(), {"Content-Type": "application/json"})
        self.hub.add(repo_id, {".gitattributes": b""}, private=wanted.get("visibility") == "private")
        self._json({"url": f"{self.hub.url}/{repo_id}", "id": repo_id})

    def _preupload(self, repo: Repo, revision: str) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._json({"files": files, "commitOid": self._at(repo, revision)[0]})

    def _lfs_batch(self, repo: Repo) -> None:
        objects: list[dict[str, Any]] = [dict(item) for item in json.loads(self.body)["objects"]]
        for item in objects:
            if item["oid"] not in self.hub.uploads:
                item["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def _lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Refused(400, "", "Content does not match its hash")
        self.hub.uploads[oid] = Blob(self.body)
        self._reply(200, b"")

    def _commit(self, repo: Repo, revision: str) -> None:
        _, files = self._at(repo, revision)
        files, title = dict(files), ""
        for line in self.body.splitlines():
            key, value = (operation := json.loads(line))["key"], operation["value"]
            if key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                if value["oid"] not in self.hub.uploads:
                    raise _Refused(400, "", f"LFS object {value['oid']} was not uploaded")
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            elif key == "header":
                title = value["summary"]
        pull = self.query.get("create_pr") == ["1"]
        repo.pulls += pull
        if pull:
            repo.open_pulls[repo.pulls] = title
        sha = repo.commit(files, f"refs/pr/{repo.pulls}" if pull else revision)
        page = f"{self.hub.url}/{self.repo_id}"
        self._json(
            {
                "commitUrl": f"{page}/commit/{sha}",
                "commitOid": sha,
                "pullRequestUrl": f"{page}/discussions/{repo.pulls}" if pull else None,
            }
        )

    def _branch(self, repo: Repo, branch: str) -> None:
        if branch in repo.refs:
            raise _Refused(409, "", "Reference already exists")
        start = json.loads(self.body or b"{}").get("startingPoint", "main")
        repo.refs[branch] = self._at(repo, start)[0]
        self._reply(200, b"")

    def _delete_branch(self, repo: Repo, branch: str) -> None:
        del repo.refs[branch]
        self._reply(200, b"")

    def _discussions(self, repo: Repo) -> None:
        common = {"createdAt": "2026-01-01T00:00:00.000Z", "status": "open", "isPullRequest": True}
        where = {"repo": {"name": self.repo_id, "type": "model"}}
        pulls = [
            {"num": number, "title": title, "author": {"name": repo.authors.get(number, "org")}, **common, **where}
            for number, title in repo.open_pulls.items()
        ]
        self._json({"discussions": pulls, "count": len(pulls), "start": 0})

    def _merge(self, repo: Repo, number: str) -> None:
        del repo.open_pulls[int(number)]
        repo.refs["main"] = self._at(repo, f"refs/pr/{number}")[0]
        self._json({"newStatus": "merged"})


def _entry(name: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": blob.size, "oid": blob.git}
    if name.endswith(LFS):
        entry["lfs"] = {"oid": blob.etag, "size": blob.size, "pointerSize": 134}
    return entry
