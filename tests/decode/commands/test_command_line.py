"""``draftsmith decode`` as a user types it: options, help, exit codes, configurations, stores, papers' tables."""

import csv
import json
import os
import pkgutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from benchmarks import Watched
from pairs import save_pair

from decode.__main__ import COMMANDS, main
from decode.commands import bench
from decode.commands.paper import BASELINES, PUBLISHED, measured, table_of
from decode.commands.settings import bench_settings, default_suites
from decode.measure.report import latest
from decode.methods import METHODS, PROBE_STOPS, RULES, STOPS
from decode.progress import as_current

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"), tiny)


def test_an_installed_package_has_every_file_that_is_not_python():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    installed = {
        file
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for file in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    walks = (walk for name in ("decode", "distill", "probes") for walk in os.walk(ROOT / name, followlinks=True))
    there = {Path(folder, file) for folder, _, files in walks for file in files}
    assert there > {ROOT / "decode" / file.relative_to(ROOT) for file in ROOT.glob("configs/**/*.yaml")}
    assert {file for file in there if file.suffix not in (".py", ".pyc")} == installed
    assert all((file.parent / "__init__.py").is_file() for file in there if file.suffix == ".py")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_lists_options_with_hyphens_and_examples(name, capsys):
    assert main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: draftsmith decode {name} [options]")
    assert "examples:\n  " in shown
    assert "_" not in "".join(word for word in shown.split() if word.startswith("--"))
    assert name != "generate" or shown.index("--prompt PROMPT") < shown.index("--dtype")  # its own options first


def test_methods_lists_every_stop_rule_and_acceptance_rule(capsys):
    main(["methods"])
    shown = capsys.readouterr().out.partition("--stop-rule")[2]
    assert all(name in shown for name in (*STOPS, *PROBE_STOPS, *RULES))


HELP = """
import decode.__main__, pytest, sys
decode.__main__.main(["bench", "--help"])
assert "jinja2" not in sys.modules
import distill.__main__, probes.__main__
for package, argv in ((distill, ["--help"]), (probes, ["--help"])):
    pytest.raises(SystemExit, package.__main__.main, argv)
"""


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (HELP, "torch transformers pyarrow numpy lightning"),
        (HELP + "pytest.raises(SystemExit, distill.__main__.main, ['ablate', '--help'])", "torch"),
        # transformers itself imports jinja2
        ("import decode.commands.generate", "pyarrow datasets pandas decode.measure.suites decode.measure.report"),
    ],
)
def test_commands_load_only_what_they_need(code, absent):
    code += f"\nimport sys; sys.exit(' '.join(sys.modules.keys() & {set(absent.split())!r}) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_program_is_the_three_packages(capsys, monkeypatch):
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["draftsmith"]
    for argv, status, words in (
        (["--version"], 0, f"draftsmith {version('draftsmith')}"),
        (["decode", "methods"], 0, "hybrid-tree"),
        (["distill", "--name"], 2, "--name has the values []"),
        (["distil"], 2, "did you mean 'distill'?"),
    ):
        monkeypatch.setattr(sys, "argv", ["draftsmith", *argv])
        assert pkgutil.resolve_name(script)() == status
        assert words in "".join(capsys.readouterr())


