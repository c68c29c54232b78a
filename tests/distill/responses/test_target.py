"""Responses that the target writes, here or on servers: every turn of a chat, kept line by line, the same after a kill."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_run import begun, bench, run_tiny, tiny_settings
from tokenizers_of_kinds import with_start
from transformers import PreTrainedModel

from decode.errors import UserError
from distill import ranks
from distill.config import DataSettings, ResponseSettings, ServerSettings, Settings, TargetSettings
from distill.data.chat import IGNORE, until_end
from distill.data.prompts import TextFile
from distill.responses import target as target_module
from distill.responses.target import Job, answered_by_servers, answered_texts, check_servers
from distill.stages import run_stages

Tiny = Callable[..., PreTrainedModel]
Reply = tuple[int, Any]
JOBS = [Job(i, [40 + i, 7], 8) for i in range(12)]


def test_nothing_after_the_first_end_token_is_learned_whichever_of_several_it_is() -> None:
    assert until_end([4, 5, 1, 6, 1], {1}) == [4, 5, 1]
    assert until_end([4, 3, 5, 1], {1, 3}) == [4, 3]
    assert until_end([4, 5], {1}) == [4, 5]  # cut by the budget: no end is learned


def test_a_kill_costs_the_line_being_written_and_what_was_made_from_something_else_is_set_aside(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "train.jsonl", with_start()

    def opened(made_from: dict[str, Any]) -> TextFile:
        file = TextFile(path, made_from)
        file.open()
        return file

    def texts() -> Iterator[tuple[int, list[int]]]:
        return ((number, [number + 3, 0]) for number in range(5))

    writing = opened({"a": 1}).add(texts(), tokenizer)
    for _ in range(3):
        next(writing)
    assert len(path.read_bytes().splitlines()) == 3  # written at once, not when all are done
    path.write_bytes(path.read_bytes()[:-9])
    file = opened({"a": 1})
    assert list(file.texts) == [0, 1]
    assert list(file.add(texts(), tokenizer)) == [2, 3, 4]
    for number in (2, 3):
        assert not opened({"a": number}).texts
        path.write_text(f'{{"example": 0, "ids": [{number}]}}\n')
    opened({"a": 4})
    kept = [path.with_suffix(f".old-{number}.jsonl").read_text() for number in (1, 2, 3)]
    assert [len(text.splitlines()) for text in kept] == [5, 1, 1]  # each under a name of its own


# -- a whole run ------------------------------------------------------------------------------------------------------


def answering(folder: Path, **responses: Any) -> Settings:
    settings = tiny_settings(folder)
    settings.teacher.responses = ResponseSettings(source="target", batch_size=8, **responses)
    return settings


def test_a_draft_learns_what_the_target_wrote_and_a_torn_line_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "GROUP", 1)
    settings = answering(tmp_path, max_new_tokens=10)
    _, run, printed = run_tiny(begun(settings))
    assert "the target's responses, train: 20, 20 of them written now" in printed
    account = run.record("distillspec").account
    assert account["teacher_tokens"] <= 12 * 4 * 10
    path = run.work / "responses/train.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[:-20])
    settings.drafts[1].k = 0.5  # another draft of the same texts
    assert "train: 20, 1 of them written now" in run_tiny(settings)[2]
    assert sorted(path.read_bytes().splitlines()) == sorted(before.splitlines())


def test_several_processes_write_what_a_single_one_does_each_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "GROUP", 1)
    settings = begun(answering(tmp_path, max_new_tokens=4))
    alone = answered_texts(bench(settings)[0])[0][:]
    folder = tmp_path / "tiny" / "work" / "responses"
    lines = {line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()}
    for path in folder.iterdir():
        path.unlink()
    run = bench(settings)[0]
    _ = run.corpus  # before there are two processes
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(ranks, "barrier", lambda: None)
    for rank in (1, 0):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        if rank:
            with pytest.raises(KeyError):  # process 0 has yet to write
                answered_texts(run)
    assert answered_texts(run)[0][:] == alone
    assert len((folder / "train-1.jsonl").read_text().splitlines()) == 8  # the second of the groups of 8, 8 and 4
    assert {line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()} == lines


# -- every turn of a chat ---------------------------------------------------------------------------------------------

LEADS = {"as it was": "", "rewritten": "=>"}  # what the prompt of an answer ends with, which history leaves out


def chatting(folder: Path, tiny: Tiny, history: str, turns: list[dict[str, Any]]) -> Settings:
    tokenizer, model = with_start(adds=False), folder / "model"
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>" + LEADS[history] + "{% endif %}"
    )
    tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = [{"messages": [{"role": "user", "content": f"Hi{n}"}, *turns]} for n in range(12)]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = [{"messages": [{"role": "user", "content": f"{split}{n}"}, *turns]} for n in range(2)]
    settings = answering(folder, max_new_tokens=5, temperature=0.0)
    settings.teacher.examples = None
    settings.target = TargetSettings(kind="as_is", model=str(model))
    settings.data = DataSettings(
        files={split: str(folder / f"{split}.jsonl") for split in ("train", "validation", "test")}, max_length=200
    )
    return settings


@pytest.mark.parametrize("history", LEADS)
def test_every_turn_of_a_chat_is_answered_behind_what_the_target_said_before(
    tmp_path: Path, tiny: Tiny, history: str
) -> None:
    said = {"role": "assistant", "content": "theirs"}
    turns = [said, {"role": "user", "content": "and?"}, said, {"role": "user", "content": "then?"}, said]
    run, _ = bench(chatting(tmp_path, tiny, history, turns))
    run_stages(run, only=("target",))
    train, _, _ = answered_texts(run)
    texts = [run.tokenizer.decode(row["input_ids"]) for row in train]
    assert not any("theirs" in text for text in texts)
    lines = (run.work / "responses/train.jsonl").read_text().splitlines()
    written = {line["example"]: line["ids"] for line in map(json.loads, lines)}
    assert len(written) == 3 * 12
    assert len(train) == (12 if history == "as it was" else 36)
    labels = [token for row in train for token in row["labels"] if token != IGNORE]
    assert sorted(labels) == sorted(token for ids in written.values() for token in ids)
    third = [text for text in texts if "then?" in text]
    for number, text in enumerate(third):
        first, second = (run.tokenizer.decode([i for i in written[number + turn] if i]) for turn in (0, 12))
        assert f"{first}</s><user>and?" in text
        assert f"{second}</s><user>then?" in text
    again = [path.read_bytes() for path in (run.work / "responses").glob("*.jsonl")]
    assert answered_texts(bench(run.settings)[0])[0][:] == train[:]
    assert again == [path.read_bytes() for path in (run.work / "responses").glob("*.jsonl")]


def test_chats_that_lose_turns_are_counted_with_the_reason(tmp_path: Path, tiny: Tiny) -> None:
    call = {"type": "function", "function": {"name": "sky", "arguments": {}}}
    said = {"role": "assistant", "content": "sky"}
    run, printed = bench(
        chatting(
            tmp_path, tiny, "as it was", [said | {"tool_calls": [call]}, {"role": "tool", "content": "rain"}, said]
        )
    )
    run_stages(run, only=("target",))
    assert len(answered_texts(run)[0]) == 12
    assert "12 chats lose their later turns, because a tool's result belongs to another call" in printed.getvalue()


# -- servers ----------------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """What the server saw, and how it answers: a function of the request's body and its number."""

    answer: Callable[[dict[str, Any], int], Reply]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    lock: Any = field(default_factory=threading.Lock)


