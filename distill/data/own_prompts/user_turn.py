"""The user's turn of a chat template: what stands before the text, and what ends it."""

from collections.abc import Collection
from dataclasses import dataclass

from decode.core.errors import UserError
from decode.models.prompt_tokens import plain_ids, written_ids
from distill.data.tokenization.chat_masks import ChatFormat
from distill.data.tokenization.label_masks import UnusableRow

PROBE = "\ue000prompt\ue001"
"""Stands for the user's words while their place in a rendered chat is looked for; no text contains these characters."""


@dataclass(frozen=True)
class UserTurn:
    """The user's turn of a chat template."""

    text: str  # The template up to the place of the user's words
    before: list[int]  # Its ids
    # Tokens that end a prompt: the first special token that the template writes after it, and the model's
    ends: set[int]
    markers: frozenset[str]  # Texts of the template and special tokens, which no prompt may contain


def user_turn(chat: ChatFormat, ends: Collection[int]) -> UserTurn:
    """The user's turn, found by rendering a chat whose only words are a probe.

    Args:
        chat: Template and system message.
        ends: The model's end-of-text tokens.

    Raises:
        UserError: no template, none with a user's turn, or nothing before it that a model could continue.
    """
    tokenizer = chat.tokenizer
    if not tokenizer.chat_template:
        raise UserError(
            f"data.source is target, and the tokenizer {tokenizer.name_or_path!r} has no chat template, so the target "
            "cannot be asked for what a user says: choose an instruction-tuned target, give data.chat_template, or "
            "name a file with prompts as data.source with reference.responses.source target"
        )
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    try:
        text = chat.render([*system, {"role": "user", "content": PROBE}])
    except UnusableRow as error:
        raise UserError(
            f"data.source is target, and its chat template refuses a chat of one user's turn ({error.detail}): name a "
            "file with prompts as data.source with reference.responses.source target"
            + (", or leave data.system out" if system else "")
        ) from error
    before, found, after = text.partition(PROBE)
    before = before.rstrip(" ")
    if not found or not before.strip():
        raise UserError(
            "data.source is target, and its chat template "
            + ("writes nothing before a user's turn" if found else "does not write what the user says")
            + ", so the target cannot be asked for prompts: give another one with data.chat_template, or name a file "
            "with prompts as data.source with reference.responses.source target"
        )
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    tail = (token for token in plain_ids(tokenizer, [after])[0] if token in special)
    stops = {int(end) for end in ends} | set([*tail][:1])
    if not stops:
        raise UserError(
            "data.source is target, and neither the model nor its chat template has a token that ends a user's turn: "
            "set eos_token in its tokenizer_config.json"
        )
    texts = {before.rsplit("\n", 1)[-1].strip(), before.strip().rsplit("\n", 1)[-1].strip(), after.strip()}
    texts |= {str(tokenizer.decode([token])).strip() for token in special}
    markers = frozenset(text for text in texts if len(text) > 2)
    return UserTurn(before, written_ids(tokenizer, before), stops, markers)
