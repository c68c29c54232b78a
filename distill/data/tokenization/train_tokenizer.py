"""A small tokenizer for models that are trained from scratch."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from decode.core.errors import UserError

EOS = "<|endoftext|>"


PAD = "<|pad|>"


SMALLEST = 256 + 2  # every byte and the two special tokens


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer that encodes any text without loss.

    Words with their leading space are the largest pieces. Every digit is a token of its own, so that numbers are
    copied and computed digit by digit. The same texts give the same tokenizer.

    Args:
        texts: what to learn the pieces from.
        vocab_size: tokens at most, special tokens and the 256 bytes included; fewer where the texts hold no more
            repeated pieces.

    Returns:
        A tokenizer with ``<|endoftext|>`` (id 0) as end of text and ``<|pad|>`` (id 1); it adds neither by itself.

    Raises:
        UserError: ``vocab_size`` has no room for the bytes.
    """
    if vocab_size < SMALLEST:
        raise UserError(
            f"tokenizer_vocab_size is {vocab_size}, but {SMALLEST} tokens are the least that can write any text: "
            f"set it to {SMALLEST} or more, 1024 for example"
        )
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
