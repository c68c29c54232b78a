"""``python -m probes --config C``: probes for every exit layer, the best exit, and self-speculation measured."""

import sys

from decode.commands.parsing import parse, run_main, take_flag
from decode.errors import UserError

ABOUT = """Trains linear probes that predict, at every layer of a run's target, whether the token drafted there will be
accepted; chooses exit layer, stop rule and threshold by predicted speedup; confirms the best by real runs; and writes
runs/<name>/probes, report.json and probes.html. The target is trained first where it is not there or its settings have
changed. The settings of this command are those under probes; all others are those of python -m distill. Flags that are
not settings: --dry-run (all of it in miniature, with a tiny random target of the same family and no network),
--tracker wandb|csv|tensorboard|none (short for --tracker.kind)."""

EXAMPLES = """\
  python -m probes --config configs/quickstart.yaml
  python -m probes --config configs/quickstart.yaml --probes.layers 1,2,3 --probes.confirm 1
  python -m probes --config configs/layerskip-llama.yaml --dry-run"""


def main(argv: list[str] | None = None) -> None:
    """Parses the arguments and runs."""
    from probes.settings import ProbesSettings

    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        raise UserError("give a configuration, such as --config configs/quickstart.yaml; --help all explains every key")
    dry_run = take_flag(argv, "--dry-run")
    foreign, aliases = {"bench", "ablation", "design", "speed"}, {"tracker": "tracker.kind"}
    settings = parse(
        ProbesSettings,
        argv,
        prog="python -m probes",
        description=ABOUT,
        examples=EXAMPLES,
        foreign=foreign,
        aliases=aliases,
    )
    if dry_run:
        from distill.ranks import check_alone
        from probes.settings import shrink

        check_alone("python -m probes --dry-run")
        settings = shrink(settings)
    from probes.pipeline import run_probes

    run_probes(settings)


if __name__ == "__main__":
    sys.exit(run_main(main))
