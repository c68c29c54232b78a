"""README and docs: their Python runs, in small, and the options of their commands exist."""

from __future__ import annotations

import pkgutil
import re
import runpy
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from enumeration import bias_of
from tiny_run import tiny_settings

import distill.__main__ as distill
import probes.__main__ as probes
from decode import load
from decode.__main__ import COMMANDS
from decode.commands.cli import known_keys, parse
from decode.core.verify import Exact
from decode.methods import is_lossless
from distill.config import AblateSettings, EvaluationSettings, Settings
from distill.config.base import change
from probes.settings import ProbesSettings

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in (*ROOT.glob("[!C]*.md"), *ROOT.glob("docs/*.md"))}
EXAMPLES = [distill.EXAMPLES, probes.EXAMPLES, *(command["examples"] for command in COMMANDS.values())]
COMMANDED = PAGES | {"--help": "\n".join(["```bash", *EXAMPLES, "```"])}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning's, about defaults
def test_the_snippets_of_python_run_on_a_tiny_run(tmp_path, monkeypatch, capsys) -> None:
    """A page is a script, and how-to.md's trains the run that the others read."""
    small = EvaluationSettings(prompts=4, accuracy_prompts=2, decode_prompts=1, max_new_tokens=8, draft_lengths=[2])
    settings = tiny_settings(Path("runs"), evaluation=small)
    change(settings, training__steps=None, training__epochs=1)
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/quickstart.yaml").write_text(yaml.safe_dump(asdict(settings), sort_keys=False))
    Path("texts.txt").write_text("Tom has 3 apples.\nEva has 4 pens and buys 5 more.\n" * 20)
    Path("runs").mkdir()
    Path("runs/quickstart").symlink_to("mine")
    snippets = {name: "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)) for name, page in PAGES.items()}
    names: dict[str, dict[str, Any]] = {}
    for page in sorted(filter(snippets.get, snippets), key="how-to.md".__ne__):
        script = Path(page).with_suffix(".py")
        script.write_text(snippets[page])
        names[page] = runpy.run_path(str(script), run_name="__main__")
    assert names.keys() >= {"README.md", "api.md", "how-to.md", "probes.md"}
    api, pair = names["api.md"], load("runs/quickstart/target", draft="my-draft")
    assert pair.draft.config.hidden_size == settings.student.architecture.hidden_size
    assert int(api["module"].global_step) == len(api["loader"])
    Path("rules.py").write_text(
        "from decode.core.verify import AcceptanceRule, Exact\nclass Kept(AcceptanceRule): exact = True\n"
        "class Derived(Exact): pass\n"
    )
    assert not is_lossless("vanilla", "rules.Derived")
    assert (api["text"].lossless, is_lossless("vanilla", "rules.Kept")) == (False, True)
    assert bias_of(api["Lenient"]()) > 0.01
    assert bias_of(Exact()) < 1e-12
    shown = capsys.readouterr().out
    assert re.search(r"vanilla rule=__main__.Lenient +relaxed", shown)
    assert re.search(r"distillspec +0\.\d", shown)


OURS = re.compile(r"(?:python -m|draftsmith) (decode|distill|probes?) ([^|>`;]+)")
FLAGS = {"--dry-run", "--estimate", "--show-example"}


def commands(page: str) -> list[tuple[str, list[str]]]:
    """The commands of ours on a page, in blocks and in lines, each with its arguments."""
    blocks = re.findall(r"```\w+\n.*?```", page, re.DOTALL)
    spans = re.findall(r"`[^`]+`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    for at, block in enumerate(blocks):
        for variable, value in re.findall(r'^(\w+)="([^"]*)"', block, re.MULTILINE):
            blocks[at] = block.replace(f"${variable}", value.replace("\n", " "))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [OURS.search(line.replace("\n", " ")) for line in lines + spans]
    return [(match[1], shlex.split(match[2], comments=True)) for match in found if match]


@pytest.mark.parametrize("name", ["README.md", *(name for name, page in COMMANDED.items() if commands(page))])
def test_commands_are_parsed(name: str) -> None:
    """`C` stands for any configuration."""
    found = commands(COMMANDED[name])
    assert found
    for package, words in found:
        argv, foreign = ["quickstart.yaml" if word == "C" else word for word in words if word not in FLAGS], set[str]()
        if package == "decode":
            command = next((each for each in COMMANDS if " ".join(argv).startswith(each)), "")
            if not command:
                assert argv in ([], ["methods"]), argv
                continue
            argv = argv[len(command.split()) :]
            kind: Any = pkgutil.resolve_name(COMMANDS[command]["settings"])
            section = "bench" if command == "bench" else None
            if command == "paper" and not argv[0].startswith("-"):
                argv[0] = f"--paper={argv[0]}"
        else:
            kind, section = Settings if package == "distill" else ProbesSettings, None
            if argv[0] in ("ablate", "check-engine"):
                kind = AblateSettings if argv.pop(0) == "ablate" else kind
            foreign = {"bench", "probes", "ablation"} - known_keys(kind).keys()
        parse(kind, argv, f"{name}: {words}", foreign=foreign, section=section)


def test_the_page_on_the_architecture_names_files_and_names_that_are_there() -> None:
    _, *sections = re.split(r"### `(\w+)/`\n", PAGES["architecture.md"])
    for package, text in zip(sections[::2], sections[1::2], strict=True):
        for line in text.split("\n- "):
            spans = re.findall(r"`([^`]+)`", line)
            files = [span for span in spans if re.search(r"/|\.(py|yaml|csv)$", span)]
            paths = [ROOT / ("" if re.match("decode/|distill/|tests/", file) else package) / file for file in files]
            assert all(path.exists() for path in paths), line
            code = "".join(file.read_text() for path in paths for file in (path, *path.glob("*.py")) if file.is_file())
            names = [span.split(".")[-1] for span in spans if span not in files and not span.startswith("--")]
            assert all(re.search(rf"\b{name}\b", code) for name in names), line
