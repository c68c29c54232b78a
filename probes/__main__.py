"""``draftsmith probe --config C``: probes for every exit layer, the best exit, and self-speculation measured."""

import sys

from decode.commands.cli import parse, run_main, take_flag
from decode.errors import UserError
from probes.settings import ProbesSettings, shrink

ABOUT = """Trains linear probes that predict, at every layer of a run's target, whether the token drafted there will be
accepted; chooses exit layer, stop rule and threshold of each method by real rounds; and writes runs/<name>/probes,
report.json and probes.html. The target is trained first where it is not there or its settings have changed. This
command's settings are those under probes, all others those of draftsmith distill; --dry-run does all of it in
miniature, with a tiny random target of the same family and no network."""

EXAMPLES = """\
  draftsmith probe --config configs/quickstart.yaml --probes.layers 1,2,3 --probes.confirm 1
  draftsmith probe --config configs/layerskip-llama.yaml --dry-run"""


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments and run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        raise UserError("give a configuration, such as --config configs/quickstart.yaml; --help explains every key")
    dry_run, given = take_flag(argv, "--dry-run"), list(argv)
    foreign = {"bench", "ablation"}
    settings = parse(
        ProbesSettings, argv, prog="draftsmith probe", description=ABOUT, examples=EXAMPLES, foreign=foreign
    )
    from distill import ranks

    if dry_run:
        ranks.check_alone("draftsmith probe --dry-run")
        settings = shrink(settings)
    from probes.pipeline import run_probes

    if ranks.environment().world_size() == 1:
        settings.validate()
    ranks.restart(settings.trainer, "probes", given)
    run_probes(settings, results=not dry_run)
    if dry_run:
        print("\nDry run finished; its models are random, so no results are shown")


if __name__ == "__main__":
    sys.exit(run_main(main))
