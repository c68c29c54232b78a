"""Draft models with another tokenizer than the target's.

They draft in the intersection of the two vocabularies (token-level intersection, arXiv 2502.05202): the draft's
distribution, renormalised to the common tokens, is an ordinary q for the exact rule, and the residual covers all other
tokens. Tokens are equal if the bytes of their text are, however a tokenizer writes them (``Ġthe`` and ``▁the``), and
special tokens if their role is.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decode.draft import Draft
from decode.errors import UserError
from decode.models.heads import DraftHead
from decode.models.huggingface_runner import HuggingFaceRunner
from decode.models.runner import Cache, Output, Runner, WrappedRunner

LEAST = 100  # fewest tokens of an intersection: fewer do not even spell the letters, digits and signs of English
BOS, EOS = "<bos>", "<eos>"
Token = bytes | str
"""A token of any tokenizer: the bytes of its text, or `BOS`, `EOS` or the content of another special token."""
SPACE = "\u2581"  # SentencePiece's sign for a space
RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens for bytes that no other token spells


CHARACTERS = [bytes_to_unicode()[byte] for byte in range(256)]  # GPT-2's character of each byte
BYTES = {character: byte for byte, character in enumerate(CHARACTERS)}


class Vocabulary:
    """The tokens of one tokenizer that its model knows.

    Attributes:
        tokens: tokens by id.
        ids: ids by token; of several ids with one text the lowest, and a raw byte only where no other token spells it.

    Raises:
        UserError: the tokenizer is neither byte-level nor like SentencePiece, so its tokens have no text of their own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, whose: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = backend.decoder.__getstate__().decode() if backend is not None and backend.decoder else ""
        self.byte_level = "ByteLevel" in decoder
        if backend is None or not (self.byte_level or SPACE in decoder):
            raise UserError(
                f"the {whose}'s tokenizer ({type(tokenizer).__name__}) is neither byte-level nor like SentencePiece, "
                "so its tokens cannot be compared with another vocabulary's; use a draft of the target's model family"
            )
        self.size, self._model = size, backend.model
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        roles = {tokenizer.bos_token_id: BOS} | {tokenizer.eos_token_id: EOS}  # a token with both roles is an end
        named = {i: token for token, i in tokenizer.get_vocab().items() if i < size}
        self.tokens: dict[int, Token] = {}
        raw = set()
        for i, token in named.items():
            byte = None if self.byte_level else RAW_BYTE.fullmatch(token)
            if i in roles or i in special:
                self.tokens[i] = roles.get(i, token)
            elif byte:
                self.tokens[i] = bytes([int(byte[1], 16)])
                raw.add(i)
            elif not self.byte_level:
                self.tokens[i] = token.replace(SPACE, " ").encode()
            elif all(character in BYTES for character in token):
                self.tokens[i] = bytes(BYTES[character] for character in token)
            else:
                self.tokens[i] = token.encode()
        self.ids: dict[Token, int] = {
            self.tokens[i]: i for i in sorted(named, key=lambda i: (i in raw, i), reverse=True)
        }
        self._unknown = self.ids.get(EOS, 0)

    def spell(self, token: Token | None) -> list[int]:
        """A token of another vocabulary in ids of this one: its own id, or at least one id that spells its text.

        The tokenizer's own merges split the text, without anything before it.
        """
        if token in self.ids:
            return [self.ids[token]]
        if token in (None, BOS, EOS):  # GPT-2 and others begin texts with the token that ends them
            return [self._unknown]
        text = token.encode() if isinstance(token, str) else token or b""
        if self.byte_level:
            ids = [piece.id for piece in self._model.tokenize("".join(CHARACTERS[byte] for byte in text))]
        else:
            try:
                ids = [piece.id for piece in self._model.tokenize(text.decode().replace(" ", SPACE))]
            except UnicodeDecodeError:  # a part of a character
                ids = [self.ids[bytes([byte])] for byte in text if bytes([byte]) in self.ids]
        return [i for i in ids if i < self.size] or [self._unknown]


