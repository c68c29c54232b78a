"""What was measured on an exported draft: `speculation_profile.json` for machines, the model card for people."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, Template
from transformers import PreTrainedModel

from decode.models.heads import FeatureHead, default_captured_layers

HERE = Path(__file__).parent
KINDS = {1: "eagle", 3: "eagle3"}  # kinds of feature heads, by the version of EAGLE
TOKEN_MAP = "token_map.pt"  # the ids that an EAGLE-1 head of a reduced vocabulary drafts, as SGLang reads them
ROWS = (
    ("offline_alpha", "acceptance rate α, offline", "mean of Σ min(p, q) over the target's own texts"),
    ("alpha", "acceptance rate α, while decoding", "mean of Σ min(p, q) over tested positions"),
    ("accepted_per_drafted", "accepted per drafted token", "Σ m / Σ k"),
    ("block_efficiency", "block efficiency", "Σ (m + 1) / rounds: tokens per target forward"),
    ("speedup", "speedup", "tokens/s over the same loop without a draft"),
    ("speedup_vs_generate", "speedup over `generate`", "tokens/s over `model.generate` of transformers"),
    ("predicted_speedup", "predicted speedup", "tokens per round / (c · drafted + v(drafted + 1))"),
    ("cost_ratio", "cost ratio c", "one draft forward in target forwards"),
    ("break_even_alpha", "break-even α", "acceptance rate at which nothing is gained"),
)
"""What was measured: key, name and formula."""


def export_profile(report: Mapping[str, Any], draft: str = "adaspec") -> dict[str, Any]:
    """What a run's report says of one draft, as `distill.export.draft.export_draft` wants it.

    Args:
        report: as `distill.report.write_report` takes it.
        draft: name of the exported draft in the report.

    Returns:
        The numbers of the draft at its fastest measured length, greedy or at the lowest temperature that was measured.
        `best_draft_length` is absent if decoding was not.
    """
    of_draft: dict[str, Any] = next((d for d in report["drafts"] if d["name"] == draft), {})
    profile = {"draft_name": draft, **{k: of_draft.get(k) for k in ("offline_alpha", "offline_alpha_se")}}
    costs = report.get("profile") or {}
    if costs.get("draft", draft) == draft:
        profile |= {key: costs.get(key) for key in ("cost_ratio", "break_even_alpha")}
    rows = [row for row in report["decoding"] if row["draft"] == draft and row.get("speedup")]
    coldest = min((row["temperature"] for row in rows), default=0.0)
    rows = [row for row in rows if row["temperature"] == coldest]
    unchanged = [row for row in rows if row.get("identical_to_target") is not False] or rows
    if unchanged:
        best = max(unchanged, key=lambda row: row["speedup"])
        profile |= {key: best.get(key) for key, _, _ in ROWS if key in best}
        profile |= {key: best.get(key) for key in ("speedup_ci95", "identical_to_target")}
        profile["best_draft_length"] = best["draft_length"]
        profile["acceptance_by_position"] = (report.get("analysis") or {}).get("acceptance_by_position", {}).get(draft)
        profile["conditions"] = {
            "dataset": best.get("suite"),
            "num_samples": best.get("prompts"),
            "temperature": coldest,
            "acceptance_rule": "exact",
            **{name: fact for name, fact in (report.get("machine") or {}).items() if name != "note"},
        }
    return profile


def speculation_profile(profile: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The portable measurement file, in the field names that NVIDIA's Model-Optimizer proposes.

    Both conventions of acceptance by position are given with their errors: conditional (position i accepted, given
    that all before it were) and marginal (positions up to i all accepted), over the rounds whose draft neither a
    text's end nor its budget cut, repeats of a deterministic text counted once. Lengths count the target's own token,
    so a round that accepts m drafted tokens has length m + 1; the mean is 1 + Σ of the marginal rates, and the
    histogram counts the same rounds. `synthetic_acceptance_rates` are the marginal rates under the name by which vLLM
    takes them (unconditional, non-increasing).

    Args:
        profile: `acceptance_by_position`, the rows of `Trace.acceptance_by_position` of drafts of
            `best_draft_length` tokens; optionally `mean_accept_length_per_request` and `conditions` (data set,
            temperature, prompts, machine, …). Without the rows, or if they belong to another length, the vectors are
            null and `measured` is false.
        length: number of drafted tokens per round.
    """
    rows = list(profile.get("acceptance_by_position") or [])
    usable = bool(rows) and len(rows) == length == profile.get("best_draft_length")
    result: dict[str, Any] = {
        "schema_version": "1.0",
        "producer": "draftsmith",
        "measured": usable,
        "method": "draft_model",
        "num_speculative_tokens": length,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": None,
        "marginal_accept_rates": None,
        "synthetic_acceptance_rates": None,
        "mean_accept_length": None,
        "mean_accept_length_per_request": profile.get("mean_accept_length_per_request"),
        "acceptance_length_histogram": None,
        "measurement_conditions": {k: v for k, v in (profile.get("conditions") or {}).items() if v is not None},
    }
    if not usable:
        reason = "acceptance was measured at another draft length" if rows else "acceptance was not measured"
        return result | {"vectors_unavailable_reason": reason}
    marginal = [round(row["marginal"], 6) for row in rows]
    rounds = int(rows[0]["rounds"])
    kept = [rounds, *(round(row["marginal"] * rounds) for row in rows), 0]
    rates = {
        f"{kind}_accept_rates{error}": [_rounded(row.get(f"{kind}{error}")) for row in rows]
        for kind in ("conditional", "marginal")
        for error in ("", "_se")
    }
    return (
        result
        | rates
        | {
            "synthetic_acceptance_rates": marginal,
            "mean_accept_length": round(1 + sum(row["marginal"] for row in rows), 6),
            "acceptance_length_histogram": {str(m + 1): a - b for m, (a, b) in enumerate(pairwise(kept))},
        }
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)


