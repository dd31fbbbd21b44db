"""Hugging Face Trainer: a small BERT from random weights, with gradient accumulation."""

import tempfile

import torch
from common import compare, sentences
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import slangvi

data = sentences()


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=6, **sizes, **dropout))


def arguments(folder: str, **options: object) -> TrainingArguments:
    sizes = {"num_train_epochs": 1, "per_device_train_batch_size": 15, "gradient_accumulation_steps": 2}
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    return TrainingArguments(folder, use_cpu=True, **(sizes | quiet | options))


def adam() -> torch.Tensor:
    model = bert()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, arguments(folder), train_dataset=data.rows(), optimizers=(opt, None)).train()
    return model.eval()(data.x_test).logits.softmax(-1)


def slang() -> torch.Tensor:
    model = bert()
    cool = {"temperature": 0.1, "prior_precision": 300.0, "init_precision": 1e4}
    opt = slangvi.SLANG(model, num_data=data.size, rank=4, lr=0.1, **cool)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, arguments(folder), train_dataset=data.rows(), optimizers=(opt, None)).train()
    return slangvi.predictive_samples(model, opt.posterior, data.x_test).mean(0)


if __name__ == "__main__":
    compare(adam, slang, data.y_test)
