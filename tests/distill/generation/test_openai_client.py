"""A server's responses: tried again where that helps, kept when it stops, refused where no further try would help."""

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_run import begun, run_tiny, tiny_settings
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from distill.config.drafts import ResponseSettings, ServerSettings
from distill.data.tokenizer import EOS, train_tokenizer
from distill.responses.server import Client, answered_by_server, check_servers
from distill.responses.store import Job, Response

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
    busy: int = 0
    busiest: int = 0
    lock: Any = field(default_factory=threading.Lock)


@contextmanager
def serving(played: Played) -> Iterator[Played]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {}, {"data": [{"id": name} for name in played.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"]))) | {"path": self.path}
            with played.lock:
                played.bodies.append(body)
                number = len(played.bodies)
                played.busy += 1
                played.busiest = max(played.busiest, played.busy)
            played.keys.add(self.headers.get("authorization"))
            self.reply(*played.answer(body, number))
            with played.lock:
                played.busy -= 1

        def reply(self, status: int, headers: dict[str, str], value: Any) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in ({"content-length": str(len(data))} | headers).items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    played.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
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
    monkeypatch.setattr(Client, "__init__", _quick(Client.__init__))


def _quick(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Client, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.first_wait = 0.005

    return init


def asked(
    played: Played, tokenizer: PreTrainedTokenizerBase, missing: Any = range(12), **server: Any
) -> list[Response]:
    settings = ResponseSettings(
        source="target", temperature=0.7, top_p=0.9, server=ServerSettings(url=played.url, **server)
    )
    return list(answered_by_server(settings, 5, tokenizer, {0}, Path("runs/x/target"))(JOBS, missing))


def test_every_prompt_is_answered_with_many_requests_in_flight(tokenizer: PreTrainedTokenizerBase) -> None:
    together = threading.Barrier(4)

    def slow(body: dict[str, Any], number: int) -> Reply:
        together.wait(20)  # answers nothing before four requests are there
        return good(body, number)

    with serving(Played(slow)) as played:
        found = asked(played, tokenizer, concurrency=4)
    assert sorted(response.example for response in found) == list(range(12))
    for response in found:
        whole = tokenizer(f" re: prompt {response.example}")["input_ids"]
        assert response.ids == whole[:8]
    assert played.busiest <= 4
    assert {body["path"] for body in played.bodies} == {"/v1/completions"}
    assert {(body["model"], body["temperature"], body["top_p"], body["max_tokens"]) for body in played.bodies} == {
        ("target", 0.7, 0.9, 8)
    }
    assert len({body["seed"] for body in played.bodies}) == 12


def test_failures_that_pass_are_tried_again(tokenizer: PreTrainedTokenizerBase) -> None:
    replies: list[Reply] = [
        (503, {"retry-after": "0.01"}, {"error": "starting"}),
        (429, {}, {"error": "too many"}),
        (500, {}, b"oops"),
        (200, {}, b"not json"),
        (200, {}, {"choices": []}),
        (200, {"content-length": "999"}, b"cut off"),
    ]

    def flaky(body: dict[str, Any], number: int) -> Reply:
        return replies[number - 1] if number <= len(replies) else good(body, number)

    with serving(Played(flaky)) as played:
        found = asked(played, tokenizer, concurrency=2, timeout=1.0)
    assert sorted(response.example for response in found) == list(range(12))
    assert len(played.bodies) == 12 + len(replies)


def test_what_is_finished_is_kept_when_the_server_fails_for_good(tokenizer: PreTrainedTokenizerBase) -> None:
    def dying(body: dict[str, Any], number: int) -> Reply:
        return good(body, number) if number <= 5 else (500, {}, b"out of memory")

    found: list[int] = []
    with serving(Played(dying)) as played:
        settings = ResponseSettings(source="target", server=ServerSettings(url=played.url, concurrency=1, retries=2))
        answers = answered_by_server(settings, 5, tokenizer, {0}, Path("t"))(JOBS, range(12))
        with pytest.raises(UserError, match=r"failed 3 times on example 5, at last with status 500: out of memory"):
            found.extend(response.example for response in answers)
    assert found == [0, 1, 2, 3, 4]
    with serving(Played(good)) as played:
        rest = asked(played, tokenizer, set(range(12)) - set(found))
    assert sorted(response.example for response in rest) == list(range(5, 12))


def test_the_chat_endpoint_and_the_key_of_the_environment(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat(body: dict[str, Any], number: int) -> Reply:
        text = f" re: {body['messages'][0]['content']}"
        return 200, {}, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}

    monkeypatch.setenv("MY_KEY", "secret")
    with serving(Played(chat)) as played:
        found = asked(played, tokenizer, endpoint="chat", key_variable="MY_KEY")
    assert played.keys == {"Bearer secret"}
    assert {body["path"] for body in played.bodies} == {"/v1/chat/completions"}
    assert tokenizer.eos_token == EOS
    whole = tokenizer(" re: prompt 3")["input_ids"]
    assert next(r for r in found if r.example == 3).ids == [*whole, tokenizer.eos_token_id][:8]


def test_the_chat_endpoint_receives_the_messages_of_a_chat_and_not_the_rendered_prompt(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]

    def reply(body: dict[str, Any], number: int) -> Reply:
        return 200, {}, {"choices": [{"message": {"content": "2"}, "finish_reason": "stop"}]}

    with serving(Played(reply)) as played:
        server = ServerSettings(url=played.url, endpoint="chat")
        answers = answered_by_server(ResponseSettings(source="target", server=server), 5, tokenizer, {0}, Path("t"))
        assert len(list(answers([Job(0, [3, 4], "<|user|>1 + 1?", 8, json.dumps(chat))], {0}))) == 1
    assert played.bodies[0]["messages"] == chat


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "wants a key .status 401.: put it into the environment variable OPENAI_API_KEY"),
        (404, "refuses .*completions .status 404.: .*Check reference.responses.server: url, model and endpoint"),
    ],
)
def test_what_no_further_try_would_better_stops_at_once(
    tokenizer: PreTrainedTokenizerBase, status: int, words: str
) -> None:
    with serving(Played(lambda body, number: (status, {}, {"error": "no"}))) as played:
        with pytest.raises(UserError, match=words):
            asked(played, tokenizer, concurrency=1)
        assert len(played.bodies) == 1


