"""The measurements of a run whose drafts are feature heads: the usual ones, trees, and acceptance by depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decode.core.acceptance import overlap
from decode.core.options import MethodOptions
from decode.measure.acceptance_offline import OfflineAlpha, prefixes, response_logits
from decode.measure.bench_entries import BenchEntry
from decode.models.eagle.head import FeatureHead, head_logits
from distill.evaluation.evaluate import Evaluation, Text

DEPTHS = 5
"""Drafted tokens whose offline acceptance is reported, each from the head's own states before it."""


class HeadEvaluation(Evaluation):
    """See the module's docstring."""

    def _whole(self, name: str) -> bool:
        head = self.models[name]
        return isinstance(head, FeatureHead) and head.draft_ids() is None

    def _entries(self, profile: dict[str, Any]) -> list[BenchEntry]:
        """The trained heads' chains as for draft models, and two heads' trees, as deep as the longest chain."""
        settings, names = self.full.eagle, self.run.names
        drafted = [c for c in super()._entries(profile) if c.draft != names["initial"]]  # it only costs time
        chains = [replace(entry, method="eagle") for entry in drafted]
        depth = max(entry.options.draft_length or 1 for entry in chains)
        trees = [
            BenchEntry(
                "eagle-tree",
                trained,
                MethodOptions(draft_length=depth, tree_width=width, tree_nodes=nodes),
                temperature=temperature,
                name=f"{trained}-tree {width}/{nodes}",
            )
            for temperature in self.settings.temperatures
            for trained in dict.fromkeys((names["reference"], self.best))
            for width, nodes in zip(settings.tree_widths, settings.tree_nodes)
        ]
        return chains + trees

    def _named(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"draft": f"{row['draft']}-tree"} if row["method"] == "eagle-tree" else row

    def _analysis(self, texts: list[Text]) -> dict[str, Any]:
        depths = {name: self._by_depth(name, texts) for name in self.models}
        return super()._analysis(texts) | {"alpha_by_depth": depths}

    def _by_depth(self, name: str, texts: list[Text]) -> list[dict[str, float]]:
        """offline_alpha of the first, second, … drafted token at temperature 1, by teacher forcing."""
        warp, head, found = self._warp(1.0), self.models[name], []
        assert isinstance(head, FeatureHead)
        for depth in self.bar.track(range(1, DEPTHS + 1), f"acceptance by depth, {name}"):
            values = [
                overlap(
                    warp(response_logits(self.target, ids, start), before),
                    warp(head_logits(head, self.target, ids, start, depth), before),
                )
                for ids, start in texts
                if len(ids) > start
                for before in [prefixes(warp, ids, start)]
            ]
            alpha = OfflineAlpha([row.double().tolist() for row in values])
            found.append({"depth": depth, "alpha": alpha.mean, "se": alpha.se})
        return found
