"""Engines as processes, of which none is left behind, and their answers and metrics, late, busy, silent or gone."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from serving import serving

from decode.engines import server as engines
from decode.engines.base import NEUTRAL, model_name
from decode.engines.check import Drafts
from decode.engines.server import ENGINES, Engine, Metrics, Server, check_engine, opened, parse_metrics, running
from decode.errors import UserError

FOREVER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], " \
    "stdout=open(sys.argv[1], 'w')); print('up', flush=True); time.sleep(600)"  # fmt: skip


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import sys; print('reading'); sys.exit('no kernel here')", r"status 1 while loading(.|\n)*no kernel here"),
        (FOREVER, "not ready after 2 s"),
    ],
)
def test_a_process_that_dies_or_hangs_is_told_and_leaves_none_behind(tmp_path, code: str, told: str) -> None:
    marker = tmp_path / "child"
    command = [sys.executable, "-c", code, str(marker)]
    with pytest.raises(UserError, match=told), running(command, lambda: False, name="engine", seconds=2):
        pass
    assert not _holders(str(marker))


@pytest.mark.parametrize("loads", [False, True])
def test_the_first_error_of_a_long_log_is_told(tmp_path, monkeypatch, loads: bool) -> None:
    """vLLM's worker says what is wrong, and its server, hundreds of lines later, that something is; also while it writes
    texts. The log is kept."""
    code = (
        "print('(Server) WARNING 11-27 This may cause errors like OSError: [Errno 24]'); "
        "print('(Worker pid=7) ERROR ValueError: There is no parameter named x'); print('line\\n' * 2000); "
        "raise RuntimeError('Engine core initialization failed. See root cause above.')"
    )
    told = (
        r"The first error:\n\(Worker pid=7\) ERROR ValueError: There is no parameter named x\n(.|\n)*root cause above"
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = tmp_path / "ended"
    command = ["/bin/sh", "-c", f"{shlex.join([sys.executable, '-c', code])}; touch {ended}; exit 1"]
    server = running(command, lambda: loads and ended.exists(), name="vllm", seconds=60)
    with pytest.raises(UserError, match=told) as refused, server:
        raise UserError("vllm answered /v1/completions with status 500")
    assert str(refused.value).startswith("vllm answered" if loads else "vllm ended with status 1 while loading")
    (log,) = tmp_path.glob("*/vllm.log")
    assert f"Its whole log is {log}" in str(refused.value)
    assert "Errno 24" in log.read_text()


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGINT])
def test_a_check_that_is_ended_takes_its_engine_and_its_workers_with_it(
    tmp_path, monkeypatch, ended_by: signal.Signals
) -> None:
    """The worker does not end with the engine, as vLLM's may not. The folder goes at the next start at the latest."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    marker, ready = tmp_path / "worker", tmp_path / "ready"
    code = (
        "import pathlib, signal, sys, time\nfrom decode.engines.server import running\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"ready = lambda: pathlib.Path({str(marker)!r}).exists()\n"
        f"with running([sys.executable, '-c', {FOREVER!r}, {str(marker)!r}], ready, name='engine', seconds=600):\n"
        f"    pathlib.Path({str(ready)!r}).touch()\n"
        "    time.sleep(600)"
    )
    check = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not ready.exists() or not _holders(str(marker)):
        time.sleep(0.05)
    check.send_signal(ended_by)
    check.wait()
    end = time.monotonic() + 30
    while _holders(str(marker)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _holders(str(marker))
    assert any(scratch.iterdir()) == (ended_by != signal.SIGINT)


def _holders(path: str) -> list[str]:
    """Processes that have a file open."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            handles = os.listdir(f"/proc/{process}/fd")
            found += [process for handle in handles if os.readlink(f"/proc/{process}/fd/{handle}") == path]
        except OSError:
            continue
    return found


def test_what_is_not_installed_is_said_with_the_next_step(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("decode.engines.base.CHECKOUT", tmp_path)
    with pytest.raises(UserError, match="make engines"):
        check_engine("vllm")
    with pytest.raises(UserError, match=r"no program .* that can be run"):
        check_engine("llama.cpp", str(tmp_path))
    with pytest.raises(UserError, match="nothing answers"), opened(Engine("vllm", url="http://127.0.0.1:9"), 3):
        pass


def test_a_program_of_another_version_is_said(tmp_path, monkeypatch) -> None:
    def refused(name: str, sentence: str, program: str) -> None:
        with pytest.raises(UserError, match=sentence):
            check_engine(name, program)

    refused("vllm", r"has no vLLM, expected 0\.32 or newer; .* by --program", sys.executable)
    (tmp_path / "vllm-0.11.0.dist-info").mkdir()
    (tmp_path / "vllm-0.11.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.11.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refused("vllm", r"has vLLM 0\.11\.0, expected 0\.32 or newer", sys.executable)
    (tmp_path / "vllm-0.11.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0+cpu\n")
    assert check_engine("vllm", sys.executable, "dflash") == sys.executable
    with pytest.raises(UserError, match=r"vLLM 0\.32\.0\+cpu .* does not run DSpark"):
        check_engine("vllm", sys.executable, "dspark")
    (tmp_path / "llama-server").write_text("#!/bin/sh\necho usage: --model FILE\n")
    (tmp_path / "llama-server").chmod(0o755)
    refused("llama.cpp", "no option --spec-draft-sampling", str(tmp_path / "llama-server"))
    (tmp_path / "llama-server").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("decode.engines.server.ANSWER", 0.2)
    refused("llama.cpp", r"printed no version \(.* 0\.2 seconds\); run `make engines`", str(tmp_path / "llama-server"))


@pytest.mark.parametrize(("given", "inherited"), [({}, None), ({"GOMP_SPINCOUNT": "200"}, "200")])
def test_an_engine_does_not_inherit_what_this_package_sets_for_itself(given, inherited, monkeypatch) -> None:
    """Also in a process of our own that was started by another one."""
    code = "import decode, json, os; print(json.dumps(dict(os.environ)))"
    ours = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "DRAFTSMITH_SPINCOUNT"}
    environment = {name: value for name, value in os.environ.items() if name not in ours} | given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    monkeypatch.setattr(os, "environ", json.loads(done.stdout))
    seen = engines.inherited_environment()
    assert seen.get("GOMP_SPINCOUNT") == inherited
    assert "DRAFTSMITH_SPINCOUNT" not in seen


# -- requests ---------------------------------------------------------------------------------------------------------


COUNTS = """vllm:generation_tokens_total{{engine="0"}} {tokens}
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafts}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {drafts}
"""


@contextmanager
def vllm(page: Callable[[float], str]) -> Iterator[Server]:
    """A server that writes three tokens for every request; its metrics depend on the seconds since the last one."""
    written = [math.inf]

    def answer(body: dict, number: int) -> tuple[int, dict]:
        written[0] = time.monotonic()
        return 200, {"choices": [{"token_ids": [7, 8, 9]}]}

    with serving(answer, metrics=lambda: page(time.monotonic() - written[0])) as (url, _):
        yield Server(url.removesuffix("/v1"), "vllm", seconds=1.0)


def write(server: Server):
    return server.write([1, 2], temperature=0.0, seed=0, max_new_tokens=3)


def test_counts_that_come_late_belong_to_their_text() -> None:
    def page(since: float) -> str:
        late = since > 0.3
        return COUNTS.format(tokens=3 * late, drafts=2 * late)

    with vllm(page) as running, opened(Engine("vllm", url=running.url), 3) as server:
        text = write(server)
    assert (text.ids, text.drafts) == ([7, 8, 9], Drafts(2, [2]))
    assert server.client.is_closed


@pytest.mark.parametrize(
    ("models", "name"),
    [
        ({"other": "/x/other"}, "other"),  # the only one
        ({"other": "/x/other", "served": "/data/target"}, "served"),
        ({"a/target": None, "target": None}, "target"),
        ({"other": None, "a/target": None}, "a/target"),
        ({"first": "/x/other", "second": "/x/other"}, "first"),  # one under two names
        ({"other": None, "more": None}, None),
        ({}, None),
    ],
)
def test_a_server_with_several_models_is_asked_for_the_target(models: dict, name: str | None) -> None:
    listed = [{"id": model, "root": root, "parent": None} for model, root in models.items()]
    listed.append({"id": "target-lora", "root": "/data/target", "parent": "target"})
    if name is None:
        with pytest.raises(UserError, match=f"serves {', '.join(models) or 'no model'}, expected /data/target or"):
            model_name(listed, {"target", "/data/target"}, "http://a")
    else:
        assert model_name(listed, {"target", "/data/target"}, "http://a") == name


def test_requests_name_the_model_and_every_field_that_would_cut_the_distribution() -> None:
    with serving(lambda *_: (200, {"choices": [{"token_ids": [7]}]}), metrics=lambda: VLLM) as (url, bodies):
        write(Server(url.removesuffix("/v1"), "vllm"))
    assert bodies[0].items() >= (NEUTRAL | {"model": "target", "temperature": 0.0, "top_p": 1.0}).items()


def late(_: float) -> str:
    time.sleep(1.5)
    return ""


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (lambda _: COUNTS.format(tokens=time.monotonic_ns(), drafts=0), "stop other clients that send requests"),
        (lambda _: COUNTS.format(tokens=2, drafts=0), r"at 5 written tokens or more \(.*tokens=2.0"),
        (late, "did not answer /metrics: no answer in time"),
    ],
)
def test_servers_that_are_busy_miscount_or_hang_are_refused(monkeypatch, page: Callable[[float], str], told) -> None:
    monkeypatch.setattr("decode.engines.server.READINGS", 5)
    with vllm(page) as server, pytest.raises(UserError, match=told):
        write(server)


def test_llama_server_is_given_the_targets_stop_ids() -> None:
    """It stops at strings: special tokens are written out, and what it wrote after a stop id is cut."""

    def answer(body: dict, number: int) -> tuple[int, dict]:
        if body["path"] == "/detokenize":
            return 200, {"content": {5: "<|end|>", 6: "\n"}[body["tokens"][0]]}
        return 200, {"tokens": [1, 2, 5, 9], "timings": {"predicted_ms": 500}}

    with serving(answer) as (url, bodies):
        server = Server(url.removesuffix("/v1"), "llama.cpp")
        text = server.write([3, 4], temperature=0.0, seed=0, max_new_tokens=4, stop_ids=[5, 6], alone=False)
    assert (text.ids, text.decode_seconds) == ([1, 2, 5], 0.5)
    assert bodies[-1]["stop"] == bodies[-1]["preserved_tokens"] == ["<|end|>", "\n"]


VLLM = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 207.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="0"} 206.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="1"} 199.0
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_bucket{engine="0",le="+Inf",model_name="a b"} 3.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="a b"} 12.5
"""
LLAMA = """# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 11
llamacpp:tokens_predicted_total 52
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 10
"""


