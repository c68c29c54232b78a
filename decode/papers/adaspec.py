"""AdaSPEC (Hu, Guo, Feng & Zhao, NeurIPS 2025): main results and speeds, from reports of ``python -m distill``."""

from __future__ import annotations

from collections.abc import Mapping

from decode.papers import Paper
from decode.papers.results import Estimate, Ordering, Results, Row, Table, number

TASKS = ("gsm8k", "alpaca", "mbpp", "cnn-dailymail", "xsum")
MAIN_RESULTS = {
    ("pythia", "3-epoch"): ("57.58 62.63", "44.34 47.25", "46.88 47.73", "73.05 74.22", "47.24 49.11"),
    ("codegen", "3-epoch"): ("79.49 82.79", "56.48 58.80", "87.36 88.76", "79.33 80.63", "58.88 59.93"),
    ("pythia", "optimal"): ("66.19 68.28", "65.41 65.79", "49.88 65.12", "80.15 80.89", "56.11 57.80"),
    ("codegen", "optimal"): ("81.49 83.48", "58.05 60.36", "86.60 87.70", "85.01 86.29", "66.78 68.19"),
}
"""α in percent, DistillSpec then AdaSPEC, by task in the order of `TASKS`."""
SPEEDS = {"mbpp": "149.15 181.67", "gsm8k": "227.86 241.34", "cnn-dailymail": "248.49 283.50"}
"""Tokens/s, DistillSpec then AdaSPEC (pair, engine and hardware not stated)."""
PAIRS = {"pythia": "Pythia-31M → 1.4B", "codegen": "CodeGen-350M → Phi-2"}
NAMES = {"undistilled": "undistilled", "distillspec": "DistillSpec", "adaspec": "AdaSPEC"}


def tables(runs: Mapping[str, Results]) -> list[Table]:
    """Our drafts, then the paper's main results with ours in their places, then speeds."""
    return [
        *(_drafts(name, results.report) for name, results in runs.items() if results.report.get("drafts")),
        _main({name: results.report for name, results in runs.items() if results.report.get("drafts")}),
        *(_speeds(name, results.report) for name, results in runs.items() if results.report.get("decoding")),
    ]


def _drafts(name: str, report: Row) -> Table:
    columns = ["draft", "α, T = 1", "± se", "α, greedy", "± se", "steps", "examples", "teacher tokens", "selected"]
    table = Table(f"AdaSPEC: drafts of {name}", columns, note=NOTE)
    for draft in report["drafts"]:
        table.rows.append(
            [
                NAMES.get(draft["name"], draft["name"]),
                number(draft["offline_alpha"], ".4f"),
                number(draft["offline_alpha_se"], ".4f"),
                number(draft.get("offline_alpha_greedy"), ".4f"),
                number(draft.get("offline_alpha_greedy_se"), ".4f"),
                *(number(draft.get(k), ",") for k in ("optimiser_steps", "examples", "teacher_tokens")),
                number(draft.get("selected_tokens"), ","),
            ]
        )
    return table


NOTE = (
    "α: mean of Σₓ min(p(x), q(x)) over every response position of texts that the target wrote for test prompts "
    "(greedy: agreement of the argmax). adaspec-more-data is the accounting of the official scripts: equal steps, 1/k "
    "times the examples and teacher tokens; AdaSPEC has the same examples, steps and teacher tokens as DistillSpec"
)


def _main(reports: Mapping[str, Row]) -> Table:
    columns = ["task", *(f"{PAIRS[pair]}, {length}" for pair, length in MAIN_RESULTS)]
    note = "paper: α in % of DistillSpec → AdaSPEC, estimator not stated; ours: α at T = 1 of the same two drafts"
    table = Table("AdaSPEC, main results", columns, note=note)
    for i, task in enumerate(TASKS):
        table.rows.append([f"paper: {task}", *(" → ".join(cells[i].split()) for cells in MAIN_RESULTS.values())])
        ours = [reports.get(f"{pair}-{task}-{length}") for pair, length in MAIN_RESULTS]
        if any(ours):
            table.rows.append([f"ours: {task}", *(_pair(report) for report in ours)])
    for name, report in reports.items():
        if not any(name == f"{p}-{t}-{n}" for p, n in MAIN_RESULTS for t in TASKS):
            table.rows.append([f"ours: {name}", _pair(report), *["–"] * (len(MAIN_RESULTS) - 1)])
    return table


def _pair(report: Row | None) -> str:
    if report is None:
        return "–"
    alphas = {draft["name"]: draft["offline_alpha"] for draft in report["drafts"]}
    return f"{100 * alphas['distillspec']:.2f} → {100 * alphas['adaspec']:.2f}"


def _speeds(name: str, report: Row) -> Table:
    task = next((t for t in SPEEDS if f"-{t}-" in name), "gsm8k")
    columns = ["draft", "T", "k", "tokens/s", "speedup", "95 %", "tokens/round", f"paper: tokens/s, {task}"]
    table = Table(f"AdaSPEC, speed: {name}, each draft at its fastest length", columns)
    theirs = dict(zip(("distillspec", "adaspec"), SPEEDS[task].split()))
    rows = [row for row in report["decoding"] if row["draft"] in NAMES and row.get("speedup")]
    for key in dict.fromkeys((row["temperature"], row["draft"]) for row in rows):
        row = max((r for r in rows if (r["temperature"], r["draft"]) == key), key=lambda r: r["speedup"])
        low, high = row["speedup_ci95"] or (None, None)
        table.rows.append(
            [
                NAMES[row["draft"]],
                number(row["temperature"], "g"),
                number(row["draft_length"], "d"),
                number(row["tokens_per_second"], ".0f"),
                number(row["speedup"], ".2f"),
                f"{number(low, '.2f')}–{number(high, '.2f')}",
                number(row["block_efficiency"], ".2f"),
                theirs.get(row["draft"], "–"),
            ]
        )
    return table


def orderings(runs: Mapping[str, Results]) -> list[Ordering]:
    """AdaSPEC's α above DistillSpec's, in every accounting and mode, by the report's paired differences."""
    made = []
    for name, results in runs.items():
        for pair in results.report.get("paired") or []:
            if pair["b"] == "undistilled" or pair.get("se") is None:
                continue
            d, width = pair["difference"], 1.96 * pair["se"]
            claim = f"α of {NAMES.get(pair['a'], pair['a'])} is above {NAMES.get(pair['b'], pair['b'])}'s"
            key = "offline_alpha_greedy" if pair["label"].startswith("greedy") else "offline_alpha"
            alphas = {draft["name"]: draft.get(key) for draft in results.report["drafts"]}
            start, base = alphas.get("undistilled"), alphas.get("distillspec")
            reason = (
                f"undistilled {start:.4f}, DistillSpec {base:.4f}: distillation as a whole gains {base - start:+.4f}"
                if start is not None and base is not None
                else ""
            )
            estimate = Estimate(d, d - width, d + width, pair["n"])
            made.append(Ordering(claim, estimate, reason=reason, where=f"{name}, {pair['label']}"))
    return made


PAPER = Paper("AdaSPEC: Selective Knowledge Distillation", tables, orderings, trains=True)
