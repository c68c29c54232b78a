"""The corpus that a draft is trained on: sources, splits, tokenizer, label masks, batches."""

from distill.data.corpus import Corpus, collate, load_corpus, show_example
from distill.data.examples import IGNORE, prompt_ids
from distill.data.settings import DataSettings
from distill.data.tokenizer import train_tokenizer

__all__ = [
    "IGNORE",
    "Corpus",
    "DataSettings",
    "collate",
    "load_corpus",
    "prompt_ids",
    "show_example",
    "train_tokenizer",
]
