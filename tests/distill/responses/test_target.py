"""Texts that the target writes, here or on servers, and the draft's own: the same ones again after a kill."""

import re
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from serving import Reply, StatesServer, serving
from some_rows import some_rows, write_rows
from tiny_run import begun, bench, check_killed_ends_alike, random_target, run_tiny, tiny_settings
from tokenizers_of_kinds import with_start
from transformers import PreTrainedModel

from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.models.tokens import continuation_ids
from decode.writing import write_texts
from distill import ranks
from distill.checks import check_engine
from distill.config import Settings
from distill.config.data import DataSettings
from distill.config.teacher import EngineSettings, ResponseSettings
from distill.data.chat import IGNORE, ChatFormat
from distill.data.dataset import Examples, Picks, Schedule
from distill.data.writing import Job, Served
from distill.engine.servers import Engine
from distill.kept import TEXT_IDS, Kept
from distill.responses import target as target_module
from distill.responses.on_policy import OnPolicy
from distill.responses.target import Conversations, answered_texts, ends_with
from distill.run import Run
from distill.stages import run_stages


def answering(folder: Path, **responses: Any) -> Settings:
    settings = tiny_settings(folder)
    settings.teacher.responses = ResponseSettings(source="target", batch_size=8, **responses)
    return settings


def answers_in(run: Run, split: str = "train") -> dict[int, list[int]]:
    """The answers that a run keeps, by their numbers."""
    (folder,) = (run.work / "responses").glob(f"{split}-*")
    kept = Kept(TEXT_IDS, folder)
    _ = kept.find(kept.keys)
    return {int(key): kept.get("ids", int(key)).tolist() for key in kept.keys}


def test_several_processes_write_what_a_single_one_does(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(target_module, "GROUP", 1)
    settings = begun(answering(tmp_path, max_new_tokens=4))
    run = bench(settings)[0]
    alone, wanted = answered_texts(run)[0][:], answers_in(run)
    shutil.rmtree(run.work / "responses")
    run = bench(settings)[0]
    _ = run.corpus  # before there are two processes
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(ranks, "SEEN", 0.0)
    monkeypatch.setattr(ranks, "barrier", lambda: None)
    monkeypatch.setattr(ranks, "exchange", lambda value: [value] * 2)
    for rank, count in enumerate((8 + 4, 8)):  # of the groups of 8, 8 and 4
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        with pytest.raises(UserError, match="not seen alike"):  # the other process has yet to write
            answered_texts(run)
        assert len(answers_in(run)) == count
        for shard in (run.work / "responses").rglob("*.safetensors"):
            shard.unlink()
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(ranks, "world", lambda: 1)
    assert answered_texts(run)[0][:] == alone
    assert answers_in(run) == wanted


# -- every turn of a chat ---------------------------------------------------------------------------------------------

SAID = {"role": "assistant", "content": "theirs"}
LEADS = {"as it was": "", "rewritten": "=>"}  # what the prompt of an answer ends with, which history leaves out


def chatting(folder: Path, history: str, *turns: dict[str, Any]) -> Settings:
    tokenizer = with_start(adds=False)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>" + LEADS[history] + "{% endif %}"
    )
    settings = answering(folder, max_new_tokens=5, temperature=0.0)
    settings.teacher.examples, settings.target = None, random_target(folder / "model", tokenizer)
    folder.mkdir(exist_ok=True)
    files = {}
    for split, count in {"train": 12, "validation": 2, "test": 2}.items():
        rows = [{"messages": [{"role": "user", "content": f"{split}{n}"}, *turns]} for n in range(count)]
        files[split] = write_rows(folder / f"{split}.jsonl", rows)
    settings.data = DataSettings(files=files, max_length=200)
    return settings


@pytest.mark.parametrize("history", LEADS)
def test_every_turn_of_a_chat_is_answered_behind_the_others(tmp_path, history: str) -> None:
    """But for turns that are not to be learned, which stay as they are."""
    questions = [{"role": "user", "content": text} for text in ("so?", "and?", "then?")]
    kept = {"role": "assistant", "content": "kept", "weight": 0}
    run, _ = bench(chatting(tmp_path, history, SAID, questions[0], kept, questions[1], SAID, questions[2], SAID))
    run_stages(run, only=("target",))
    train, _, _ = answered_texts(run)
    texts = [run.tokenizer.decode(row["input_ids"]) for row in train]
    assert not any("theirs" in text for text in texts)
    written = answers_in(run)
    assert len(written) == 3 * 12
    assert len(train) == (12 if history == "as it was" else 36)
    labels = [token for row in train for token in row["labels"] if token != IGNORE]
    assert sorted(labels) == sorted(token for ids in written.values() for token in ids)
    for number, text in enumerate(text for text in texts if "then?" in text):
        first, second = (run.tokenizer.decode([i for i in written[number + turn] if i]) for turn in (0, 12))
        assert f"{first}</s><user>so?<assistant>kept</s><user>and?" in text
        assert f"{second}</s><user>then?" in text
    assert answered_texts(bench(run.settings)[0])[0][:] == train[:]
    assert answers_in(run) == written


