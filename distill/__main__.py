"""``draftsmith distill --config C``: from data to an exported, measured draft."""

import os
import shlex
import sys

from decode.commands.cli import config_paths, parse, run_main, take_flag
from decode.errors import UserError
from decode.progress import output_console
from distill.config import AblateSettings, Settings

ABOUT = """Trains drafts for a target: target -> student -> drafts (DistillSpec; with a reference AdaSPEC), exports the
one that export.choose names and measures all of them, under <output_dir>/<name>/. Stages whose inputs have not changed
are skipped, and an interrupted run continues where it was. --drafts.NAME.KEY VALUE changes one draft. Where
trainer.devices means several GPUs of this machine, a process is started for each."""

EXAMPLES = """\
  draftsmith distill --config configs/quickstart.yaml
  draftsmith distill --config C --dry-run         # the whole run with tiny random models, without a network
  draftsmith distill --config C --estimate        # tokens, memory and time of the training, from a few of its steps
  draftsmith distill --config C --show-example    # one training example with its label mask
  draftsmith distill --config configs/quickstart.yaml --name wider --student.architecture.hidden-size 96
  draftsmith distill --config configs/quickstart.yaml --name k20 --drafts.adaspec.k 0.2
  draftsmith distill check-engine --config C --teacher.signal vllm    # vLLM's hidden states beside transformers'
  draftsmith distill ablate --config configs/ablation.yaml    # objectives and kinds of drafts over several seeds"""

ABLATE = """Trains each of the drafts with several seeds, and compares them with the first one of the same seed by
offline alpha on the same texts. Finished drafts are kept; the table grows with each kind of draft. Without --config,
configs/ablation.yaml."""

FOREIGN = {"bench", "probes", "ablation"}
"""Sections of a shared configuration that belong to other commands."""


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments and run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        raise UserError("give a configuration, such as --config configs/quickstart.yaml; --help explains every key")
    if argv[0] == "ablate":
        return _ablate(argv[1:])
    modes = [argv.pop(0)] if argv[0] == "check-engine" else []
    modes += [flag for flag in ("--dry-run", "--estimate", "--show-example") if take_flag(argv, flag)]
    try:
        settings = read_settings(argv)
    except UserError as error:
        if not {"WORLD_SIZE", "SLURM_NTASKS"} & os.environ.keys():
            raise
        from distill import ranks

        ranks.refuse(error)
    from distill import pipeline, ranks, rehearse

    for mode in modes:
        ranks.check_alone(f"draftsmith distill {mode}")
    if ranks.environment().world_size() == 1:  # several processes tell each other what is refused in one of them
        settings.validate()
    if "check-engine" in modes:
        return pipeline.check_command(settings, output_console())
    if "--estimate" in modes:
        rehearse.estimate(settings, output_console())
        return None
    if "--dry-run" in modes:
        settings = rehearse.shrink(settings)
    if "--show-example" in modes:
        return pipeline.show_example(settings)
    ranks.restart(settings.trainer, "distill", argv)
    pipeline.run_pipeline(settings, show="--dry-run" not in modes)
    if "--dry-run" in modes:
        command = f"draftsmith distill {shlex.join(argv)}"
        print(f"\nDry run finished; its models are random, so no results are shown. To train: {command}")
    return None


def read_settings(argv: list[str]) -> Settings:
    """The settings that the arguments of the command mean."""
    return parse(Settings, argv, prog="draftsmith distill", description=ABOUT, examples=EXAMPLES, foreign=FOREIGN)


def _ablate(argv: list[str]) -> None:
    if not (config_paths(argv) or "-h" in argv or "--help" in argv):
        print("without --config: configs/ablation.yaml", file=sys.stderr)
        argv = ["--config", "configs/ablation.yaml", *argv]
    foreign = FOREIGN - {"ablation"}
    settings = parse(AblateSettings, argv, prog="draftsmith distill ablate", description=ABLATE, foreign=foreign)
    from distill import ranks

    ranks.check_alone("draftsmith distill ablate")
    from distill.ablation import ablate

    ablate(settings)


if __name__ == "__main__":
    sys.exit(run_main(main))
