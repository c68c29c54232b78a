"""A feature head drafts (EAGLE): a chain, or EAGLE-2's dynamic tree (arXiv 2406.16858)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decode.core.drafter_base import Drafter
from decode.core.errors import UserError
from decode.core.proposal import Draft
from decode.core.rng import Rng
from decode.core.runner_protocol import Runner
from decode.core.sampling import Warp
from decode.core.stopping.batch_draft_length import RoundCosts
from decode.core.stopping.stop_rules import StopRule
from decode.core.trace_metrics import Round
from decode.drafters.draft_model import Drafting, ModelDrafter
from decode.models.eagle.head_runner import HeadRunner

LEVEL = 2.0  # forwards of a chain that one of a tree takes the time of: more rows, and choosing among them (measured)


def head_of(draft: Runner | None) -> HeadRunner:
    """The feature head among a method's parts.

    Raises:
        UserError: there is no draft, or it is a language model.
    """
    if isinstance(draft, HeadRunner):
        return draft
    given = "no draft is given" if draft is None else "the draft given is a language model of its own, for vanilla"
    raise UserError(
        f"this method drafts with a feature head (EAGLE), and {given}; give a head's folder with --draft (train one: "
        "python -m distill --config configs/quickstart-eagle.yaml)"
    )


class FeatureDrafter(ModelDrafter):
    """Drafts a chain from the target's features, drawn from the head's warped distribution like any draft model's.

    The loop has the target keep the hidden states named by `captured_layers`; after every round the pairs that were
    drafted on the head's own states are replaced by pairs with the target's.
    """

    runner: HeadRunner

    def __init__(self, runner: HeadRunner, target: Runner, warp: Warp) -> None:
        super().__init__(runner, warp, target.vocab_size)
        self.target = target  # the target's runner, whose `features` are read

    @property
    def captured_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        """Which of the target's hidden states are the feature."""
        return self.runner.feature_head.captured_layers

    def start(self, ids: list[int]) -> None:
        """Pair the prompt's tokens with the features that the target's prefill left."""
        self.runner.truncate(0)
        if len(ids) > 1:
            self.runner.settle(self.target.features)
        if not self.waits and 1 < len(ids) <= self.runner.limit:
            self.runner.read(self._known(ids[:-1]), head=0)

    def _drafting(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Drafting:
        """A text of one token has no feature yet, so nothing is drafted."""
        if not len(self.runner.unread):
            return Draft.empty()
        return (yield from super()._drafting(ids, stop, max_depth, rng))

    def fork(self, targets: Sequence[Runner]) -> list[Drafter]:
        """See `Drafter.fork`: each reads the features of its own text's target."""
        forks = super().fork(targets)
        for fork, target in zip(forks, targets):
            assert isinstance(fork, FeatureDrafter)
            fork.target = target
        return forks

    def commit(self, ids: list[int]) -> None:
        """What was accepted is known from the round."""

    def observe(self, round: Round) -> None:
        """Queue the target's features of the pending token and of the accepted ones."""
        rows = [0, *(node + 1 for node in round.path)]
        self.runner.settle(self.target.features[torch.tensor(rows, device=self.target.device)])


class FeatureTreeDrafter(FeatureDrafter):
    """EAGLE-2: a level keeps the `width` nodes of the largest cumulative probability, the tree the best `nodes` of all.

    With costs, a tree has as many of those nodes as should give most tokens a second, by the head's probabilities, and
    no level that cannot pay for its forward. The tree is a function of the text, so it is verified as a deterministic
    draft.

    Attributes:
        width: nodes expanded a level, and children tried of each (the paper's top k, 10).
        nodes: most nodes of the finished tree (the paper: 60).
        threshold: least cumulative probability of a node (the paper: 0).
        costs: of rounds; those of a single text count.
    """

    def __init__(
        self,
        runner: HeadRunner,
        target: Runner,
        warp: Warp,
        *,
        width: int = 10,
        nodes: int = 60,
        threshold: float = 0.0,
        costs: RoundCosts | None = None,
    ) -> None:
        super().__init__(runner, target, warp)
        self.width, self.nodes, self.threshold, self.costs = width, nodes, threshold, costs
        if costs is not None:
            self._level = LEVEL * costs.drafting(1)
            self._checking = torch.tensor([costs.verifying(1, n) for n in range(1, nodes + 2)])  # by nodes, from 0 on

    def _drafting(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Drafting:
        """The tree, as deep as the stop rule's window."""
        runner = self.runner
        depth = min(stop.cap(), max_depth, runner.limit - len(ids))
        if depth < 1 or not len(runner.unread):
            return Draft.empty()
        logits = runner.reduce((yield self._known(ids[runner.length :])))
        states, seen = runner.hidden[-1:], torch.zeros(1, 0, dtype=torch.bool, device=runner.device)
        paths: list[list[int]] = [[]]
        above = torch.zeros(1, device=runner.device)  # log-probability of each node that is being expanded
        origin = torch.full((1,), -1, device=runner.device)  # and its place among all candidates
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        scores: list[Tensor] = []
        count, least = 0, math.log(self.threshold) if self.threshold else -math.inf
        for level in range(depth):
            log_q = self._log_probs(logits, ids, paths)
            width = min(self.width, log_q.shape[-1])
            best = log_q.topk(width, -1)
            score = (above[:, None] + best.values).flatten()
            drafted = best.indices.flatten()
            tokens.append(drafted if runner.draft_ids is None else runner.draft_ids[drafted])
            scores.append(score)
            parents.append(origin.repeat_interleave(width))
            if level + 1 == depth:
                break
            top = score.topk(min(self.width, len(score)))
            if (self.threshold and top.values[0] < least) or not self._pays(top.values, torch.cat(scores), level + 1):
                break
            above, picked, row = top.values, tokens[-1][top.indices], top.indices // width
            origin = count + top.indices
            count += len(score)
            if self.warp.needs_prefix:
                paths = [paths[r] + [t] for r, t in zip(row.tolist(), picked.tolist())]
            if level:  # the first level hangs below the text, which every node sees
                own = torch.eye(len(seen), dtype=torch.bool, device=runner.device)
                seen = torch.cat([seen, own], 1)
            seen = seen[row]
            logits = yield picked, states[row], seen, level
            states = runner.hidden
        every = torch.cat(scores)
        nodes = self.nodes if self.costs is None else self._worthwhile(every, level + 1)[0]
        return _best_nodes(torch.cat(tokens), torch.cat(parents), every, nodes, least)

    def _worthwhile(self, scores: Tensor, levels: int) -> tuple[int, float]:
        """How many of the most probable candidates give most tokens a second, and those tokens a second.

        Each adds the chance that it is accepted to the round's tokens, and a token to be checked to its time.
        """
        best = scores.topk(min(self.nodes, len(scores))).values.exp().cpu()
        tokens = 1 + torch.cat([best.new_zeros(1), best]).cumsum(0)
        rate = tokens / (levels * self._level + self._checking[: len(tokens)])
        count = int(rate.argmax())
        return count, float(rate[count])

    def _pays(self, expanded: Tensor, scores: Tensor, levels: int) -> bool:
        """Whether a level below these nodes can bring more tokens than its forward's time does elsewhere."""
        return self.costs is None or float(expanded.exp().sum()) > self._worthwhile(scores, levels)[1] * self._level

    def _read(self, feed: Any) -> Tensor:
        """Logits behind the text's tokens, or behind those of a level."""
        return self.runner.read_level(*feed) if isinstance(feed, tuple) else super()._read(feed)

    def _read_texts(self, runners: list[Any], feeds: list[Any]) -> Sequence[Tensor]:
        """`_read` of several texts."""
        if not isinstance(feeds[0], tuple):
            return super()._read_texts(runners, feeds)
        return runners[0].read_levels(runners, [feed[:3] for feed in feeds], feeds[0][3])

    def _log_probs(self, logits: Tensor, ids: list[int], paths: list[list[int]]) -> Tensor:
        """log q of each row as sampling sees it ``[w, draft vocab]``; greedy decoding ranks by the unwarped one."""
        if self.warp.greedy:
            return logits.float().log_softmax(-1)
        if self.warp.needs_prefix:
            q = self.runner.reduce(self.warp(self.runner.expand(logits), [ids + path for path in paths]))
        else:
            q = self.warp(logits)
        return q.log().clamp_(max=0)


def _best_nodes(tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int, least: float) -> Draft:
    """The tree of the most probable candidates: none is likelier than its parent, and of equals the first counts.

    Args:
        tokens: of the candidates, parents before children.
        parents: their places among the candidates; -1 for the root's children.
        scores: their log-probabilities.
        nodes: most nodes of the tree.
        least: their least log-probability.
    """
    order = torch.sort(scores, descending=True, stable=True).indices[:nodes]
    order = order[(scores[order] >= least) & (scores[order] > -torch.inf)].sort().values
    kept = order.tolist()
    place = {node: i for i, node in enumerate(kept)} | {-1: -1}
    return Draft(tokens[order], [place[p] for p in parents[order].tolist()])
