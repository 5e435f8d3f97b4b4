"""Upload a folder to the Hugging Face Hub."""

import re
from pathlib import Path

from laconic.errors import InputError, UsageError

REPOSITORY_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")


def check_repository_name(repo: str) -> None:
    """Raise UsageError for a name that is not OWNER/NAME."""
    if not REPOSITORY_NAME.fullmatch(repo):
        raise UsageError(f"repository {repo!r}: give OWNER/NAME, such as me/kava-smollm2")


def upload_folder(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Create a model repository unless it exists, upload a folder as one commit, and return its address.

    The hub's client takes the token from `hf auth login` or HF_TOKEN.

    Raises:
        InputError: The hub refuses, or cannot be reached; what was uploaded before stays in no commit.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except Exception as error:  # the hub's client raises many kinds: HTTP, names, tokens, offline
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"{repo}: not uploaded: {reason}; {folder} is complete, upload it with: hf upload {repo} {folder}"
        ) from error
    return str(commit.repo_url)
