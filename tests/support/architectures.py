"""What works for each architecture of `families.ARCHITECTURES`; run as a script it writes the tables of docs/targets.md."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from families import ARCHITECTURES, build_architecture
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.api import Model
from decode.models.check import open_runner
from decode.models.fast.forward import FastRunner, self_speculating
from decode.models.heads.eagle import output_head
from distill.config.models import LayerSkipSettings, StudentSettings
from distill.kinds.eagle import EAGLE3
from distill.kinds.start import check_states, start_from_target
from distill.networks.layerskip import LayerSkip
from distill.networks.lm_head import LMHead, check_head

REFUSED = {
    *("BERT", "RecurrentGemma"),
    *("Mamba", "FalconMamba", "Jamba", "Zamba"),  # transformers' scan of several tokens begins without a state
    *("RWKV", "xLSTM", "MiniMax"),  # they take no cache but their own
    *(
        "Zamba 2, clamped time steps",
        "Nemotron-H, clamped time steps",
    ),  # its generate too: a scan clamps time steps, a step of one token does not
}
RECURRENT = {
    *("Mamba-2", "Bamba", "LFM2", "Qwen3-Next", "Qwen3-Next, four layers", "Qwen3.5", "Qwen3.5-MoE", "Kimi-Linear"),
    *("Bailing hybrid", "Nemotron-H", "LFM2-MoE", "LFM3", "Granite 4 hybrid", "Falcon-H1", "OLMo hybrid", "Zamba 2"),
    "DeepSeek-V4",
}
NO_TREES = {*("Llama 4, temperature tuning", "GPT-Neo", "BLOOM", "MPT", "Falcon, ALiBi", "BART decoder"), *RECURRENT}

DOCS = Path(__file__).parents[2] / "docs" / "targets.md"
GENERATED = "<!-- written by: python tests/support/architectures.py -->\n"
GROUPS = ("Attention", "Recurrent and hybrid", "Refused")
COLUMNS = ("trees", "fast forward", "drafts", "heads", "LayerSkip")


@dataclass
class Opened:
    """What works for an architecture."""

    name: str
    group: str
    cells: dict[str, tuple[str, str]] = field(default_factory=dict)


def refusal(attempt: Callable[[], object]) -> str:
    """The reason in the message of the `UserError` that this raises; empty if it raises none."""
    try:
        attempt()
    except UserError as error:
        text = re.sub(r".*cannot be (decoded here|reached): |^\w+For\w+ ", "", str(error))
        text = re.sub(r"the layers of \w+", "its layers", text)
        return re.split(r"; |: | \(|, (?:and|so) |\. Use ", text)[0]
    return ""


def start(model: PreTrainedModel) -> None:
    check_states(model)
    start_from_target(EAGLE3.create(model, None, StudentSettings(kind="eagle3"), 0), model)


def opened(name: str, model: PreTrainedModel, to_runner: Callable[[PreTrainedModel], Model] = open_runner) -> Opened:
    """What opening a model for decoding, and starting each kind of training with it, come to."""
    made: list[Any] = []
    if why := refusal(lambda: made.append(to_runner(model))):
        return Opened(name, "Refused", {"reason": (why, "")})
    runner = made[0]

    def answer(why: str, yes: str = "yes", no: str = "no") -> tuple[str, str]:
        return (no, why) if why else (yes, "")

    untrained = refusal(lambda: check_head(model, LMHead(model)))
    no_head = untrained or refusal(lambda: start(model))
    heads = answer(no_head) if no_head else answer(refusal(lambda: output_head(model)), no="not EAGLE-1")
    exits = answer(
        refusal(lambda: LayerSkip(model, LayerSkipSettings(), 1, scratch=False).remove()),
        "trained only" if refusal(lambda: self_speculating(runner)) else "yes",
    )
    cells = {
        "trees": answer(runner.tree_refusal),
        "fast forward": ("yes" if isinstance(runner, FastRunner) else "no", ""),
        "drafts": answer(untrained),
        "heads": heads,
        "LayerSkip": exits,
    }
    return Opened(name, GROUPS[runner.recurrent], cells)


def table(lines: list[Opened]) -> str:
    """The tables of docs/targets.md, one a group; families with the same entries share a row."""
    reasons: list[str] = []

    def cell(entry: str, why: str) -> str:
        if why and why not in reasons:
            reasons.append(why)
        return f"{entry} ({reasons.index(why) + 1})" if why else entry

    text = ""
    for group in GROUPS:
        rows: dict[str, dict[str, list[str]]] = {}  # entries → family → its variants
        columns = ("reason",) if group == "Refused" else COLUMNS
        for architecture in (line for line in lines if line.group == group):
            family, _, variant = architecture.name.partition(", ")
            entries = " | ".join(cell(*architecture.cells[column]) for column in columns)
            rows.setdefault(entries, {}).setdefault(family, []).append(variant)
        text += f"\n### {group}\n\n| architectures | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}\n"
        for entries, families in rows.items():
            names = [
                family + f" ({'' if kinds[0] else 'also '}{', '.join(filter(None, kinds))})" * (kinds != [""])
                for family, kinds in families.items()
            ]
            text += f"| {', '.join(names)} | {entries} |\n"
    return text + "\n" + "".join(f"{number}. {why}\n" for number, why in enumerate(reasons, 1))


if __name__ == "__main__":
    page = DOCS.read_text(encoding="utf-8").split(GENERATED)[0]
    made = table([opened(name, build_architecture(name)) for name in ARCHITECTURES])
    DOCS.write_text(page + GENERATED + made, encoding="utf-8")
