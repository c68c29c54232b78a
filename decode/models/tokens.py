"""Prompts and chats to token ids, and ids back to text.

Training, evaluation and decoding call the same functions, so that a prompt has the same ids everywhere. Where a
tokenizer puts a start token before texts (Llama, Mistral, Gemma), prompts begin with exactly one. A chat is the text of
its template and nothing more, as in transformers and the engines: it has a start token only if the template writes it.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from inspect import signature
from itertools import takewhile

import jinja2
import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from decode.core.draft import Ids
from decode.errors import UserError
from decode.files import Fields
from decode.incoming import REASONING

Message = Fields
"""One turn of a chat as OpenAI and chat templates write it: ``role``, ``content``, possibly ``tool_calls``."""
PROMPT_END = "prompt_end"
"""A field of tokenizer_config.json: the end of all prompts that a model made here has seen; shells leave it out."""
TRAINED = "trained_prompts"
"""A field of tokenizer_config.json: what shaped the prompts of a model's training here, the fields of
`decode.options.ChatSettings`."""
ARGUMENTS = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"tools"}
"""Arguments of transformers that are no variables of a template."""
MARKED = [{"role": "user", "content": "MARKED QUESTION"}, {"role": "assistant", "content": "MARKED ANSWER"}]
"""A chat by which it is seen what a template writes."""
REFUSALS = jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError  # what rendering a chat may raise


def start_ids(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """Ids that the tokenizer itself puts before every text: one start token, or none."""
    ids, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    return next((ids[:i] for i in range(len(ids)) if ids[i : i + len(bare)] == bare), [])


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Ids:
    """Ids of a prompt, without an end token; see `batch_prompt_ids`. A prompt of one line ends as `PROMPT_END` says.

    Raises:
        UserError: the prompt has no ids.
    """
    end = tokenizer.init_kwargs.get(PROMPT_END, "")
    (ids,) = batch_prompt_ids(tokenizer, [text if end in text else text + end])
    if not ids:
        raise UserError("the prompt is empty, and the tokenizer has no start token; give some text")
    return ids


def batch_prompt_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Ids of prompts. Where the tokenizer has a start token they begin with exactly one, also if the text has it."""
    start, prompts = start_ids(tokenizer), []
    for ids in plain_ids(tokenizer, texts):
        while start and ids[: len(start)] == start:
            ids = ids[len(start) :]
        prompts.append(start + ids)
    return prompts


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template_args: Fields | None = None
) -> Ids:
    """Ids of a chat up to the beginning of the assistant's turn, equal to transformers' ``apply_chat_template``.

    Raises:
        UserError: the tokenizer has no chat template, the template refuses the messages, or a message spells a control
            token.
    """
    if token := control_token(tokenizer, [message for message in messages if message["role"] != "assistant"]):
        raise UserError(
            f"a message holds the text {token!r}, which the tokenizer would read as a control token (it can end the "
            "turn or begin another one): leave it out, or continue plain text (--chat false)"
        )
    return written_ids(tokenizer, render_chat(tokenizer, messages, ask=True, template_args=template_args))


