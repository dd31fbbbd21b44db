"""Models of torchvision and transformers with random weights, a batch for each, and a LoRA adapter."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from slangvi_reproduction.bench.networks import Problem, images, mlp, tokens, vectors

__all__ = ["BERT", "GPT2", "GPT2_LORA", "MLP", "RESNET", "VIT", "Adapter", "adapted_gpt2", "problems"]

MLP, RESNET, VIT, BERT, GPT2 = "MLP", "ResNet-18", "vision transformer", "BERT-base", "GPT-2 small"
GPT2_LORA = "GPT-2 small with LoRA"
_BERT_QUICK = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_GPT2_QUICK = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}


def problems(quick: bool, device: str) -> dict[str, Problem]:
    """Return the networks by name with one draw a step; a library is imported when its network is built."""
    if quick:
        return {
            MLP: vectors(partial(mlp, (20, 16, 16, 4)), 4, 20, 4, 1, device),
            RESNET: images(partial(resnet, (1, 1, 1, 1)), 4, 16, 1, device),
            VIT: images(partial(vision_transformer, 16, 2, 2, 16), 4, 16, 1, device),
            BERT: _texts_with_labels(4, 8, 30, device, **_BERT_QUICK),
            GPT2: tokens(partial(gpt2, vocab_size=30, **_GPT2_QUICK), 4, 8, 30, 1, device),
            GPT2_LORA: tokens(partial(adapted_gpt2, vocab_size=30, **_GPT2_QUICK), 4, 8, 30, 1, device),
        }
    return {
        MLP: vectors(partial(mlp, (784, 400, 400, 10)), 200, 784, 10, 1, device),
        RESNET: images(partial(resnet, (2, 2, 2, 2)), 128, 64, 1, device),
        VIT: images(partial(vision_transformer, 64, 8, 6, 384), 64, 64, 1, device),
        BERT: _texts_with_labels(16, 128, 30_522, device),
        GPT2: tokens(gpt2, 8, 256, 50_257, 1, device),
        GPT2_LORA: tokens(adapted_gpt2, 8, 256, 50_257, 1, device),
    }


def resnet(depths: tuple[int, ...]) -> nn.Module:
    """Build torchvision's residual network with GroupNorm for ten classes; (2, 2, 2, 2) blocks are resnet18."""
    library = import_module("torchvision.models.resnet")
    norm = partial(nn.GroupNorm, 8)
    model: nn.Module = library.ResNet(library.BasicBlock, list(depths), num_classes=10, norm_layer=norm)
    return model


def vision_transformer(side: int, layers: int, heads: int, width: int) -> nn.Module:
    """Build torchvision's VisionTransformer for ten classes, with patches of 8 by 8 pixels."""
    library = import_module("torchvision.models.vision_transformer")
    model: nn.Module = library.VisionTransformer(side, 8, layers, heads, width, 4 * width, num_classes=10)
    return model


def bert(**sizes: int) -> nn.Module:
    """Build the BERT classifier of transformers for two classes, without dropout; BERT-base if no size is given."""
    library = import_module("transformers")
    config = library.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    model: nn.Module = library.BertForSequenceClassification(config)
    return model


def gpt2(**sizes: int) -> nn.Module:
    """Build the GPT-2 language model of transformers, without dropout; GPT-2 small if no size is given."""
    library = import_module("transformers")
    config = library.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    model: nn.Module = library.GPT2LMHeadModel(config)
    return model


class Adapter(nn.Module):
    """A frozen layer plus a trainable product of two thin matrices (LoRA), which is zero at first.

    Args:
        layer: a Conv1D of transformers, whose weight is (inputs, outputs).
        rank: columns of the first matrix.
    """

    def __init__(self, layer: Any, rank: int = 8) -> None:
        super().__init__()
        inputs, outputs = layer.weight.shape
        self.layer = layer
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Add the low-rank product to the output of the layer."""
        result: Tensor = self.layer(x) + self.up(self.down(x))
        return result


def adapted_gpt2(**sizes: int) -> nn.Module:
    """Build GPT-2 with all its weights frozen and an adapter on both projections of every attention layer."""
    model: Any = gpt2(**sizes).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn, block.attn.c_proj = Adapter(block.attn.c_attn), Adapter(block.attn.c_proj)
    adapted: nn.Module = model
    return adapted


def _texts_with_labels(batch: int, length: int, vocab: int, device: str, **sizes: int) -> Problem:
    """Return BERT with random texts of two classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(vocab, (batch, length), generator=generator).to(device)
    y = torch.randint(2, (batch,), generator=generator).to(device)
    return Problem.of(partial(bert, vocab_size=vocab, **sizes), x, y, 1)
