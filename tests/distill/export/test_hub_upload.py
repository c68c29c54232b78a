"""The upload to the Hub, with a stand-in for its client; revisions of Hub names; the Hub switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, RepoUrl, constants
from huggingface_hub.utils import filter_repo_objects
from tiny_run import tiny_settings

from decode.errors import UserError
from decode.models.loading import load_config, load_model, load_tokenizer
from decode.models.wrapped import pinned
from distill.export import model_card
from distill.export.model_card import check_hub, push
from distill.models.loading import source_folder
from distill.pipeline import run_pipeline


class Hub(HfApi):
    """Takes uploads; remembers the repositories and the files."""

    made: list[Any]
    files: dict[str, bytes]

    def whoami(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"name": "me"}

    def create_repo(self, repo_id: str, **options: Any) -> RepoUrl:
        self.made.append((repo_id, options["private"]))
        return RepoUrl(f"{constants.ENDPOINT}/{repo_id}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, ignore_patterns: list[str], **_: Any):  # type: ignore
        files = {str(file.relative_to(folder_path)): file for file in folder_path.rglob("*") if file.is_file()}
        kept = filter_repo_objects(files, ignore_patterns=ignore_patterns)
        self.files |= {name: files[name].read_bytes() for name in kept}


def test_an_export_is_uploaded_with_its_card_and_profile_under_the_names_that_others_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    export = tmp_path / "runs" / "export"
    (export / "gguf").mkdir(parents=True)
    target = str(tmp_path / "runs" / "target")
    for name in ("model.safetensors", "speculation_profile.json", "gguf/draft-f32.gguf", "gguf/target-f32.gguf"):
        (export / name).write_bytes(name.encode())
    (export / "README.md").write_text(f"---\ntags: [a]\n---\nserve {target} --draft {export}")
    Hub.made, Hub.files = [], {}
    monkeypatch.setattr(model_card, "HfApi", Hub)
    check_hub("me/draft")
    assert push(export, "me/draft", {target: "some/target"}) == f"{constants.ENDPOINT}/me/draft"
    files = Hub.files
    assert set(files) == {"README.md", "model.safetensors", "speculation_profile.json", "gguf/draft-f32.gguf"}
    assert files["README.md"].endswith(b"serve some/target --draft me/draft")
    assert Hub.made == [("me/draft", True)]


@pytest.mark.parametrize(
    ("name", "token", "offline", "wanted"),
    [
        ("me/my draft", "hf_x", False, "export.hub is 'me/my draft'.*HFValidationError"),
        ("me/draft", "", False, "no token found.*hf auth login"),
        ("me/draft", "hf_x", True, "HF_HUB_OFFLINE"),
        ("me/draft", "hf_x", False, r"the Hub \(http://127.0.0.1:9\) does not take the upload"),
    ],
)
def test_an_upload_that_would_fail_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, token: str, offline: bool, wanted: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", token)
    settings = tiny_settings(tmp_path)
    settings.export.hub = name
    with pytest.raises(UserError, match=wanted):
        run_pipeline(settings)
    assert not (tmp_path / "tiny").exists()


def test_a_revision_stands_behind_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a@b").mkdir()
    assert pinned(tmp_path / "a@b") == (str(tmp_path / "a@b"), {})
    assert pinned("me/tiny") == ("me/tiny", {})
    seen: list[tuple[str, str]] = []

    def asked(name: str, *_: Any, revision: str, **__: Any) -> None:
        seen.append((name, revision))
        raise OSError("enough")

    for seam in ("transformers.AutoModelForCausalLM.from_pretrained", "transformers.AutoConfig.from_pretrained"):
        monkeypatch.setattr(seam, asked)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", asked)
    monkeypatch.setattr("distill.models.loading.snapshot_download", asked)
    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", lambda *_, **__: ({}, {}))
    for load in (
        lambda name: load_model(name, device="cpu", dtype="float32"),
        load_tokenizer,
        load_config,
        source_folder,
    ):
        with pytest.raises(UserError, match="me/tiny@v2"):
            load("me/tiny@v2")
    assert seen == [("me/tiny", "v2")] * 4
