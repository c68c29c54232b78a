"""Upload of the exported draft to the Hugging Face Hub, with its card and profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from decode.errors import UserError


def check_hub(name: str | None) -> None:
    """Refuses an upload that would fail; cheap, so it is called before training starts.

    Raises:
        UserError: The name is not valid, there is no token, the Hub refuses it, or the Hub does not answer.
    """
    if name is None:
        return
    given = f"export.hub is {name!r}"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{given}, expected a name such as me/my-draft: {error}") from error
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{given} and the Hub is switched off (HF_HUB_OFFLINE): unset one of the two")
    if get_token() is None:
        raise UserError(
            f"{given} and there is no token for the Hub: log in with `hf auth login`, or set the environment variable "
            "HF_TOKEN to a token with write access"
        )
    try:
        HfApi().whoami()
    except Exception as error:
        raise _failure(given, error) from error


def push(export: Path, name: str | None, names: Mapping[str, str]) -> str | None:
    """Uploads an export without the target's GGUF files, and returns its address. None: no upload is wanted.

    Args:
        export: The finished export.
        name: The repository, which is created (private) if it does not exist.
        names: What replaces folders of this machine in the card.

    Raises:
        UserError: The Hub refuses the upload, or does not answer.
    """
    if name is None:
        return None
    card, api = (export / "README.md").read_text(encoding="utf-8"), HfApi()
    for folder, known in {str(export): name, **names}.items():
        card = card.replace(folder, known)
    message = "Draft model with its card and speculation profile"
    try:
        repository = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=export, ignore_patterns=["README.md", "*/target-*"],
            commit_message=message,
        )  # fmt: skip
        api.upload_file(
            repo_id=repository.repo_id, path_or_fileobj=card.encode(), path_in_repo="README.md",
            commit_message=message,
        )  # fmt: skip
    except Exception as error:
        raise _failure(f"export.hub is {name!r}", error) from error
    return str(repository)


def _failure(given: str, error: Exception) -> UserError:
    if isinstance(error, HfHubHTTPError):
        return UserError(f"{given} and the Hub refuses it: {str(error).strip()}")
    return UserError(
        f"{given} and the Hub ({constants.ENDPOINT}) does not answer ({type(error).__name__}: {error}): check the "
        "network, or remove the setting and upload the export later"
    )
