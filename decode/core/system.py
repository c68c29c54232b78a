"""A decoding method as the parts that it is made of: who drafts, when drafting stops, which tokens are kept."""

from dataclasses import dataclass, field

from decode.core.acceptance_rules import AcceptanceRule, Exact
from decode.core.drafter_base import Drafter
from decode.core.stopping.batch_draft_length import DraftLengths
from decode.core.stopping.stop_rules import StopRule


@dataclass
class System:
    """A decoding method: a drafter, a stop rule and an acceptance rule."""

    name: str
    drafter: Drafter
    stop: StopRule
    rule: AcceptanceRule = field(default_factory=Exact)
    # limits the drafts of all texts of a round to what pays; None: the stop rule alone ends them
    lengths: DraftLengths | None = None

    def reset(self) -> None:
        """Forget everything adapted so far, the drafter's learned weights included."""
        self.stop.reset()
        self.rule.reset()
        self.drafter.reset()
        if self.lengths is not None:
            self.lengths.reset()
