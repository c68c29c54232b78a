"""AdaSPEC (Hu, Guo, Feng & Zhao, NeurIPS 2025): main results and speeds, from report.json of trainings."""

from collections.abc import Mapping

from decode.papers import Paper
from decode.papers.claims import Estimate, Ordering, PaperTable, Results, Row, number, published

PUBLISHED = published("adaspec")
"""DistillSpec and AdaSPEC: α in percent by pair, epochs and task; tokens/s by task (pair and hardware not stated)."""
MAIN_RESULTS = {(r["pair"], r["length"], r["task"]): r for r in PUBLISHED if r["measure"] == "alpha, %"}
SPEEDS = {r["task"]: r for r in PUBLISHED if r["measure"] == "tokens/s"}
TASKS = list(dict.fromkeys(task for _, _, task in MAIN_RESULTS))
SETTINGS = list(dict.fromkeys((pair, length) for pair, length, _ in MAIN_RESULTS))
PAIRS = {"pythia": "Pythia-31M → 1.4B", "codegen": "CodeGen-350M → Phi-2"}
NAMES = {"undistilled": "undistilled", "distillspec": "DistillSpec", "adaspec": "AdaSPEC"}


def tables(runs: Mapping[str, Results]) -> list[PaperTable]:
    """Our drafts, then the paper's main results with ours in their places, then speeds."""
    return [
        *(_drafts(name, results.report) for name, results in runs.items() if results.report.get("drafts")),
        _main({name: results.report for name, results in runs.items() if results.report.get("drafts")}),
        *(_speeds(name, results.report) for name, results in runs.items() if results.report.get("decoding")),
    ]


def _drafts(name: str, report: Row) -> PaperTable:
    columns = ["draft", "α, T = 1", "± se", "α, greedy", "± se", "steps", "examples", "teacher tokens", "selected"]
    table = PaperTable(f"AdaSPEC: drafts of {name}", columns, note=NOTE)
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


def _main(reports: Mapping[str, Row]) -> PaperTable:
    columns = ["task", *(f"{PAIRS[pair]}, {length}" for pair, length in SETTINGS)]
    note = "paper: α in % of DistillSpec → AdaSPEC, estimator not stated; ours: α at T = 1 of the same two drafts"
    table = PaperTable("AdaSPEC, main results", columns, note=note)
    places = {(pair, length, task): f"{pair}-{task}-{length}" for pair, length, task in MAIN_RESULTS}
    for task in TASKS:
        theirs = [MAIN_RESULTS[pair, length, task] for pair, length in SETTINGS]
        table.rows.append([f"paper: {task}", *(f"{row['distillspec']} → {row['adaspec']}" for row in theirs)])
        ours = [reports.get(places[pair, length, task]) for pair, length in SETTINGS]
        if any(ours):
            table.rows.append([f"ours: {task}", *(_pair(report) for report in ours)])
    for name, report in reports.items():
        if name not in places.values():
            table.rows.append([f"ours: {name}", _pair(report), *["–"] * (len(SETTINGS) - 1)])
    return table


def _pair(report: Row | None) -> str:
    if report is None:
        return "–"
    alphas = {draft["name"]: draft["offline_alpha"] for draft in report["drafts"]}
    return f"{100 * alphas['distillspec']:.2f} → {100 * alphas['adaspec']:.2f}"


def _speeds(name: str, report: Row) -> PaperTable:
    task = next((t for t in SPEEDS if f"-{t}-" in name), "gsm8k")
    columns = ["draft", "T", "k", "tokens/s", "speedup", "95 %", "tokens/round", f"paper: tokens/s, {task}"]
    table = PaperTable(f"AdaSPEC, speed: {name}, each draft at its fastest length", columns)
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
                SPEEDS[task].get(row["draft"], "–"),
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
