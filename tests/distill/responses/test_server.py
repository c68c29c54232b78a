"""Responses from servers and from vLLM: retried where that helps, kept when it stops, refused with the next step."""

import http.server
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from engine_pairs import needs_vllm, save_exports
from tiny_run import begun, run_tiny, tiny_settings
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from distill.config.drafts import ResponseSettings, ServerSettings
from distill.config.run import Settings
from distill.config.training import TargetSettings
from distill.data.response_file import Response
from distill.data.tokenizer import train_tokenizer
from distill.responses.server import Job, answered_by_servers, check_servers

Reply = tuple[int, dict[str, str], Any]
JOBS = [Job(i, [40 + i], f"prompt {i}", 8) for i in range(12)]


@dataclass
class Played:
    """What the server saw, and how it answers: a function of the request's body and its number."""

    answer: Callable[[dict[str, Any], int], Reply]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    models: tuple[str, ...] = ("target",)
    url: str = ""
    lock: Any = field(default_factory=threading.Lock)


@contextmanager
def serving(played: Played) -> Iterator[Played]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {}, {"object": "list", "data": [{"id": name} for name in played.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"]))) | {"path": self.path}
            with played.lock:
                played.bodies.append(body)
                number = len(played.bodies)
            played.keys.add(self.headers.get("authorization"))
            self.reply(*played.answer(body, number))

        def reply(self, status: int, headers: dict[str, str], value: Any) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in (
                {"content-length": str(len(data)), "content-type": "application/json"} | headers
            ).items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    played.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield played
    finally:
        server.shutdown()
        server.server_close()


def good(body: dict[str, Any], number: int) -> Reply:
    return 200, {}, {"choices": [{"text": f" re: {body['prompt']}", "finish_reason": "length"}]}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["re: prompt 0 1 2 3 4"] * 2, 300)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.005)


def asked(tokenizer: PreTrainedTokenizerBase, *several: Played, **server: Any) -> Iterator[Response]:
    where = ServerSettings(urls=[played.url for played in several], **server)
    settings = ResponseSettings(source="target", temperature=0.7, top_p=0.9, server=where)
    return answered_by_servers(settings, 5, tokenizer, {0})(JOBS)


def test_servers_share_the_prompts_with_many_requests_in_flight(tokenizer: PreTrainedTokenizerBase) -> None:
    together = threading.Barrier(6)

    def slow(body: dict[str, Any], number: int) -> Reply:
        together.wait(20)  # answers nothing before six requests are there
        return good(body, number)

    with serving(Played(slow)) as one, serving(Played(slow)) as two:
        found = list(asked(tokenizer, one, two, concurrency=3))
    assert sorted(example for example, _ in found) == list(range(12))
    for example, ids in found:
        assert ids == tokenizer(f" re: prompt {example}")["input_ids"][:8]
    bodies = [*one.bodies, *two.bodies]
    assert (len(one.bodies), len(two.bodies)) == (6, 6)
    assert {body["path"] for body in bodies} == {"/v1/completions"}
    assert {(b["model"], b["temperature"], b["top_p"], b["max_tokens"]) for b in bodies} == {("target", 0.7, 0.9, 8)}
    assert len({body["seed"] for body in bodies}) == 12


def test_answers_without_text_are_counted_and_stop_a_run_that_has_little_else(tmp_path: Path) -> None:
    """A reasoning parser leaves nothing of an answer that was cut off within its reasoning."""

    def parsed(body: dict[str, Any], number: int) -> Reply:
        return 200, {}, {"choices": [{"text": None, "finish_reason": "length"}]}

    settings = tiny_settings(tmp_path)
    settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=8)
    with serving(Played(parsed)) as played:
        settings.teacher.responses.server.urls = [played.url]
        with pytest.raises(UserError, match=r"20 of 20 are empty: .*without a reasoning parser"):
            run_tiny(begun(settings))


def test_a_server_that_does_not_answer_is_refused_before_the_first_stage() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(UserError, match=r"failed: APIConnectionError.*start it with the target"):
            check_servers(ServerSettings(urls=[url]))


def test_a_run_continues_with_the_responses_that_a_server_had_given(tmp_path: Path) -> None:
    def dying(body: dict[str, Any], number: int) -> Reply:
        passing: Reply = (503, {"retry-after": "0.01"}, {"error": "starting"})
        return passing if number == 1 else good(body, number) if number <= 8 else (500, {}, b"out of memory")

    settings = tiny_settings(tmp_path)
    settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=8)
    server = settings.teacher.responses.server
    server.concurrency = 1
    with serving(Played(dying)) as played:
        server.urls = [played.url]
        with pytest.raises(UserError, match=r"failed: InternalServerError: .*What is finished is kept"):
            run_tiny(begun(settings))
    assert len((tmp_path / "tiny/work/responses/train.jsonl").read_text().splitlines()) == 7
    with serving(Played(good)) as played:
        server.urls = [played.url]
        ran, _, printed = run_tiny(settings)
    assert ran == ["distillspec", "adaspec"]
    assert "train: 20, 13 of them written now" in printed
    assert len(played.bodies) == 13 + 8


