"""The report of a run with three drafts, of which `adaspec` is exported; its best draft length is 2."""

import copy


def decoding(draft, temperature, length, speedup, same=True, recommended=True):
    return {
        "name": draft, "draft": draft, "temperature": temperature, "draft_length": length, "tokens_per_second": 594.0 * speedup,
        "speedup": speedup, "speedup_ci95": [speedup - 0.05, speedup + 0.05], "speedup_vs_generate": 2.4 * speedup,
        "speedup_vs_generate_ci95": [3.7, 4.1],
        "predicted_speedup": speedup * 1.05, "accepted_length": 4.2, "alpha": 0.94, "accepted_per_drafted": 0.7,
        "identical_to_target": same, "suite": "arithmetic", "batch_size": 1, "repeats": 1, "kind": "lossless",
        "lossless": True, "baseline": False, "method": "vanilla" if length else "autoregressive",
        "acceptance_by_position": None, "recommended": recommended,
    }  # fmt: skip


def draft(name, alpha):
    return {
        "name": name, "parameters": 81_472, "offline_alpha": alpha, "offline_alpha_se": 0.001,
        "optimiser_steps": 1500, "examples": 48_000, "teacher_tokens": 2_900_000, "selected_tokens": 1_160_000,
    }  # fmt: skip


def pair(a, b, difference, p_value):
    return {"a": a, "b": b, "difference": difference, "se": 0.0004, "p_value": p_value, "n": 200}


FIELDS = "position", "rounds", "tested", "conditional", "marginal"
POSITIONS = [dict(zip(FIELDS, row)) for row in ((1, 100, 100, 0.9, 0.9), (2, 100, 90, 0.8, 0.72))]
TRAINED = {"acceptance": [{"position": 1, "validation": 0.91, "offline": 0.92}], "curve": [[0, 0.87], [100, 0.94]]}
FULL = {
    "name": "quickstart",
    "created": "2025-11-21 09:40 UTC",
    "machine": {
        "cpu": "Some CPU",
        "cores": 2,
        "threads": 1,
        "torch": "2",
        "transformers": "5",
        "note": "measured packing",
    },
    "settings": {"seed": 7},
    "target": {"parameters": 1_938_432, "accuracy": 0.64},
    "drafts": [draft("undistilled", 0.8751), draft("distillspec", 0.9461), draft("adaspec", 0.9480) | TRAINED],
    "paired": [pair("adaspec", "distillspec", 0.0019, 2e-6)],
    "decoding": [
        {**decoding("autoregressive", 0.0, None, 1.0), "speedup_ci95": None, "alpha": None},
        decoding("distillspec", 0.0, 4, 1.50),
        decoding("adaspec", 0.0, 4, 1.65, recommended=False),
        decoding("adaspec", 0.0, 2, 1.62) | {"acceptance_by_position": POSITIONS},
        decoding("adaspec", 1.0, 4, 1.40, same=None),
    ],
    "profile": {"draft": "adaspec", "cost_ratio": 0.14, "best_draft_length": 2, "break_even_alpha": 0.41},
    "exported": {"length": 3, "kind": "draft", "gguf_type": "q8_0", "unserved": {}},
    "commands": {"reproduce": "draftsmith distill --config configs/quickstart.yaml"},
}


def changed(**parts):
    """The report with other parts."""
    return {**copy.deepcopy(FULL), **parts}
