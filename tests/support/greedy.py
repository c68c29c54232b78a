"""What tests of greedy identity share: prompts, what generate writes, and the comparison."""

import torch
from transformers import PreTrainedModel

from decode.core.sampling import LogitsWarper, TorchRng
from decode.loop import Method, Text, decode, decode_texts
from decode.models.api import Model

GREEDY = LogitsWarper()
PROMPTS = [[3, 7, 1, 9], [1, 2, 3, 1, 2, 3, 1, 2]]
NEW = 28


def generate(model: PreTrainedModel, prompt: list[int], new: int = NEW, **options) -> list[int]:  # type: ignore[no-untyped-def]
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0, **options
    )
    return out[0].tolist()


def assert_decodes(runner: Model, system: Method, wanted: list[int], prompt: list[int], new: int = NEW, **options):  # type: ignore[no-untyped-def]
    out = decode(runner, system, GREEDY, prompt, max_new_tokens=new, **options)
    assert out.ids == wanted
    assert sum(len(r.new) for r in out.rounds) == len(wanted) - len(prompt)
    return out.rounds


def together(runner: Model, system: Method, prompts: list[list[int]], **options) -> list[Text]:  # type: ignore[no-untyped-def]
    """Greedy texts of several prompts, decoded together."""
    return decode_texts(runner, system, GREEDY, prompts, rngs=[TorchRng(0) for _ in prompts], **options)
