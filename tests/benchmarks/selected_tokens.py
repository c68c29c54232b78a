"""Which kinds of tokens AdaSPEC selects: the share of each kind among all response tokens and among the selected ones.

    python tests/benchmarks/selected_tokens.py RUN [--reference distillspec] [--drafts initial adaspec-k40] [--k 0.4]

Delta L is taken on the test examples of a finished run, by forward KL in float32.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from datasets import load_from_disk
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from distill.losses.selection import top_k


def kind(token: str) -> str:
    """A number holds a digit; a word a letter; what is left are signs and line breaks."""
    if any(char.isdigit() for char in token):
        return "numbers"
    return "words" if any(char.isalpha() for char in token) else "signs"


@torch.no_grad()
def divergence(target: PreTrainedModel, draft: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """KL(p || q) at every label token, ``[label tokens]``, in nats."""
    at = labels[0, 1:] >= 0
    p, q = (model(input_ids=ids).logits[0, :-1][at].float().log_softmax(-1) for model in (target, draft))
    return (p.exp() * (p - q)).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--reference", default="distillspec")
    parser.add_argument("--drafts", nargs="+", default=["initial", "adaspec-k40"])
    parser.add_argument("--k", type=float, default=0.4)
    args = parser.parse_args()

    names = ["target", args.reference, *args.drafts]
    models = {name: AutoModelForCausalLM.from_pretrained(args.run / name, dtype=torch.float32).eval() for name in names}
    tokenizer = AutoTokenizer.from_pretrained(args.run / "target")
    kinds: list[str] = []
    losses: dict[str, list[Tensor]] = {name: [] for name in names[1:]}
    for row in load_from_disk(str(args.run / "work/corpus/test")):
        ids, labels = (torch.tensor(row[column])[None] for column in ("input_ids", "labels"))
        kinds += [kind(tokenizer.decode([token])) for token in labels[0, 1:].tolist() if token >= 0]
        for name in names[1:]:
            losses[name].append(divergence(models["target"], models[name], ids, labels))

    table = Table("tokens", *("all", *args.drafts))
    chosen = [top_k(torch.cat(losses[d]) - torch.cat(losses[args.reference]), args.k).tolist() for d in args.drafts]
    counts = [Counter(kinds), *(Counter(kinds[i] for i in rows) for rows in chosen)]
    for name in ("numbers", "words", "signs"):
        table.add_row(name, *(f"{count[name] / count.total():.1%}" for count in counts))
    Console().print(table, f"{len(kinds):,} response tokens")


if __name__ == "__main__":
    main()
