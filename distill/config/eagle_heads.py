"""Settings of feature heads."""

from dataclasses import dataclass, field
from typing import Any, Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from decode.core.errors import UserError
from decode.core.method_options import Share
from distill.config.distillation import DistillSettings

Kind = Literal["none", "eagle", "eagle3"]


@dataclass
class EagleSettings:
    """A feature head in place of a draft model: the sections reference, draft and comparisons then train heads.

    The section initial is not read; the reference is EAGLE, the draft EAGLE + AdaSPEC. Everything else in those
    sections means what it means for draft models: signals, divergences, selection, optimisers, texts of its own.
    """

    kind: Kind = "none"
    """none: the drafts are language models. eagle: EAGLE-1, one layer on the target's last hidden state, with the
    target's embedding and output head. eagle3: on a low, a middle and a high state, with an output head of its own."""
    init: Literal["target", "random"] = "target"
    """eagle3: weights that the head starts from. target: those of the target's last layer where the shapes agree, with
    fc passing the last captured state through. random: none but the output rows, which are the target's. EAGLE-1
    always starts at random: its states are behind the final norm, and that layer's weights are for states before it."""
    intermediate_size: PositiveInt | None = None
    """Width inside the layer's MLP; null: the target's. The layer's width is the target's."""
    heads: PositiveInt | None = None
    """Attention heads; null: as many as the target has."""
    kv_heads: PositiveInt | None = None
    """Key and value heads; null: the target's."""
    draft_vocab: PositiveInt | None = None
    """Tokens that the head can draft, the most frequent ones of the training labels (FR-Spec); null: all. Fewer make
    the output head cheaper and leave the rest to the target: 4,000 to 16,000 of some 50,000 are a good start."""
    layers: list[NonNegativeInt] = field(default_factory=list)
    """eagle3: the target's states that are fused (i enters layer i); empty: 2, L/2 and L - 3, which serving engines
    expect."""
    unroll: PositiveInt | None = None
    """Drafting steps trained at once on the head's own states (training-time test); null: 1 for eagle, 7 for
    eagle3, as published. More steps keep acceptance up deeper into a draft and cost as much again each."""
    decay: Share = 0.8
    """Weight of each further step's loss against the one before."""
    feature_weight: NonNegativeFloat = 1.0
    """eagle: weight of the smooth L1 distance between the head's state and the target's."""
    ce_weight: NonNegativeFloat = 0.1
    """eagle: weight of the divergence from the target, which AdaSPEC's selection applies to. (eagle3 has nothing
    else.)"""
    noise: NonNegativeFloat = 0.2
    """eagle: width of the uniform noise on the features, times 512 / length, as published; 0: none."""
    tree_widths: list[PositiveInt] = field(default_factory=lambda: [4])
    """Trees measured at the end: nodes expanded a level, one entry for each of tree_nodes."""
    tree_nodes: list[PositiveInt] = field(default_factory=lambda: [8])
    """Nodes of each tree (EAGLE-2: 60, for a machine on which checking 60 tokens costs little more than one)."""

    @property
    def enabled(self) -> bool:
        """Whether heads are trained."""
        return self.kind != "none"

    @property
    def version(self) -> int:
        """1 or 3."""
        return 3 if self.kind == "eagle3" else 1

    @property
    def steps(self) -> int:
        """Drafting steps trained at once."""
        return self.unroll or (7 if self.kind == "eagle3" else 1)

    def shape(self) -> dict[str, Any]:
        """What `decode.models.eagle.head_files.head_config` takes."""
        names = ("intermediate_size", "heads", "kv_heads", "draft_vocab")
        return {name: getattr(self, name) for name in names} | {"captured_layers": tuple(self.layers) or None}

    def check_reference(self, reference: DistillSettings) -> None:
        """Refuse the one thing that draft models can be trained with and heads cannot."""
        if reference.lora is not None:
            raise UserError(
                "reference.lora is set, and a feature head has one layer, all of whose weights are trained: set it to "
                "null"
            )

    def validate(self) -> None:
        """Check that the settings fit together."""
        if self.kind == "eagle" and not self.ce_weight:
            raise UserError("eagle.ce_weight is 0: the divergence is what AdaSPEC selects by; wanted above 0")
        if len(self.tree_widths) != len(self.tree_nodes):
            raise UserError(
                f"eagle.tree_widths is {self.tree_widths} and eagle.tree_nodes {self.tree_nodes}: expected equal "
                "lengths"
            )
        if self.kind == "eagle3" and self.layers and len(set(self.layers)) != 3:
            raise UserError(f"eagle.layers is {self.layers}: expected three different layers, or none for the default")
        if self.kind == "eagle" and self.layers:
            raise UserError("eagle.layers is for kind eagle3; EAGLE-1 reads the target's last hidden state")
