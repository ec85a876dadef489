"""A draft head for a causal language model: it guesses the next hidden state, from which a server drafts.

It is that of EAGLE for llamas (Li et al. 2024, arXiv 2401.15077, section 4), with the names of vLLM's
``EagleLlamaForCausalLM``: ``fc`` over the embedding of the next token and the last hidden state, then one llama layer
without its first norm. The embeddings and the output head are the model's own.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ..errors import ConfigError
from ..kernels.packed_attention import packed_arguments, register_packed_attention
from .build import logits_cap, logits_factor

_NEEDED = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"
_TAKEN = "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"
# The keys of rotary embeddings that transformers' and vLLM's llamas read alike. Of others the head takes the base only.
_ROPE = {"rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_OTHERWISE = "`ngram` and `suffix` of --speculative-config need no head"


def draft_config(config: PretrainedConfig) -> LlamaConfig:
    """The config of the head of a model, a llama of one layer whose sizes are the model's.

    Raises:
        ConfigError: the model caps or scales its logits, which vLLM's head does not, or has no such sizes.
    """
    if logits_cap(config) is not None or logits_factor(config) != 1:
        what = f"a {config.model_type} caps or scales its logits, which vLLM's EAGLE head for llamas does not"
        raise ConfigError(f"train.draft_head: {what}", _OTHERWISE)
    given = config.get_text_config().to_dict()
    if missing := [name for name in _NEEDED if not isinstance(given.get(name), int)]:
        what = f"config.json of this {config.model_type} has no single {missing[0]} for the layer of the head"
        raise ConfigError(f"train.draft_head: {what}", _OTHERWISE)
    rope = given.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope.keys() - _ROPE or rope.get("rope_type") not in ("default", "llama3"):
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    fields = {name: given[name] for name in (*_NEEDED, *_TAKEN) if given.get(name) is not None}
    try:
        return LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"], rope_parameters=rope, **fields)
    except ValueError as error:
        what = f"no llama has the sizes of this {config.model_type}: {' '.join(str(error).split())}"
        raise ConfigError(f"train.draft_head: {what}", _OTHERWISE) from error


def meta_head(config: PretrainedConfig) -> "DraftHead":
    """The head of a model of this config on the meta device, where tensors have shapes but no memory.

    Raises:
        ConfigError: see ``draft_config``.
    """
    with torch.device("meta"):
        return DraftHead(draft_config(config))


class DraftHead(nn.Module):
    """The head. The names of its parameters are those of vLLM's checkpoints.

    Args:
        config: the result of ``draft_config``.
        dtype: that of the parameters; rotary frequencies stay in fp32.
    """

    def __init__(self, config: LlamaConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        config._attn_implementation = register_packed_attention()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        self.layers = nn.ModuleList([layer])
        self.to(dtype)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(
        self, embedded: Tensor, hidden: Tensor, position_ids: Tensor | None = None, borders: Tensor | None = None
    ) -> Tensor:
        """What stands for the model's hidden states one token later, in the shape and dtype of ``hidden``.

        Args:
            embedded: ``[batch, seq, hidden]``, the embeddings of the token after each, as they are in the weights.
            hidden: ``[batch, seq, hidden]``, the model's last hidden states, after its final norm.
            position_ids: ``[batch, seq]`` int64, those of ``hidden``; None counts from 0.
            borders: of the documents of packed rows, see ``document_borders``; None if each row is one document.
        """
        x = self.fc(torch.cat((embedded, hidden), -1))
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        inside = {} if borders is None else packed_arguments(borders)
        return self.layers[0](x, position_ids=position_ids, position_embeddings=self.rotary(x, position_ids), **inside)

    def save(self, directory: Path) -> None:
        """Write the new directory that vLLM takes as ``model`` of ``--speculative-config``."""
        directory.mkdir(parents=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.named_parameters()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        dtype = str(self.fc.weight.dtype).removeprefix("torch.")
        config = json.dumps(self.config.to_dict() | {"dtype": dtype}, indent=2)
        (directory / "config.json").write_text(config + "\n", encoding="utf-8")
