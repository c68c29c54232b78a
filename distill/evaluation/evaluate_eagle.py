"""The measurements of a run whose drafts are feature heads: the usual ones, trees, and acceptance by depth."""

from dataclasses import replace
from typing import Any

from decode.core.method_options import MethodOptions
from decode.measure.bench.method_entries import BenchEntry
from decode.measure.offline_acceptance import OfflineAlpha
from decode.models.eagle.head import FeatureHead
from distill.evaluation.evaluate_drafts import Evaluation


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

    def _analysis(self, alphas: dict[str, list[OfflineAlpha]]) -> dict[str, Any]:
        depths = {
            name: [{"depth": depth, "alpha": alpha.mean, "se": alpha.se} for depth, alpha in enumerate(by_depth, 1)]
            for name, by_depth in alphas.items()
        }
        return super()._analysis(alphas) | {"alpha_by_depth": depths}
