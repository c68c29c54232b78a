"""A small tokenizer trained on the texts of a run, for targets that are trained from scratch."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from decode.errors import UserError

EOS, PAD = "<|endoftext|>", "<|pad|>"
SMALLEST = 256 + 2  # every byte and the two special tokens


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer that encodes any text without loss; the same texts give the same tokenizer.

    Every digit is a token of its own, so that numbers are copied and computed digit by digit.

    Args:
        texts: Training texts.
        vocab_size: Largest vocabulary, special tokens and the 256 bytes included.

    Returns:
        A tokenizer with ``<|endoftext|>`` (id 0) as end of text and ``<|pad|>`` (id 1); it adds neither by itself.

    Raises:
        UserError: ``vocab_size`` is below 258.
    """
    if vocab_size < SMALLEST:
        raise UserError(
            f"tokenizer_vocab_size is {vocab_size}, but 256 bytes and two special tokens need {SMALLEST}: set it to "
            f"{SMALLEST} or more, 1024 for example"
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