def model_card(
    profile: Mapping[str, Any],
    model: PreTrainedModel | FeatureHead,
    target: str,
    folder: str,
    length: int,
    notes: Sequence[str] = (),
    *,
    trained_vocabulary: int = 0,
    layers: int = 0,
    gguf_type: str = "f32",
) -> str:
    """The README.md of an exported draft or feature head: what it is, what was measured, how to use it.

    Args:
        profile: optional keys `draft_name`, `target_name`, `offline_alpha`, `offline_alpha_se`, `alpha`,
            `block_efficiency`, `accepted_per_drafted`, `speedup`, `speedup_ci95`, `speedup_vs_generate`,
            `predicted_speedup`, `cost_ratio`, `break_even_alpha`, `best_draft_length`, `identical_to_target`,
            `conditions`. What is absent is left out.
        model: the exported model or head.
        target: the target's folder or hub name, for the commands.
        folder: the export's folder, for the commands.
        length: drafted tokens per round.
        notes: further ones of this pair; empty ones are left out.
        trained_vocabulary: of a draft model, its vocabulary size before padding or cutting.
        layers: of the target of a head.
        gguf_type: number format of the GGUF files, if there are any.
    """
    kind, token_map, facts = "draft", False, {"trained_vocabulary": trained_vocabulary, "layers": layers}
    if isinstance(model, FeatureHead):
        kind, three, captured = KINDS[model.version], model.version == 3, model.captured_layers
        token_map = not three and model.reduced
        facts |= {
            "behind_norm": three and max(captured) == layers,
            "captured_elsewhere": three and captured != default_captured_layers(layers),
        }
    else:
        facts["vocabulary"], target = model.config.get_text_config().vocab_size, profile.get("target_name") or target
    environment = Environment(loader=FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True)
    environment.filters["grouped"] = "{:,}".format
    text = environment.get_template("model_card.md").render(
        facts, kind=kind, profile=profile, model=model, head=model, target=target, length=length,
        parameters=sum(weight.numel() for weight in model.parameters()), conditions=profile.get("conditions") or {},
        measured=[row for row in ROWS if isinstance(profile.get(row[0]), int | float)],
        commands=commands(target, folder, length, kind, token_map=token_map, gguf_type=gguf_type),
        notes=list(filter(None, notes)),
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def commands(
    target: str, draft: str, length: int, kind: str = "draft", *, token_map: bool = False, gguf_type: str = "f32"
) -> list[tuple[str, str, str]]:
    """(title, language, lines to paste) for each engine that takes drafts of this kind.

    Args:
        target: folder or hub name.
        draft: the export's folder.
        length: drafted tokens per round.
        kind: draft, eagle or eagle3.
        token_map: the head is of EAGLE-1 and has a reduced vocabulary.
        gguf_type: number format of the GGUF files, if there are any.
    """
    given = {"target": target, "draft": draft, "length": length, "kind": kind, "gguf_type": gguf_type}
    given["token_map"] = TOKEN_MAP if token_map else ""
    engines = yaml.safe_load((HERE / "serving_commands.yaml").read_text(encoding="utf-8"))
    return [
        (engine["title"], engine["language"], Template(engine["lines"]).render(given))
        for engine in engines
        if kind in engine["kinds"]
    ]