def control_token(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str | None:
    """The first special token that is spelt out in the text of a message, or None."""
    texts = (str(message.get(name) or "") for message in messages for name in ("content", REASONING[0]))
    found = filter(None, map(_special_tokens(tokenizer, len(tokenizer)).search, texts))
    return next((token[0] for token in found), None)


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> re.Pattern[str]:
    """Any special token as text (Gemma has thousands), the longest first; ``size`` is the cache's key."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} - {""}
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")


def written_ids(tokenizer: PreTrainedTokenizerBase, chat: str) -> Ids:
    """Ids of a chat that a template has written.

    Raises:
        UserError: the template wrote nothing.
    """
    (ids,) = plain_ids(tokenizer, [chat])
    if not ids:
        raise UserError("the chat template writes nothing for these messages; give another template, or plain prompts")
    return ids


def user_says(text: str, system: str | None = None) -> list[Message]:
    """The messages of a chat that begins with a user's turn, after a system message if one is given."""
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": text.strip()}]


def check_template(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
    """Refuse a chat template that leaves out the assistant's turns, or the system message that is to be used.

    Raises:
        UserError: which of them it leaves out or refuses; or there is no template.
    """
    question, answer = (turn["content"] for turn in MARKED)
    try:
        refuses = answer not in render_chat(tokenizer, MARKED, ask=False)
    except UserError:
        if not tokenizer.chat_template:
            raise
        refuses = False  # a template may refuse chats that end with the assistant's turn
    if refuses:
        raise UserError(
            "the chat template does not write the assistant's turns, so it is none to chat with; give the tokenizer "
            "the model's own template, or continue plain text (--chat false)"
        )
    if not system:
        return
    cure = "leave out --system, or say it in the prompts"
    try:
        written = render_chat(tokenizer, user_says(question, system), ask=True)
    except UserError as error:
        raise UserError(f"the chat template refuses a system message ({error}); {cure}") from error
    if system.strip() not in written:
        raise UserError(f"the chat template leaves the system message out; {cure}")


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    ask: bool,
    template_args: Fields | None = None,
) -> str:
    """The text of a chat.

    Contents become parts for templates that read nothing else (LLaVA, SmolVLM), and an assistant's reasoning stands
    under every name that templates read it by. With `ask` it ends with the beginning of the assistant's next turn;
    `template_args` are further variables of the template, such as ``enable_thinking``.

    Raises:
        UserError: no chat template, or one that does not accept these messages.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruction-tuned model, give one "
            "(--chat-template, data.chat_template), or plain prompts (--chat false, data.chat false)"
        )
    parts, args = _reads_parts(tokenizer, str(tokenizer.chat_template)), template_args or {}
    if taken := ARGUMENTS.intersection(args):
        raise UserError(f"{', '.join(sorted(taken))}: not a variable of the chat template, but set by this program")
    try:
        try:
            written = _render(tokenizer, messages, parts, ask, args)
        except TypeError:  # a template may take a tool call's arguments as text, as APIs write them (DeepSeek-V3)
            texts = json.loads(json.dumps(list(messages)))
            for function in (call["function"] for message in texts for call in message.get("tool_calls") or ()):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            written = _render(tokenizer, texts, parts, ask, args)
    except REFUSALS as error:
        raise UserError(f"the chat template does not accept these messages: {error}") from error
    if ask and not all(tool.get("function", tool).get("name", "") in written for tool in args.get("tools") or ()):
        raise UserError("the chat template does not write the tools: leave them out")
    return written


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], parts: bool, ask: bool, args: Fields
) -> str:
    turns = []
    for message in messages:
        thought = next((message[name] for name in REASONING if message.get(name)), None)
        turn = dict(message) | (dict.fromkeys(REASONING, thought) if thought else {})
        if parts and isinstance(message.get("content"), str):
            turn["content"] = [{"type": "text", "text": message["content"]}]
        turns.append(turn)
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask, **args)


@lru_cache(maxsize=8)
def _reads_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a template writes contents only where they are lists of parts (``template`` is the cache's key)."""

    def written(parts: bool) -> int:
        texts = []
        for turns in (MARKED[:1], MARKED):  # a template may refuse a chat that ends with the answer
            with suppress(*REFUSALS):
                texts.append(_render(tokenizer, turns, parts, len(turns) == 1, {}))
        return sum(turn["content"] in "".join(texts) for turn in MARKED)

    return written(True) > written(False)


def plain_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Ids of texts, without start and end tokens."""
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def continuation_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Ids of texts that follow other text: without a start token, and without a space before the first word.

    SentencePiece tokenizers write "▁" before the first word of any text. With them the texts are encoded after a line
    break, whose ids are removed again.
    """
    bare = plain_ids(tokenizer, texts)
    if not tokenizer.convert_ids_to_tokens(plain_ids(tokenizer, ["a"])[0])[0].startswith("▁"):
        return bare
    anchor = plain_ids(tokenizer, ["\n"])[0]
    encoded, cut = plain_ids(tokenizer, [f"\n{text}" for text in texts]), len(anchor)
    return [long[cut:] if long[:cut] == anchor else short for long, short in zip(encoded, bare, strict=True)]


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of the end-of-text token.

    Raises:
        UserError: the tokenizer has none.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-text token, so a model could not learn to stop: "
            "set eos_token in its tokenizer_config.json"
        )
    return end


