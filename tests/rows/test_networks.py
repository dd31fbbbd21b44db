"""Public networks in small: every parameter is read by a rule, and is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slangvi.rows import Plans, record
from slangvi.rows.nodes import type_name, walk
from slangvi.rows.rules import find_rule

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make loops installs it")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = {"input_ids": torch.arange(32).view(4, 8) % 11, "attention_mask": torch.ones(4, 8, dtype=torch.long)}
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=9, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), TOKENS


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BertConfig(vocab_size=11, max_position_embeddings=9, **SMALL)
    return transformers.BertForSequenceClassification(config), TOKENS


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **SMALL)
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(4, 3, 8, 8).double()}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(vocab_size=11, max_position_embeddings=9, num_key_value_heads=1, **SMALL)
    return transformers.LlamaForCausalLM(config), TOKENS


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config), {"pixel_values": torch.randn(4, 3, 16, 16).double()}


def convnext() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ConvNextConfig(hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, num_labels=3, patch_size=2)
    return transformers.ConvNextForImageClassification(config), {"pixel_values": torch.randn(4, 3, 8, 8).double()}


NETWORKS = {"gpt2": gpt2, "bert": bert, "vit": vit, "llama": llama, "resnet": resnet, "convnext": convnext}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("network", NETWORKS)
def test_public_networks_are_read_by_rules(network: str, mode: str):
    build: Callable = NETWORKS[network]
    torch.manual_seed(0)
    model, inputs = build()
    model = model.double().train(mode == "train" and network != "resnet")  # batch normalisation mixes examples
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    logits = model(**inputs).logits
    losses, chosen = logits.flatten(1).logsumexp(1), [3, 0]
    each = [torch.autograd.grad(losses[k], list(params.values()), retain_graph=True, allow_unused=True) for k in chosen]
    recording = record([logits], params, torch.tensor(chosen), plans := Plans(), 4)
    losses.sum().backward()
    plan, nodes = plans.latest(), walk([logits])
    assert not plan.by_definition
    assert {
        type_name(nodes[f.position]) for f in plan.frontiers if not f.by_rule or not find_rule(nodes[f.position])
    } == set()
    for j, (name, param) in enumerate(params.items()):
        expected = torch.stack([torch.zeros_like(param) if grads[j] is None else grads[j] for grads in each])
        block = recording.blocks().get(name)
        found = torch.zeros_like(expected) if block is None else block.form().view_as(expected)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12, msg=name)
