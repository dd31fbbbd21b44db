"""PEFT LoRA: a small GPT-2 is frozen, and there is a posterior over the adapters only."""

import torch
import torch.nn.functional as F
from common import compare, sentences
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2ForSequenceClassification

import slangvi

data = sentences()


def adapted() -> PeftModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 6, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 32}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    base = GPT2ForSequenceClassification(GPT2Config(**sizes, **dropout, **special, initializer_range=0.3))
    layers = ["c_attn", "c_proj", "c_fc"]
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=layers, fan_in_fan_out=True))


def adam() -> torch.Tensor:
    model = adapted()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in data.epochs(1):
        opt.zero_grad()
        F.cross_entropy(model(x).logits, y).backward()
        opt.step()
    return model(data.x_test).logits.softmax(-1)


def slang() -> torch.Tensor:
    model = adapted()
    cool = {"temperature": 0.1, "prior_precision": 1000.0, "init_precision": 1e4}
    opt = slangvi.SLANG(model, num_data=data.size, rank=4, lr=0.02, **cool)
    for x, y in data.epochs(1):
        opt.zero_grad()
        opt.train()
        F.cross_entropy(model(x).logits, y).backward()
        opt.step()
    return slangvi.predictive_samples(model, opt.posterior, data.x_test).mean(0)


if __name__ == "__main__":
    compare(adam, slang, data.y_test)
