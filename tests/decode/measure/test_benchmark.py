"""Benchmarks: complete rows, fair pairs, and what is kept of a run that was stopped."""

import copy
import csv
import json
import re
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from benchmarks import run_benchmark
from pairs import make_pair, make_suite, make_tokenizer

from decode.commands.settings import BenchSettings
from decode.core.lengths import RoundCosts
from decode.errors import UserError
from decode.measure import benchmark as benchmark_module
from decode.measure import machine
from decode.measure.benchmark import BenchEntry, Benchmark, EntryRun, Record, Written, measured, plan, recommend
from decode.measure.costs import Costs
from decode.measure.report import answers, by_category, console_tables, latest, sections, write_report
from decode.measure.session import BenchOptions, Session
from decode.measure.suites import Prompt, Suite
from decode.models.tokens import chat_ids
from decode.options import ChatSettings, MethodOptions

MACHINE, BENCH = machine.describe() | {"note": ""}, {"notes": {}, "settings": {}}
SURE = {"prompts": 6, "accepted_length": 4.0, "least_cost": 1.2, "cpu_share": 1.0}  # of a speed that is a result
METHODS = ["vanilla", "adasd", "vanilla:rule=ears", "prompt-lookup", "generate-assistant", "generate-prompt-lookup"]


@pytest.fixture(scope="module")
def models(tiny):
    return make_pair(tiny)


@pytest.fixture(scope="module")
def bench(models):
    target, draft = models
    entries = plan(METHODS, {"small": draft}, [0.0, 1.0])
    options = BenchOptions(max_new_tokens=12, repeats=2, pack="off")
    suite = make_suite()
    suite.prompts[:] = [replace(prompt, category="aba"[i]) for i, prompt in enumerate(suite.prompts)]
    return run_benchmark(target, {"small": draft}, make_tokenizer(), [suite], entries, options)


def rows_of(bench, temperature, **wanted):
    found = [r for r in bench.rows if r["temperature"] == temperature]
    return [r for r in found if all(r[k] == v for k, v in wanted.items())]


def test_rows_are_complete_and_lossless_methods_and_baselines_write_what_generate_writes(bench) -> None:
    assert len(bench.rows) == 2 * (len(METHODS) + 2)
    for row in bench.rows:
        assert row.keys() >= {"name", "suite", "kind", "lossless", "draft_length", *benchmark_module.MEASURED}
        assert row["tokens_per_second"] > 0
        assert (row["prompts"], row["note"]) == (3, "")
        same = [None] if row["temperature"] else [True] if row["lossless"] else [True, False]
        assert row["identical_to_target"] in same, row["name"]
        assert row["baseline"] or sum(row["draft_lengths"].values()) == row["rounds"]
        assert not (row["baseline"] and row["acceptance_by_position"])
        assert [(part["category"], part["prompts"]) for part in row["categories"]] == [("a", 2), ("b", 1)]
        assert sum(part["tokens"] for part in row["categories"]) == row["tokens"]
    assert json.loads(json.dumps(bench.rows, allow_nan=False)) == bench.rows
    assert len(rows_of(bench, 0.0, name="vanilla")[0]["acceptance_by_position"]) == 5
    assert rows_of(bench, 0.0, name="adasd")[0]["verification_threshold"] is not None


def test_metrics_follow_their_definitions_and_relaxed_methods_are_marked(bench) -> None:
    assert {r["name"] for r in bench.rows if not r["lossless"]} == {"adasd", "vanilla rule=ears"}
    assert rows_of(bench, 1.0, name="vanilla rule=ears")[0]["tv_spent"] > 0
    for row in bench.rows:
        assert row["accepted_length"] >= 1 - 1e-9
        if row["lossless"] and not row["baseline"]:
            assert row["tv_spent"] == 0
        if row["name"] == "vanilla":
            # tokens behind the end of a text were accepted and never written
            assert row["accepted_length"] == pytest.approx(row["tokens"] / row["rounds"])
            assert row["accepted_length"] <= 1 + row["accepted_per_drafted"] * row["drafted_per_round"]
            assert row["accepted_length_ci95"] is row["speedup_ci95"] is None  # of three prompts
            assert 0 < row["alpha"] < 1
            assert row["draft_length"] == 5
    assert rows_of(bench, 0.0, name="vanilla")[0]["accuracy"] == rows_of(bench, 0.0, name="generate")[0]["accuracy"]


