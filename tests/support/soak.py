"""``make soak``: SIGKILL at random moments of a whole tiny run, then damaged files; the end stays the same, bit by bit.

A run that nothing disturbs tells which moments there are: every training step and every change of a file below the
run's folder, stage by stage. Then the same run is killed at moments drawn from the seed, half of them with a random
delay of milliseconds, so that a kill also hits the middle of a computation or of a file. After each kill it is started
again. In the end every weight, cached value, response and export must equal the undisturbed run's, no training may have
lost more steps than lie between two checkpoints, and nothing half-done may be left behind. Last, files are truncated
and altered one by one: none may be used.

Each start is a process of its own, forked from this one, which has the libraries loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tiny_run import tiny_settings

import distill.evaluate  # noqa: F401  (the pipeline loads it late; here it is loaded once, before all starts)
from distill import pipeline, run_stages
from distill.config.drafts import DraftSettings
from distill.config.run import Settings
from distill.stages import RunDir
from distill.trainer import ProgressLines

INTERVAL = 5
"""Steps between checkpoints."""
STAGES = ("target", "initial", "distillspec", "adaspec", "own-texts")
DISTILLED = [phase for stage in STAGES[2:] for phase in (f"{stage}: signals", stage)]
PHASES = ("target", "initial", *DISTILLED, "evaluation", "export", "report")
"""Parts of a run in order, among which kills are spread."""
SLOWEST = 900
"""Seconds after which a start that neither ended nor was killed counts as stuck."""
TIMED = ("README.md", "speculation_profile.json", "generation_config.json")
"""Files of an export that depend on measured speeds."""

Event = dict[str, Any]


def soak_settings(folder: Path) -> Settings:
    """A run with everything that is kept on disk: responses, signals, texts of the draft, LayerSkip's chance."""
    settings = tiny_settings(folder, name="run")
    settings.target.layerskip.enabled = True
    responses = settings.teacher.responses
    responses.source, responses.max_new_tokens, responses.batch_size, responses.refresh_every = "target", 8, 4, 4
    settings.teacher.signal = "hidden"
    settings.drafts.append(DraftSettings(name="own-texts", on_policy=0.5, divergence="tv", kl_first=0.5, seed=3))
    settings.export.choose = "adaspec"
    settings.trainer.validate_every = INTERVAL
    evaluation = settings.evaluation
    evaluation.prompts = evaluation.accuracy_prompts = 4
    evaluation.decode_prompts, evaluation.max_new_tokens = 1, 6
    evaluation.temperatures, evaluation.draft_lengths = [0.0], [2]
    return settings


# -- the process that is killed ---------------------------------------------------------------------------------------


@dataclass
class Kill:
    """When a process ends: at the n-th moment of the phase or the first one after it, and ``delay`` seconds more."""

    phase: str
    moment: int
    delay: float = 0.0


