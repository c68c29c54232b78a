"""The measurements of an exported draft as `speculation_profile.json`, and its model card."""

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
KINDS = {1: "eagle", 3: "eagle3"}  # kinds of feature heads by the version of EAGLE
TOKEN_MAP = "token_map.pt"  # the ids that an EAGLE-1 head of a reduced vocabulary drafts, as SGLang reads them
ROWS = (
    ("offline_alpha", "acceptance rate α, offline", "mean of Σ min(p, q) over the target's own texts"),
    ("alpha", "acceptance rate α, while decoding", "mean of Σ min(p, q) over tested positions"),
    ("accepted_per_drafted", "accepted per drafted token", "Σ m / Σ k"),
    ("block_efficiency", "accepted length", "Σ (m + 1) / rounds: tokens per target forward"),
    ("speedup", "speedup", "tokens/s over the same loop without a draft"),
    ("speedup_vs_generate", "speedup over `generate`", "tokens/s over `model.generate` of transformers"),
    ("predicted_speedup", "predicted speedup", "tokens per round / (c · drafted + v(drafted + 1))"),
    ("cost_ratio", "cost ratio c", "one draft forward in target forwards"),
    ("break_even_alpha", "break-even α", "acceptance rate at which nothing is gained"),
)
"""Rows of the card: key of the profile, name and formula."""


def export_profile(report: Mapping[str, Any], draft: str = "adaspec") -> dict[str, Any]:
    """Returns the measurements of one draft in a run's report, as `export_draft` takes them.

    Args:
        report: As `write_report` takes it.
        draft: Name of the exported draft in the report.

    Returns:
        The numbers of the draft at its fastest measured length, greedy or at the lowest measured temperature.
        ``best_draft_length`` is absent if decoding was not measured.
    """
    of_draft: dict[str, Any] = next((d for d in report["drafts"] if d["name"] == draft), {})
    profile = {"draft_name": draft, **{k: of_draft.get(k) for k in ("offline_alpha", "offline_alpha_se")}}
    costs = report.get("profile") or {}
    if costs.get("draft", draft) == draft:
        profile |= {key: costs.get(key) for key in ("cost_ratio", "break_even_alpha")}
    rows = [row for row in report["decoding"] if row["draft"] == draft and row.get("speedup")]
    coldest = min((row["temperature"] for row in rows), default=0.0)
    rows = [row for row in rows if row["temperature"] == coldest]
    rows = [row for row in rows if row.get("identical_to_target") is not False] or rows
    if not rows:
        return profile
    best = max(rows, key=lambda row: row["speedup"])
    machine = {name: fact for name, fact in (report.get("machine") or {}).items() if name != "note"}
    conditions = {"dataset": best.get("suite"), "num_samples": best.get("prompts"), "temperature": coldest}
    return profile | {
        **{key: best.get(key) for key, _, _ in ROWS if key in best},
        **{key: best.get(key) for key in ("speedup_ci95", "identical_to_target")},
        "best_draft_length": best["draft_length"],
        "acceptance_by_position": (report.get("analysis") or {}).get("acceptance_by_position", {}).get(draft),
        "conditions": conditions | {"acceptance_rule": "exact"} | machine,
    }


def speculation_profile(profile: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Returns the portable measurements, under the field names that NVIDIA's Model-Optimizer proposes.

    Acceptance by position is given as conditional rates (position i accepted, if all before it were) and marginal rates
    (positions up to i all accepted), with their errors, over the rounds whose draft was not cut by the end of a text or
    its budget; repeats of a deterministic text count once. Lengths count the target's own token: a round that accepts m
    drafted tokens has length m + 1, the mean is 1 + Σ of the marginal rates, and the histogram counts the same rounds.
    ``synthetic_acceptance_rates`` are the marginal rates under vLLM's name.

    Args:
        profile: ``acceptance_by_position``, the rows of `Trace.acceptance_by_position` for drafts of
            ``best_draft_length`` tokens; optionally ``mean_accept_length_per_request`` and ``conditions``. Without the
            rows, or if they belong to another length, the vectors are null and ``measured`` is false.
        length: Number of drafted tokens per round.
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
    for kind in ("conditional", "marginal"):
        for error in ("", "_se"):
            values = [row.get(f"{kind}{error}") for row in rows]
            result[f"{kind}_accept_rates{error}"] = [
                None if value is None or not math.isfinite(value) else round(value, 6) for value in values
            ]
    rounds = int(rows[0]["rounds"])
    kept = [rounds, *(round(row["marginal"] * rounds) for row in rows), 0]
    return result | {
        "synthetic_acceptance_rates": result["marginal_accept_rates"],
        "mean_accept_length": round(1 + sum(row["marginal"] for row in rows), 6),
        "acceptance_length_histogram": {str(m + 1): a - b for m, (a, b) in enumerate(pairwise(kept))},
    }


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
    """Returns the README.md of an exported draft or feature head.

    Args:
        profile: Optionally the keys of `ROWS`, ``target_name``, ``offline_alpha_se``, ``speedup_ci95``,
            ``best_draft_length``, ``identical_to_target`` and ``conditions``. What is absent is left out.
        model: The exported model or head.
        target: Folder or Hub name of the target, for the commands.
        folder: Folder of the export, for the commands.
        length: Number of drafted tokens per round.
        notes: Further notes on this pair; empty ones are left out.
        trained_vocabulary: Vocabulary size of a draft model before padding or cutting.
        layers: Number of layers of a head's target.
        gguf_type: Number format of the GGUF files.
    """
    kind, token_map, facts = "draft", False, {"trained_vocabulary": trained_vocabulary, "layers": layers}
    if isinstance(model, FeatureHead):
        kind, three, captured = KINDS[model.version], model.version == 3, model.captured_layers
        token_map = not three and model.reduced
        facts |= {
            "after_norm": three and max(captured) == layers,
            "captured_elsewhere": three and captured != default_captured_layers(layers),
        }
    else:
        facts["vocabulary"], target = model.config.get_text_config().vocab_size, profile.get("target_name") or target
    environment = Environment(loader=FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True)
    environment.filters["grouped"] = "{:,}".format
    text = environment.get_template("model_card.md").render(
        facts, kind=kind, profile=profile, model=model, target=target, length=length,
        parameters=sum(weight.numel() for weight in model.parameters()), conditions=profile.get("conditions") or {},
        measured=[row for row in ROWS if isinstance(profile.get(row[0]), int | float)],
        commands=commands(target, folder, length, kind, token_map=token_map, gguf_type=gguf_type),
        notes=list(filter(None, notes)),
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def commands(
    target: str, draft: str, length: int, kind: str = "draft", *, token_map: bool = False, gguf_type: str = "f32"
) -> list[tuple[str, str, str]]:
    """Returns (title, language, lines to paste) for each engine that loads drafts of this kind.

    Args:
        target: Folder or Hub name of the target.
        draft: Folder of the export.
        length: Number of drafted tokens per round.
        kind: draft, eagle or eagle3.
        token_map: Whether the head is of EAGLE-1 with a reduced vocabulary.
        gguf_type: Number format of the GGUF files.
    """
    given = {"target": target, "draft": draft, "length": length, "kind": kind, "gguf_type": gguf_type}
    given["token_map"] = TOKEN_MAP if token_map else ""
    engines = yaml.safe_load((HERE / "serving_commands.yaml").read_text(encoding="utf-8"))
    return [
        (engine["title"], engine["language"], Template(engine["lines"]).render(given))
        for engine in engines
        if kind in engine["kinds"]
    ]