def record(*texts: list[tuple[int, float]], **more) -> Record:
    written = [[Written([1] * n, seconds, 1, []) for n, seconds in repeats] for repeats in texts]
    return Record(written, **{"clusters": range(len(texts))} | more)


def test_ratios_are_paired_by_prompt_and_repeat_and_intervals_are_over_prompts() -> None:
    ours, base = record([(10, 1.0), (10, 2.0)], [(6, 1.0)] * 2), record([(10, 2.0), (10, 8.0)], [(3, 1.0)] * 2)
    # of 3, the median of 2 and 4, and 2; lengths do not matter
    assert benchmark_module.speed_ratio(ours, base) == (2.5, None)
    row = measured(ours, {"generate": base})
    assert (row["speedup_vs_generate"], row["speedup_vs_generate_ci95"]) == (2.5, None)
    assert row["tokens_per_second"] == pytest.approx((16 / 2 + 16 / 3) / 2)  # the median of the repeats'
    batch = record(*[[(4, 1.0)] * 3, [(2, 1.0)] * 3] * 3, batch_size=2)
    assert measured(batch, {"autoregressive": batch})["speedup_ci95"] == [1, 1]
    assert measured(batch, {})["accepted_length_ci95"] is not None
    batch.clusters = [0, 1] * 3
    assert measured(batch, {})["accepted_length_ci95"] is None  # a prompt given three times is one observation


def test_the_recommended_length_is_the_shortest_that_is_not_told_from_the_fastest() -> None:
    times = {2: [1.5] * 8, 4: [1.1, 0.9] * 4, 8: [1.0] * 8, 16: [2.0] * 8}  # seconds of the same prompts

    def chosen(prompts: int = 8, **change: Any) -> int:
        rows = [{"draft_length": n, "speedup": 3 / sum(each), "identical_to_target": True} for n, each in times.items()]
        rows[2] |= {"speedup": 2.0} | change
        recommend([(row, record(*([(10, s)] for s in times[row["draft_length"]][:prompts]))) for row in rows])
        (best,) = (row["draft_length"] for row in rows if row["recommended"])
        return best

    assert chosen() == 4  # 2 is slower with every prompt, 4 with half of them
    assert chosen(prompts=4) == 8  # too few for an interval
    assert chosen(identical_to_target=False) == 4
    times[4] = [1.1] * 8
    assert chosen() == 8
    assert chosen(identical_to_target=False) == 4  # of other texts, and so the next one is the fastest


def test_repeats_of_a_greedy_run_add_nothing_to_errors_and_rates(models) -> None:
    target, draft = models
    told = []
    for repeats in (1, 3):
        options = BenchOptions(max_new_tokens=24, repeats=repeats, pack="off")
        entries = [BenchEntry("vanilla", "d", MethodOptions(draft_length=3))]
        bench = run_benchmark(target, {"d": draft}, make_tokenizer(), [make_suite()], entries, options)
        told.append((bench.rows[-1], bench.rows[-1]["acceptance_by_position"]))
    (once, first), (often, last) = told
    assert often["rounds"] == 3 * once["rounds"]
    assert 0 < once["alpha_se"] < 0.5
    for key in ("alpha", "alpha_se", "accepted_per_tested", "accepted_per_drafted", "drafted_per_round"):
        assert often[key] == pytest.approx(once[key], rel=1e-9)
    for key in ("marginal", "conditional"):
        assert [row[key] for row in last] == pytest.approx([row[key] for row in first], nan_ok=True)
    assert first[2]["marginal"] == pytest.approx(np.prod([row["conditional"] for row in first]))


def test_entries_are_all_combinations_with_names_options_and_lengths_of_their_own(models) -> None:
    target, draft = models
    entries = plan(["vanilla", "hf-constant"], {"a": draft, "b": target}, [0.0], draft_lengths=[2, 4])
    labels = [f"vanilla n={n} ({name})" for name in "ab" for n in (2, 4)]
    assert [c.label for c in entries] == [*labels, "hf-constant (a)", "hf-constant (b)"]
    methods = ["ears:beta=0.2", "vanilla:draft_length=5", "vanilla", "adaptix:adaptive=false"]
    planned = plan(methods, {"d": draft}, draft_lengths=[3], options=MethodOptions(beta=0.05))
    assert [c.name for c in planned] == [m.replace(":", " ") for m in methods]
    assert [c.options.beta for c in planned] == [0.2, 0.05, 0.05, 0.05]
    assert [c.options.draft_length for c in planned] == [3, 5, 3, None]
    assert [c.options.adaptive for c in planned] == [True, True, True, False]
    named = ["vanilla", "vanilla:rule=ears", "autoregressive"]
    rules = plan(named, {"d": draft}, options=MethodOptions(rule="typical"))
    assert [c.options.rule for c in rules] == ["typical", "ears", None]
    exported = copy.deepcopy(draft)
    exported.generation_config.num_assistant_tokens = 7
    assert [c.options.draft_length for c in plan(["vanilla", "adasd"], {"d": exported})] == [7, None]
    assert plan(["vanilla"], {"d": exported}, options=MethodOptions(draft_length=3))[0].options.draft_length == 3


