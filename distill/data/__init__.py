"""The corpus that a draft is trained on: sources, splits, tokenizer, label masks, batches."""

from distill.config.data import DataSettings
from distill.data.corpus import Corpus, collate, load_corpus
from distill.data.tokenize import IGNORE, prompt_part, train_tokenizer

__all__ = [
    "IGNORE",
    "Corpus",
    "DataSettings",
    "collate",
    "load_corpus",
    "prompt_part",
    "train_tokenizer",
]
