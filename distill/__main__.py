"""``python -m distill --config C``: from data to a measured, exported draft."""

import importlib
import sys
from dataclasses import fields

import yaml

from decode.commands.parsing import config_paths, parse, run_main, take_flag
from decode.errors import UserError

ABOUT = """Trains drafts for a target: target -> student -> drafts (DistillSpec; with a reference AdaSPEC), measures all
of them and exports the one that export.choose names, under <output_dir>/<name>/. Stages whose inputs have not changed
are skipped, and an interrupted run continues where it was. Flags that are not settings: --dry-run (the whole run with
tiny random models of the same architectures, no network, under two minutes), --show-example (print one training example
with its label mask, then stop), --estimate (run a few steps of every part with the run's own models and data, and print
tokens, memory and time of the whole), --tracker wandb|csv|tensorboard|none (short for --tracker.kind),
--drafts.NAME.KEY VALUE (change one draft)."""

EXAMPLES = """\
  python -m distill --config configs/quickstart.yaml
  python -m distill --config configs/quickstart.yaml --name wider --student.architecture.hidden-size 96 --dry-run
  python -m distill --config configs/quickstart.yaml --show-example
  python -m distill --config configs/quickstart.yaml --name k20 --drafts.adaspec.k 0.2
  python -m distill bench                                     how fast AdaSPEC trains here; own settings: --speed.*
  python -m distill ablate --config configs/ablation.yaml     variations of AdaSPEC over several seeds
  python -m distill design --config configs/quickstart.yaml   which draft to train: costs, short trials
  wandb sweep configs/sweeps/distill.yaml                     grids of settings"""

BENCH = """Measures AdaSPEC's training steps against a straightforward implementation over Hugging Face's Trainer, with
the models of a configuration as they are before training. Without --config, configs/quickstart.yaml."""

ABLATE = """Trains each of the drafts with several seeds, and compares them with the first one of the same seed by
offline alpha on the same texts. Target, student and references are taken from another run where they are the same.
Finished drafts are kept; the table grows with each new one. Without --config, configs/ablation.yaml."""

DESIGN = """Compares drafts that could be trained for a target: each is timed with random weights, which gives the
acceptance rate that it needs to gain; those that can gain are trained briefly, the better half again for twice the
steps. Writes a table and winner.yaml, which a second --config of python -m distill reads, to <name>-design. Without
--config, configs/quickstart.yaml."""

GPU_REPORT = """Measures on one GPU, in about eight minutes, the tests that need one, training of drafts (beside Hugging
Face's Trainer) and of heads, the loss in chunks, and decoding of a target of 1.7 billion random weights; writes
docs/gpu.md. Takes no configuration. A part that fails is named there, and the others go on."""

FOREIGN = {"bench", "probes", "ablation", "design", "speed"}  # sections of a shared configuration of other commands
TRACKER = {"tracker": "tracker.kind"}


EXPERIMENTS = {
    "bench": ("speed", "TrainingBenchSettings", "run", "configs/quickstart.yaml", BENCH),
    "ablate": ("ablation", "AblateSettings", "ablate", "configs/ablation.yaml", ABLATE),
    "design": ("design", "DesignRunSettings", "design", "configs/quickstart.yaml", DESIGN),
    "gpu-report": ("gpu_report", "GpuReportSettings", "gpu_report", "", GPU_REPORT),
}
"""Commands: a module of `distill.experiments`, its settings, its function, the usual configuration, and the help."""


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments and run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    from distill.ranks import check_alone

    if argv and argv[0] in EXPERIMENTS:
        name = argv.pop(0)
        module, settings_class, function, config, about = EXPERIMENTS[name]
        check_alone(f"python -m distill {name}")
        experiment = importlib.import_module(f"distill.experiments.{module}")
        if config and not (config_paths(argv) or "-h" in argv or "--help" in argv):
            print(f"without --config: {config}", file=sys.stderr)
            argv = ["--config", config, *argv]
        kind, prog = getattr(experiment, settings_class), f"python -m distill {name}"
        foreign = FOREIGN - {section.name for section in fields(kind)}
        aliases = TRACKER | ({"json": "speed.json"} if name == "bench" else {})
        settings = parse(kind, argv, prog=prog, description=about, foreign=foreign, aliases=aliases)
        getattr(experiment, function)(settings)
        return
    if not argv:
        raise UserError("give a configuration, such as --config configs/quickstart.yaml; --help all explains every key")
    dry_run, show = take_flag(argv, "--dry-run"), take_flag(argv, "--show-example")
    measure = take_flag(argv, "--estimate")
    if dry_run or measure:
        check_alone(f"python -m distill {'--dry-run' if dry_run else '--estimate'}")
    from distill.config.run import Settings

    options = take_draft_options(argv)
    settings = parse(
        Settings, argv, prog="python -m distill", description=ABOUT, examples=EXAMPLES, foreign=FOREIGN, aliases=TRACKER
    )
    for option, (name, key, value) in options.items():
        found = next((draft for draft in settings.drafts if draft.name == name), None)
        if found is None or key not in vars(found):
            known = [draft.name for draft in settings.drafts] if found is None else list(vars(found))
            raise UserError(f"{option}: {name if found is None else key!r} is not one of {', '.join(known)}")
        setattr(found, key, yaml.safe_load(value))
    from distill.pipeline import run_pipeline, show_example

    if measure:
        from decode.progress import output_console
        from distill.estimate import estimate

        estimate(settings, output_console())
        return
    if dry_run:
        from distill.dry_run import shrink

        settings = shrink(settings)
    if show:
        show_example(settings)
    else:
        run_pipeline(settings)


def take_draft_options(argv: list[str]) -> dict[str, tuple[str, str, str]]:
    """Remove the options ``--drafts.NAME.KEY VALUE`` from the arguments; return name, key and value of each."""
    found, rest = {}, list(argv)
    argv.clear()
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        parts = option.split(".")
        if parts[0] == "--drafts" and len(parts) == 3 and (equals or rest):
            found[option] = parts[1], parts[2].replace("-", "_"), value if equals else rest.pop(0)
        else:
            argv.append(option + equals + value)
    return found


if __name__ == "__main__":
    sys.exit(run_main(main))