def test_of_lists_of_variables_and_temperatures_each_chat_has_its_own_in_all_turns(tmp_path) -> None:
    asked = [SAID, {"role": "user", "content": "and?"}, SAID]
    template = "{% for m in messages %}<{{ m.role }}{{ mood }}>{{ m.content }}{{ '</s>' if m.role == 'assistant' }}"
    template += "{% endfor %}{% if add_generation_prompt %}<assistant{{ mood }}>{% endif %}"
    written, several = {}, [0.0, 1.0, 0.5]
    for temperature in (1.0, 0.0, several):
        settings = chatting(tmp_path / str(temperature), "as it was", *asked)
        settings.data.chat_template, settings.data.template_args = template, [{"mood": "A"}, {"mood": "B"}]
        settings.teacher.responses.temperature = temperature
        run, _ = bench(settings)
        run_stages(run, only=("target",))
        rows, written[str(temperature)] = answered_texts(run)[0], answers_in(run)
    moods = [re.findall("<(?:user|assistant)(A|B)>", run.tokenizer.decode(ids)) for ids in rows["input_ids"]]
    assert {len({*each}) for each in moods} == {1}
    assert {each[0] for each in moods} == {"A", "B"}
    assert max(map(len, moods)) == 4
    assert {*rows["temperature"]} == {*several}
    own = written[str(several)]
    for place, alone in enumerate(several[:2]):  # each as if all had its temperature
        numbers = [number for number in own if number % 12 % 3 == place]
        assert [own[number] for number in numbers] == [written[str(alone)][number] for number in numbers]
    assert written["0.0"] != written["1.0"]


def test_chats_that_lose_turns_are_counted_with_the_reason(tmp_path) -> None:
    call = SAID | {"content": "sky", "tool_calls": [{"type": "function", "function": {"name": "sky", "arguments": {}}}]}
    run, printed = bench(chatting(tmp_path, "as it was", call, {"role": "tool", "content": "rain"}, SAID))
    run_stages(run, only=("target",))
    assert len(answered_texts(run)[0]) == 12
    assert "12 chats are cut before a later turn, because a tool's recorded result does not fit" in printed.getvalue()


def said(ids: list[int] | None, reason: str = "stop", **more: Any) -> Reply:
    return 200, {"choices": [{"text": "Hi", "token_ids": ids, "finish_reason": reason}], **more}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch) -> None:
    monkeypatch.setattr("distill.engine.servers.PAUSE", 0.005)
    monkeypatch.setattr("distill.engine.servers.AGAIN", 0.02)


def written(engine: Engine, jobs: list[Job], warp: LogitsWarper | None = None) -> dict[int, list[int]]:
    """What servers write, of a target with the ids of the byte tokenizer, whose texts end with 1 or 2."""
    servers = Served(engine, with_start(adds=False), [1, 2], 2, 300, 5)
    return dict(servers.write(warp or LogitsWarper(0.7, top_p=0.9), jobs))


def test_servers_share_the_prompts_as_ids_with_many_requests_in_flight() -> None:
    together, jobs = threading.Barrier(6), [Job(i, [40 + i, 7], 8) for i in range(12)]

    def slow(body: dict[str, Any], number: int) -> Reply:
        together.wait(20)  # answers nothing before six requests are there
        return said([7, 7, 7])

    with serving(slow) as (first, asked), serving(slow) as (second, others):
        engine = Engine([first, second], EngineSettings(in_flight=3))
        texts = written(engine, jobs)
    assert texts == {i: [7, 7, 7, 2] for i in range(12)}  # an end that a server leaves out is put back
    assert (len(asked), len(others)) == (6, 6)
    bodies = [*asked, *others]
    assert sorted(body["prompt"] for body in bodies) == [job.ids for job in jobs]
    how = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    how |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [1, 2]}
    how |= {"path": "/v1/completions", "max_tokens": 8, "return_token_ids": True, "model": "target"}
    assert all(how.items() <= body.items() for body in bodies)
    assert len({body["seed"] for body in bodies}) == 12