def test_metrics_pages() -> None:
    assert parse_metrics(VLLM) == Metrics(Drafts(207, [206, 199]), 12.5, math.inf)
    assert parse_metrics(LLAMA) == Metrics(Drafts(11, [10]), 0.0, 52.0)
    for other in ("<html>404</html>", "sglang:num_running_reqs 0.0\n"):
        with pytest.raises(UserError, match=r"not vLLM's or llama\.cpp's"):
            parse_metrics(other)


@pytest.mark.parametrize(("method", "kind"), [("draft_model", "simple"), ("dflash", "dflash"), ("dspark", "dspark")])
def test_engines_are_started_with_their_names_of_a_method(method: str, kind: str, tmp_path) -> None:
    program = tmp_path / "program"
    program.touch(0o755)
    given = {"target": "t", "draft": "d", "method": method, "program": str(program)}
    command, _ = ENGINES["llama.cpp"].command(Engine("llama.cpp", **given), 4, 1)
    assert command[command.index("--spec-type") + 1] == f"draft-{kind}"
    command, _ = ENGINES["vllm"].command(Engine("vllm", **given), 4, 1)
    drafting = json.loads(command[command.index("--speculative-config") + 1])
    assert drafting == {"method": method, "model": "d", "num_speculative_tokens": 4}