class Intersection:
    """The tokens that the vocabularies of a target and of a draft have in common, one id to one id.

    Raises:
        UserError: they have fewer than `LEAST` in common.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target, self.draft = target, draft
        pairs = sorted((i, draft.ids[token]) for token, i in target.ids.items() if token in draft.ids)
        if len(pairs) < LEAST:
            raise UserError(
                f"the vocabularies have {len(pairs)} tokens in common, {len(target.ids)} being the target's and "
                f"{len(draft.ids)} the draft's; at least {LEAST} are needed; use a draft of the same model family"
            )
        self._pairs = torch.tensor(pairs).T
        self.shared: Collection[int] = {i for i, _ in pairs}  # the target's ids of them
        self._spelt: dict[int, list[int]] = {}

    @property
    def target_ids(self) -> Tensor:
        """The target's ids of the common tokens, ascending, long ``[shared]``."""
        return self._pairs[0]

    def translate(self, token: int) -> list[int]:
        """The draft's ids for one id of the target: exactly one for a common token, else one or more.

        A text is translated token by token, so what is translated stays as it is when the text goes on.
        """
        if token not in self._spelt:
            self._spelt[token] = self.draft.spell(self.target.tokens.get(token))
        return self._spelt[token]

    def to_target(self, logits: Tensor) -> Tensor:
        """The draft's logits ``[n, draft's ids]`` as ``[n, target's ids]``; tokens it does not share are impossible."""
        self._pairs = self._pairs.to(logits.device)
        target, draft = self._pairs
        rows = logits.new_full((len(logits), self.target.size), -torch.inf)
        return rows.index_copy_(1, target, logits[:, draft])

    def sentence(self, prompt: Collection[int]) -> str:
        """Which part of the target's vocabulary, and of the tokens of some prompts, the draft can draft."""
        shared, whole = len(self.shared), len(self.target.tokens)
        known = sum(i in self.shared for i in prompt) / max(1, len(prompt))
        return (
            f"the draft shares {shared} of the target's {whole} tokens ({shared / whole:.1%}), "
            f"{known:.1%} of the prompts' tokens"
        )


@dataclass
class ForeignDraft:
    """A draft model with what its vocabulary shares with the target's."""

    model: PreTrainedModel
    vocabulary: Intersection

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of the model."""
        return self.model.parameters()

    @property
    def generation_config(self) -> GenerationConfig | None:
        """Of the model."""
        return self.model.generation_config


DraftModel = PreTrainedModel | DraftHead | ForeignDraft  # what can draft for a target, besides its own layers


class ForeignCache(Cache):
    """The cache of a translated sequence; lengths are in tokens of the target."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.ends: list[int] = []  # positions of the inner cache that the sequence takes up to each token

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens of the target that have been read."""
        return len(self.ends)

    def truncate(self, length: int) -> None:
        """See `Cache.truncate`."""
        if length < self.length:
            self.inner.truncate(self.ends[length - 1] if length else 0)
            del self.ends[length:]

    def close(self) -> None:
        """See `Cache.close`."""
        self.inner.close()


class ForeignRunner(WrappedRunner):
    """Reads the target's ids and gives logits over them, while the caches hold the translated sequences.

    Drafters need not know: lengths and ids are the target's throughout.

    Attributes:
        limit: tokens of the target that fit if every one is a single token for the draft; `remaining` knows better.
    """

    def __init__(self, runner: Runner, vocabulary: Intersection) -> None:
        super().__init__(runner, "a draft of another vocabulary reads chains only", vocabulary.target.size)
        self.vocabulary = vocabulary

    def new_cache(self) -> ForeignCache:
        """See `Runner.new_cache`."""
        return ForeignCache(self.inner.new_cache())

    def remaining(self, cache: ForeignCache, ids: Sequence[int]) -> int:
        """See `Runner.remaining`; each token to come is one that the vocabularies share."""
        unread = sum(len(self.vocabulary.translate(token)) for token in ids[cache.length :])
        return self.inner.limit - (cache.ends[-1] if cache.ends else 0) - unread

    def _read(
        self, cache: ForeignCache, tokens: Tensor, tree: Draft | None, capture: tuple[int, ...], last: int | None
    ) -> Output:
        """A row follows the last of a token's translations."""
        pieces = [self.vocabulary.translate(token) for token in tokens.tolist()]
        feed = torch.tensor([i for piece in pieces for i in piece], dtype=torch.long, device=self.device)
        ends = list(accumulate(map(len, pieces)))
        needed = ends if last is None else ends[len(ends) - last :]
        before = cache.ends[-1] if cache.ends else 0
        out = self.inner.forward([cache.inner], [feed], last=len(feed) - needed[0] + 1 if needed else 0)
        cache.ends += [before + end for end in ends]
        rows = [end - needed[0] for end in needed]
        return Output(self.vocabulary.to_target(out.logits[rows]), out.hidden[rows])


@torch.inference_mode()
def foreign_logits(draft: ForeignDraft, ids: Sequence[int], prompt_length: int) -> Tensor:
    """What a draft of another vocabulary would draft at each response position of one text, by teacher forcing.

    Returns:
        Logits ``[response, vocab]`` over the target's ids. Behind the end of the draft's context a row is impossible
        (all −inf but the first id).
    """
    runner = ForeignRunner(HuggingFaceRunner(draft.model), draft.vocabulary)
    ends = accumulate(len(draft.vocabulary.translate(token)) for token in ids[:-1])
    fit = sum(end <= runner.limit for end in ends)  # tokens of the text that the draft's context holds
    rows = torch.full((len(ids) - prompt_length, runner.vocab_size), -torch.inf, device=runner.device)
    rows[:, 0] = 0.0
    if (seen := fit - prompt_length + 1) > 0:
        cache = runner.new_cache()
        rows[:seen] = runner.forward([cache], [torch.tensor(ids[:fit], device=runner.device)], last=seen).logits
        cache.close()
    return rows
