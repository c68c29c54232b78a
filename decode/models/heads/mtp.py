"""A target's own next-token layer (MTP, DeepSeek-V3 2412.19437, section 2.2) as its draft.

It reads in slot t the target's last hidden state of token t and the embedding of token t + 1, and its state predicts
token t + 2. It is applied again to its own states, as EAGLE's is. transformers loads it from the target's files.
"""

from collections.abc import Iterator
from textwrap import shorten
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import MtpModel

from decode.errors import UserError
from decode.files import Fields
from decode.models.api import Cache, Capture, Model, Out, Read
from decode.models.heads.eagle import DraftHead
from decode.models.heads.runner import Features
from decode.models.huggingface import RollbackCache, facts_of
from decode.models.sources import Name

MTP = "mtp"  # the name of the draft, and its version among heads
QWEN = "qwen3_next", "qwen3_5"
"""Model types whose files hold one layer, named as Mellum's, which their configurations do not tell transformers."""


class MtpHead(DraftHead):
    """A next-token layer in the role of a head, whose parameters are the layer's alone.

    Attributes:
        mtp: transformers' model, which holds the target's embedding and output head beside the layer.
        target_config: the target's configuration.
    """

    version = kind = MTP
    mtp: MtpModel

    def __init__(self, mtp: MtpModel, target_config: PreTrainedConfig) -> None:
        of_target = target_config.get_text_config()
        mtp.config.num_target_layers = of_target.num_hidden_layers
        mtp.config.target_hidden_size = of_target.hidden_size
        super().__init__(mtp.config)
        object.__setattr__(self, "mtp", mtp)  # as a submodule it would add the target's tables to the parameters
        self.layers, self.target_config = mtp.layers, target_config

    @property
    def embed_tokens(self) -> Any:
        """The embedding that the layers read."""
        return self.mtp.embed_tokens

    def logits(self, states: Tensor, target_head: Any = None) -> Tensor:
        """Logits ``[..., vocab]`` of states, by the target's output head."""
        return self.mtp._project_to_logits(states)

    def output(self, states: Tensor) -> Tensor:
        """States as the output head reads them."""
        return states

    def unroll(self, embeds: Tensor, features: Tensor, steps: int, rows: Tensor | None = None) -> Iterator[Tensor]:
        """States of each step: see `FeatureHead.unroll`; all positions are computed.

        A position sees the text's slots up to its own, and the slots of its earlier steps.
        """
        mtp, time = self.mtp, embeds.shape[1]
        cache, hidden, turn = DynamicCache(), features, torch.arange(time, device=embeds.device)
        before, (kind,) = turn[:, None] - turn, getattr(self.config, "layer_types", None) or ["full_attention"]
        window = self.config.sliding_window if kind == "sliding_attention" else time + steps
        for step in range(steps):
            ages = range(step - 1, -1, -1)  # how far back the slots of earlier steps are
            seen = [(before >= 0) & (before < window - step), *((before == 0) & (age < window) for age in ages)]
            hidden_from = torch.cat(seen, -1).logical_not()
            mask = embeds.new_zeros(hidden_from.shape).masked_fill_(hidden_from, torch.finfo(embeds.dtype).min)
            place, e = (turn + 1 + step)[None], embeds.roll(-step, 1)
            rope = {"layer_type": kind} if mtp.has_per_layer_rope else {}
            hidden = self.layers[0](
                e,
                hidden,
                position_embeddings=mtp.rotary_emb(e, position_ids=place, **rope),
                position_ids=place,
                attention_mask=mask[None, None],
                past_key_values=cache,
            )
            yield hidden if rows is None else hidden.flatten(0, 1).index_select(0, rows)

    def fields(self) -> Fields:
        """The target's config.json, with what the tuned layers are."""
        tuned = {name: getattr(self.config, name, None) for name in ("dtype", "num_assistant_tokens")}
        fields = self.target_config.to_diff_dict() | tuned | {"draft_format": MTP}
        fields.pop("quantization_config", None)  # tuned layers have no scales
        return fields

    def tensors(self) -> dict[str, Tensor]:
        """The layers' tensors under the names of the target's files."""
        state = {f"layers.{name}": tensor for name, tensor in self.layers.state_dict().items()}
        # transformers 5.23 leaves the end of a pattern in Mellum's and Qwen's names
        return {name.replace("..)", "."): value for name, value in revert_weight_conversion(self.mtp, state).items()}


