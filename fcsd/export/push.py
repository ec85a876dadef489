"""The command ``fcsd push``: uploads an exported directory to a pull request, which is merged at the end.

What has arrived is read back before the merge and after it: no answer of the hub alone says that a model has arrived.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from fcsd.checkpoint import read_object
from fcsd.checkpoint.files import quoted, shown
from fcsd.errors import ConfigError, FcsdError
from fcsd.export.reload import RECORD, check_record
from fcsd.foreign_errors import reason_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_NOT_UPLOADED = [RECORD, ".*", "**/__pycache__/**"]
_AGAIN = "Run it again; what has arrived is not sent twice."
# Files of an earlier upload that must not stay beside the new ones, which may have other shards and other code.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py"]

_SILENCE = 120.0  # seconds until an answer that does not begin or go on is given up
_WAITS = (2.0, 10.0)  # seconds
_PULL = "refs/pr/"
_MOST_PULLS = 10_000  # open ones of this account, among which that of an interrupted push is looked for


def push_model(
    directory: str | Path,
    repo: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a directory that ``fcsd export`` wrote.

    The upload goes to a pull request, which is merged last, so the repository never shows a part of a model. After an
    interruption, another call sends only the files that are missing.

    Args:
        directory: an exported directory. Only its card may have changed since its reload proof.
        repo: ``org/name``; it is created if it does not exist.
        private: create the repository as private; an existing public one is refused.
        create_pr: leave the pull request open.
        revision: commit to this branch instead of a pull request; it is created if it does not exist.
        token: the hub token; by default the one that ``hf auth login`` stored, or HF_TOKEN. It is never shown.

    Returns:
        The address of the repository, branch or pull request.

    Raises:
        BadInputError: the directory has no valid reload proof.
        ConfigError: there is no token, or the repository is public or holds another model.
        FcsdError: the hub refused the upload, or the network failed.
    """
    from huggingface_hub import HfApi

    directory = Path(directory)
    token = require_target(repo, create_pr=create_pr, revision=revision, token=token)
    check_record(directory)
    title = f"fcsd export {read_object(directory / RECORD)['fingerprint'][:12]}"
    api = HfApi(token=token)
    with _hub_errors(repo), _no_silence():
        target = _prepare(api, repo, title, private, create_pr, revision)
        made = api.upload_folder(  # one commit, after all large files have arrived
            repo_id=repo,
            folder_path=directory,
            commit_message=title,
            revision=target,
            create_pr=target is None,
            ignore_patterns=_NOT_UPLOADED,
            delete_patterns=_REPLACED,
        )
        if target is None and made.pr_num is not None:  # None if everything was there already
            target = f"{_PULL}{made.pr_num}"
        _check_arrival(api, directory, repo, target or "main", _AGAIN)
        if target is not None and not (create_pr or revision):
            api.merge_pull_request(repo, int(target.removeprefix(_PULL)))
            _check_arrival(api, directory, repo, "main", "Look at the pull request on the repository's page.")
    if revision:
        return f"{api.endpoint}/{repo}/tree/{revision}"
    if create_pr and target:
        return f"{api.endpoint}/{repo}/discussions/{target.removeprefix(_PULL)}"
    return f"{api.endpoint}/{repo}"


def require_target(repo: str, *, create_pr: bool, revision: str | None, token: str | None = None) -> str:
    """Check the arguments of ``push_model`` before anything is written or sent, and return the token to use.

    Raises:
        ConfigError: there is no token, the name has no organisation, or a pull request and a branch are asked for.
        HFValidationError: no repository can have this name.
    """
    from huggingface_hub import get_token
    from huggingface_hub.utils import validate_repo_id

    if create_pr and revision:
        raise ConfigError("a pull request and a branch exclude each other", "Give --create-pr or --revision.")
    if "/" not in repo:
        raise ConfigError(f"{quoted(repo)} is not ORG/NAME", "Put your name or that of an organisation before it.")
    validate_repo_id(repo)
    if not (token := token or get_token()):
        raise ConfigError("no hub token", "Run: hf auth login")
    return token


