"""Suites of several categories and turns: what is one prompt, what is measured of each category, where it is shown."""

from __future__ import annotations

import io
import json

import pytest
from benchmarks import run_benchmark
from pairs import make_pair, make_suite, make_tokenizer
from rich.console import Console

from decode.bench.entries import plan
from decode.bench.report import category_table, write_report
from decode.bench.session import BenchOptions
from decode.bench.suite_acceptance import suite_alphas
from decode.bench.suites import Prompt, Suite


@pytest.fixture(scope="module")
def models(tiny):
    return make_pair(tiny)


def chat_suite(chats: int = 4) -> Suite:
    def prompt(i: int) -> Prompt:
        turns = (f"Say {i}", "And then?") if i % 2 else (f"Count to {i}",)
        return Prompt(f"c/{i}", turns[0], None, "multi-turn" if i % 2 else "qa", turns)

    return Suite("chats", [prompt(i) for i in range(chats)], None)


@pytest.fixture(scope="module")
def chat_bench(models):
    """Two chats of two turns and two of one, in two categories."""
    target, draft = models
    options = BenchOptions(16, 2, chat=True, system="Be brief.", samples=2, costs=False, threads=1)
    entries = plan(["vanilla", "hybrid", "prompt-lookup", "generate-prompt-lookup"], {"d": draft}, [0.0, 0.7])
    return run_benchmark(target, {"d": draft}, make_tokenizer(chat=True), [chat_suite()], entries, options)


def test_all_turns_of_a_chat_are_one_prompt(chat_bench):
    for row in chat_bench.rows:
        assert row["prompts"] == 4
        assert row["method"] == "autoregressive" or row["temperature"] or row["identical_to_target"] is not False
    plain = chat_bench.records["chats", 0.0, "autoregressive"]
    assert [len(text.new_ids) for text, _ in plain.texts] == [16, 32, 16, 32]
    turns = [item.said for item in chat_bench.items["chats"]]
    assert turns == ["Count to 0", "Say 1", "And then?", "Count to 2", "Say 3", "And then?"]
    samples = chat_bench.analysis[0]["samples"]
    assert [sample["prompt"] for sample in samples] == turns[:3]


def test_categories_are_parts_of_the_whole(chat_bench):
    for row in chat_bench.rows:
        parts = {part["category"]: part for part in row["categories"]}
        assert {name: part["prompts"] for name, part in parts.items()} == {"qa": 2, "multi-turn": 2}
        for key in ("block_efficiency", "alpha"):
            known = [part[key] for part in parts.values() if part.get(key) is not None]
            if row[key] is not None:
                assert min(known) - 1e-9 <= row[key] <= max(known) + 1e-9
                low, high = row[f"{key}_ci95"]
                assert low - 1e-9 <= row[key] <= high + 1e-9
        assert all(part["speedup_ci95"][0] <= part["speedup"] <= part["speedup_ci95"][1] for part in parts.values())
    peer = next(r for r in chat_bench.rows if r["method"] == "generate")
    assert peer["block_efficiency"] == 1
    assert peer["alpha"] is None


def test_categories_stand_in_the_table_and_on_the_page(chat_bench, tmp_path):
    alphas = suite_alphas(chat_bench.session, "chats", chat_bench.items["chats"], 1.0)
    assert [(row["category"], row["prompts"]) for row in alphas] == [("", 4), ("qa", 2), ("multi-turn", 2)]
    weighted = sum(row["alpha"] * row["positions"] for row in alphas[1:]) / alphas[0]["positions"]
    assert alphas[0]["alpha"] == pytest.approx(weighted)
    assert alphas[0]["alpha_ci95"][0] <= alphas[0]["alpha"] <= alphas[0]["alpha_ci95"][1]
    path, page = write_report(chat_bench, {"ignore_eos": False}, tmp_path, alphas=alphas)
    assert json.loads(path.read_text())["bench"]["offline_alpha"] == alphas
    html = page.read_text()
    assert "By category" in html
    assert "Offline α" in html
    shown = Console(width=130, record=True, file=io.StringIO())
    shown.print(category_table(chat_bench.blocks[0], 130))
    assert {"qa", "multi-turn", "hybrid"} <= set(shown.export_text().split())


def test_a_suite_of_one_category_has_no_table_of_categories(models):
    target, _ = models
    entries = plan(["prompt-lookup"], {}, [0.0])
    bench = run_benchmark(target, None, make_tokenizer(), [make_suite(2)], entries, BenchOptions(8, 1, costs=False))
    assert [row["categories"] for row in bench.rows] == [[], [], []]
    assert category_table(bench.blocks[0]) is None
