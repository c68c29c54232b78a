"""Small tokenizers of both kinds that vocabularies are compared across."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

OTHER = "A farm keeps 12 apples; how many more apples are there on the farm? Über 30 Maße voll, 日本."


def spelled_out(
    vocab: Sequence[str], merges: Sequence[tuple[str, str]] = (), **special: str
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of exactly these pieces, the special ones last."""
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(vocab)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def byte_level(
    text: str = OTHER, size: int = 290, special: Sequence[str] = ("<pad>", "</end>")
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges of its own, whose last special token ends texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    core.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[-1])


def sentencepiece(text: str = OTHER, size: int = 90) -> PreTrainedTokenizerFast:
    """BPE as SentencePiece writes it: ``▁`` for a space, one put before every text, tokens ``<0x..>`` for bytes."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, max_token_length=7
    )
    core.train_from_iterator([" ".join(text.split()), *"abcdefghijklmnopqrstuvwxyz"], trainer)
    content = json.loads(core.to_str())
    pieces = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    pieces[3:3] = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [tuple(merge) for merge in content["model"]["merges"]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    core.model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