def test_cost_optimal_drafts_by_the_costs_that_were_measured_before(models) -> None:
    target, draft = models
    session = Session(target, {"small": draft}, make_tokenizer(), BenchOptions(max_new_tokens=8, repeats=1, pack="off"))
    rounds = RoundCosts({1: {0: 0.01, 1: 0.0135, 8: 0.038}})
    session.costs["small"] = Costs(rounds, 0.25, {1: 1.0}, 9)
    entry, plain, guarded = plan(["cost-optimal", "vanilla", "vanilla:never_slower=true"], {"small": draft}, [0.0])
    lengths = EntryRun(session, entry).methods[0].lengths
    lengths.limit(1)
    assert lengths.step_costs == pytest.approx([0, 0.35])
    assert EntryRun(session, plain).methods[0].lengths is None
    assert EntryRun(session, guarded).methods[0].lengths.costs is rounds


def test_a_repeat_knows_nothing_of_what_another_learned(models) -> None:
    target, draft = models
    bench = Benchmark(Session(target, {"d": draft}, make_tokenizer(), BenchOptions(20, 2, pack="off")))
    run = EntryRun(bench.session, BenchEntry("adasd", "d", temperature=1.0))
    run.write([bench.session.items(make_suite(1))], 0, 0, 20)
    assert [method.stop.threshold.count > 0 for method in run.methods] == [True, False, False]


def test_a_baseline_that_refuses_is_a_note_and_not_the_end(models) -> None:
    target, _ = models
    padded = copy.deepcopy(target)
    padded.resize_token_embeddings(288)
    entries = [BenchEntry("vanilla", "d"), BenchEntry("generate-assistant", "d")]
    options = BenchOptions(8, 1, pack="off")
    bench = run_benchmark(target, {"d": padded}, make_tokenizer(), [make_suite(1)], entries, options)
    ours, theirs = bench.rows[2:]
    assert (ours["identical_to_target"], ours["accepted_per_tested"]) == (True, 1)
    assert ("transformers refused" in theirs["note"], theirs["speedup"]) == (True, None)
    assert len({row["prompts"] for row in bench.rows}) == 1  # so that all stand in one table


def test_texts_of_a_relaxed_rule_that_are_not_generates_are_told(models) -> None:
    target, draft = models
    entries, options = plan(["vanilla:rule=fuzzy"], {"d": draft}, [0.0]), BenchOptions(16, 1, pack="off")
    row = run_benchmark(target, {"d": draft}, make_tokenizer(), [make_suite()], entries, options).rows[-1]
    assert (row["identical_to_target"], row["identical_share"] < 1) == (False, True)


def test_what_generate_refuses_at_a_batch_size_leaves_the_rest_of_the_report(models, monkeypatch) -> None:
    """Two-turn chats at batch size 1 have expected texts, their first turns at size 2 none."""

    def refusing(name, *models_and_prompts, **how):
        if name == "generate" and len(models_and_prompts[-1]) > 1:
            raise RuntimeError("out of memory")
        return generate(name, *models_and_prompts, **how)

    generate = benchmark_module.generate
    monkeypatch.setattr(benchmark_module, "generate", refusing)
    chats = [Prompt(f"c/{i}", f"Say {i}", None, turns=(f"Say {i}", "And then?")) for i in range(2)]
    options = BenchOptions(6, 1, chat=ChatSettings(), pack="off")
    bench = Benchmark(Session(models[0], None, make_tokenizer(chat=True), options))
    bench.run([Suite("chats", chats, None)], [BenchEntry("prompt-lookup")], batch_sizes=[1, 2])
    small, large = ([row for row in bench.rows if row["batch_size"] == size and not row["baseline"]] for size in (1, 2))
    assert [row["identical_to_target"] for row in small] == [True, True]
    assert [row["identical_to_target"] for row in large] == [None, None]
    assert [row["speedup"] is not None for row in large] == [True, True]
    assert [row["prompts"] for row in small + large] == [2, 2, 4, 4]
    whole_chats = bench.records["chats", 0.0, 1, "autoregressive"].texts
    assert [len(text.new_ids) for (text,) in whole_chats] == [12, 12]  # all turns of a chat are one text
    assert "out of memory" in next(row["note"] for row in bench.rows if row["batch_size"] == 2 and row["baseline"])


