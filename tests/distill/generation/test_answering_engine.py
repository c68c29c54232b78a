"""An engine that a run starts for its target's answers: once for all splits, ended with them, refused if missing."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from engine_pairs import needs_vllm, save_exports
from tiny_run import run_tiny, tiny_settings

from decode.errors import UserError
from distill.config.drafts import ResponseSettings, ServerSettings
from distill.config.run import Settings
from distill.config.training import TargetSettings

STAND_IN = """#!{python}
import http.server, json, os, pathlib, sys
if sys.argv[1] == "-c":
    sys.exit(print("vLLM 0.32.0"))
def note(value):
    with open({log!r}, "a") as log:
        print(json.dumps(value), file=log)

note([os.getpid(), sys.argv[1:], "MASTER_ADDR" in os.environ])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say({{"data": [{{"id": "t"}}]}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        note(body)
        self.say({{"choices": [{{"token_ids": body["prompt"][-4:], "finish_reason": "stop"}}]}})

    def say(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def settings_of(folder: Path, **server: Any) -> Settings:
    settings = tiny_settings(folder)
    settings.comparisons, settings.reference.training.steps = [], 2
    settings.reference.responses = ResponseSettings(
        source="target", temperature=0.0, max_new_tokens=8, server=ServerSettings(engine="vllm", **server)
    )
    return settings


def answers(work: Path) -> dict[str, list[dict[str, Any]]]:
    """What was written, by split."""
    read = {path.stem: path.read_text().splitlines() for path in (work / "responses").glob("*.jsonl")}
    return {name: sorted(map(json.loads, lines), key=lambda line: line["example"]) for name, lines in read.items()}


def test_an_engine_is_started_once_with_the_target_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, log = tmp_path / "python", tmp_path / "log"
    program.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    settings = settings_of(tmp_path, python=str(program), arguments=["--tensor-parallel-size=2"], concurrency=7)
    _, run, printed = run_tiny(settings)
    (pid, command, ranked), *bodies = map(json.loads, log.read_text().splitlines())
    assert len(bodies) == 28
    plain = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert all(plain.items() <= body.items() for body in bodies)  # whatever the model's generation_config says
    assert command[2:4] == ["serve", str(run.target)]
    assert not ranked
    given = dict(pairwise(command))
    assert (given["--dtype"], given["--max-num-seqs"], given["--max-model-len"]) == ("float32", "7", "256")
    assert "--tensor-parallel-size=2" in command
    assert "--enforce-eager" not in command
    assert not Path(f"/proc/{pid}").exists()
    assert printed.count("vllm starts with") == 1
    found = answers(run.work)
    assert {name: len(lines) for name, lines in found.items()} == {"train": 20, "validation": 8}
    assert all(len(line["ids"]) == 4 for lines in found.values() for line in lines)


def test_an_engine_that_is_not_installed_is_refused_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("decode.engines.settings.CHECKOUT", tmp_path)
    with pytest.raises(UserError, match=r"make engines.*reference\.responses\.server\.python"):
        run_tiny(settings_of(tmp_path))
    assert not (tmp_path / "tiny/target").exists()


def test_an_engine_beside_servers_is_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, url="http://127.0.0.1:1/v1")
    with pytest.raises(UserError, match=r"server\.engine is vllm and .*server\.url is .*: give one of the two"):
        settings.validate()
    settings = settings_of(tmp_path)
    settings.reference.responses.source = "dataset"
    with pytest.raises(UserError, match=r"server\.engine is vllm, but no response is the target's"):
        settings.validate()


@needs_vllm
@pytest.mark.engine
def test_vllm_writes_what_the_target_writes_here(tmp_path: Path) -> None:
    target = save_exports(tmp_path, "llama") / "target"

    def written(name: str, engine: Literal["vllm"] | None) -> dict[str, list[list[int]]]:
        settings = settings_of(tmp_path / name)
        settings.reference.responses.server.engine = engine
        settings.target = TargetSettings(kind="as_is", model=str(target))
        found = answers(run_tiny(settings)[1].work)
        return {split: [line["ids"] for line in lines] for split, lines in found.items()}

    end = written("before", None)["train"][0][3]  # ends some texts from now on
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    here = written("here", None)
    assert any(len(ids) < 8 and ids[-1] == end for ids in here["train"])
    assert written("there", "vllm") == here
