"""``make soak``: SIGKILL at random moments of a whole tiny run, then cut files; it ends the same, bit by bit.

Moments are every training step and every change of a file below the run's folder. A run that nothing disturbs tells how
many there are. The same run is killed at moments drawn from the seed and started again. Each start is a forked process.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tiny_run import tiny_settings

import distill.results.evaluate  # noqa: F401  (the pipeline loads it late)
from distill import pipeline
from distill.config import DraftSettings, EvaluationSettings, Settings
from distill.config.teacher import ResponseSettings
from distill.training.trainer import ProgressLines

TIMED = ("README.md", "speculation_profile.json", "generation_config.json")
"""Files of an export that depend on measured speeds."""
CUT = (
    "distillspec/model.safetensors", "initial/config.json", "target/model.safetensors", "export/model.safetensors",
    "work/signals/*.arrow", "work/responses/*.jsonl", "work/corpus/**/*.arrow",
)  # fmt: skip


def soak_settings(folder: Path, measured: bool) -> Settings:
    """A run with everything that is kept on disk: responses, signals, texts of the draft, LayerSkip's chance."""
    settings = tiny_settings(folder, name="run", evaluation=False)
    own = DraftSettings(name="own-texts", on_policy=0.5, divergence="tv", kl_first=0.5, seed=3)
    settings.target.layerskip.enabled, settings.export.choose = True, "adaspec"
    settings.drafts.append(own)
    settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=8, batch_size=4, refresh_every=4)
    if measured:
        few = {"prompts": 4, "accuracy_prompts": 4, "max_new_tokens": 4, "decode_prompts": 1}
        settings.evaluation = EvaluationSettings(temperatures=[0.0], draft_lengths=[2], **few)
    return settings


def start(settings: Settings, kill_at: int = 0) -> tuple[int, int]:
    """Runs the pipeline in a process of its own; returns its status (negative: a signal) and its moments."""
    folder = os.path.abspath(Path(settings.output_dir) / settings.name)
    counter, log = Path(f"{folder}.moments"), Path(f"{folder}.log")
    counter.parent.mkdir(parents=True, exist_ok=True)
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), counter.stat().st_size
    moments, stepped = os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), ProgressLines.on_train_batch_end

    def moment() -> None:
        os.write(moments, b".")
        if os.lseek(moments, 0, os.SEEK_CUR) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink")
        changes |= event == "open" and bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if changes and os.path.abspath(str(arguments[0])).startswith(folder + os.sep):
            moment()

    with log.open("w") as out:
        try:
            ProgressLines.on_train_batch_end = lambda *given: (stepped(*given), moment())  # type: ignore[method-assign,assignment,func-returns-value]
            sys.addaudithook(audit)
            pipeline.run_pipeline(settings, Console(file=out, width=160))
        except BaseException:
            out.write(traceback.format_exc())
            out.flush()
            os._exit(70)
    os._exit(0)


def content(run: Path) -> dict[str, Any]:
    """What has to be alike of two runs, and what should have been cleared away."""
    files = [path for path in run.rglob("*") if path.suffix in (".safetensors", ".arrow", ".json")]
    made = {str(path.relative_to(run)): path for path in files if path.name not in TIMED and path.parent != run}
    kept = {name: path.read_bytes() for name, path in made.items() if not name.startswith("work/") or ".arrow" in name}
    return kept | {str(path.relative_to(run)): b"" for name in (".tmp-*", "checkpoints-*") for path in run.rglob(name)}


def main(seed: int, kills: int, short: bool) -> list[str]:
    """Does all of it; returns the faults."""
    torch.set_num_threads(1)
    chance, faults = random.Random(seed), list[str]()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        settings = [soak_settings(Path(name, part), not short) for part in ("undisturbed", "killed")]
        runs = [Path(each.output_dir, each.name) for each in settings]
        status, count = start(settings[0])
        wanted, ended = content(runs[0]), status == 0
        for number in range(kills if ended else 0):
            status, moments = start(settings[1], chance.randint(1, 2 * count // kills + 10))
            print(f"{number + 1:>3} ended with {status} after {moments} moments", flush=True)
            ended &= status in (0, -signal.SIGKILL)
        for pattern in ("", *CUT):
            for path in sorted(runs[1].glob(pattern))[:1] if pattern else ():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
                (runs[1] / "work/adaspec.json").unlink(missing_ok=True)  # it reads what is kept for it
            ended = ended and start(settings[1])[0] == 0
            there = content(runs[1])
            different = [file for file in sorted(wanted | there) if wanted.get(file) != there.get(file)]
            faults += [f"{file} differs or is left behind after {pattern or 'kills'}" for file in different]
        if not ended:
            faults.append("a start failed: " + "".join(Path(f"{run}.log").read_text()[-1500:] for run in runs))
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, count in (("--seed", 0), ("--kills", 20)):
        parser.add_argument(name, type=int, default=count)
    parser.add_argument("--short", action="store_true", help="without the evaluation")
    given = parser.parse_args()
    wrong = main(**vars(given))
    print("\n".join(wrong) or f"sound: after {given.kills} kills and cut files it ended as undisturbed")
    sys.exit(bool(wrong))
