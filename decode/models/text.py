"""Text in and out: prompts to ids, ids to text as they come, stop strings inside a round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from decode.core.errors import UserError
from decode.core.trace import Round

ROLES = ("user", "assistant")
INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are no whole character yet


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool = False, history: Sequence[tuple[str, str]] = ()
) -> list[int]:
    """Ids of a prompt, ready to be continued.

    Plain text gets the tokenizer's own start token, if it has one, and no end token.

    Args:
        tokenizer: of the target.
        text: what the user says.
        chat: put it into the tokenizer's chat template, followed by the mark that the assistant's turn begins.
        history: earlier turns of the chat, (user, assistant).

    Raises:
        UserError: the tokenizer has no chat template, or nothing is left to continue.
    """
    if chat:
        if not tokenizer.chat_template:
            raise UserError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template; leave --chat out")
        messages = [{"role": role, "content": said} for turn in history for role, said in zip(ROLES, turn)]
        messages.append({"role": "user", "content": text})
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(shown, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(text)["input_ids"]
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]
    if not ids:
        raise UserError("the prompt is empty, and the tokenizer has no start token; give some text")
    return [int(i) for i in ids]


class Detokenizer:
    """Token ids in, text out; the pieces joined are the text of all ids at once.

    A piece is held back while its last bytes are no whole character. Each piece is decoded together with the one
    before it, because many tokenizers treat the first token of a text differently (spaces).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip = skip_special_tokens
        self.ids: list[int] = []
        self._before = 0  # first id of the last piece
        self._told = 0  # ids whose text has been given out

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
        known = self.text(self.ids[self._before : self._told])
        if len(text) <= len(known) or (hold and text.endswith(INCOMPLETE)):
            return ""
        self._before, self._told = self._told, len(self.ids)
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
        written_by: as `decode.loop.who_wrote` tells it.
        rejected: for each token the drafted ones that were rejected at its place; at most three are told.
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
) -> Iterator[tuple[Round, list[int]]]:
    """Cut rounds after the first token that completes one of the strings, by transformers' own criterion.

    A round emits several tokens, so the text may end inside it; what follows is dropped, as if the tokens had come
    one by one.

    Args:
        rounds: from `decode.loop.rounds`.
        prompt: token ids before the first round.
        tokenizer: of the target.
        strings: the stop strings; none passes the rounds through.
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
                yield result, new[: i + 1]
                return
        yield result, new