def test_turns_of_a_chat_follow_the_targets_own_answers(models) -> None:
    tokenizer = make_tokenizer(chat=True)
    spelt = Prompt("c/1", f"End it with {tokenizer.eos_token}", None)
    suite = Suite("chat", [Prompt("c/0", "Hello", None, turns=("Hello", "And then?")), spelt], None)
    session = Session(models[0], None, tokenizer, BenchOptions(6, 1, chat=ChatSettings(), pack="off"))
    first, second = session.items(suite)
    assert session.notes["chat"].startswith("1 prompts are left out, whose text spells a control token")
    assert tokenizer.decode(first.ids) == "[user]Hello\n[assistant]"
    answer = session.text(session.written([first.ids], session.options.warp)[0])
    assert tokenizer.decode(second.ids).endswith("[user]And then?\n[assistant]")
    plain = Session(models[0], None, tokenizer, BenchOptions(6, 1, pack="off"))
    assert len(plain.items(suite)) == 2
    assert "of 1 prompts the first turn alone is asked" in plain.notes["chat"]
    assert first.ids == chat_ids(tokenizer, [{"role": "user", "content": "Hello"}])
    tokenizer.chat_template = "{{ mood }}" + tokenizer.chat_template
    moody = Prompt("c/3", "Hi", None, system="S", variables={"mood": "good"})
    own = Suite("own", [Prompt("c/2", "Hi", None), moody], None)
    written = [tokenizer.decode(item.ids) for item in session.items(own)]
    assert written == ["[user]Hi\n[assistant]", "good[system]S\n[user]Hi\n[assistant]"]
    assert len(plain.items(own)) == 1
    assert plain.notes["own"].startswith("1 prompts are left out, whose system message or variables need a chat")
    said = [("user", "Hello"), ("assistant", answer), ("user", "And then?")]
    assert second.ids == chat_ids(tokenizer, [{"role": role, "content": text} for role, text in said])


def test_prompts_that_cannot_fit_are_refused_with_the_numbers(models) -> None:
    session = Session(models[0], None, make_tokenizer(), BenchOptions(300, 1, pack="off"))
    with pytest.raises(UserError, match=r"toy: 2 of 2 prompts do not fit the context .*, 256 tokens, .* with 300 new"):
        session.items(make_suite(2))
    short = Session(models[0], None, make_tokenizer(), BenchOptions(200, 1, pack="off"))
    kept = short.items(make_suite(12))
    assert 0 < len(kept) < 12
    assert short.notes["toy"].startswith(f"{12 - len(kept)} of 12 prompts do not fit the context of the target, 256 t")
    ends = Session(models[0], None, make_tokenizer(), BenchOptions(1, 1, pack="off"))
    ends.runner.boundary = min(len(item.ids) for item in kept)
    assert len(ends.items(make_suite(12))) == 12
    draft = copy.deepcopy(models[1])
    draft.config.max_position_embeddings = 64
    both = Session(models[0], {"d": draft}, make_tokenizer(), BenchOptions(30, 1, pack="off"))
    assert 0 < 12 - len(both.items(make_suite(12))) < 12
    assert "do not fit the context of the draft d, 64 tokens" in both.notes["toy"]
    short.runner.vocab_size = 40
    with pytest.raises(UserError, match=r"toy: a prompt holds token id \d+, but the target's ids are 0 to 39"):
        short.items(make_suite(2))


@pytest.fixture(scope="module")
def written(bench, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "bench-20250101-000000.json").write_text('{"methods": "old"}')
    return write_report(bench, asdict(BenchSettings(target="t")), folder)