@contextmanager
def serving(answer: Callable[[dict[str, Any], int], Reply]) -> Iterator[Played]:
    played = Played(answer)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"object": "list", "data": [{"id": "target"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"]))) | {"path": self.path}
            with played.lock:
                played.bodies.append(body)
                number = len(played.bodies)
            self.reply(*played.answer(body, number))

        def reply(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"content-length": str(len(data)), "content-type": "application/json"}.items():
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


def good(body: dict[str, Any], number: int, reason: str = "length") -> Reply:
    """Says the last id of the prompt three times."""
    ids = body["prompt"][-1:] * 3 if body["return_token_ids"] else None
    return 200, {"choices": [{"text": "", "token_ids": ids, "finish_reason": reason}]}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.005)


def test_servers_share_the_prompts_as_ids_with_many_requests_in_flight() -> None:
    together = threading.Barrier(6)

    def slow(body: dict[str, Any], number: int) -> Reply:
        together.wait(20)  # answers nothing before six requests are there
        return good(body, number, "stop")

    with serving(slow) as first, serving(slow) as second:
        where = ServerSettings(urls=[first.url, second.url], concurrency=3)
        settings = ResponseSettings(source="target", temperature=0.7, top_p=0.9, server=where)
        texts = dict(answered_by_servers(settings, 5, [1, 2], 2)(JOBS))
    assert texts == {i: [7, 7, 7, 2] for i in range(12)}  # an end that a server leaves out is put back
    bodies = [*first.bodies, *second.bodies]
    assert (len(first.bodies), len(second.bodies)) == (6, 6)
    assert sorted(body["prompt"] for body in bodies) == [job.ids for job in JOBS]
    sampling = {(b["path"], b["temperature"], b["top_p"], b["max_tokens"]) for b in bodies}
    assert sampling == {("/v1/completions", 0.7, 0.9, 8)}
    assert len({body["seed"] for body in bodies}) == 12


def test_servers_that_are_not_there_or_return_text_alone_are_refused_before_the_first_stage() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(UserError, match=r"failed: APIConnectionError.*start it with the target"):
            check_servers(ServerSettings(urls=[url]))
    with (
        serving(lambda body, number: (200, {"choices": [{"text": "Hi", "finish_reason": "stop"}]})) as played,
        pytest.raises(UserError, match=r"no token ids.*vLLM \(0\.10\.2 or later\)"),
    ):
        check_servers(ServerSettings(urls=[played.url]))


def test_a_run_goes_on_with_the_responses_that_a_server_had_given_and_stops_where_most_are_empty(
    tmp_path: Path,
) -> None:
    settings = answering(tmp_path, max_new_tokens=8)
    server = settings.teacher.responses.server
    server.concurrency = 1

    def dying(body: dict[str, Any], number: int) -> Reply:
        return (503, {}) if number == 1 else good(body, number) if number <= 8 else (500, {})

    def empty(body: dict[str, Any], number: int) -> Reply:
        return 200, {"choices": [{"text": "", "token_ids": [], "finish_reason": "stop"}]}

    with serving(dying) as played:
        server.urls = [played.url]
        with pytest.raises(UserError, match=r"failed: InternalServerError: .*What is finished is kept"):
            run_tiny(begun(settings))
    assert len((tmp_path / "tiny/work/responses/train.jsonl").read_text().splitlines()) == 7
    with serving(good) as played:
        server.urls = [played.url]
        assert "train: 20, 13 of them written now" in run_tiny(settings)[2]
    assert len(played.bodies) == 13 + 8
    settings.name = "other"
    with serving(empty) as played:
        server.urls = [played.url]
        with pytest.raises(UserError, match="20 of 20 are empty"):
            run_tiny(begun(settings))
