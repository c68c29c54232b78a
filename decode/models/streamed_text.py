"""Token ids to text as they come, and stop strings inside a round."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from decode.core.trace_metrics import Round

INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are no whole character yet


class Detokenizer:
    """Token ids in, text out; the pieces joined are the text of all ids at once.

    A piece is held back while its last bytes are no whole character. Each piece is decoded together with the one
    before it, because many tokenizers treat the first token of a text differently (spaces). `tokenizers`' DecodeStream
    does the same for fast tokenizers only, and does not give out what it holds back at the end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip = skip_special_tokens
        self.ids: list[int] = []
        self._before = 0  # first id of the last piece
        self._shown = 0  # ids whose text has been given out

    def text(self, ids: Sequence[int]) -> str:
        """The text of some ids on their own."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=self.skip, clean_up_tokenization_spaces=False))

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; returns the text that is certain by now, possibly none."""
        self.ids += ids
        return self._new(hold=True)

    def finish(self) -> str:
        """What was held back."""
        return self._new(hold=False)

    def _new(self, hold: bool) -> str:
        text = self.text(self.ids[self._before :])
        known = self.text(self.ids[self._before : self._shown])
        if len(text) <= len(known) or (hold and text.endswith(INCOMPLETE)):
            return ""
        self._before, self._shown = self._shown, len(self.ids)
        return text[len(known) :]


def marked(
    detokenizer: Detokenizer,
    tokens: Sequence[int],
    written_by: Sequence[str],
    rejected: Sequence[Sequence[int]],
    alone: bool = False,
) -> list[dict[str, str]]:
    """Tokens as ``{text, who}``: accepted, corrected, bonus, target, and rejected before what replaced it.

    Args:
        detokenizer: holds what came before.
        tokens: the next tokens.
        written_by: as `Round.written_by` tells it.
        rejected: for each token the drafted ones that were rejected at its place; at most three are shown.
        alone: nobody drafts, so the target's tokens are no bonus.
    """
    names = {"draft": "accepted", "fix": "corrected", "target": "target" if alone else "bonus"}
    pieces = []
    for token, writer, instead in zip(tokens, written_by, rejected):
        pieces += [{"text": detokenizer.text([r]), "who": "rejected"} for r in instead[:3]]
        pieces.append({"text": detokenizer.push([token]), "who": names[writer]})
    return pieces


def stop_at(
    rounds: Iterable[tuple[Round, list[int]]],
    prompt: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    strings: Sequence[str],
    found: Callable[[int], None] = lambda dropped: None,
) -> Iterator[tuple[Round, list[int]]]:
    """Cut rounds after the first token that completes one of the strings, by transformers' own criterion.

    A round emits several tokens, so the text may end inside it; what follows is dropped, as if the tokens had come
    one by one.

    Args:
        rounds: from `decode.loop.rounds`.
        prompt: token ids before the first round.
        tokenizer: of the target.
        strings: the stop strings; none passes the rounds through.
        found: told how many tokens were dropped, once a string is complete.
    """
    if not strings:
        yield from rounds
        return
    met = StopStringCriteria(tokenizer, list(strings))
    ids = list(prompt)
    for result, new in rounds:
        for i, token in enumerate(new):
            ids.append(token)
            if bool(met(torch.tensor([ids]), torch.empty(0))[0]):
                found(len(new) - i - 1)
                yield result, new[: i + 1]
                return
        yield result, new
