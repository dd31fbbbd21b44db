"""Embedding tables: only the rows that were looked up carry gradient."""

from __future__ import annotations

from torch import Tensor, nn

from slangvi.errors import UnsupportedModuleError
from slangvi.grads.blocks import Block, Rows
from slangvi.grads.rules.registry import register_rule


@register_rule(nn.Embedding)
def embedding(module: nn.Embedding, index: Tensor, delta: Tensor) -> dict[str, Block] | None:
    """Table: g_r adds δ_rt to row index_rt; the padding row gets nothing.  index (R, ...), δ (R, ..., D)."""
    check_embedding("", module)
    values = delta.reshape(index.shape[0], -1, delta.shape[-1])
    flat = index.reshape(index.shape[0], -1)
    if module.padding_idx is not None:
        values = values * (flat != module.padding_idx).unsqueeze(-1)
    return {"weight": Rows(flat, values, module.num_embeddings)}


def check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Refuse options under which a table has no per-example gradient."""
    if module.sparse:
        raise UnsupportedModuleError(
            f"module {name!r} ({type(module).__name__}) has sparse=True, and sparse gradients are not supported. "
            "Build it with sparse=False: the table's gradient is kept as touched rows anyway."
        )
    if module.max_norm is not None:
        raise UnsupportedModuleError(
            f"module {name!r} ({type(module).__name__}) has max_norm={module.max_norm}, which rewrites the weights "
            "inside forward and so changes the sample. Build it with max_norm=None; the prior keeps rows small."
        )
    if module.scale_grad_by_freq:
        raise UnsupportedModuleError(
            f"module {name!r} ({type(module).__name__}) has scale_grad_by_freq=True, which mixes examples. "
            "Build it with scale_grad_by_freq=False."
        )