def test_a_configuration_gives_bench_its_run_and_keeps_to_its_section(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below/a.yaml").write_text("name: a\ntarget: {kind: scratch}\nbench: {methods: [ears], limit: 2}\n")
    (tmp_path / "below/b.yaml").write_text("base: a.yaml\ndata: {source: gsm8k, files: {test: t.jsonl}}\n")
    config, runs = tmp_path / "recipe.yaml", f"output_dir: {tmp_path}/runs"
    # which builds on another one, which builds on a third
    config.write_text(f"base: below/b.yaml\nname: toy\n{runs}\nbench: {{methods: [vanilla], limit: 3}}\n")
    (tmp_path / "runs/toy/export").mkdir(parents=True)
    settings = bench_settings(["--config", str(config), "--max-new-tokens", "9", "--limit", "4"])
    toy = f"{tmp_path}/runs/toy"
    assert (settings.target, settings.draft, settings.output) == (f"{toy}/target", [f"{toy}/export"], toy)
    assert settings.suite == ["gsm8k=t.jsonl"]
    assert (settings.methods, settings.limit, settings.max_new_tokens) == (["vanilla"], 4, 9)
    chosen = bench_settings(["--config", str(config), "--suite", "open", "--draft", "other"])
    assert (chosen.suite, chosen.draft, chosen.folder) == (["open"], ["other"], "runs/bench")
    (tmp_path / "runs/mine/work").mkdir(parents=True)
    mine = f"{tmp_path}/runs/mine"
    (tmp_path / "threads.yaml").write_text(f"base: {config}\nthreads: 3\n")
    chosen = bench_settings(["--config", str(tmp_path / "threads.yaml"), "--draft", f"a={mine}/export"])
    assert (chosen.folder, chosen.target, chosen.threads) == (mine, f"{mine}/target", 3)
    assert bench_settings(["--config", str(config), "--target", f"{mine}/target", "--draft", "mtp"]).folder == mine
    assert bench_settings(["--target", "hub/name", "--draft", f"a={mine}/kl-tv", f"b={mine}/export"]).folder == mine
    for argv in (["--config", str(config)], ["--output", f"{tmp_path}/runs/other"]):
        named = bench_settings([*argv, "--name", "other"])
        assert named.folder == f"{tmp_path}/runs/other"
        assert Path(named.target or "").parts[-2:] == ("other", "target")
    two = ["--target", "hub/name", "--draft", f"{mine}/export", "hub/draft"]
    assert bench_settings(two).folder == "runs/bench"


def test_the_suite_follows_the_training_data_and_a_presets_name_wins_over_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    assert default_suites({"source": "train.jsonl", "files": {"test": "t.jsonl"}}) == ["prompts=t.jsonl"]
    assert default_suites({"source": "gsm8k"}) == ["gsm8k"]
    assert default_suites({"source": "./gsm8k"}) == ["prompts=./gsm8k"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bnch"], "did you mean 'bench'"),
        (["bench", "--config", "{}", "bnch: {limit: 3}"], "unknown key 'bnch'; the nearest known key is 'bench"),
        (["bench", "--config", "{}", "bench: {limt: 3}"], "section bench: unknown key 'limt'; the nearest known key"),
        (["bench", "--target", "t", "--methods", "ears:beta=x"], "'ears:beta=x'"),
        (["bench"], "--target is missing"),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(argv, message, capsys, tmp_path):
    if "{}" in argv:  # followed by the content of the configuration
        (tmp_path / "recipe.yaml").write_text(argv[-1])
        argv = [*argv[:-2], str(tmp_path / "recipe.yaml")]
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.splitlines()[-1].startswith("error: ")


def test_stores_are_built_from_files_and_suites_and_serve_the_bench(folder, tmp_path, capsys):
    own = tmp_path / "own.txt"
    own.write_text("Tom has 3 apples and buys 4 more.\n" * 20)
    target = str(folder / "target")
    build = ["--tokenizer", target, "--input", str(own), "arithmetic", "--texts", "30", "--output", str(tmp_path / "s")]
    assert main(["datastore", "build", *build]) == 0
    assert "31 documents" in capsys.readouterr().out
    options = "--suite open --limit 1 --threads 1 --max-new-tokens 8 --methods rest,adaptix --output"
    run = ["bench", "--target", target, *options.split(), str(tmp_path / "out"), "--datastore", str(tmp_path / "s")]
    assert main(run) == 0
    rows = latest(tmp_path / "out")["methods"]
    assert [r["name"] for r in rows] == ["autoregressive", "generate", "rest", "adaptix"]
    assert all(r["identical_to_target"] for r in rows)
    assert [*(tmp_path / "out").glob("bench-*.html")]
    assert main(["datastore", "build", "--tokenizer", target, "--input", "gone.txt", "--output", "x"]) == 2
    assert "gone.txt" in capsys.readouterr().err


def test_an_interrupted_bench_writes_what_it_measured(folder, tmp_path, capsys, monkeypatch):
    def stop(done, total, label):
        if done == 5:
            raise KeyboardInterrupt

    class Interrupted(bench.Benchmark):
        def run(self, *args, **extra):
            with as_current(Watched(stop)):
                return super().run(*args, **extra)

    monkeypatch.setattr(bench, "Benchmark", Interrupted)
    options = "--suite open --limit 3 --max-new-tokens 4 --threads 1 --methods prompt-lookup --output"
    assert main(["bench", "--target", str(folder / "target"), *options.split(), str(tmp_path)]) == 130
    told = " ".join(capsys.readouterr().out.split())
    assert "9 texts of at most 4 tokens, 36 in all, by autoregressive, generate, prompt-lookup" in told
    assert "stopped early" in told
    assert [row["prompts"] for row in latest(tmp_path)["methods"]] == [1, 1, 1]


def test_an_output_that_cannot_be_written_is_refused_before_models_are_loaded(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("decode.models.open.load_model", lambda *_, **__: pytest.fail("loaded a model"))
    (tmp_path / "here").write_text("a file")
    argv = ["bench", "--target", str(folder / "target"), "--suite", "open", "--methods", "prompt-lookup"]
    assert main([*argv, "--output", str(tmp_path / "here/below")]) == 2
    assert "choose another output" in capsys.readouterr().err


@pytest.mark.parametrize("paper", PUBLISHED)
def test_published_columns_and_methods_are_known_and_ratios_follow_from_speeds(paper: str) -> None:
    with PUBLISHED[paper].open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    speeds = {(row["setting"], row["method"]): row.get("tokens/s") for row in rows}
    assert len(speeds) == len(rows)
    for row in rows:
        assert row.keys() - {"setting", "method"} <= measured({}, {}).keys()
        assert row["method"] in {"draft alone", "distillspec", "adaspec"} or row["method"].split()[0] in METHODS
        if row.get("ratio"):
            wanted = float(row["tokens/s"]) / float(speeds[row["setting"], BASELINES[paper]])
            assert float(row["ratio"]) == pytest.approx(wanted, abs=0.02)


def row(name: str, speed: float, **more: object) -> dict:
    return {"name": name, "suite": "s", "temperature": 0.6, "tokens_per_second": speed, **more}


def test_our_numbers_stand_beside_the_papers() -> None:
    ours = [row("autoregressive", 20.0), row("vanilla draft_length=5", 50.0)]
    table = table_of("adasd", [*ours, row("adasd", 75.0, verification_threshold=0.3)])
    columns = {str(column.header): map(str, column.cells) for column in table.columns}
    rows = [dict(zip(columns, cells)) for cells in zip(*columns.values())]
    shown = {(row["method"], row["setting"]): row for row in rows}
    llama = next(r["setting"] for r in rows if "1B, mmlu" in r["setting"])
    mine = "ours: s, T = 0.6"
    assert (shown["vanilla", llama]["tokens/s"], shown["vanilla draft_length=5", mine]["ratio"]) == ("8.746", "1.000")
    of_adasd = [(shown["adasd", where]["ratio"], shown["adasd", where]["threshold"]) for where in (mine, llama)]
    assert of_adasd == [("1.500", "0.300"), ("1.136", "0.463")]


def test_a_configuration_is_measured_and_its_report_read_again(tmp_path: Path, tiny, capsys, monkeypatch) -> None:
    save_pair(tmp_path, tiny)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/papers/ears").mkdir(parents=True)
    (tmp_path / "configs/papers/ears/quickstart.yaml").write_text(
        f"name: e\nbench: {{target: {tmp_path}/target, draft: [{tmp_path}/draft], suite: [open], limit: 1, "
        "max_new_tokens: 8, temperatures: [0.9], threads: 1, "
        "methods: ['vanilla:draft_length=5', 'ears:draft_length=5:beta=0.1']}\n"
    )
    out = str(tmp_path / "out")
    assert main(["paper", "ears", "--output", out]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"configs/papers/ears/quickstart.yaml is measured now; later, --run {out} prints")
    assert "58.47" in said
    assert main(["paper", "ears", "--run", out]) == 0
    assert "58.47" in capsys.readouterr().out


def test_adaspec_reads_the_drafts_of_a_training_by_its_own_measure_beside_a_benchmark(tmp_path: Path, capsys) -> None:
    alphas = {"distillspec": 0.6, "adaspec": 0.65}
    drafts = [{"name": name, "offline_alpha": 0.5, "greedy_accepted_per_tested": a} for name, a in alphas.items()]
    (tmp_path / "report.json").write_text(json.dumps({"drafts": drafts, "decoding": [row("adaspec", 999.0)]}))
    (tmp_path / "bench-20260101-000000.json").write_text(json.dumps({"methods": [row("vanilla", 999.0)]}))
    assert main(["paper", "adaspec", "--run", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "65.000" in shown
    assert "62.63" in shown
    assert "999" not in shown  # no speed of a toy beside those of the paper


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "choose one: draftsmith decode paper adaptix|adasd"),
        (["ears", "--run", "nowhere"], "nowhere has no bench-DATE.json"),
        (["adaspeed"], "no probes in 'runs/quickstart/probes'; make them with `make probe`"),
        (["ears", "--scale", "nowhere"], "no configuration file 'configs/papers/ears/nowhere.yaml'"),
    ],
)
def test_mistakes_are_reported_before_anything_is_loaded(argv: list[str], message: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("decode.commands.bench.load_tokenizer", None)  # no call is reached
    monkeypatch.setattr("decode.drafters.probe.read_model_json", lambda path: {})
    assert main(["paper", *argv]) == 2
    assert message in capsys.readouterr().err