def load_mtp(target: PreTrainedModel, folder: Name | None = None) -> MtpHead:
    """The next-token layers in the files that a target was loaded from, or tuned ones of it in another folder.

    Raises:
        UserError: there are none, or transformers does not load them.
    """
    config = target.config.get_text_config()
    origin = target.config.name_or_path
    if config.model_type.startswith(QWEN):
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        target._keys_to_ignore_on_load_unexpected = [r"^mtp\."]  # by which the layers are found, without a vision tower
    try:
        if not hasattr(MtpModel, "forward_layer"):
            raise ValueError("this version runs all of its layers together; install a newer one")
        if not getattr(config, "num_mtp_layers", None):
            raise ValueError("its configuration names none that it knows (num_mtp_layers)")
        target.config.name_or_path = str(folder or origin)
        mtp = MtpModel.from_pretrained(target, device_map={"": target.get_output_embeddings().weight.device})
        if len(mtp.layers) > 1 or RollbackCache(mtp.config).recurrent:
            raise ValueError(f"{len(mtp.layers)} of them, expected one without a recurrent state")
    except Exception as error:  # a family's layers may be stored in many ways that are not known
        reason = shorten(str(error) or type(error).__name__, 200)
        raise UserError(
            f"the next-token layers (MTP) of {type(target).__name__} ({target.config.model_type}) are not loaded by "
            f"transformers {transformers.__version__}: {reason}. Loaded are those of DeepSeek-V3, GLM-4.5, Mellum, "
            "Qwen3-Next and Qwen3.5, where the target's files hold them; or give another draft"
        ) from error
    finally:
        target.config.name_or_path = origin
    return MtpHead(mtp, target.config).eval()


class MtpCache(Cache):
    """The slots of one sequence.

    Attributes:
        length: tokens that are known; the first one makes no slot.
        unread: features ``[n, hidden]`` of the target that wait for the tokens after theirs.
        settled: number of tokens whose slots depend on verified tokens only.
        state: the latest one, ``[1, hidden]``, which the next token is paired with.
    """

    state: Tensor
    settled = 0

    def __init__(self, keys: RollbackCache) -> None:
        self.keys, self.unread = keys, Features()

    def settle(self, features: Tensor) -> None:
        """Drop the slots that depend on drafted tokens, and queue the target's features, ``[n, hidden]``."""
        self._drop(self.settled)
        self.unread.put(features)

    def truncate(self, length: int) -> None:
        """Know the first `length` tokens only; 0 forgets the queued features too."""
        self._drop(min(length, self.length))
        if not length:
            self.settled = 0
            self.unread.clear()

    def _drop(self, length: int) -> None:
        self.length = length
        self.keys.truncate(max(0, length - 1))


class MtpRunner(Model):
    """Reads tokens as `HeadRunner` does."""

    def __init__(self, head: MtpHead, target: PreTrainedModel) -> None:
        head.mtp.tie_with_main_model(target)  # layers in training were loaded with another copy of its tables
        table, self.head = target.get_output_embeddings().weight, head
        read = sum(p.numel() for p in head.parameters()) + table.numel()
        config = target.config.get_text_config()
        cached = facts_of(target)["cache_bytes_per_token"] // config.num_hidden_layers  # of a layer like the target's
        super().__init__(
            "the target's next-token layers",
            device=table.device,
            dtype=target.dtype,
            vocab_size=len(table),
            limit=head.config.max_position_embeddings,
            model=head,
            weight_bytes=read * target.dtype.itemsize,
            tree_refusal="next-token layers draft chains",
            cache_bytes_per_token=cached,
        )

    def new_cache(self) -> MtpCache:
        """See `Model.new_cache`."""
        return MtpCache(RollbackCache(self.head.config))

    def _read(self, read: Read, capture: Capture, last: int | None) -> Out:
        """With features in the queue the layer reads the tokens that they are paired with."""
        cache, tokens = read.cache, read.tokens
        true, keys = len(cache.unread) > 0, cache.keys
        if not cache.length:
            tokens, cache.length = tokens[1:], 1
        n = len(tokens)
        cache.length += n
        x = cache.unread.take(n) if true else cache.state.expand(n, -1)
        start = keys.get_seq_length() + 1
        position = torch.arange(start, start + n, device=self.device)[None]
        states = self.head.mtp.forward_layer(0, x[None], position, keys, input_ids=tokens[None])[0]
        keys.end(tokens)
        cache.state, cache.settled = states[-1:], keys.read + 1 if true else cache.settled
        states = states if last is None else states[len(states) - last :]
        return Out(self.head.logits(states), states)