# -- vLLM -------------------------------------------------------------------------------------------------------------

STAND_IN = """
import dataclasses, json, os, sys
print("INFO loading")
def note(value):
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        print(json.dumps(value), file=log)
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        for name in ("model", "dtype", "max-model-len", "generation-config", "max-num-seqs", "tensor-parallel-size"):
            parser.add_argument("--" + name)
class SamplingParams:
    def __init__(self, **how):
        self.how = how
class Text:
    def __init__(self, ids):
        self.outputs, self.token_ids = [self], ids
class LLM:
    def __init__(self, **engine):
        note([engine, "MASTER_ADDR" in os.environ])
    def generate(self, prompts, sampling, use_tqdm):
        for one in sampling:
            note(one.how)
        if os.environ.get("STAND_IN_FAILS"):
            sys.exit("out of memory")
        return [Text(prompt["prompt_token_ids"][-4:]) for prompt in prompts]
"""


def vllm_settings(folder: Path, **server: Any) -> Settings:
    settings = tiny_settings(folder)
    settings.training.steps = 2
    settings.teacher.responses = ResponseSettings(
        source="target", temperature=0.0, max_new_tokens=8, server=ServerSettings(engine="vllm", **server)
    )
    return settings


def answers(work: Path) -> dict[str, list[dict[str, Any]]]:
    """What was written, by split."""
    read = {path.stem: path.read_text().splitlines() for path in (work / "responses").glob("*.jsonl")}
    return {name: sorted(map(json.loads, lines), key=lambda line: line["example"]) for name, lines in read.items()}


def test_vllm_gets_the_prompts_as_tokens_and_what_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, log = tmp_path / "packages", tmp_path / "log"
    (package / "vllm" / "utils").mkdir(parents=True)
    (package / "vllm" / "__init__.py").write_text(STAND_IN)
    (package / "vllm" / "utils" / "__init__.py").touch()
    parser = "from argparse import ArgumentParser as FlexibleArgumentParser\n"
    (package / "vllm" / "utils" / "argparse_utils.py").write_text(parser)
    for name, value in {"PYTHONPATH": package, "STAND_IN_LOG": log, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("distill.responses.server.check_engine", lambda name: sys.executable)
    settings = vllm_settings(tmp_path, arguments=["--tensor-parallel-size=2"], concurrency=7)
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(UserError, match=r"(?s)vLLM ended with status 1.*out of memory"):
        run_tiny(begun(settings))
    monkeypatch.delenv("STAND_IN_FAILS")
    log.unlink()
    _, run, _ = run_tiny(settings)
    noted = [json.loads(line) for line in log.read_text().splitlines()]
    (engine, ranked), sampling = noted[0], [line for line in noted if isinstance(line, dict)]
    assert engine == {
        "model": str(run.target), "dtype": "float32", "max_model_len": "256", "generation_config": "vllm",
        "max_num_seqs": "7", "tensor_parallel_size": "2",
    }  # fmt: skip
    assert not ranked
    assert len(sampling) == 28
    assert all(one["temperature"] == 0.0 and one["max_tokens"] <= 8 and one["stop_token_ids"] for one in sampling)
    found = answers(run.work)
    assert {name: len(lines) for name, lines in found.items()} == {"train": 20, "validation": 8}
    assert all(len(line["ids"]) == 4 for lines in found.values() for line in lines)


@needs_vllm
@pytest.mark.engine
def test_vllm_writes_what_the_target_writes_here(tmp_path: Path) -> None:
    target = save_exports(tmp_path, "llama") / "target"

    def written(name: str, engine: Literal["vllm"] | None) -> dict[str, list[list[int]]]:
        settings = vllm_settings(tmp_path / name)
        settings.teacher.responses.server.engine = engine
        settings.target = TargetSettings(kind="as_is", model=str(target))
        found = answers(run_tiny(settings)[1].work)
        return {split: [line["ids"] for line in lines] for split, lines in found.items()}

    end = written("before", None)["train"][0][3]  # ends some texts from now on
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    here = written("here", None)
    assert any(len(ids) < 8 and ids[-1] == end for ids in here["train"])
    assert written("there", "vllm") == here