def _prepare(api: "HfApi", repo: str, title: str, private: bool, create_pr: bool, branch: str | None) -> str | None:
    """The revision to upload to: ``branch``, a pull request that is open, or None for one that has to be made."""
    api.create_repo(repo, private=private, exist_ok=True)
    if private and not api.model_info(repo).private:
        raise ConfigError(f"{repo}: exists already and is public", "Make it private on its page, or choose another.")
    if branch:
        api.create_branch(repo, branch=branch, exist_ok=True)
        return branch
    if not create_pr:
        _refuse_another_model(api, repo)
    return _open_pull(api, repo, title)


def _open_pull(api: "HfApi", repo: str, title: str) -> str | None:
    """The pull request that an interrupted push of the same weights left open.

    Anybody may open one with this title, with files of his own in it: those of others are left alone.
    """
    own = api.whoami()["name"]
    open_ones = api.get_repo_discussions(repo, author=own, discussion_type="pull_request", discussion_status="open")
    try:
        for pull in islice(open_ones, _MOST_PULLS):
            if pull.title == title and pull.author == own:
                return f"{_PULL}{pull.num}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FcsdError(f"{repo}: the hub's list of pull requests cannot be read", _AGAIN) from error
    return None


def _check_arrival(api: "HfApi", directory: Path, repo: str, revision: str, hint: str) -> None:
    """Compare names and hashes of a revision's files on the hub with those of a directory.

    They are compared again after each of ``_WAITS``: a large hub may take seconds to show what it has.

    Raises:
        FcsdError: a file is missing or differs, or one of an earlier upload is still there.
    """
    from huggingface_hub.utils import filter_repo_objects

    problems: dict[str, list[str]] = {}
    for wait in (0.0, *_WAITS):
        time.sleep(wait)
        found = api.verify_repo_checksums(repo, revision=revision, local_dir=directory)
        other = [one["path"] for one in found.mismatches]
        problems = {
            "lacks": list(filter_repo_objects(found.extra_paths, ignore_patterns=_NOT_UPLOADED)),
            "differs in": list(filter_repo_objects(other, ignore_patterns=_NOT_UPLOADED)),
            "still has the earlier": list(filter_repo_objects(found.missing_paths, allow_patterns=_REPLACED)),
        }
        if not any(problems.values()):
            return
    what, names = next((what, names) for what, names in problems.items() if names)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise FcsdError(f"{repo}: after the upload, {revision} {what} {shown(names[0])}{more}", hint)


@contextmanager
def _no_silence() -> Iterator[None]:
    """Inside the block, huggingface_hub gives up a request about which nothing is heard for ``_SILENCE``."""
    from huggingface_hub import get_session

    session = get_session()
    before, session.timeout = session.timeout, _SILENCE
    try:
        yield
    finally:
        session.timeout = before


def _refuse_another_model(api: "HfApi", repo: str) -> None:
    if not api.file_exists(repo, "config.json"):
        return
    with tempfile.TemporaryDirectory() as folder:
        there = read_object(Path(api.hf_hub_download(repo, "config.json", local_dir=folder)))
    if "fcsd" not in there:
        raise ConfigError(
            f"{repo}: holds another model, of type {quoted(str(there.get('model_type')))}",
            "Choose another name; or leave the decision to people with --create-pr.",
        )


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn exceptions of huggingface_hub into one line that cannot contain a token."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
        OfflineModeIsEnabled,
    )

    try:
        yield
    except OfflineModeIsEnabled:
        raise ConfigError("pushing needs the hub, but offline mode is on", "Unset HF_HUB_OFFLINE.") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        who = "Has your token write access? `hf auth whoami` says whose it is. For others' repositories: --create-pr."
        hint = who if status in (401, 403, 404) else _AGAIN
        raise FcsdError(f"{repo}: the hub answered {status}", hint) from None
    except (HTTPError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error.__cause__, HTTPError):
            raise  # the client raises RuntimeError when a large file did not arrive
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {reason_of(cause)}"
        raise FcsdError(f"{repo}: the upload broke off ({why})", _AGAIN) from None
