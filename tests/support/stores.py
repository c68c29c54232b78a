"""What retrieval drafts from, built from documents."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from decode.drafters.adaptix import save_ngram_table
from decode.drafters.corpus_files import join_documents
from decode.drafters.rest import save_datastore

Documents = Iterable[Sequence[int] | np.ndarray]


def build_datastore(documents: Documents, path: str | Path, fingerprint: str) -> Path:
    return save_datastore(join_documents(documents), Path(path), fingerprint)


def build_trigram_table(documents: Documents, path: str | Path, fingerprint: str, **options: int) -> Path:
    return save_ngram_table(join_documents(documents), Path(path), fingerprint, **options)
