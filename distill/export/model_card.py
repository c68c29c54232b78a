"""What was measured of an exported draft, as `speculation_profile.json` and model card; the upload to the Hub."""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import validate_repo_id
from jinja2 import Environment, FileSystemLoader, Template
from transformers import PreTrainedConfig, PreTrainedModel

from decode.bench.page import COLUMNS, cell, markdown
from decode.engines.gap_causes import weight_fingerprints
from decode.errors import UserError
from decode.models.heads import DraftHead, default_captured_layers

HERE = Path(__file__).parent
KINDS: dict[int | str, str] = {1: "eagle", 3: "eagle3", "dflash": "dflash", "dspark": "dspark", "mtp": "mtp"}
"""Kinds of heads, by their version."""
TOKEN_MAP = "token_map.pt"  # the ids that an EAGLE-1 head of a reduced vocabulary drafts, as SGLang reads them
MEASURED = (
    "offline_alpha", "alpha", "accepted_length", "accepted_per_drafted", "speedup", "speedup_vs_generate",
    "predicted_speedup", "cost_ratio", "break_even_alpha",
)  # fmt: skip
"""Rows of the card, by key of the profile."""


def fastest_row(report: Mapping[str, Any], *drafts: str) -> dict[str, Any]:
    """Returns the fastest row of some drafts at the lowest measured temperature; empty if there is none.

    Rows with other texts than the target's count only if all are such.
    """
    rows = [row for row in report["decoding"] if row["draft"] in drafts and row.get("speedup")]
    coldest = min((row["temperature"] for row in rows), default=0.0)
    rows = [row for row in rows if row["temperature"] == coldest]
    rows = [row for row in rows if row.get("identical_to_target") is not False] or rows
    return max(rows, key=lambda row: row["speedup"], default={})


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
    analysis = report.get("analysis") or {}
    profile |= {"trained_with": report.get("trained_with"), "acceptance": (analysis.get("acceptance") or {}).get(draft)}
    costs = report.get("profile") or {}
    if costs.get("draft", draft) == draft:
        profile |= {key: costs.get(key) for key in ("cost_ratio", "break_even_alpha")}
    if not (best := fastest_row(report, draft)):
        return profile
    machine = {name: fact for name, fact in (report.get("machine") or {}).items() if name != "note"}
    conditions = {"dataset": best.get("suite"), "num_samples": best.get("prompts"), "temperature": best["temperature"]}
    return profile | {
        **{key: best[key] for key in (*MEASURED, "speedup_ci95", "identical_to_target") if key in best},
        "best_draft_length": best["draft_length"],
        "acceptance_by_position": analysis.get("acceptance_by_position", {}).get(draft),
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


def write_card(
    folder: Path,
    profile: Mapping[str, Any],
    model: PreTrainedModel | DraftHead,
    target: PreTrainedConfig,
    length: int,
    *,
    names: tuple[str, str],
    gguf_type: str,
    trained_vocabulary: int = 0,
    notes: Sequence[str] = (),
    unserved: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes speculation_profile.json, with fingerprints of the folder's weights, and README.md.

    Args:
        folder: Folder that holds the exported files.
        profile: Optionally the keys of `MEASURED`, ``offline_alpha_se``, ``speedup_ci95``,
            ``best_draft_length``, ``identical_to_target`` and ``conditions``. What is absent is left out.
        model: The exported model or head.
        target: Configuration of its target.
        length: Number of drafted tokens per round.
        names: Folder or Hub name of the target and folder of the export, for the commands.
        gguf_type: Number format of the GGUF files.
        trained_vocabulary: Vocabulary size of a draft model before padding or cutting.
        notes: Further notes on this pair; empty ones are left out.
        unserved: Engines that do not run the head as it was trained, with the reasons.
    """
    kind, token_map, layers = "draft", False, int(target.get_text_config().num_hidden_layers)
    measured = speculation_profile(profile, length)
    if isinstance(model, DraftHead):
        kind = measured["method"] = KINDS[model.version]
        token_map = model.version == 1 and model.reduced
    measured["weights"] = weight_fingerprints(folder)
    measured |= {key: profile[key] for key in ("acceptance", "trained_with") if profile.get(key)}
    measured |= {"unserved": unserved} if unserved else {}
    (folder / "speculation_profile.json").write_text(json.dumps(measured, indent=2) + "\n")
    environment = Environment(loader=FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True)
    environment.filters["grouped"] = "{:,}".format
    text = environment.get_template("model_card.md").render(
        kind=kind, profile=profile, model=model, length=length, layers=layers, cell=cell, columns=COLUMNS,
        target=names[0], target_type=target.model_type,
        vocabulary=target.get_text_config().vocab_size, trained_vocabulary=trained_vocabulary,
        usual_layers=default_captured_layers(layers), parameters=sum(weight.numel() for weight in model.parameters()),
        conditions=profile.get("conditions") or {}, measured=[key for key in MEASURED if profile.get(key) is not None],
        commands=commands(*names, length, kind, token_map=token_map, gguf_type=gguf_type, unserved=unserved),
        notes=[*notes, *(f"{engine} does not run it as it was trained: {why}." for engine, why in unserved.items())],
        positions=markdown(("position", "validation", "offline", "decoded"), profile.get("acceptance") or []),
    )  # fmt: skip
    (folder / "README.md").write_text(re.sub(r"\n{3,}", "\n\n", text).strip() + "\n", encoding="utf-8")


def commands(
    target: str,
    draft: str,
    length: int,
    kind: str = "draft",
    *,
    token_map: bool = False,
    gguf_type: str = "f32",
    unserved: Collection[str] = (),
) -> list[tuple[str, str, str]]:
    """Returns (title, language, lines to paste) for each engine that loads drafts of this kind.

    Args:
        target: Folder or Hub name of the target.
        draft: Folder of the export.
        length: Number of drafted tokens per round.
        kind: draft, eagle, eagle3, dflash, dspark or mtp.
        token_map: Whether the head is of EAGLE-1 with a reduced vocabulary.
        gguf_type: Number format of the GGUF files.
        unserved: Engines that are left out.
    """
    given = {"target": target, "draft": draft, "length": length, "kind": kind, "gguf_type": gguf_type}
    given["token_map"] = TOKEN_MAP if token_map else ""
    engines = yaml.safe_load((HERE / "serving_commands.yaml").read_text(encoding="utf-8"))
    return [
        (engine["title"], engine["language"], Template(engine["lines"]).render(given))
        for engine in engines
        if kind in engine["kinds"] and not engine["title"].lower().startswith(tuple(unserved))
    ]


def check_hub(name: str | None) -> None:
    """Refuses an upload that would fail; cheap, so it is called before training starts.

    Raises:
        UserError: The name is not valid, there is no token, or the Hub refuses it, is switched off or does not answer.
    """
    if name is not None:
        try:
            validate_repo_id(name)
            HfApi().whoami()
        except Exception as error:
            raise _refusal(name, error) from error


def push(export: Path, name: str | None, names: Mapping[str, str]) -> str | None:
    """Uploads an export without the target's GGUF files, and returns its address. None: no upload is wanted.

    Args:
        export: The finished export.
        name: The repository, which is created (private) if it does not exist.
        names: What replaces folders of this machine in the card.

    Raises:
        UserError: The Hub refuses the upload, or does not answer.
    """
    if name is None:
        return None
    card, api = export / "README.md", HfApi()
    text = card.read_text(encoding="utf-8")
    for folder, known in {str(export): name, **names}.items():
        text = text.replace(folder, known)
    card.write_text(text, encoding="utf-8")
    message = "Draft model with its card and speculation profile"
    try:
        repository = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=export, ignore_patterns=["*/target-*"], commit_message=message
        )
    except Exception as error:
        raise _refusal(name, error) from error
    return str(repository)


def _refusal(name: str, error: Exception) -> UserError:
    """The Hub's library raises exceptions of many kinds, of the network's layers too; their messages are clear."""
    return UserError(
        f"export.hub is {name!r} and the Hub ({constants.ENDPOINT}) does not take the upload "
        f"({type(error).__name__}: {str(error).strip()}); correct the setting, or remove it and upload the export later"
    )