def test_the_share_of_a_server_that_dies_goes_to_the_other_until_it_is_back() -> None:
    dead, told = threading.Event(), list[str]()

    def dying(body: dict[str, Any], number: int) -> Reply:
        return (500, "out of memory") if dead.is_set() else said([7])

    with serving(dying) as (first, _), serving(lambda *_: said([8])) as (second, others):
        engine = Engine([first, second], EngineSettings(in_flight=1), say=told.append)
        for wanted, change in (({7, 8}, dead.set), ({8}, dead.clear), ({7, 8}, dead.clear)):
            for _ in range(400):  # until the server has failed too often, or has been tried again
                texts = written(engine, [Job(i, [5], 8) for i in range(8)])
                if {ids[0] for ids in texts.values()} == wanted and engine.servers[0].lost == dead.is_set():
                    break
            assert {ids[0] for ids in texts.values()} == wanted
            assert len(texts) == 8
            change()
        engine.close()
    assert any("500: out of memory; asked again in" in line for line in told)
    assert f"{first} answers again" in told
    assert any(line.startswith(f"{second} gave {len(others)} answers") for line in told)


def test_a_request_that_one_server_refuses_is_asked_of_the_other() -> None:
    with serving(lambda *_: (400, {})) as (first, _), serving(lambda *_: said([8])) as (second, _):
        texts = written(Engine([first, second], EngineSettings(in_flight=1)), [Job(i, [5], 8) for i in range(4)])
    assert texts == {i: [8, 2] for i in range(4)}


def test_a_server_with_too_much_to_do_is_waited_for_however_often_it_says_so() -> None:
    """One request in four succeeds, so that some of 40 are refused more often than another failure may occur."""
    statuses = dict.fromkeys(range(1, 12), 429) | {12: 500}  # and at first none, nor after a failure

    def busy(_: dict[str, Any], number: int) -> Reply:
        status = statuses.get(number, 200 if number % 4 == 0 else 429)
        return said([7]) if status == 200 else (status, {})

    with serving(busy) as (url, bodies):
        assert len(written(Engine([url], EngineSettings(in_flight=20)), [Job(i, [5], 8) for i in range(40)])) == 40
    assert len(bodies) >= 160


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, r"--max-model-len"), (401, r"OPENAI_API_KEY"), (404, r"has to end with /v1"),
        (429, r"lower teacher\.engine\.in_flight"), (500, r"its log says why"),
    ],
)  # fmt: skip
def test_a_failure_is_told_with_what_its_status_asks_for(status: int, words: str) -> None:
    with serving(lambda *_: (status, {"error": "no"})) as (url, bodies):
        with pytest.raises(UserError, match=rf"failed: status {status}: .*{words}.*What is finished is kept"):
            written(Engine([url], EngineSettings()), [Job(0, [5], 8)])
        assert len(bodies) == {429: 20, 500: 7}.get(status, 1)


def test_texts_without_ids_are_taken_where_their_number_of_tokens_is_that_of_the_server() -> None:
    tokenizer, told = with_start(adds=False), list[str]()
    (ids,) = continuation_ids(tokenizer, ["Hi"])
    counts = [len(ids) + 1, len(ids), len(ids) + 2, len(ids) - 1]  # with the end token, without, and others

    def texts_alone(body: dict[str, Any], number: int) -> Reply:
        return said(None, usage={"completion_tokens": counts[body["prompt"][0]]})

    with serving(texts_alone) as (url, _):
        texts = written(Engine([url], EngineSettings(), say=told.append), [Job(i, [i], 8) for i in range(4)])
    assert texts == {0: [*ids, 2], 1: [*ids, 2], 2: [], 3: []}
    assert any(line.startswith("2 answers came without token ids") for line in told)
    with serving(lambda *_: said([299, 300])) as (url, _), pytest.raises(UserError, match="token id 300"):
        written(Engine([url], EngineSettings()), [Job(0, [5], 8)])


