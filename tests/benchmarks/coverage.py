"""How often what is called a 95 % interval holds the true value, and how often p is below 0.05 where nothing differs.

    python tests/benchmarks/coverage.py [--draws 1000]

The texts of prompts are drawn as decoding makes them (`simulated_prompts`). Beside this project's intervals stands the
percentile bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from decode.measure.report import markdown_table

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from simulated_prompts import BOOTSTRAP, INTERVALS, NULLS, covered, rejected

PROMPTS = 8, 24, 80


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=1000)
    draws = parser.parse_args().draws
    tables = {
        "95 % interval holds the true value": (INTERVALS | BOOTSTRAP, covered),
        "p < 0.05 without a difference": (NULLS, rejected),
    }
    for title, (kinds, share) in tables.items():
        rows = [[name, *(f"{share(kind, n, draws):.1%}" for n in PROMPTS)] for name, kind in kinds.items()]
        print(markdown_table([f"{title}, {draws} draws", *(f"{n} prompts" for n in PROMPTS)], rows), end="\n\n")


if __name__ == "__main__":
    main()
