"""Both runners give the model's own logits: long texts, growth, several threads, weights in every layout."""

import copy
import math
import random
import threading
from pathlib import Path

import pytest
import torch
from families import VOCAB, build_architecture
from reading import Reader, paths, text_before
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from decode.core.draft import Draft
from decode.errors import UserError
from decode.models import check, huggingface
from decode.models.api import PIECE, read_prompt
from decode.models.check import TOLERANCE, compare, open_draft_runner, open_runner
from decode.models.fast import cache, forward, layout, weights
from decode.models.fast.forward import FastRunner
from decode.models.fast.weights import HalfLinear, Linear, Linears, PackedLinear, halvable
from decode.models.huggingface import HuggingFaceRunner, RollbackLayer

TEXT = [3, 7, 1, 9, 3, 7, 22, 4, 40, 0, 11]
WAYS = {"fast": {}, "ordinary": {"fast": False}, "packed": {"pack": "on"}}
"""How a runner is opened."""


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def close(seen: Tensor, wanted: Tensor, atol: float = 0.0002) -> bool:
    return seen.shape == wanted.shape and torch.allclose(seen, wanted, atol=atol, rtol=1e-4)


def random_tree(seed: int, nodes: int = 12) -> Draft:
    dice = random.Random(seed)
    return Draft([dice.randrange(VOCAB) for _ in range(nodes)], [dice.randrange(-1, i) for i in range(nodes)])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_runner_is_used_only_where_it_gives_the_models_own_logits(dtype: torch.dtype, monkeypatch) -> None:
    model = build_architecture("Llama", dtype=dtype)
    assert type(open_runner(model)) is FastRunner
    assert type(open_runner(model, fast=False)) is HuggingFaceRunner
    gaps = compare(model, open_runner(model))
    assert max(gaps.chain, gaps.tree) < TOLERANCE[dtype]
    monkeypatch.setattr(layout, "norm", lambda module: torch.tanh)
    with pytest.warns(UserWarning, match="differs from LlamaForCausalLM"):
        assert type(open_runner(model)) is HuggingFaceRunner


@pytest.mark.parametrize(
    ("family", "way"), [("llama", "fast"), ("llama", "packed"), ("mistral", "ordinary"), ("gemma3", "fast")]
)
@torch.inference_mode()
def test_texts_longer_than_the_first_allocation_are_read_right(family: str, way: str, tiny) -> None:
    model = tiny(family, max_position_embeddings=2048)
    reader = Reader(open_runner(model, **WAYS[way]))
    ids = torch.arange(PIECE + 300) * 7919 % VOCAB
    wanted = logits_of(model, ids.tolist())
    captured: list[torch.Tensor] = []
    read_prompt(reader.runner, reader.cache, ids[:-200].tolist(), capture=(1,), each=captured.append)
    assert [len(piece) for piece in captured] == [PIECE, 100]
    assert reader.length == PIECE + 100
    assert close(torch.cat([reader.read(ids[-200:-180]), reader.read(ids[-180:])]), wanted[-200:], atol=1e-3)
    reader.truncate(100)
    assert close(reader.read(ids[100:400]), wanted[100:400], atol=1e-3)