def test_benches_are_dated_and_kept_and_the_page_needs_nothing_from_outside(bench, written) -> None:
    assert len({file.stem for file in written}) == 1
    assert [file.name[:8] + file.suffix for file in written] == ["bench-20.json", "bench-20.html", "bench-20.csv"]
    content, page = latest(written[0].parent), written[1].read_text()
    assert len([*written[0].parent.iterdir()]) == 4
    assert content["methods"] == bench.rows
    assert content["machine"]["threads"] == bench.session.threads
    assert all(row["name"] in page for row in bench.rows)
    assert page.count("<svg") == 2  # three prompts are too few for speeds
    assert page.count("<summary>By category</summary>") == 2
    assert page.count("fewer than 6 prompts were timed") == 1
    assert not re.search("https?://(?!www.w3.org)", page)


def test_categories_of_few_prompts_are_marked_where_they_stand_or_at_the_head_of_the_page(bench) -> None:
    few = {"categories": [{"category": "math", "speedup": 1.5, "prompts": 4}], "recommended": True}
    rows = [row | SURE | few for row in bench.rows if row["speedup"]]
    assert "fewer than 6 prompts were timed" in by_category(rows).note
    assert not by_category([row | {"prompts": 1} for row in rows]).note  # the head of the page says it


def test_the_fastest_lossless_method_writes_the_targets_texts_and_is_faster_than_no_draft(bench) -> None:
    def fastest():
        said = [re.search("fastest lossless method (\\S+):", line) for line in answers(rows)]
        return [match and match[1] for match in said]

    def spoil(method: str) -> None:
        for row in rows:
            if row["name"] == method and row["temperature"] == 0:
                row["identical_to_target"] = False

    rows = [row | SURE | {"speedup": 2.0} for row in bench.rows]
    best, sampled = fastest()
    assert {best, sampled} <= {"vanilla", "prompt-lookup"}
    spoil(best)
    other = ({"vanilla", "prompt-lookup"} - {best}).pop()
    assert fastest() == [other, other]  # only greedy texts show what is lossless
    assert f"texts differ from model.generate's: {best}" in answers(rows)[0]
    spoil("autoregressive")
    assert fastest() == [None]
    slow, fast = ([row | SURE | {"speedup": speedup} for row in rows_of(bench, 0.0)] for speedup in (0.99, 1.01))
    assert answers(slow)[0].endswith(": no lossless method is faster than no draft")
    assert "fastest lossless method" in answers(fast)[0]
    assert ">vanilla<" in next(iter(sections(fast, MACHINE, BENCH))).figures[0]
    for row in fast:
        row["recommended"] = row["name"] != "vanilla"
    assert ">vanilla<" not in next(iter(sections(fast, MACHINE, BENCH))).figures[0]
    busy = [row | {"cpu_share": 0.5} for row in fast]
    assert "Speedup" not in "".join(next(iter(sections(busy, MACHINE, BENCH))).figures)
    assert answers(busy) == ["toy, greedy, 6 prompts: no speedup is reliable"]


def test_every_method_writes_the_same_greedy_texts_at_every_batch_size(models, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("decode.measure.costs.TURNS", 2)
    session = Session(models[0], {"small": models[1]}, make_tokenizer(), BenchOptions(10, 2, threads=1, pack="off"))
    entries = plan(["vanilla", "cost-optimal", "generate-assistant"], session.draft_models, draft_lengths=[1, 3])
    batches = Benchmark(session)
    batches.run([make_suite(2)], entries, batch_sizes=[1, 3])
    names = ["autoregressive", "generate", "vanilla n=1", "vanilla n=3", "cost-optimal"]
    found = [(row["batch_size"], row["name"]) for row in batches.rows if row["method"] != "generate-assistant"]
    assert found == [(size, name) for size in (1, 3) for name in names]
    for row in batches.rows:
        assert row["identical_share"] == 1
        texts = batches.records["toy", 0.0, row["batch_size"], row["name"]].texts
        assert len(texts) == (2 if row["batch_size"] == 1 else 6)  # twice the places of the batch
        assert row["prompts"] == 2
    assert [row["speedup"] for row in batches.rows if row["method"] == "autoregressive"] == pytest.approx([1, 1])
    batches.rows = [row | SURE for row in batches.rows]
    files = write_report(batches, {}, tmp_path)
    beside = "6 prompts"
    titles = [f"toy, greedy, {beside}", f"toy, greedy, batch size 3, {beside}"]
    assert [str(table.title) for table in console_tables(batches.rows)] == titles
    values = list(csv.DictReader(files[2].open(encoding="utf-8")))
    assert [float(row["speedup"]) for row in values] == [row["speedup"] for row in batches.rows]
    assert {row["batch_size"] for row in values} == {"1", "3"}
