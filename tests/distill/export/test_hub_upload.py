"""The upload to the Hub, against a small server in its place; revisions of Hub names; the Hub switched off."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tiny_run import tiny_settings

from decode.errors import UserError
from decode.models.loading import load_config, load_model, load_tokenizer, pinned
from distill.export.hub_upload import check_hub, push
from distill.models.loading import source_folder
from distill.pipeline import run_pipeline


class Hub(http.server.ThreadingHTTPServer):
    """Takes uploads; remembers what was asked and the files of each commit, by branch."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.asked, self.branches = f"http://127.0.0.1:{self.server_port}", list[Any](), dict[str, Any]()
        self.refusal = 0


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.answer({"name": "me", "type": "user"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append((self.path, self.headers["authorization"], body))
        if self.path.endswith("/repos/create"):
            self.answer({"url": f"{self.server.url}/me/draft"})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
            branch = self.server.branches.setdefault(self.path.split("/")[-1], {})
            branch |= {p: base64.b64decode(c) for p, c in files.items()}
            self.answer({"commitUrl": f"{self.server.url}/me/draft/commit/1", "commitOid": "1"})
        else:
            self.answer({"errors": [], "warnings": []})

    def answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(self.server.refusal or 200)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    server.server_close()


def test_an_export_is_uploaded_with_its_card_and_profile_under_the_names_that_others_know(
    hub: Hub, tmp_path: Path
) -> None:
    export = tmp_path / "runs" / "export"
    (export / "gguf").mkdir(parents=True)
    target = str(tmp_path / "runs" / "target")
    for name in ("model.safetensors", "speculation_profile.json", "gguf/draft-f32.gguf", "gguf/target-f32.gguf"):
        (export / name).write_bytes(name.encode())
    (export / "README.md").write_text(f"---\ntags: [a]\n---\nserve {target} --draft {export}")
    check_hub("me/draft")
    assert push(export, "me/draft", {target: "some/target"}) == f"{hub.url}/me/draft"
    files = hub.branches["main"]
    assert set(files) == {"README.md", "model.safetensors", "speculation_profile.json", "gguf/draft-f32.gguf"}
    assert files["README.md"].endswith(b"serve some/target --draft me/draft")
    assert files["model.safetensors"] == b"model.safetensors"
    created = next(json.loads(body) for path, _, body in hub.asked if path == "/api/repos/create")
    assert created["name"] == "draft"
    assert created.get("private", created.get("visibility")) in (True, "private")
    assert {key for _, key, _ in hub.asked} == {"Bearer hf_secret"}


def test_a_token_that_the_hub_refuses_is_told(hub: Hub) -> None:
    hub.refusal = 401
    with pytest.raises(UserError, match=r"export.hub is 'me/draft' and the Hub refuses it"):
        check_hub("me/draft")


@pytest.mark.parametrize(
    ("name", "token", "offline", "wanted"),
    [
        ("me/my draft", "hf_x", False, "export.hub is 'me/my draft', expected a name such as me/my-draft"),
        ("me/draft", "", False, "there is no token for the Hub: log in with `hf auth login`"),
        ("me/draft", "hf_x", True, r"the Hub is switched off \(HF_HUB_OFFLINE\)"),
        ("me/draft", "hf_x", False, r"the Hub \(http://127.0.0.1:9\) does not answer"),
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
    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
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
