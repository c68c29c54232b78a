"""Servers that are late, busy, silent or gone."""

from __future__ import annotations

import http.server
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from decode.engines.acceptance import Drafts
from decode.engines.server import Server
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


def test_texts_written_together_are_told_with_all_their_drafts() -> None:
    def page(since: float) -> str:  # before the first request since is minus infinity
        return COUNTS.format(tokens=12 * (since > 0), drafts=8 * (since > 0))

    with serving(page) as server:
        texts, seconds, drafts = server.write_together([[1], [2], [3], [4]], 2, max_new_tokens=3)
    assert texts == [[7, 8, 9]] * 4
    assert seconds > 0
    assert drafts == Drafts(8, 8, [8])