class Witness:
    """Inside the process: writes down what happens, line by line as it happens, and ends it when the time has come."""

    def __init__(self, folder: Path, trace: Path, kill: Kill | None) -> None:
        self.folder, self.kill = os.path.abspath(folder), kill
        self.file = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.phase, self.moments, self.ending = "", 0, False

    def write(self, **event: Any) -> None:
        os.write(self.file, (json.dumps(event) + "\n").encode())

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.write(phase=phase)

    def moment(self, what: str) -> None:
        """Something that can be interrupted is about to happen."""
        if not self.phase:
            return
        self.write(moment=what)
        kill = self.kill
        if kill is None or self.ending or PHASES.index(self.phase) < PHASES.index(kill.phase):
            return
        self.moments += 1
        if self.phase != kill.phase or self.moments == kill.moment:
            self.ending = True
            if kill.delay:
                threading.Timer(kill.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's audit hook: changes of files below the run's folder."""
        if event == "open":
            path, mode, flags = arguments
            if not (set(str(mode or "")) & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                return
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink"):
            path = arguments[0]
        else:
            return
        if isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(self.folder + os.sep):
            self.moment(f"{event.removeprefix('os.')} {Path(path).name}")


def watch(witness: Witness, *, measured: bool) -> None:
    """Puts the witness into the code of this process, which will not live on."""

    def before(place: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(place, name)

        def noted(*args: Any, **options: Any) -> Any:
            note(*args, **options)
            return original(*args, **options)

        setattr(place, name, noted)

    def started(progress: ProgressLines, trainer: Any, *_: Any) -> None:
        witness.enter(progress.name)
        witness.write(stage=progress.name, step=trainer.global_step, steps=trainer.max_steps, begins=True)

    def stepped(progress: ProgressLines, trainer: Any, *_: Any) -> None:
        witness.write(stage=progress.name, step=trainer.global_step, steps=trainer.max_steps, begins=False)
        witness.moment(f"step {trainer.global_step}")

    before(run_stages, "language_model", lambda context, stage, key: witness.enter(stage))
    before(run_stages, "distil", lambda context, draft, key: witness.enter(f"{draft.name}: signals"))
    before(pipeline, "measure", lambda *_: witness.enter("evaluation") if measured else os._exit(0))
    before(pipeline, "export_draft", lambda *_, **__: witness.enter("export"))
    before(pipeline, "write_report", lambda *_: witness.enter("report"))
    before(ProgressLines, "on_train_start", started)
    before(ProgressLines, "on_train_batch_end", stepped)
    sys.addaudithook(witness.audit)


def start(settings: Settings, trace: Path, kill: Kill | None, measured: bool) -> tuple[int, list[Event], str]:
    """Runs the pipeline in a process of its own; returns its status (negative: a signal), its events and its output.

    Args:
        settings: Of the run.
        trace: File for the events.
        kill: When it ends; None: by itself.
        measured: With evaluation, export and report, not the training alone.
    """
    log = trace.with_suffix(".log")
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 70
        with log.open("w") as out:
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                watch(Witness(Path(settings.output_dir) / settings.name, trace, kill), measured=measured)
                pipeline.run_pipeline(settings, Console(file=out, width=160))
                status = 0
            except BaseException:
                out.write(traceback.format_exc())
            finally:
                out.flush()
                os._exit(status)
    deadline = time.monotonic() + SLOWEST
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"stuck: {log.read_text()[-2000:]}")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(found[1]), [json.loads(line) for line in trace.open()], log.read_text()


Start = Callable[[Kill | None], tuple[int, list[Event], str]]
"""`start` of the run that is killed."""


# -- kills ------------------------------------------------------------------------------------------------------------


def moments(events: list[Event]) -> dict[str, list[str]]:
    """The moments of each phase."""
    found: dict[str, list[str]] = {phase: [] for phase in PHASES}
    phase = ""
    for event in events:
        phase = event.get("phase", phase)
        if "moment" in event:
            found[phase].append(event["moment"])
    return found


def draw(found: dict[str, list[str]], number: int, chance: random.Random) -> list[Kill]:
    """Kills in the order of the phases: as many phases as there can be, no phase twice before all have had one.

    Where there is training, half of them are at its steps, which are fewer than the changes of files.
    """
    phases, kills = list[str](), []
    known = [phase for phase in PHASES if found[phase]]
    while len(phases) < number:
        phases += chance.sample(known, min(len(known), number - len(phases)))
    for phase in sorted(phases, key=PHASES.index):
        late = PHASES.index(phase) >= PHASES.index("evaluation")  # a delay could let the run end
        delay = 0.0 if late or chance.random() < 0.5 else chance.uniform(0, 0.03)
        steps = [number for number, what in enumerate(found[phase], 1) if what.startswith("step ")]
        moment = chance.choice(steps) if steps and chance.random() < 0.5 else chance.randint(1, len(found[phase]))
        kills.append(Kill(phase, moment, delay))
    return kills


def kill_all(begin: Start, kills: list[Kill], console: Console) -> list[str]:
    """Starts and kills the run as often as wanted, lets it end, and returns the faults."""
    reached: dict[str, Event] = {}  # the last step of each stage
    faults: list[str] = []
    for number, kill in enumerate([*kills, None], 1):
        code, events, log = begin(kill)
        if code != (wanted := 0 if kill is None else -signal.SIGKILL):
            return [*faults, f"start {number} ended with {code}, wanted {wanted}: {log[-1500:]}"]
        went_on = []
        for event in (event for event in events if "step" in event):
            before = reached.get(event["stage"])
            if event["begins"] and before is not None:
                went_on.append(f"{event['stage']} went on from step {event['step']}, killed at {before['step']}")
                if not 0 <= before["step"] - event["step"] <= INTERVAL:
                    faults.append(went_on[-1])
            reached[event["stage"]] = event
        phase, last = ([e[key] for e in events if key in e][-1:] or ["–"] for key in ("phase", "moment"))
        ended = "ended" if kill is None else f"killed in {phase[0]} at {last[0]} + {kill.delay * 1000:.0f} ms"
        console.print(f"{number:>3} {ended}; {', '.join(went_on) or 'no training was cut short'}", highlight=False)
    ends = [event for event in reached.values() if event["step"] != event["steps"]]
    return faults + [f"{end['stage']}: ended at step {end['step']} of {end['steps']}" for end in ends]


# -- damage -----------------------------------------------------------------------------------------------------------


def truncated(path: Path) -> None:
    """Half of the file is lost."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def altered(path: Path) -> None:
    """A digit of a text, or a bit of anything else, changes; the size does not."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    if path.suffix == ".jsonl":  # of the token ids: beside them stands a text that nothing reads
        middle = data.index(b'"ids": [', middle)
    if path.suffix == ".ckpt":  # of the largest tensor: between the members of the file lies padding
        with zipfile.ZipFile(path) as file:
            largest = max(file.infolist(), key=lambda member: member.file_size)
        header = data[largest.header_offset : largest.header_offset + 30]
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        middle = largest.header_offset + 30 + names + largest.file_size // 2
    if path.suffix in (".json", ".jsonl"):
        place = next(i for i in [*range(middle, len(data)), *range(middle)] if chr(data[i]).isdigit())
        data[place] = ord("1") if data[place] == ord("0") else data[place] - 1
    else:
        data[middle] ^= 1
    path.write_bytes(data)


MADE_AGAIN = "not as it was written"
VICTIMS = (
    ("distillspec/model.safetensors", MADE_AGAIN, "", False),
    ("work/checkpoints-adaspec/step-*.ckpt", "is damaged", "adaspec", True),
    ("export/model.safetensors", MADE_AGAIN, "", False),
    ("work/signals/target_hidden_train.npy", "", "adaspec", False),
    ("work/signals/distillspec_forward_kl_train.npy", "", "adaspec", False),
    ("work/signals/target_hidden_train.json", "", "adaspec", False),
    ("work/responses/train.jsonl", "", "adaspec", False),
    ("work/responses/train.json", "", "adaspec", False),
    ("target/model.safetensors", MADE_AGAIN, "", False),
    ("initial/config.json", MADE_AGAIN, "", False),
    ("work/checkpoints-adaspec/fingerprint.json", "", "adaspec", True),
    ("export/config.json", MADE_AGAIN, "", False),
    ("report.json", MADE_AGAIN, "", False),
    ("work/report.json", "", "", False),
)
"""Files of a run, what the next start has to say, the stage that reads the file and is to be made once more, and whether
that is to be stopped in its training first, so that its checkpoints are there."""


def damage_all(begin: Start, count: int, events: list[Event], whole: Path, run: Path, console: Console) -> list[str]:
    """Damages one file after the other in a finished run, starts it again, and returns the faults."""
    faults: list[str] = []
    late = Kill("adaspec", moments(events)["adaspec"].index(f"step {2 * INTERVAL + 1}") + 1)
    for pattern, says, stage, stop in VICTIMS[:count]:
        for damage in (truncated, altered):
            if stage:
                (run / f"work/{stage}.json").unlink()
            if stop:
                begin(late)
            damage(sorted(run.glob(pattern))[-1])
            code, again, log = begin(None)
            if code:
                return [*faults, f"{pattern}, {damage.__name__}: ended with {code}: {log[-1500:]}"]
            found = differences(whole, run) + ([] if says in log else [f"did not say {says!r}"])
            trained = ", ".join(event["stage"] for event in again if event.get("begins")) or "nothing"
            verdict = "used or lost" if found else "not used"
            console.print(f"    {pattern}, {damage.__name__}: {trained} trained again, {verdict}", highlight=False)
            faults += [f"{pattern}, {damage.__name__}: {fault}" for fault in found]
    return faults


# -- the end ----------------------------------------------------------------------------------------------------------


def differences(whole: Path, run: Path) -> list[str]:
    """What the two runs do not have in common, bit by bit, and what should have been cleared away."""
    contents: list[dict[str, Any]] = []
    for folder in (whole, run):
        kept: dict[str, Any] = {}
        for place in (*STAGES, "export", "work/signals", "work/responses"):
            for path in (folder / place).rglob("*"):
                if path.is_dir() or path.match("*.old.jsonl") or (place == "export" and path.name in TIMED):
                    continue
                kept[str(path.relative_to(folder))] = data = path.read_bytes()
                if path.suffix == ".jsonl":  # lines may come in any order, and the last one of an example counts
                    by_example = {line.partition(b",")[0]: line for line in data.splitlines()}
                    kept[str(path.relative_to(folder))] = by_example
        for stage in STAGES:
            record = RunDir(folder).record(stage)
            kept[f"the record of {stage}"] = None if record is None else (record.history, record.account)
        if (report := folder / "report.json").exists():
            kept["offline alpha"] = [draft["offline_alpha"] for draft in json.loads(report.read_text())["drafts"]]
        contents.append(kept)
    one, other = contents
    found = [f"{name} differs" for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    found += [f"{name} is missing" for name, value in one.items() if value is None]
    left = [path for pattern in (".tmp-*", "checkpoints-*", ".export*") for path in run.rglob(pattern)]
    return found + [f"{path.relative_to(run)} is left behind" for path in left]


def main() -> int:
    """Parses the arguments and does all of it; returns 1 if there were faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments (default 0)")
    parser.add_argument("--kills", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--short", action="store_true", help="without the evaluation, and one damaged file only")
    arguments = parser.parse_args()
    count, measured = (1, False) if arguments.short else (len(VICTIMS), True)
    torch.set_num_threads(1)
    console, began = Console(width=150), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        whole, killed = soak_settings(folder / "whole"), soak_settings(folder / "killed")

        def begin(kill: Kill | None) -> tuple[int, list[Event], str]:
            return start(killed, folder / "killed.jsonl", kill, measured)

        code, events, log = start(whole, folder / "whole.jsonl", None, measured)
        faults, runs = [f"the undisturbed run ended with {code}: {log}"] if code else [], ("whole/run", "killed/run")
        if not faults:
            found = moments(events)
            console.print(f"{sum(map(len, found.values()))} moments, seed {arguments.seed}", highlight=False)
            faults = kill_all(begin, draw(found, arguments.kills, random.Random(arguments.seed)), console)
        faults = faults or differences(*(folder / run for run in runs))
        faults = faults or damage_all(begin, count, events, *(folder / run for run in runs), console)
    console.print(f"{time.monotonic() - began:.0f} s", highlight=False)
    for fault in faults:
        console.print(f"[red]FAULT[/red] {fault}", highlight=False, markup=True)
    if not faults:
        console.print(
            f"sound: after {arguments.kills} kills and {2 * count} damaged files the run ended bit by bit as an "
            f"undisturbed one; no training lost more than {INTERVAL} steps",
            highlight=False,
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
