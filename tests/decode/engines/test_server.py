"""Requests and metrics of servers, also of those that are late, busy, silent or gone."""

from __future__ import annotations

import http.server
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from decode.engines.acceptance import Drafts
from decode.engines.server import Metrics, Server, parse_metrics
from decode.errors import UserError

COUNTS = """vllm:generation_tokens_total{{engine="0"}} {tokens}
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafts}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {drafts}
"""


@contextmanager
def serving(page: Callable[[float], str]) -> Iterator[Server]:
    """A server that writes three tokens for every request; its metrics depend on the seconds since the last one."""
    written = [math.inf]

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, body: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            models = json.dumps({"data": [{"id": "m"}]})
            self.answer(models if self.path == "/v1/models" else page(time.monotonic() - written[0]))

        def do_POST(self) -> None:
            written[0] = time.monotonic()
            self.answer(json.dumps({"choices": [{"token_ids": [7, 8, 9]}]}))

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", "vllm", seconds=1.0)
    finally:
        server.shutdown()
        server.server_close()


def write(server: Server):
    return server.write([1, 2], temperature=0.0, seed=0, max_new_tokens=3)


def test_counts_that_come_late_belong_to_their_text() -> None:
    def page(since: float) -> str:
        late = since > 0.3
        return COUNTS.format(tokens=3 * late, drafts=2 * late)

    with serving(page) as server:
        text = write(server)
    assert (text.ids, text.drafts) == ([7, 8, 9], Drafts(2, 2, [2]))


def test_a_server_with_other_users_is_refused() -> None:
    with (
        serving(lambda _: COUNTS.format(tokens=time.monotonic_ns(), drafts=0)) as server,
        pytest.raises(UserError, match="so other clients are sending requests"),
    ):
        write(server)


def test_a_server_that_hangs_is_given_up() -> None:
    def page(_: float) -> str:
        time.sleep(1.5)
        return ""

    with serving(page) as server, pytest.raises(UserError, match=r"did not answer /metrics within 1 s"):
        write(server)


def test_a_server_that_is_gone_is_said() -> None:
    with serving(lambda _: "") as server:
        pass
    with pytest.raises(UserError, match="is it running"):
        write(server)


def test_llama_server_is_given_the_targets_stop_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at strings: special tokens are written out, and what it wrote after a stop id is cut."""
    sent = []

    def answer(method: str, path: str, json: dict) -> SimpleNamespace:
        sent.append((path, json))
        content = {"/detokenize": {"content": {5: "<|end|>", 6: "\n"}.get(json.get("tokens", [0])[0])}}
        completed = {"tokens": [1, 2, 5, 9], "timings": {"predicted_ms": 500}}
        return SimpleNamespace(json=lambda: content.get(path, completed))

    server = Server("http://127.0.0.1:1", "llama.cpp")
    monkeypatch.setattr(server, "_call", answer)
    monkeypatch.setattr(server, "_settled", lambda tokens=0.0: Metrics(Drafts(), None, 0.0))
    text = server.write([3, 4], temperature=0.0, seed=0, max_new_tokens=4, stop_ids=[5, 6])
    assert (text.ids, text.decode_seconds) == ([1, 2, 5], 0.5)
    body = sent[-1][1]
    assert body["stop"] == body["preserved_tokens"] == ["<|end|>", "\n"]
    server.write([3, 4], temperature=0.0, seed=0, max_new_tokens=4, stop_ids=[5, 6])
    assert [path for path, _ in sent].count("/detokenize") == 2  # asked once for each token


VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 207.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 621.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 595.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="0"} 206.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="1"} 199.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="2"} 190.0
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_bucket{engine="0",le="+Inf",model_name="a b"} 3.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="a b"} 12.5
vllm:request_decode_time_seconds_count{engine="0",model_name="a b"} 3.0
"""
LLAMA = """# HELP llamacpp:spec_decode_num_drafts_total Speculative: Total speculative decoding verification steps
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 11
llamacpp:spec_decode_num_draft_tokens_total 44
llamacpp:tokens_predicted_total 52
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 11
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 10
"""


def test_metrics_pages() -> None:
    assert parse_metrics(VLLM) == Metrics(Drafts(207, 621, [206, 199, 190]), 12.5, math.inf)
    assert parse_metrics(LLAMA) == Metrics(Drafts(11, 44, [11, 10]), None, 52.0)
    for other in ("<html>404</html>", "sglang:num_running_reqs 0.0\n"):
        with pytest.raises(UserError, match=r"not vLLM's or llama\.cpp's"):
            parse_metrics(other)