def test_an_answer_ends_as_the_template_ends_it_where_a_server_leaves_the_stop_token_out() -> None:
    tokenizer = with_start(adds=False)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<s>{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
    ends = [tokenizer.eos_token_id, tokenizer.bos_token_id]  # as <|end_of_text|> and <|eot_id|> of Llama 3
    assert ends_with(tokenizer, ChatFormat(tokenizer, ends=ends)) == tokenizer.bos_token_id
    assert ends_with(tokenizer, None) == tokenizer.eos_token_id
    served = Served(Mock(), tokenizer, ends, tokenizer.eos_token_id, 300, 0)
    for end in ends:  # whichever of them an engine gives, none is put behind it
        assert served.ids({"url": "", "token_ids": [5, end], "finish_reason": "stop"}) == [5, end]
    assert served.ids({"url": "", "token_ids": [5], "finish_reason": "stop"}) == [5, tokenizer.eos_token_id]
    talks = Conversations(Mock(), ends, None, None, None)
    talks.count = 1
    row = {"input_ids": [7], "labels": [IGNORE], "chat": "", "number": 0}
    for end in ends:  # and an answer ends with it
        (learned,), _ = talks.after(row, [5, end, 6])
        assert learned["labels"] == [IGNORE, 5, end]


# -- answers of servers beside the target -----------------------------------------------------------------------------


def spoiled(first: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """From this request on, the logits of another model."""
    return lambda number, logits: -1e3 * logits if number >= first else logits


def cut(_: int, logits: torch.Tensor) -> torch.Tensor:
    """Sampling with a top_k of 20."""
    return logits.masked_fill(logits < logits.topk(20).values[-1], -torch.inf)


@pytest.mark.parametrize(("signal", "temperature"), [("topk", 0.0), ("online", 1.0)])
def test_answers_that_are_no_samples_of_the_target_are_refused_before_any_is_kept(
    tmp_path, monkeypatch, signal: str, temperature: float
) -> None:
    """The target is hardly trained, so that its distributions are flat, and a cut of them shows in few texts."""
    for place in ("distill.data.writing.FIRST", "distill.signal.target.FIRST"):
        monkeypatch.setattr(place, 8)
    monkeypatch.setattr("distill.run.EVERY", 1)
    settings = answering(tmp_path, max_new_tokens=32 if temperature else 12, temperature=temperature)
    settings.teacher.signal, settings.training.steps = signal, 8
    del settings.drafts["adaspec"]
    target, engine = Run(begun(settings)).load_target().eval(), settings.teacher.engine
    answers = partial(StatesServer, target, [2], tmp_path)
    for spoil_logits in [spoiled(0), *[cut] * (temperature > 0)]:
        with serving(answers(spoil_logits=spoil_logits)) as (url, bodies):
            engine.urls = [url]
            with pytest.raises(UserError, match=r"no samples of the target: of 8 answers .*--generation-config vllm"):
                run_tiny(settings)
        assert len(bodies) == 1 + 8  # with the first request of all
        assert not answers_in(Run(settings))
    put_aside = r"no samples of the target: .*what learned from them, are put aside"
    with serving(answers(spoil_logits=spoiled(1 + 8 + 3))) as (url, _):  # it turns bad after the first answers
        engine.urls = [url]
        with pytest.raises(UserError, match=put_aside) as refused:
            run_tiny(settings)
    assert any(entry.name == "check_finite" for entry in refused.traceback) == (signal == "online")  # in the training
    left = {path.name for path in Run(settings).work.iterdir()}
    assert "target.json" in left
    assert not left & {"responses", "initial.json", "checkpoints-distillspec"}
    assert list((Run(settings).work / "responses.old-1").rglob("*.safetensors"))
    with serving(answers()) as (url, _):
        engine.urls = [url]
        created, _, printed = run_tiny(settings)
    assert created == ["initial", "distillspec"]
    assert "of the first 8 answers" in printed
    assert ("servers with top_k 20 would be found with 100.0%" in printed) == (temperature > 0)
    settings.training.steps, engine.urls = 7, ["http://127.0.0.1:9/v1"]
    assert run_tiny(settings)[0] == ["distillspec"]  # what is finished needs no server


def test_servers_that_are_not_there_or_say_neither_ids_nor_their_number_are_refused_before_the_first_stage(
    tmp_path,
) -> None:
    settings = answering(tmp_path)
    run, _ = bench(begun(settings))
    refused = pytest.raises(UserError, match=r"neither token ids nor a text")
    with serving(lambda *_: said(None)) as (url, _), refused:
        run.settings.teacher.engine.urls = [url]
        check_engine(run)
    run, _ = bench(settings)
    with pytest.raises(UserError, match=r"failed: ConnectError.*start it with the target"):
        check_engine(run)


def test_a_run_goes_on_with_what_a_server_had_given_and_stops_where_most_is_empty(tmp_path) -> None:
    settings = begun(answering(tmp_path, max_new_tokens=8))
    del settings.drafts["adaspec"]
    settings.training.steps, server = 3, settings.teacher.engine
    good = StatesServer(Run(settings).load_target().eval(), [2], tmp_path)
    server.in_flight = 1

    def dying(body: dict[str, Any], number: int) -> Reply:
        return (503, {}) if number == 2 else good(body, number) if number <= 9 else (500, {})

    with serving(dying) as (url, _):
        server.urls = [url]
        with pytest.raises(UserError, match=r"failed: status 500: .*What is finished is kept"):
            run_tiny(settings)
    assert len(answers_in(Run(settings))) == 7
    with serving(good) as (url, bodies):
        server.urls = [url]
        assert "train: 20 (13 new)" in run_tiny(settings)[2]
    assert len(bodies) == 1 + 13 + 8
    settings.name = "other"
    with serving(lambda *_: said([])) as (url, _):
        server.urls = [url]
        with pytest.raises(UserError, match="20 of 20 are empty"):
            run_tiny(begun(settings))


def policy(model: PreTrainedModel, rows: Examples, share: float = 1.0, **settings: Any) -> OnPolicy:
    responses = ResponseSettings(**{"max_new_tokens": 5, "refresh_every": 3, "batch_size": 4} | settings)
    schedule, write = Schedule(rows.lengths, 4, seed=1), partial(write_texts, model)
    return OnPolicy(write, rows, schedule, 12, responses, share, 7, 64, {1}, lambda batch: batch)


def picks(written_texts: OnPolicy, step: int) -> Picks:
    return [(written_texts.prompts, int(example)) for example in written_texts.schedule.batch(step)]


def content(picked: Picks) -> list[list[int]]:
    return [rows.text(i)[0].tolist() for rows, i in picked]


def test_every_prompt_of_a_step_is_answered_by_the_draft_and_no_other_chance_is_drawn(tiny) -> None:
    rows, written = some_rows(10, prompt=2), 0
    written_texts, chance = policy(tiny("llama"), rows), torch.get_rng_state()
    for step in range(4):
        wanted = picks(written_texts, step)
        picked = written_texts(step, wanted)
        for (_, example), text, (made, i) in zip(wanted, content(picked), picked):
            prompt = rows.prompt(example)
            assert text[: len(prompt)] == prompt
            assert made.labels_of(np.array([i])) == len(text) - len(prompt)
            assert 1 <= len(text) - len(prompt) <= 5
            written += len(text) - len(prompt)
    assert written_texts.label_tokens == written
    assert torch.equal(torch.get_rng_state(), chance)


def test_texts_are_written_again_with_the_weights_of_the_refresh_and_not_between(tiny) -> None:
    rows = some_rows(10, prompt=2)
    both = [policy(tiny("llama"), rows, temperature=0.0) for _ in range(2)]
    for step, alike in ((0, True), (2, True), (3, False)):
        first, second = (content(each(step, picks(each, step))) for each in both)
        assert (first == second) == alike
        both[1].write = partial(write_texts, tiny("llama", seed=5))


def test_mixing_is_by_sample_in_the_share_asked_for(tiny) -> None:
    rows = some_rows(10, prompt=2)
    texts = policy(tiny("llama"), rows, 0.3, refresh_every=200, max_new_tokens=1)
    texts.steps = 200
    counts = [sum(made is not rows for made, _ in texts(step, picks(texts, step))) for step in range(200)]
    assert {0, 1, 2, 3} <= set(counts)  # within a step, some and some
    assert sum(counts) / 800 == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(
    ("share", "source", "signal", "stage", "step"),
    [(1.0, "dataset", "hidden", "adaspec", 11), (0.5, "target", "online", "distillspec", 7)],
)
def test_a_killed_run_ends_with_the_same_weights(tmp_path, share: float, source, signal, stage: str, step: int) -> None:
    """It is killed between two refreshes, and after the last one."""
    settings = begun(tiny_settings(tmp_path / "undisturbed"))
    if stage == "distillspec":
        del settings.drafts["adaspec"]
    responses = {"source": source, "max_new_tokens": 4, "refresh_every": 4, "batch_size": 8}
    settings.teacher.responses, settings.teacher.signal = ResponseSettings(**responses), signal
    for draft in settings.drafts.values():
        draft.on_policy = share
    run_tiny(settings)
    check_killed_ends_alike(settings, tmp_path / "killed", {stage: step})
