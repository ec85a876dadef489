"""The command ``fcsd push``: uploads an exported directory to a pull request, which is merged at the end."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fcsd.checkpoint import read_object
from fcsd.checkpoint.files import quoted
from fcsd.errors import ConfigError, FcsdError
from fcsd.export.reload import RECORD, check_record

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

_NOT_UPLOADED = [RECORD, ".*", "**/__pycache__/**"]
_AGAIN = "Run it again; what has arrived is not sent twice."
# Files of an earlier upload that must not stay beside the new ones, which may have other shards and other code.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py"]


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
    from huggingface_hub import HfApi, get_token

    directory = Path(directory)
    if create_pr and revision:
        raise ConfigError("a pull request and a branch exclude each other", "Give --create-pr or --revision.")
    check_record(directory)
    token = token or get_token()
    if not token:
        raise ConfigError("no hub token", "Run: hf auth login")
    title = f"fcsd export {read_object(directory / RECORD)['fingerprint'][:12]}"
    api = HfApi(token=token)
    with _hub_errors(repo):
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise ConfigError(
                f"{repo}: exists already and is public", "Make it private on its page, or choose another."
            )
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
            _upload(api, directory, repo, title, revision)
            return f"{api.endpoint}/{repo}/tree/{revision}"
        if not create_pr:
            _refuse_another_model(api, repo)
        number = _pull_request(api, directory, repo, title)
        if create_pr:
            return f"{api.endpoint}/{repo}/discussions/{number}"
        api.merge_pull_request(repo, number)
    return f"{api.endpoint}/{repo}"


def _pull_request(api: "HfApi", directory: Path, repo: str, title: str) -> int:
    """Upload to a new pull request, or to the one that an interrupted push of the same weights left open."""
    for pull in api.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open"):
        if pull.title == title:
            _upload(api, directory, repo, title, f"refs/pr/{pull.num}")
            return pull.num
    number = _upload(api, directory, repo, title, None).pr_num
    assert number is not None
    return number


def _upload(api: "HfApi", directory: Path, repo: str, title: str, revision: str | None) -> "CommitInfo":
    """Make one commit after all large files have arrived. Without a revision, it goes to a new pull request."""
    return api.upload_folder(
        repo_id=repo,
        folder_path=directory,
        commit_message=title,
        revision=revision,
        create_pr=revision is None,
        ignore_patterns=_NOT_UPLOADED,
        delete_patterns=_REPLACED,
    )


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
        raise FcsdError(f"{repo}: the upload broke off ({type(error.__cause__ or error).__name__})", _AGAIN) from None
