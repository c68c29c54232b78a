"""Methods that need no training, on texts that the target wrote: prompt lookup, REST, exits of the target as it is.

Retrieval is deterministic, so a drafted token is accepted exactly where the text goes on with it: on greedy texts
because decoding does the same, on sampled ones because a token drawn from p equals it with probability p(x).
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decode.bench.prediction import speedup_of_rounds
from decode.draft import Draft
from decode.drafters.base import Drafter
from decode.drafters.corpus_files import join_documents, tokenizer_fingerprint
from decode.drafters.rest import save_datastore
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.runner import Runner
from decode.sampling import TorchRng, Warp
from decode.stopping import StopRule
from distill.data.datasets import TokenDataset
from distill.experiments.design.shape_costs import Price
from distill.experiments.target_texts import Text

LENGTHS = (2, 4, 6, 10)  # draft lengths of prompt lookup


@dataclass
class Rounds:
    """What a drafter did on texts."""

    drafted: list[int] = field(default_factory=list)  # nodes of each round
    accepted: list[int] = field(default_factory=list)  # tokens of each round that the text goes on with
    seconds: list[float] = field(default_factory=list)  # of each round, for drafting

    def speedup(self, price: Price) -> float:
        """Tokens over plain steps: the target's forwards, and the time of drafting in their unit."""
        plain = price.cost.target_seconds * price.unit
        lookup = statistics.median(self.seconds) / plain
        return speedup_of_rounds(self.drafted, self.accepted, 0.0, price.v, lookup)

    @property
    def alpha(self) -> float:
        """Accepted of tested tokens."""
        tested = sum(min(m + 1, k) for k, m in zip(self.drafted, self.accepted))
        return sum(self.accepted) / max(1, tested)


def draft_along(drafter: Drafter, stop: StopRule, texts: Sequence[Text]) -> Rounds:
    """Have a deterministic drafter draft along texts that are known, round by round as decoding would."""
    found, rng = Rounds(), TorchRng(0)
    for ids, start in texts:
        at = start
        drafter.start(ids[:at])
        while at < len(ids):
            began = time.perf_counter()
            stop.begin()
            draft = drafter.propose(ids[:at], stop, len(ids) - at - 1, rng) if at + 1 < len(ids) else Draft.empty()
            found.seconds.append(time.perf_counter() - began)
            accepted, node, children = 0, -1, draft.children
            while at + accepted < len(ids) - 1 and (child := children[node + 1].get(ids[at + accepted])) is not None:
                accepted, node = accepted + 1, child
            found.drafted.append(len(draft))
            found.accepted.append(accepted)
            at += accepted + 1
            drafter.commit(ids[:at])
    return found


def lookup(target: Runner, warp: Warp, texts: Sequence[Text], price: Price) -> tuple[float, int, float]:
    """Prompt lookup's speedup at its best draft length, that length, and the share of tested tokens accepted."""
    best = (0.0, 0, 0.0)
    for length in LENGTHS:
        system = build("prompt-lookup", MethodInputs(target, warp, options=MethodOptions(draft_length=length)))
        rounds = draft_along(system.drafter, system.stop, texts)
        best = max(best, (rounds.speedup(price), length, rounds.alpha))
    return best


def rest(
    work: Path,
    tokenizer: PreTrainedTokenizerBase,
    target: Runner,
    warp: Warp,
    rows: TokenDataset,
    texts: Sequence[Text],
    price: Price,
) -> tuple[float, int, float]:
    """REST's speedup over the training texts, the mean size of its trees, and the share of tested tokens accepted."""
    documents = [rows.ids[a:b] for a, b in zip(rows.offsets[:-1], rows.offsets[1:])]
    save_datastore(join_documents(documents), work / "datastore", tokenizer_fingerprint(tokenizer))
    system = build("rest", MethodInputs(target, warp, tokenizer=tokenizer, datastore=work / "datastore"))
    rounds = draft_along(system.drafter, system.stop, texts)
    return rounds.speedup(price), round(statistics.fmean(rounds.drafted)), rounds.alpha