def test_a_server_with_several_models_wants_a_name(tokenizer: PreTrainedTokenizerBase) -> None:
    with serving(Played(good, models=("a", "b"))) as played:
        with pytest.raises(UserError, match=r"lists a, b: name the target with reference.responses.server.model"):
            asked(played, tokenizer)
        assert len(asked(played, tokenizer, model="b")) == 12
    assert {body["model"] for body in played.bodies} == {"b"}


def test_where_no_server_is_the_command_to_start_one_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(UserError, match=r"no server answers at .* `vllm serve runs/x/target`"):
            asked(Played(good, url=url), tokenizer)


def test_a_run_continues_with_the_responses_that_a_server_had_given(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, comparisons=[])
    settings.reference.responses = ResponseSettings(source="target", max_new_tokens=8)

    def dying(body: dict[str, Any], number: int) -> Reply:
        return good(body, number) if number <= 7 else (500, {}, b"")

    server = settings.reference.responses.server
    server.concurrency, server.retries = 1, 0
    with serving(Played(dying)) as played:
        server.url = played.url
        with pytest.raises(UserError, match="What is finished is kept"):
            run_tiny(begun(settings))
    lines = (tmp_path / "tiny/work/responses/train.jsonl").read_text().splitlines()
    assert len(lines) == 7
    url = server.url
    with serving(Played(good)) as played:
        server.url = played.url
        played_on = (tmp_path / "tiny/work/responses/train.json").read_text()
        manifest = tmp_path / "tiny/work/responses/train.json"
        manifest.write_text(played_on.replace(str(url), played.url))  # the same server, had its port not changed
        ran, _, printed = run_tiny(settings)
    assert ran == ["reference", "draft"]
    assert "train: 20, 13 of them written now" in printed
    assert len(played.bodies) == 13 + 8


# -- several servers --------------------------------------------------------------------------------------------------


def asked_of(
    several: Sequence[Played | str], tokenizer: PreTrainedTokenizerBase, told: list[str], **server: Any
) -> Iterator[Response]:
    urls = [played if isinstance(played, str) else played.url for played in several]
    settings = ResponseSettings(source="target", server=ServerSettings(urls=urls, **server))
    return answered_by_server(settings, 5, tokenizer, {0}, Path("runs/x/target"), told.append)(JOBS, range(12))


def test_servers_share_the_work(tokenizer: PreTrainedTokenizerBase) -> None:
    together = threading.Barrier(2)

    def slow(body: dict[str, Any], number: int) -> Reply:
        together.wait(20)  # answers nothing before the other server is asked too
        return good(body, number)

    with serving(Played(slow)) as one, serving(Played(slow)) as two:
        found = list(asked_of([one, two], tokenizer, told := [], concurrency=1))
    assert sorted(response.example for response in found) == list(range(12))
    assert (len(one.bodies), len(two.bodies), told) == (6, 6, [])


def test_what_a_server_leaves_behind_is_answered_by_the_others(tokenizer: PreTrainedTokenizerBase) -> None:
    def dies(body: dict[str, Any], number: int) -> Reply:
        return good(body, number) if number <= 2 else (500, {}, {"error": "out of memory"})

    with serving(Played(dies)) as one, serving(Played(good)) as two:
        found = list(asked_of([one, "http://127.0.0.1:9/v1", two], tokenizer, told := [], concurrency=2, retries=1))
    assert sorted(response.example for response in found) == list(range(12))
    assert len(told) == 2
    assert "2 go on with its work: no server answers at http://127.0.0.1:9/v1" in told[0]
    assert "1 go on with its work: http" in told[1]
    assert "out of memory" in told[1]


def test_a_run_is_continued_with_other_servers_from_what_was_answered(tmp_path: Path) -> None:
    def dies(body: dict[str, Any], number: int) -> Reply:
        return good(body, number) if number <= 5 else (500, {}, {"error": "out of memory"})

    settings = tiny_settings(tmp_path, comparisons=[])
    settings.reference.responses.source = "target"
    server = settings.reference.responses.server
    server.concurrency, server.retries = 1, 0
    with serving(Played(dies)) as one, serving(Played(dies)) as two:
        server.urls = [one.url, two.url]
        with pytest.raises(UserError, match="failed 1 times"):
            run_tiny(begun(settings))
    with serving(Played(good)) as third:
        server.urls = [third.url]
        run_tiny(settings)
    assert len(third.bodies) == 20 + 8 - 10  # training and validation prompts, ten of them answered before


def test_an_address_that_is_none_is_told_and_nothing_waits_for_it(tokenizer: PreTrainedTokenizerBase) -> None:
    url = "http://127.0.0.1:8000v1"
    with pytest.raises(UserError, match=r"8000v1, or the key in OPENAI_API_KEY, cannot be sent"):
        asked(Played(good, url=url), tokenizer)
    with pytest.raises(UserError, match=r"no server answers at http://127.0.0.1:8000v1 .InvalidURL"):
        check_servers([url])