def added_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of tokens that were added to a vocabulary, special ones among them."""
    return {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}


def turn_end(tokenizer: PreTrainedTokenizerBase, known: Collection[int]) -> int | None:
    """The token with which the chat template ends an answer, unless a known one stands there; None without one.

    It is the first added token that follows the answer both at the end of a chat and before a next question: a template
    may write more at the end of all (Phi-4-mini), or another token there (gpt-oss).
    """
    special, behind = added_ids(tokenizer), list[Ids]()
    for turns in (MARKED, MARKED + MARKED[:1]):
        with suppress(UserError):
            written = render_chat(tokenizer, turns, ask=False).partition(MARKED[1]["content"])[2]
            behind.append([token for token in plain_ids(tokenizer, [written])[0] if token in special])
    if not behind:
        return None
    common = [token for token, *others in takewhile(lambda some: len({*some}) == 1, zip(*behind))] or behind[0]
    return None if not common or {*common} & {*known} else common[0]


INCOMPLETE = "\ufffd"  # the character in decoded text for bytes that are no whole character yet


class Detokenizer:
    """Turns token ids into text piece by piece; the joined pieces are the text of all ids at once.

    A piece is held back until its last bytes are a whole character. Each piece is decoded together with the one before
    it, because many tokenizers treat the first token of a text differently (spaces). `tokenizers`' DecodeStream does
    the same for fast tokenizers only, and does not return what it holds back at the end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: Ids = []
        self._before = 0  # first id of the last piece
        self._shown = 0  # ids whose text has been returned

    def text(self, ids: Ids) -> str:
        """The text of some ids on their own."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, ids: Iterable[int], *, last: bool = False) -> str:
        """Add ids; returns the text that is certain by now, possibly none, or all of it after the last ids."""
        self.ids += ids
        text = self.text(self.ids[self._before :])
        known = self.text(self.ids[self._before : self._shown])
        if len(text) <= len(known) or (not last and text.endswith(INCOMPLETE)):
            return ""
        self._before, self._shown = self._shown, len(self.ids)
        return text[len(known) :]

    def finish(self) -> str:
        """The text that was held back."""
        return self.push([], last=True)


class StopStrings:
    """Strings that end a text, by transformers' own criterion."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._met = StopStringCriteria(tokenizer, list(strings))

    def ends(self, ids: Ids) -> bool:
        """Whether the last token completes a string; tokens before the longest string are not read."""
        return bool(self._met(torch.tensor([ids[-self._met.maximum_token_len :]]), torch.empty(0))[0])


def marked(
    detokenizer: Detokenizer,
    tokens: Ids,
    written_by: Sequence[str],
    rejected: Sequence[Ids],
    alone: bool = False,
) -> list[dict[str, str]]:
    """Tokens as ``{text, who}``: accepted, corrected, bonus or target, each after up to three rejected in its place.

    The detokenizer has read the text before them; for `written_by` and `rejected` see `decode.core.round.Round`.
    Where the target is alone, its tokens are no bonus.
    """
    names = {"draft": "accepted", "correction": "corrected", "target": "target" if alone else "bonus"}
    pieces = []
    for token, writer, instead in zip(tokens, written_by, rejected):
        pieces += [{"text": detokenizer.text([r]), "who": "rejected"} for r in instead[:3]]
        pieces.append({"text": detokenizer.push([token]), "who": names[writer]})
    return pieces
