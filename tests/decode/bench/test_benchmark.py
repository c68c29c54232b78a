"""Benchmarks: complete rows, fair pairs, and what is kept of a run that was stopped."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from benchmarks import run_benchmark
from pairs import make_pair, make_suite, make_tokenizer

from decode.bench.benchmark import BenchEntry, Benchmark, EntryRun, plan
from decode.bench.costs import CostModel
from decode.bench.page import COLUMNS as COLUMN_LABELS
from decode.bench.records import COLUMNS, Record, TimedText, fastest_lossless, measured, paired_ratios
from decode.bench.report import answers, console_tables, write_report
from decode.bench.session import BenchOptions, Session
from decode.bench.statistics import ratio_interval
from decode.bench.suites import Prompt, Suite
from decode.commands.bench import bench as bench_command
from decode.commands.bench import bench_options, choose_methods, plan_entries
from decode.commands.settings import BenchSettings
from decode.drafters.corpus_files import tokenizer_fingerprint
from decode.drafters.rest import Datastore
from decode.errors import UserError
from decode.method_options import MethodOptions
from decode.models.pair import Pair
from decode.models.tokens import chat_ids

METHODS = [
    "vanilla",
    "adasd",
    "ears",
    "prompt-lookup",
    "generate-assistant",
    "generate-assistant-dynamic",
    "generate-prompt-lookup",
]
PROMISED = {
    "name", "suite", "temperature", "tokens_per_second", "speedup", "speedup_ci95", "speedup_vs_generate",
    "predicted_speedup", "block_efficiency", "alpha", "alpha_se", "accepted_per_tested", "accepted_per_drafted",
    "tv_spent", "js_distance", "accuracy", "identical_to_target", "lossless", "draft_length",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tiny):
    return make_pair(tiny)


@pytest.fixture(scope="module")
def bench(models):
    target, draft = models
    entries = plan(METHODS, {"small": draft}, [0.0, 1.0])
    options = BenchOptions(max_new_tokens=16, repeats=2)
    return run_benchmark(target, {"small": draft}, make_tokenizer(), [make_suite()], entries, options)


def rows_of(bench, temperature, **wanted):
    found = [r for r in bench.rows if r["temperature"] == temperature]
    return [r for r in found if all(r[k] == v for k, v in wanted.items())]


def test_every_row_has_all_columns(bench):
    assert len(bench.rows) == 2 * (len(METHODS) + 2)
    for row in bench.rows:
        assert row.keys() >= PROMISED | set(COLUMNS)
        assert row["tokens_per_second"] > 0
        assert row["prompts"] == 3
        assert row["note"] == ""
    assert json.loads(json.dumps(bench.rows, allow_nan=False)) == bench.rows


def test_lossless_methods_and_baselines_write_what_generate_writes(bench):
    for row in rows_of(bench, 0.0, lossless=True):
        assert row["identical_to_target"] is True, row["name"]
        assert row["identical_share"] == 1
    for row in rows_of(bench, 1.0):
        assert row["identical_to_target"] is None


def test_metrics_follow_their_definitions_and_relaxed_methods_are_marked(bench):
    assert {r["name"] for r in bench.rows if not r["lossless"]} == {"adasd", "ears"}
    assert rows_of(bench, 1.0, name="ears")[0]["tv_spent"] > 0
    for row in bench.rows:
        assert row["accepted_length"] >= 1 - 1e-9
        if row["lossless"] and not row["baseline"]:
            assert row["tv_spent"] == 0
        if row["name"] == "vanilla":
            m, k, r = row["accepted_per_drafted"], row["drafted_per_round"], row["rounds"]
            assert row["accepted_length"] == row["block_efficiency"] == pytest.approx(1 + m * k)
            assert r <= row["tokens"]
            assert 0 < row["alpha"] < 1
            assert row["draft_length"] == 5
    assert rows_of(bench, 0.0, name="vanilla")[0]["accuracy"] == rows_of(bench, 0.0, name="generate")[0]["accuracy"]


def test_the_analysis_adds_up_to_the_rows(bench):
    rows = {(r["name"], r["temperature"]): r for r in bench.rows}
    for entry in bench.analysis:
        if rows[entry["name"], entry["temperature"]]["baseline"]:
            assert entry["samples"] == []
            continue
        assert sum(entry["draft_lengths"].values()) == rows[entry["name"], entry["temperature"]]["rounds"]
        sample = entry["samples"][0]
        assert sample["text"].startswith("".join(t["text"] for t in sample["tokens"] if t["who"] != "rejected"))
    assert len(next(e for e in bench.analysis if e["name"] == "vanilla")["acceptance_by_position"]) == 5


def test_ratios_are_paired_by_prompt_and_repeat_and_intervals_are_over_prompts():
    def record(*texts: list[tuple[int, float]], **more) -> Record:
        return Record(
            [[TimedText([1] * n, seconds, forwards=1) for n, seconds in repeats] for repeats in texts], **more
        )

    ours, base = record([(10, 1.0), (10, 2.0)], [(6, 1.0)] * 2), record([(10, 2.0), (10, 8.0)], [(3, 1.0)] * 2)
    assert paired_ratios(ours, base) == [3.0, 2.0]  # median of 2 and 4; lengths do not matter
    assert measured(ours, {}, 0)["tokens_per_second"] == pytest.approx(16 / 3)  # of each prompt the lower median repeat
    batch = record([(4, 1.0)] * 3, [(2, 1.0)] * 3, batch_size=2)
    assert ratio_interval([0, 1], batch.sums(), 0) == (3, 2, 4)  # one prompt or the other
    assert measured(batch, {"autoregressive": batch}, 0)["speedup_ci95"] == [1, 1]
    assert ratio_interval([0, 0], batch.sums(), 0) == (3, 3, 3)  # a prompt given twice is one observation


def test_repeats_of_a_greedy_run_add_nothing_to_errors_and_rates(models):
    target, draft = models
    told = []
    for repeats in (1, 3):
        options = BenchOptions(max_new_tokens=24, repeats=repeats, costs=False)
        entries = [BenchEntry("vanilla", "d", MethodOptions(draft_length=3))]
        bench = run_benchmark(target, {"d": draft}, make_tokenizer(), [make_suite()], entries, options)
        told.append((bench.rows[-1], bench.analysis[-1]["acceptance_by_position"]))
    (once, first), (often, last) = told
    assert often["rounds"] == 3 * once["rounds"]
    assert 0 < once["alpha_se"] < 0.5
    assert often["alpha_se"] == once["alpha_se"]
    assert first == last
    marginal = [row["marginal"] for row in first]
    assert len(marginal) == 3
    assert marginal[2] == pytest.approx(np.prod([row["conditional"] for row in first]))


def test_predicted_speedups_of_every_block_follow_from_the_report(bench, written):
    """Tokens over Σ (c·k + v(k + 1)), from report.json alone."""
    content = json.loads(written[0].read_text())
    details = {(e["name"], e["temperature"]): e for e in content["bench"]["analysis"]}
    checked = 0
    for row in content["methods"]:
        if row["method"] not in ("vanilla", "adasd", "ears", "prompt-lookup"):
            continue
        cost = CostModel.from_dict(content["bench"]["costs"][row["draft"] or ""])
        rounds = details[row["name"], row["temperature"]]["draft_lengths"]
        drafted = sum(int(k) * n for k, n in rounds.items())
        c = cost.cost_ratio if row["draft"] else row["draft_seconds"] / drafted / cost.target_seconds
        spent = sum(n * (c * int(k) + cost.v(int(k) + 1)) for k, n in rounds.items())
        assert row["predicted_speedup"] == pytest.approx(row["tokens"] / spent)
        checked += 1
    assert checked == 8


def test_entries_are_all_combinations_with_names_options_and_lengths_of_their_own(models):
    target, draft = models
    entries = plan(["vanilla", "hf-constant"], {"a": draft, "b": target}, [0.0], draft_lengths=[2, 4])
    assert [c.label for c in entries] == [
        "vanilla k=2 (a)", "vanilla k=4 (a)", "vanilla k=2 (b)", "vanilla k=4 (b)",
        "hf-constant (a)", "hf-constant (b)",
    ]  # fmt: skip
    methods = ["ears:beta=0.2", "vanilla:draft_length=5", "vanilla", "adaptix:adaptive=false"]
    planned = plan(methods, {"d": draft}, draft_lengths=[3], options=MethodOptions(beta=0.05))
    assert [c.name for c in planned] == [m.replace(":", " ") for m in methods]
    assert [c.options.beta for c in planned] == [0.2, 0.05, 0.05, 0.05]
    assert [c.options.draft_length for c in planned] == [3, 5, 3, None]
    assert [c.options.adaptive for c in planned] == [True, True, True, False]
    exported = copy.deepcopy(draft)
    exported.generation_config.num_assistant_tokens = 7
    assert [c.options.draft_length for c in plan(["vanilla", "adasd"], {"d": exported})] == [7, None]
    assert plan(["vanilla"], {"d": exported}, options=MethodOptions(draft_length=3))[0].options.draft_length == 3


def test_cost_optimal_drafts_by_the_costs_that_were_measured_before(models) -> None:
    target, draft = models
    session = Session(target, {"small": draft}, make_tokenizer(), BenchOptions(max_new_tokens=8, repeats=1))
    cost = CostModel(0.25, {1: 1.0, 9: 1.4}, draft_overhead=0.05, target_seconds=0.01)
    session.costs["small"] = {1: cost}
    entry, plain, guarded = plan(["cost-optimal", "vanilla", "vanilla:never_slower=true"], {"small": draft}, [0.0])
    lengths = EntryRun(session, entry).methods[0].lengths
    lengths.limit(1)
    assert lengths.token_cost == pytest.approx(0.30 + 0.05)
    assert EntryRun(session, plain).methods[0].lengths is None
    costs = EntryRun(session, guarded).methods[0].lengths.costs
    assert costs.drafting(1) == pytest.approx(0.30 * costs.plain(1))


def test_a_repeat_knows_nothing_of_what_another_learned(models):
    target, draft = models
    bench = Benchmark(Session(target, {"d": draft}, make_tokenizer(), BenchOptions(20, 2)))
    run = EntryRun(bench.session, BenchEntry("adasd", "d", temperature=1.0))
    items = bench.session.items(make_suite(1))
    run.write([items], 0, [0], 20)
    learned = [system.stop.threshold.count for system in run.methods]
    assert learned[0] > 0
    assert learned[1:] == [0, 0]


def test_a_baseline_that_refuses_is_a_note_and_not_the_end(tiny, models):
    target, _ = models
    padded = copy.deepcopy(target)
    padded.resize_token_embeddings(288)
    entries = [BenchEntry("vanilla", "d"), BenchEntry("generate-assistant", "d")]
    bench = run_benchmark(target, {"d": padded}, make_tokenizer(), [make_suite(1)], entries, BenchOptions(8, 1))
    ours, theirs = bench.rows[2:]
    assert ours["identical_to_target"]
    assert ours["accepted_per_tested"] == 1
    assert "transformers refused" in theirs["note"]
    assert theirs["speedup"] is None


def test_turns_of_a_chat_follow_the_targets_own_answers(models):
    tokenizer = make_tokenizer(chat=True)
    spelt = Prompt("c/1", f"End it with {tokenizer.eos_token}", None)
    suite = Suite("chat", [Prompt("c/0", "Hello", None, turns=("Hello", "And then?")), spelt], None)
    session = Session(models[0], None, tokenizer, BenchOptions(6, 1, chat=True))
    first, second = session.items(suite)
    assert session.notes["chat"].startswith("1 prompts are left out, whose text spells a control token")
    assert tokenizer.decode(first.ids) == "[user]Hello\n[assistant]"
    answer = session.text(session.written([first.ids], session.options.warp)[0])
    assert [item.said for item in (first, second)] == ["Hello", "And then?"]
    assert tokenizer.decode(second.ids).endswith("[user]And then?\n[assistant]")
    plain = Session(models[0], None, tokenizer, BenchOptions(6, 1))
    assert len(plain.items(suite)) == 2
    assert "of 1 prompts the first turn alone is asked" in plain.notes["chat"]
    assert first.ids == chat_ids(tokenizer, [{"role": "user", "content": "Hello"}])
    said = [("user", "Hello"), ("assistant", answer), ("user", "And then?")]
    assert second.ids == chat_ids(tokenizer, [{"role": role, "content": text} for role, text in said])


def test_prompts_that_cannot_fit_are_refused_with_the_numbers(models):
    session = Session(models[0], None, make_tokenizer(), BenchOptions(300, 1))
    with pytest.raises(UserError, match=r"context holds 256, 300 new ones"):
        session.items(make_suite(2))
    short = Session(models[0], None, make_tokenizer(), BenchOptions(200, 1))
    kept = short.items(make_suite(12))
    assert 0 < len(kept) < 12
    assert short.notes["toy"].startswith(f"{12 - len(kept)} of 12 prompts do not fit")


def test_methods_default_to_what_the_given_parts_allow():
    alone = choose_methods(BenchSettings(target="t"))
    assert "autoregressive" in alone
    assert not {"vanilla", "rest", "adaptix", "generate-assistant"} & set(alone)
    both = choose_methods(BenchSettings(target="t", draft=["d"], datastore="s"))
    assert {"vanilla", "rest", "adaptix", "generate-assistant"} <= set(both)
    assert choose_methods(BenchSettings(target="t", methods=["lookahead"], baselines=False)) == ["lookahead"]


@pytest.mark.parametrize("method", ["rest", "hybrid", "hybrid-tree:tree_nodes=4"])
def test_methods_that_copy_get_a_store_of_the_corpus(method, tiny, tmp_path):
    (tmp_path / "own.jsonl").write_text(json.dumps({"text": "Tom has 3 apples."}) + "\n")
    pair = Pair(tiny("llama", vocab_size=280), make_tokenizer())
    settings = BenchSettings(target="t", corpus=[str(tmp_path / "own.jsonl")])
    assert bench_options(settings, ["vanilla"], pair, tmp_path).datastore is None
    folder = bench_options(settings, [method], pair, tmp_path).datastore
    assert folder is not None
    ids = pair.tokenizer("Tom has").input_ids
    assert Datastore(folder, tokenizer_fingerprint(pair.tokenizer)).longest(ids)[0] == len(ids)


@pytest.fixture(scope="module")
def written(bench, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "report.json").write_text(json.dumps({"drafts": [1], "methods": "old"}))
    return write_report(bench, asdict(BenchSettings(target="t")), folder)


def test_a_report_of_distill_keeps_what_it_holds(bench, written):
    assert [file.name for file in written] == ["report.json", "bench.html"]
    content = json.loads(written[0].read_text())
    assert content["drafts"] == [1]
    assert content["methods"] == bench.rows
    assert content["machine"]["threads"] == torch.get_num_threads()
    assert content["bench"]["costs"]["small"]["cost_ratio"] == bench.session.costs["small"][1].cost_ratio


def test_the_page_holds_every_method_and_needs_nothing_from_outside(bench, written):
    page = written[1].read_text()
    for row in bench.rows:
        assert row["name"] in page
    assert page.count("<svg") >= 2 * 3
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_no_method_is_called_the_fastest_lossless_one_if_its_texts_are_not_the_targets(bench):
    rows = [dict(row) for row in bench.rows]
    best = fastest_lossless(rows)
    assert best["name"] in ("vanilla", "prompt-lookup")
    for row in rows:
        if row["name"] == best["name"] and row["temperature"] == 0:
            row["identical_to_target"] = False
    other = fastest_lossless(rows)
    assert other["name"] == ({"vanilla", "prompt-lookup"} - {best["name"]}).pop()
    assert fastest_lossless(rows, 1.0)["name"] == other["name"]  # only greedy texts show what is lossless
    assert f"texts differ from model.generate's: {best['name']}" in answers(rows)[0]
    for row in rows:
        if row["method"] == "autoregressive" and row["temperature"] == 0:
            row["identical_to_target"] = False
    assert fastest_lossless(rows) is None
    assert not any("fastest lossless" in line for line in answers(rows))


def test_a_method_that_was_named_and_no_draft_suits_is_refused(models):
    methods = ["eagle-tree", "vanilla"]
    with pytest.raises(UserError, match="no draft suits eagle-tree"):
        plan_entries(BenchSettings(target="t", methods=methods), methods, {"d": models[1]})


@pytest.fixture(scope="module")
def chat_bench(models):
    """Two chats of two turns and two of one, in two categories."""
    target, draft = models

    def prompt(i: int) -> Prompt:
        turns = (f"Say {i}", "And then?") if i % 2 else (f"Count to {i}",)
        return Prompt(f"c/{i}", turns[0], None, "multi-turn" if i % 2 else "qa", turns)

    suite = Suite("chats", [prompt(i) for i in range(4)], None)
    options = BenchOptions(16, 2, chat=True, system="Be brief.", samples=2, costs=False, threads=1)
    entries = plan(["vanilla", "hybrid", "prompt-lookup", "generate-prompt-lookup"], {"d": draft}, [0.0, 0.7])
    return run_benchmark(target, {"d": draft}, make_tokenizer(chat=True), [suite], entries, options)


def test_all_turns_of_a_chat_are_one_prompt(chat_bench):
    for row in chat_bench.rows:
        assert row["prompts"] == 4
        assert row["temperature"] or row["identical_to_target"] is not False
    plain = chat_bench.records["chats", 0.0, 1, "autoregressive"]
    assert [len(text.new_ids) for text, _ in plain.texts] == [16, 32, 16, 32]
    turns = ["Count to 0", "Say 1", "And then?"]
    assert [sample["prompt"] for sample in chat_bench.analysis[0]["samples"]] == turns


def test_categories_are_parts_of_the_whole_and_stand_in_the_report(chat_bench, tmp_path):
    for row in chat_bench.rows:
        parts = {part["category"]: part for part in row["categories"]}
        assert {name: part["prompts"] for name, part in parts.items()} == {"qa": 2, "multi-turn": 2}
        for key in ("accepted_length", "alpha"):
            known = [part[key] for part in parts.values() if part.get(key) is not None]
            if row[key] is not None:
                assert min(known) - 1e-9 <= row[key] <= max(known) + 1e-9
    _, page = write_report(chat_bench, {}, tmp_path)
    assert "By category" in page.read_text()
    first, greedy, *_ = console_tables(chat_bench.rows)
    assert greedy.title == f"{first.title}, by category"
    assert list(greedy.columns[0].cells) == ["multi-turn"] * 3 + ["qa"] * 3 + ["all"] * 3
    assert {"tokens/s", "speedup", COLUMN_LABELS["accepted_length"].label} <= {
        column.header for column in greedy.columns
    }


@pytest.fixture(scope="module")
def batches(models):
    target, draft = models
    session = Session(target, {"small": draft}, make_tokenizer(), BenchOptions(10, 2, threads=1, pack="off"))
    entries = plan(["vanilla", "cost-optimal", "generate-assistant"], session.draft_models, draft_lengths=[1, 3])
    bench = Benchmark(session)
    bench.run([make_suite(2)], entries, batch_sizes=[1, 3])
    return bench


def test_every_method_writes_the_same_greedy_texts_at_every_batch_size(batches, tmp_path):
    names = ["autoregressive", "generate", "vanilla k=1", "vanilla k=3", "cost-optimal"]
    found = [(row["batch_size"], row["name"]) for row in batches.rows if row["method"] != "generate-assistant"]
    assert found == [(size, name) for size in (1, 3) for name in names]
    for row in batches.rows:
        assert row["identical_share"] == 1
        assert row["prompts"] == (2 if row["batch_size"] == 1 else 6)  # twice the places of the batch
    large = [row for row in batches.rows if row["batch_size"] == 3]
    assert all(row["predicted_speedup"] > 0 for row in large if row["draft"])
    assert [row["speedup"] for row in batches.rows if row["method"] == "autoregressive"] == [1, 1]
    _, page = write_report(batches, {}, tmp_path)
    assert "toy, greedy, by concurrency" in page.read_text()
    *_, sizes = console_tables(batches.rows)
    assert list(sizes.columns[0].cells) == [name for name in names for _ in range(2)]
    assert list(sizes.columns[1].cells) == ["1", "3"] * len(names)


def test_the_api_measures_batches_and_refuses_what_cannot_be_measured(models):
    options = {"batch_sizes": [2], "draft_lengths": [2], "limit": 2, "max_new_tokens": 4, "repeats": 1, "threads": 1}
    pair = Pair(models[0], make_tokenizer(), models[1])
    assert [row["name"] for row in bench_command(pair, **options)] == [
        "autoregressive", "generate", "vanilla", "cost-optimal",
    ]  # fmt: skip
    with pytest.raises(UserError, match="batch_sizes"):
        bench_command(pair, **options | {"batch_sizes": [0]})
