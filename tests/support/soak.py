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
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tiny_run import tiny_settings

import distill.evaluate  # noqa: F401  (the pipeline loads it late; here it is loaded once, before all starts)
from distill import pipeline, run_stages
from distill.config.drafts import DraftSettings
from distill.config.run import Settings
from distill.stages import RunDir
from distill.trainer import ProgressLines

HERE = Path(__file__).parent
INTERVAL = 5
"""Steps between checkpoints."""
STAGES = ("target", "initial", "distillspec", "adaspec", "equal-tokens", "own-texts")
DISTILLED = [phase for stage in STAGES[2:] for phase in (f"{stage}: signals", stage)]
PHASES = ("target", "initial", *DISTILLED, "evaluation", "export", "report")
"""Parts of a run in order, among which kills are spread."""
SLOWEST = 900
"""Seconds after which a start that neither ended nor was killed counts as stuck."""


def soak_settings(folder: Path) -> Settings:
    """A run with everything that is kept on disk: responses, signals, texts of the draft, LayerSkip's chance."""
    settings = tiny_settings(folder, name="run")
    settings.target.layerskip.enabled = True
    responses = settings.teacher.responses
    responses.source, responses.max_new_tokens, responses.batch_size, responses.refresh_every = "target", 8, 4, 4
    own = DraftSettings(name="own-texts", on_policy=0.5, divergence="tv", kl_first=0.5, seed=3)
    settings.drafts.append(own)
    settings.trainer.validate_every = INTERVAL
    evaluation = settings.evaluation
    evaluation.prompts = evaluation.accuracy_prompts = 4
    evaluation.decode_prompts, evaluation.max_new_tokens = 1, 6
    evaluation.temperatures, evaluation.draft_lengths = [0.0], [2]
    settings.export.draft_length = 2  # else the one measured fastest, and time is not the same twice
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

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self.phase = phase
        self.write(phase=phase)

    def write(self, **event: Any) -> None:
        os.write(self.file, (json.dumps(event) + "\n").encode())

    def moment(self, what: str) -> None:
        """Something that can be interrupted is about to happen."""
        if not self.phase:
            return
        self.write(moment=what)
        if self.kill is None or self.ending or PHASES.index(self.phase) < PHASES.index(self.kill.phase):
            return
        self.moments += 1
        if self.phase != self.kill.phase or self.moments == self.kill.moment:
            self.ending = True
            if self.kill.delay:
                threading.Thread(target=lambda: (time.sleep(self.kill.delay), end()), daemon=True).start()
            else:
                end()

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


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watch(witness: Witness, *, measured: bool) -> None:
    """Puts the witness into the code of this process, which will not live on."""

    def before(place: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(place, name)

        def noted(*args: Any, **options: Any) -> Any:
            note(*args, **options)
            return original(*args, **options)

        setattr(place, name, noted)

    plan = run_stages.plan_stages

    def planned(bench: Any) -> Any:
        return [(stage, title, made(stage, make)) for stage, title, make in plan(bench)]

    def made(stage: str, make: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda key: (witness.enter(stage if stage in STAGES[:2] else f"{stage}: signals"), make(key))[1]

    run_stages.plan_stages = planned  # type: ignore[assignment]
    before(pipeline, "measure", lambda *_: witness.enter("evaluation") if measured else os._exit(0))
    before(pipeline, "export_draft", lambda *_, **__: witness.enter("export"))
    before(pipeline, "write_report", lambda *_: witness.enter("report"))

    def started(progress: ProgressLines, trainer: Any, module: Any) -> None:
        witness.enter(progress.name)
        witness.write(start=progress.name, step=trainer.global_step, steps=trainer.max_steps)

    def stepped(progress: ProgressLines, trainer: Any, module: Any, *_: Any) -> None:
        witness.write(stage=progress.name, step=trainer.global_step)
        witness.moment(f"step {trainer.global_step}")

    before(ProgressLines, "on_train_start", started)
    before(ProgressLines, "on_train_batch_end", stepped)
    sys.addaudithook(witness.audit)


def start(
    settings: Settings, trace: Path, kill: Kill | None = None, *, measured: bool = True
) -> tuple[int, list[dict[str, Any]], str]:
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
        try:
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                sys.stdout = sys.stderr = out
                watch(Witness(Path(settings.output_dir) / settings.name, trace, kill), measured=measured)
                pipeline.run_pipeline(settings, Console(file=out, width=160))
                status = 0
        except BaseException:
            import traceback

            log.open("a").write(traceback.format_exc())
        finally:
            os._exit(status)
    deadline = time.monotonic() + SLOWEST
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"stuck: {log.read_text()[-2000:]}")
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(found[1])
    events = [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []
    return code, events, log.read_text()


Start = Callable[[Kill | None], tuple[int, list[dict[str, Any]], str]]
"""`start` of the run that is killed."""


# -- kills ------------------------------------------------------------------------------------------------------------


def moments(events: list[dict[str, Any]]) -> dict[str, list[str]]:
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
    phases: list[str] = []
    known = [phase for phase in PHASES if found[phase]]
    while len(phases) < number:
        phases += chance.sample(known, min(len(known), number - len(phases)))
    kills = []
    for phase in sorted(phases, key=PHASES.index):
        late = PHASES.index(phase) >= PHASES.index("evaluation")  # a delay could let the run end
        delay = 0.0 if late or chance.random() < 0.5 else chance.uniform(0, 0.03)
        steps = [number for number, what in enumerate(found[phase], 1) if what.startswith("step ")]
        moment = chance.choice(steps) if steps and chance.random() < 0.5 else chance.randint(1, len(found[phase]))
        kills.append(Kill(phase, moment, delay))
    return kills


@dataclass
class Ledger:
    """Steps of each stage over all starts: what was reached, what was lost.

    Attributes:
        reached: The last step of stages whose training a kill ended, and how many there should be.
        faults: What must not be.
    """

    reached: dict[str, tuple[int, int]] = field(default_factory=dict)
    resumed: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def take(self, events: list[dict[str, Any]]) -> Iterator[str]:
        """Goes through the events of a start; yields how each interrupted stage went on."""
        steps = 0
        for event in events:
            if "start" in event:
                stage, steps = event["start"], event["steps"]
                if stage in self.reached:
                    before, _ = self.reached.pop(stage)
                    lost = before - event["step"]
                    if not 0 <= lost <= INTERVAL:
                        self.faults.append(f"{stage}: killed at step {before}, went on from {event['step']}")
                    yield f"{stage} from {event['step']}"
                self.reached[stage] = (event["step"], steps)
            elif "stage" in event:
                self.reached[event["stage"]] = (event["step"], steps)

    def close(self) -> None:
        """Stages that were not taken up again had to be at their end."""
        for stage, (step, steps) in self.reached.items():
            if step != steps:
                self.faults.append(f"{stage}: ended at step {step} of {steps}")


def kill_all(begin: Start, kills: list[Kill], table: Table) -> list[str]:
    """Starts and kills the run as often as wanted, lets it end, and returns the faults."""
    ledger, rows = Ledger(), []
    for number, kill in enumerate([*kills, None], 1):
        code, events, log = begin(kill)
        went_on = ", ".join(ledger.take(events))
        if rows:
            rows[-1].append(went_on or "no training was cut short")
        wanted = 0 if kill is None else -signal.SIGKILL
        if code != wanted:
            ledger.faults.append(f"start {number} ended with {code}, wanted {wanted}: {log[-1500:]}")
            break
        if kill is not None:
            phase = [event["phase"] for event in events if "phase" in event][-1]
            last = [event["moment"] for event in events if "moment" in event][-1]
            steps = [event["step"] for event in events if event.get("stage") == phase]
            delay = f" + {kill.delay * 1000:.0f} ms" if kill.delay else ""
            rows.append([str(number), phase, last + delay, str(steps[-1]) if steps else "–"])
    else:
        ledger.close()
    for row in rows:
        table.add_row(*row)
    return ledger.faults


# -- damage -----------------------------------------------------------------------------------------------------------

TEXTS = (".json", ".jsonl")


def truncate(path: Path) -> None:
    """Half of the file is lost."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def alter(path: Path) -> None:
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
    if path.suffix in TEXTS:
        place = next(i for i in [*range(middle, len(data)), *range(middle)] if chr(data[i]).isdigit())
        data[place] = ord("1") if data[place] == ord("0") else data[place] - 1
    else:
        data[middle] ^= 1
    path.write_bytes(data)


@dataclass
class Victim:
    """A file to be damaged.

    Attributes:
        what: it is.
        path: below the run's folder; a pattern, of which the last match is taken.
        again: the stage that is to be made once more, because it reads the file.
        stop: stop that stage in its training first, so that its checkpoints are there.
        says: what the next start has to say.
    """

    what: str
    path: str
    again: str = ""
    stop: bool = False
    says: str = ""


WRITTEN = "not as it was written"
VICTIMS = [
    Victim("weights of a stage", "distillspec/model.safetensors", says=WRITTEN),
    Victim("newest checkpoint", "work/checkpoints-adaspec/step-*.ckpt", "adaspec", stop=True, says="is damaged"),
    Victim("exported weights", "export/model.safetensors", says=WRITTEN),
    Victim("cached signal of the target", "work/signals/target_hidden_train.npy", "adaspec"),
    Victim("cached losses of the reference", "work/signals/distillspec_forward_kl.npy", "adaspec"),
    Victim("note of a cached signal", "work/signals/target_hidden_train.json", "adaspec"),
    Victim("cached responses", "work/responses/train.jsonl", "adaspec"),
    Victim("note of the responses", "work/responses/train.json", "adaspec"),
    Victim("weights of the target", "target/model.safetensors", says=WRITTEN),
    Victim("configuration of a stage", "initial/config.json", says=WRITTEN),
    Victim("fingerprint of checkpoints", "work/checkpoints-adaspec/fingerprint.json", "adaspec", stop=True),
    Victim("exported configuration", "export/config.json", says=WRITTEN),
    Victim("report", "report.json", says=WRITTEN),
    Victim("note of the report", "work/report.json"),
]


def damage_all(
    begin: Start, victims: list[Victim], events: list[dict[str, Any]], whole: Path, run: Path, table: Table
) -> list[str]:
    """Damages one file after the other in a finished run, starts it again, and returns the faults."""
    faults: list[str] = []
    late = Kill("adaspec", moments(events)["adaspec"].index(f"step {2 * INTERVAL + 1}") + 1)
    for victim in victims:
        for how in (truncate, alter):
            if victim.again:
                (run / f"work/{victim.again}.json").unlink()
            if victim.stop:
                begin(late)
            path = sorted(run.glob(victim.path))[-1]
            how(path)
            code, again, log = begin(None)
            trained = [event["start"] for event in again if "start" in event]
            found = [] if code == 0 else [f"ended with {code}: {log[-1500:]}"]
            found += differences(whole, run)
            if victim.says not in log:
                found.append(f"did not say {victim.says!r}")
            damage = {"truncate": "truncated", "alter": "altered"}[how.__name__]
            table.add_row(victim.what, damage, ", ".join(trained) or "–", "used or lost" if found else "not used")
            faults += [f"{victim.what}, {damage}: {fault}" for fault in found]
            if code:
                return faults
    return faults


# -- the end ----------------------------------------------------------------------------------------------------------

TIMED = ("README.md", "speculation_profile.json")
"""Files of an export that hold measured speeds."""


def differences(whole: Path, run: Path) -> list[str]:
    """What the two runs do not have in common, bit by bit, and what should have been cleared away."""
    found = []
    names = {*_kept(whole), *_kept(run)}
    for name in sorted(names):
        one, other = whole / name, run / name
        if not (one.exists() and other.exists()):
            found.append(f"{name} is only in one of the runs")
        elif _content(one) != _content(other):
            found.append(f"{name} differs")
    for stage in STAGES:
        one_record, other_record = (RunDir(folder).record(stage) for folder in (whole, run))
        if one_record is None or other_record is None:
            found.append(f"{stage} is not finished")
        elif (one_record.history, one_record.account) != (other_record.history, other_record.account):
            found.append(f"the records of {stage} differ")
    reports = [json.loads((f / "report.json").read_text()) for f in (whole, run) if (f / "report.json").exists()]
    alphas = [[draft["offline_alpha"] for draft in report["drafts"]] for report in reports]
    if alphas and alphas[0] != alphas[-1]:
        found.append(f"offline alpha differs: {alphas}")
    left = [p for pattern in (".tmp-*", "checkpoints-*", ".export*") for p in run.rglob(pattern)]
    return found + [f"{path.relative_to(run)} is left behind" for path in left]


def _content(path: Path) -> bytes | list[bytes]:
    """A file's bytes; lines that may come in any order, sorted."""
    return sorted(path.read_bytes().splitlines()) if path.suffix == ".jsonl" else path.read_bytes()


def _kept(run: Path) -> list[Path]:
    """Files that have to be the same: weights, configurations, tokenizers, signals, responses, the export."""
    folders = [RunDir(run).path(stage) for stage in STAGES] + [
        run / "export",
        run / "work/signals",
        run / "work/responses",
    ]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name not in TIMED]
    return [path.relative_to(run) for path in files]


def soak(folder: Path, seed: int, number: int, victims: list[Victim], console: Console, *, measured: bool) -> list[str]:
    """All of it; returns the faults, empty if there are none."""
    whole, killed = soak_settings(folder / "whole"), soak_settings(folder / "killed")
    code, events, log = start(whole, folder / "whole.jsonl", measured=measured)
    if code:
        return [f"the undisturbed run ended with {code}: {log}"]
    found = moments(events)
    console.print(f"{sum(map(len, found.values()))} moments in {sum(map(bool, found.values()))} phases, seed {seed}")
    kills = Table("", "killed in", "at", "step", "next start", title=f"{number} kills", title_justify="left", box=None)

    def begin(kill: Kill | None) -> tuple[int, list[dict[str, Any]], str]:
        return start(killed, folder / "killed.jsonl", kill, measured=measured)

    faults = kill_all(begin, draw(found, number, random.Random(seed)), kills)
    console.print(kills)
    runs = folder / "whole/run", folder / "killed/run"
    faults = faults or differences(*runs)
    if faults:
        return faults
    damages = Table("file", "damage", "trained again", "verdict", title="\nDamage", title_justify="left", box=None)
    faults = damage_all(begin, victims, events, *runs, damages)
    console.print(damages)
    return faults


def main() -> int:
    """Parses the arguments; returns 1 if there were faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments (default 0)")
    parser.add_argument("--kills", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--short", action="store_true", help="without the evaluation, and one damaged file only")
    arguments = parser.parse_args()
    victims = VICTIMS[:1] if arguments.short else VICTIMS
    torch.set_num_threads(1)
    console, began = Console(width=150), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        measured = not arguments.short
        faults = soak(Path(folder), arguments.seed, arguments.kills, victims, console, measured=measured)
    console.print(f"{time.monotonic() - began:.0f} s", highlight=False)
    for fault in faults:
        console.print(f"[red]FAULT[/red] {fault}", highlight=False, markup=True)
    if not faults:
        console.print(
            f"sound: after {arguments.kills} kills and {2 * len(victims)} damaged files the run ended bit by bit as an "
            f"undisturbed one; no training lost more than {INTERVAL} steps",
            highlight=False,
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
