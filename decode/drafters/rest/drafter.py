"""REST: what followed this context in a corpus, as a tree of continuations (He et al., NAACL 2024)."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decode.core.drafter_base import Drafter
from decode.core.proposal import Draft
from decode.core.rng import Rng
from decode.core.stopping.stop_rules import StopRule
from decode.drafters.corpus_files import require_fingerprint
from decode.drafters.rest.datastore import Datastore
from decode.drafters.token_tree import heaviest_tree


@dataclass
class RetrievalDrafter(Drafter):
    """Drafts the heaviest continuations of the longest tail of the text that the corpus holds."""

    store: Datastore  # the corpus
    nodes: int = 64  # most nodes in the tree
    max_span: int = 16  # longest tail looked up; shorter ones follow, down to ``min_span``
    min_span: int = 2  # shortest tail looked up
    hits: int = 5000  # most occurrences read
    length: int = 10  # tokens read after each occurrence

    def propose(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Draft:
        """The tree of continuations, at most ``max_depth`` deep; empty where no tail of the text is known."""
        rows = self.store.continuations(
            ids, length=min(self.length, max_depth), limit=self.hits, max_span=self.max_span, min_span=self.min_span
        )
        return heaviest_tree(rows, self.nodes)


def open_rest(folder: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> RetrievalDrafter:
    """REST with the paper's settings over the datastore in ``folder``.

    Raises:
        UserError: no tokenizer, or a datastore that is missing, damaged, or of another tokenizer.
    """
    return RetrievalDrafter(Datastore.open(folder, require_fingerprint(tokenizer)))
