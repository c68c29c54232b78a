"""The exported draft on the Hugging Face Hub, with its card and profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from decode.errors import UserError
from distill.config.run import HubSettings


def check_hub(settings: HubSettings) -> None:
    """Refuses an upload that would fail; cheap: call it before training starts.

    Raises:
        UserError: a name that is none of the Hub's, no token, one that the Hub does not take, or no Hub.
    """
    name = settings.repository
    if name is None:
        return
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"export.hub.repository is {name!r}, wanted a name such as me/my-draft: {error}") from error
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"export.hub.repository is {name!r} and the Hub is switched off (HF_HUB_OFFLINE): unset one of the two"
        )
    if get_token() is None:
        raise UserError(
            f"export.hub.repository is {name!r} and there is no token for the Hub: log in with `hf auth login`, or put "
            "a token that may write into the environment variable HF_TOKEN"
        )
    _asked(name, lambda: HfApi().whoami())


def push(export: Path, settings: HubSettings, names: Mapping[str, str]) -> str | None:
    """Uploads an export in one commit, without the target's GGUF files; returns its address, None if not wanted.

    Args:
        export: The finished export.
        settings: Of the repository; it and its branch are made if they are not there.
        names: What stands in the card for folders of this machine.

    Raises:
        UserError: the Hub refuses it, or does not answer.
    """
    name = settings.repository
    if name is None:
        return None
    api = HfApi()
    files = [path for path in sorted(export.rglob("*")) if path.is_file() and not path.name.startswith("target-")]

    def content(path: Path) -> Path | bytes:
        if path.name != "README.md":
            return path
        text = path.read_text(encoding="utf-8")
        for folder, known in {str(export): name, **names}.items():
            text = text.replace(folder, known)
        return text.encode()

    def upload() -> str:
        full = api.create_repo(name, private=settings.private, exist_ok=True).repo_id
        if settings.revision is not None:
            api.create_branch(full, branch=settings.revision, exist_ok=True)
        operations = [CommitOperationAdd(str(path.relative_to(export)), content(path)) for path in files]
        message = "Draft model with its card and speculation profile"
        made = api.create_commit(full, operations, commit_message=message, revision=settings.revision)
        return str(made.repo_url)

    return str(_asked(name, upload))


def _asked(name: str, ask: Any) -> Any:
    try:
        return ask()
    except HfHubHTTPError as error:
        raise UserError(f"the Hub refuses export.hub.repository {name!r}: {str(error).strip()}") from error
    except Exception as error:  # whatever the network layer calls it
        raise UserError(
            f"export.hub.repository is {name!r} and the Hub ({constants.ENDPOINT}) does not answer "
            f"({type(error).__name__}: {error}): see to the network, or leave it out and upload the export later"
        ) from error
