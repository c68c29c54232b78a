"""The kinds of heads: one table through which a head's network, its runner and its name in engines are reached."""

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from decode.models.api import Model
from decode.models.heads.block import BlockHead
from decode.models.heads.block_runner import BlockRunner
from decode.models.heads.eagle import DraftHead, FeatureHead
from decode.models.heads.mtp import MTP, MtpHead, MtpRunner
from decode.models.heads.runner import HeadRunner


class HeadKind(NamedTuple):
    """A kind of head."""

    network: type[DraftHead]
    runner: Callable[[Any, PreTrainedModel, str], Model]  # from the network, its target and the layout of weights
    served: str = ""  # the name of its method in vLLM and llama.cpp; empty: they take it from the target's own files


HEADS: dict[int | str, HeadKind] = {
    1: HeadKind(FeatureHead, HeadRunner, "eagle"),
    3: HeadKind(FeatureHead, HeadRunner, "eagle3"),
    "dflash": HeadKind(BlockHead, BlockRunner, "dflash"),
    "dspark": HeadKind(BlockHead, BlockRunner, "dspark"),
    "dflash2": HeadKind(BlockHead, BlockRunner, "dflash"),
    MTP: HeadKind(MtpHead, lambda head, target, pack: MtpRunner(head, target)),
}
"""Kinds by the version of a head (`DraftHead.version`)."""
