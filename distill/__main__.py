"""``python -m distill --config C``: from data to a measured, exported draft."""

from __future__ import annotations

import sys

from decode.commands.command_line import parse, take_flag
from decode.commands.exit_status import run_main

DESCRIPTION = """Trains a draft model for a target: target -> initial draft -> reference (DistillSpec) -> draft
(AdaSPEC), measures all drafts and exports the last, under <output_dir>/<name>/. Stages whose inputs have not changed
are skipped, and an interrupted run continues where it was. ``python -m distill bench --config C`` measures how fast
AdaSPEC trains here (its own settings: --speed.*). ``python -m distill ablate --config configs/ablation.yaml`` compares
variations of AdaSPEC over several seeds. Further switches: --dry-run (the whole run with tiny random
models of the same architectures, no network, under two minutes), --show-example (print one training example with
its label mask, then stop), --tracker wandb|csv|tensorboard|none (short for --tracker.kind). Grids of settings
are swept by W&B: configs/sweeps/distill.yaml."""

FOREIGN = {"bench", "probes", "ablation"}
"""Sections of a shared configuration that belong to the other commands."""


def main(argv: list[str] | None = None) -> None:
    """Parses the arguments and runs.

    Raises:
        UserError: Anything in settings, data or models that cannot be used.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:
        return _bench(argv[1:])
    if argv[:1] == ["ablate"]:
        return _ablate(argv[1:])
    dry_run, show = take_flag(argv, "--dry-run"), take_flag(argv, "--show-example")
    argv = [item.replace("--tracker", "--tracker.kind", 1) if _is_tracker(item) else item for item in argv]
    from distill.config.settings import Settings

    settings = parse(Settings, argv, prog="python -m distill", description=DESCRIPTION, foreign=FOREIGN)
    from distill.pipeline.runner import run_pipeline, show_example

    if dry_run:
        from distill.pipeline.dry_run import shrink

        settings = shrink(settings)
    if show:
        show_example(settings)
    else:
        run_pipeline(settings)


def _bench(argv: list[str]) -> None:
    from distill.experiments.benchmark import TrainingBenchSettings, run

    about = """Measures AdaSPEC's training steps and the memory of its loss against a straightforward implementation
over Hugging Face's Trainer, on the pair of a configuration: its trained run if there is one, else random weights."""
    argv = [item.replace("--json", "--speed.json", 1) if item.split("=")[0] == "--json" else item for item in argv]
    run(parse(TrainingBenchSettings, argv, prog="python -m distill bench", description=about, foreign=FOREIGN))


def _ablate(argv: list[str]) -> None:
    from distill.experiments.ablate import AblateSettings, ablate

    about = """Trains AdaSPEC and each of `comparisons`, a variation of it, with several seeds, and compares them with
DistillSpec of the same seed by offline alpha on the same texts. Target, initial draft and reference are taken from a
run beside it where they are the same. Finished drafts are kept; the table grows with each new one."""
    ablate(
        parse(AblateSettings, argv, prog="python -m distill ablate", description=about, foreign=FOREIGN - {"ablation"})
    )


def _is_tracker(item: str) -> bool:
    return item == "--tracker" or item.startswith("--tracker=")


if __name__ == "__main__":
    sys.exit(run_main(main))
