"""The options that decoding methods leave open, stated once: for Python, the command line and configurations."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MethodOptions:
    """What a method leaves open; null takes the paper's value."""

    draft_length: int | None = None
    """Tokens drafted a round, or the window of an adaptive stop rule (vanilla and EARS 5, AdaSD and Hugging Face 20,
    Draft & Verify and AdaSPEED 12, prompt lookup 10)."""
    beta: float = 0.1
    """EARS: tolerance β(1 − max p); the paper uses 0.05 to 0.2, 0 is the exact rule."""
    threshold: float | None = None
    """Start of an adaptive confidence threshold (Draft & Verify 0.6, AdaSPEED 0.8, Hugging Face 0.4)."""
    target_acceptance: float | None = None
    """Acceptance rate that Draft & Verify's and AdaSPEED's controller steers to (0.9)."""
    cost_ratio: float | None = None
    """Cost-optimal stopping: c, the time of a drafted token in one-token target forwards (python -m decode profile
    measures it); null: the weights that the draft reads for a token over those that the target reads."""
    verify_growth: float = 0.0
    """Cost-optimal stopping: growth of the target's forward by one more token, in one-token target forwards."""
    fuzzy_threshold: float = 0.4
    """Fuzzy: largest Jensen–Shannon divergence (nats) between target and draft at which a token is kept."""
    typical_epsilon: float = 0.09
    """Typical acceptance: a token above this probability is always kept."""
    typical_delta: float = 0.3
    """Typical acceptance: factor of exp(−H(p))."""
    exit_layer: int | None = None
    """Self-speculation: layers that the draft runs (what the probes advise, else a quarter of the model's)."""
    skip_attention: list[int] = field(default_factory=list)
    """Draft & Verify: layers whose attention the draft skips; without any, it exits early as AdaSPEED's does."""
    skip_mlp: list[int] = field(default_factory=list)
    """Draft & Verify: layers whose MLP the draft skips."""
    tree_width: int = 10
    """EAGLE-2: nodes expanded at each level of the tree, and children tried of each."""
    tree_nodes: int = 60
    """EAGLE-2: nodes of the drafted tree, the most probable ones; its depth is the draft length."""
    probes: str | None = None
    """Folder of acceptance probes (python -m probes), which also advise the options that are left open."""
    searches: int = 150
    """Adaptix: Monte Carlo iterations a round."""
    adaptive: bool = True
    """Adaptix: learn from the text; the paper's ablation does not."""
    order: int = 3
    """Adaptix: n of the n-grams, 2 to 4."""
    texts: int | None = None
    """Adaptix: use a table of so many texts of the benchmark's corpus only."""