@torch.inference_mode()
def test_a_cache_grows_as_needed_and_a_long_texts_memory_is_given_back(tiny, monkeypatch) -> None:
    runner = open_runner(tiny("llama", max_position_embeddings=2048))
    memory = runner.network.cache
    monkeypatch.setattr(cache, "KEPT", 1000 * memory.bytes_per_token)
    for length, held in ((600, 600), (1200, 256)):
        texts = [Reader(runner) for _ in range(2)]
        for text in texts:
            text.read(list(range(40)) * (length // 40), head=0)
        assert length <= memory.capacity <= 2 * length
        for text in texts:
            assert memory.tensor.shape[3] >= length  # one text is still open
            text.cache.close()
        assert memory.tensor.shape[1] == 1
        assert (memory.capacity == 256) == (held == 256)
    reader = Reader(runner)
    assert close(reader.read(TEXT), logits_of(tiny("llama", max_position_embeddings=2048), TEXT))
    assert runner.network.positions == 256


def states(*values: float) -> Tensor:
    """``[batch 1, heads 2, positions, width 3]``, each position filled with its value."""
    return torch.tensor(values)[None, None, :, None].expand(1, 2, -1, 3).clone()


def test_appending_to_a_rolling_layer_copies_nothing_while_there_is_room(monkeypatch) -> None:
    monkeypatch.setattr(huggingface, "LEAST", 4)
    layer = RollbackLayer()
    assert len({layer.update(states(value), -states(value))[0].data_ptr() for value in range(4)}) == 1
    assert layer.get_mask_sizes(2) == (6, 0)
    keys, values = layer.update(states(4, 5), -states(4, 5))
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(values, -keys)
    assert layer.memory["keys"].shape[2] == 6


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
def test_an_opened_model_can_still_be_run_saved_and_trained(family: str, tiny, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny(family)).requires_grad_()
    before, weights = logits_of(model, TEXT), {k: v.clone() for k, v in model.state_dict().items()}
    Reader(open_runner(model)).read(TEXT)
    assert torch.equal(before, logits_of(model, TEXT))
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())

    model.save_pretrained(tmp_path)
    assert torch.equal(before, logits_of(AutoModelForCausalLM.from_pretrained(tmp_path), TEXT))

    ids = torch.tensor([TEXT])
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    after = logits_of(model, TEXT)
    assert not torch.allclose(after, before, atol=1e-3)
    assert close(Reader(open_runner(model)).read(TEXT), after)


def test_weights_that_are_not_numbers_are_refused(tiny) -> None:
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(UserError, match="not finite"):
        open_runner(model)


def test_a_tree_of_one_thread_is_not_seen_by_another(tiny) -> None:
    """A model of another thread reads a chain while the first one's forward is inside its tree."""
    inside, go_on, seen = threading.Event(), threading.Event(), []
    model, other = copy.deepcopy(tiny("gpt2")), copy.deepcopy(tiny("gemma2"))
    registry = dict(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping)
    reader, waiting = Reader(open_runner(model)), Reader(open_runner(other))
    reader.read(TEXT[:-1], head=0)
    tree = random_tree(0)

    def pause(*_: object) -> None:
        inside.set()
        assert go_on.wait(20)

    model.transformer.h[1].register_forward_hook(pause)
    feed = torch.cat([torch.tensor(TEXT[-1:]), torch.tensor(tree.ids)])
    thread = threading.Thread(target=lambda: seen.append(reader.read(feed, tree)))
    thread.start()
    assert inside.wait(20)
    chain = waiting.read(TEXT)
    go_on.set()
    thread.join()
    assert close(chain, logits_of(other, TEXT))
    for node in range(-1, len(tree)):
        assert close(seen[0][node + 1], logits_of(model, text_before(tree, TEXT, node))[-1])
    assert registry == ALL_MASK_ATTENTION_FUNCTIONS._local_mapping


def test_a_tree_knows_its_depths_children_and_texts() -> None:
    tree = Draft([5, 6, 7, 5], [-1, 0, -1, -1])
    assert tree.depths() == [1, 2, 1, 1]
    assert tree.children() == [{5: 0, 7: 2}, {6: 1}, {}, {}, {}]  # of equal siblings the first counts
    assert tree.paths()[:3] == [[], [1], [1, 2]]
    assert Draft(()).is_chain
    with pytest.raises(ValueError, match="precede"):
        Draft([1, 2], [1, -1])


def test_a_branch_joins_a_tree_where_they_agree_and_no_node_twice() -> None:
    tree = Draft([5, 6, 7, 8], [-1, -1, 0, 2])
    for branch, new in (([5, 7, 9], [(5, 7, 9)]), ([4, 5], [(4,), (4, 5)]), ([5, 7], [])):
        joined = tree.with_branch(branch)
        assert set(paths(joined)) == set(paths(tree)) | set(new)
        assert len(joined) == len(set(paths(joined))) == len(joined)
        assert joined.parents[:4] == tree.parents  # the nodes of the tree keep their places


SHAPES = [(48, 32), (32, 48), (96, 576), (7, 5)]
ROWS = [(0,), (1,), (2,), (8,), (13,), (64,), (300,), (2, 3)]
LARGE = pytest.mark.usefixtures("small_weights_count_as_large")
X86 = pytest.mark.skipif(not halvable(torch.ones(1, 1)), reason="FBGEMM is for x86 processors")


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["packed", "padded", pytest.param("float16", marks=X86)])
@torch.inference_mode()
def test_products_are_those_of_plain_weights(kind: str, shape: tuple[int, int], biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).half().float(), torch.randn(shape[0]) if biased else None
    make = HalfLinear if kind == "float16" else PackedLinear
    plain, made = Linear(weight, bias), make(weight, bias)
    if isinstance(made, PackedLinear):
        made.least = weights.FEW if kind == "padded" else 1
    assert made.rows == shape[0]
    assert made.bytes == weight.numel() * (2 if kind == "float16" else 4)
    for rows in ROWS:
        x, before = torch.randn(*rows, shape[1]), torch.randn(*rows, shape[0])
        kept = before.clone()
        torch.testing.assert_close(made(x), plain(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made.add_to(before, x), plain.add_to(before, x), rtol=1e-4, atol=1e-4)
        assert torch.equal(before, kept)  # states are read again after the sum


def test_a_layout_is_chosen_by_the_size_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HALVED", 4 * 4 * 3)
    monkeypatch.setattr(weights, "PACKED", 4 * 4 * 6)

    def kinds(*args, **options) -> list[type[Linear]]:
        make = Linears(*args, **options)
        return [type(make(torch.randn(rows, 4))) for rows in (6, 3, 2)]

    assert kinds("auto") == [PackedLinear, Linear, Linear]
    assert kinds("on") == [PackedLinear] * 3
    assert kinds("off", half=True) == [Linear] * 3
    if halvable(torch.ones(1, 1)):
        assert kinds("auto", half=True) == [HalfLinear, HalfLinear, Linear]
        assert kinds("on", half=True) == [HalfLinear] * 3
    make = Linears("auto")
    make(torch.randn(6, 4))
    assert make.sentence() == "weights: 0.0 MB packed"


def in_sixteen_bits(model: PreTrainedModel) -> PreTrainedModel:
    """The same with weights that 16 bits hold, in float32."""
    return copy.deepcopy(model).bfloat16().float()


@pytest.fixture
def small_weights_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HALVED", 1)
    monkeypatch.setattr(weights, "PACKED", 1)


@LARGE
@X86
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@torch.inference_mode()
def test_a_target_published_in_sixteen_bits_is_read_in_sixteen_with_its_own_results(family: str, tiny) -> None:
    model, ids = in_sixteen_bits(tiny(family)), torch.arange(9) % VOCAB
    runner = open_runner(model, pack="auto")
    assert isinstance(runner, FastRunner)
    assert isinstance(runner.network.weights.head, HalfLinear)
    assert isinstance(runner.network.layers[0].qkv, HalfLinear)
    logits = model(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(Reader(runner).read(ids), logits, rtol=1e-5, atol=1e-5 * float(logits.std()))
    assert runner.weight_bytes < 0.6 * open_runner(model).weight_bytes
    other = open_runner(tiny(family), pack="auto")  # float16 does not hold these
    assert isinstance(other, FastRunner)
    assert isinstance(other.network.weights.head, PackedLinear)


@LARGE
@X86
def test_a_large_target_is_read_in_sixteen_bits_where_memory_has_room(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "COPIED", 0)
    model, ids = in_sixteen_bits(tiny("llama")), torch.arange(9) % VOCAB
    runner = open_runner(model, pack="auto")
    assert isinstance(runner, FastRunner)
    assert isinstance(runner.network.layers[0].qkv, HalfLinear)
    with torch.inference_mode():
        torch.testing.assert_close(Reader(runner).read(ids), model(input_ids=ids[None]).logits[0], rtol=1e-4, atol=1e-4)
    others = [open_runner(tiny("llama"), pack="auto"), open_draft_runner(model, model, pack="auto")]
    monkeypatch.setattr(forward, "free_memory", lambda device: 0.0)
    for plain in (*others, open_runner(model, pack="auto")):
        assert isinstance(plain, FastRunner)
        assert type(plain.network.layers[0].qkv) is Linear


@LARGE
@X86
@torch.inference_mode()
def test_a_draft_is_rounded_to_sixteen_bits(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, ids = tiny("llama"), torch.arange(9) % VOCAB
    rounded = open_draft_runner(draft, tiny("llama", seed=2), pack="auto")
    assert isinstance(rounded, FastRunner)
    assert isinstance(rounded.network.layers[0].down, HalfLinear)
    expected = draft(input_ids=ids[None]).logits[0]
    gap = (Reader(rounded).read(ids) - expected).square().mean(-1).sqrt().max() / expected.std()
    assert 1e-5 < gap < 0.01
    with monkeypatch.context() as patch:
        patch.setattr(check, "ROUNDED", 1e-6)
        with pytest.warns(UserWarning, match="using the ordinary model call"):
            assert isinstance(open_draft_runner(draft, draft, pack="auto"), HuggingFaceRunner)
