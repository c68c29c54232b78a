"""The corpus that a draft is trained on: sources, splits, tokenizer, label masks, batches."""

from distill.config.data import DataSettings
from distill.data.corpus import Corpus, collate, load_corpus, show_example
from distill.data.tokenize import IGNORE, prompt_part
from distill.data.train_tokenizer import train_tokenizer

__all__ = [
    "IGNORE",
    "Corpus",
    "DataSettings",
    "collate",
    "load_corpus",
    "prompt_part",
    "show_example",
    "train_tokenizer",
]
