"""Stacked sequence layers: embeddings, LayerNorm, recurrent layers, attention and transformers.

Each takes the weights of K clients, [K, ...], and the examples of all clients as one batch, client
after client. Recurrent layers, attention and transformer layers take sequences with either the
batch first, [K * B, T, ...], or the time, [T, K * B, ...], by their `batch_first`; embeddings
and LayerNorm take the batch first. `STACKED_SEQUENCE` maps layers to their stacked versions, and
`unsupported` names settings that have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedexp.kernels.dense import products
from fedexp.kernels.launch import differentiable
from fedexp.kernels.layers import gradient_buffer
from fedexp.kernels.recurrent import Cell, recurrent, wider

ONE_HOT = 2**26  # numbers of a one-hot matrix up to which it gives the gradient of an embedding


def unsupported(layer: nn.Module) -> str | None:
    """Return the setting of a layer that has no stacked implementation, if any.

    >>> unsupported(nn.LSTM(4, 6, proj_size=2))
    'a recurrent layer has projections'
    """
    if isinstance(layer, nn.Conv2d):
        square = len(set(layer.stride)) == len(set(layer.padding)) == 1
        plain = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
        plain = square and plain and not isinstance(layer.padding, str)
        return None if plain else "a convolution is not plain"
    if isinstance(layer, nn.Embedding):
        odd = layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
        return "an embedding has max_norm, scale_grad_by_freq or sparse" if odd else None
    if isinstance(layer, nn.RNNBase) and layer.proj_size:
        return "a recurrent layer has projections"
    if isinstance(layer, nn.MultiheadAttention):
        odd = layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn
        return "an attention layer has add_bias_kv or add_zero_attn" if odd else None
    return None


class StackedEmbedding(nn.Embedding):
    """Weights [K, V, E]; indices [K * B, ...]."""

    def forward(self, input: Tensor) -> Tensor:
        indices = input.long().reshape(len(self.weight), -1)
        rows = differentiable(_Embedding, indices, self.weight, self.padding_idx)
        return rows.view(*input.shape, -1)


class _Embedding(torch.autograd.Function):
    """Rows of [K, V, E] by indices [K, N]; a gradient without atomic additions."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(indices, weight)
        ctx.padding = padding
        # not by indexing, which takes a negative index for one from the end
        return weight.gather(1, indices[:, :, None].expand(-1, -1, weight.shape[2]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None]:
        indices, weight = ctx.saved_tensors
        clients, words, _ = weight.shape
        one_hot = weight.is_cuda and indices.numel() * words <= ONE_HOT
        kind = dy.dtype if one_hot else wider(dy.dtype)
        buffer = gradient_buffer(weight)
        if buffer is None or buffer.dtype != kind:
            buffer = torch.empty(weight.shape, dtype=kind, device=weight.device)
        if one_hot:
            chosen = indices[:, :, None] == torch.arange(words, device=weight.device)
            grad = torch.bmm(chosen.to(kind).mT, dy, out=buffer)
        else:
            client = torch.arange(clients, device=weight.device)[:, None]
            # sorted, not atomic, on a GPU: the same bits every time
            grad = buffer.zero_().index_put_((client, indices), dy.to(kind), accumulate=True)
        if ctx.padding is not None:
            grad[:, ctx.padding] = 0
        return None, grad.to(weight.dtype), None


class StackedLayerNorm(nn.LayerNorm):
    """Scale and shift [K, ...]; values are normalised in float32 or wider."""

    def forward(self, input: Tensor) -> Tensor:
        y = F.layer_norm(input.to(wider(input.dtype)), self.normalized_shape, eps=self.eps)
        rows = y.reshape(len(self.weight), -1, *self.normalized_shape) * self.weight[:, None]
        rows = rows if self.bias is None else rows + self.bias[:, None]
        return rows.view(input.shape).to(input.dtype)


class _StackedRecurrent(nn.RNNBase):
    """A recurrent layer with the weights of K clients, by the names of its own."""

    def flatten_parameters(self) -> None:
        """Do nothing: cuDNN does not compute with these weights."""

    def outputs_and_states(
        self, x: Tensor, states: Sequence[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs and the last states [layers * directions, K * B, H] of the layer.

        Args:
            x: the inputs, [K * B, T, F] or [T, K * B, F].
            states: the initial hidden state and of an LSTM the initial cell state; None for zeros.
        """
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise TypeError(
                "stacked recurrent layers take batches of sequences that are not packed"
            )
        cell = cast(Cell, {"LSTM": "lstm", "GRU": "gru"}.get(self.mode) or self.mode[4:].lower())
        weights: list[list[Tensor]]  # of every layer and direction
        weights = [[getattr(self, name) for name in names] for names in self._all_weights]
        kind, clients, directions = weights[0][0].dtype, len(weights[0][0]), 1 + self.bidirectional
        # [K, T, B, F]
        x = x.to(kind).unflatten(0 if self.batch_first else 1, (clients, -1))
        x = x.transpose(1, 2) if self.batch_first else x.transpose(0, 1)
        if states is None:
            zeros = x.new_zeros(clients, x.shape[2], self.hidden_size)
            first = [[zeros] * len(weights) for _ in range(1 + (cell == "lstm"))]
        else:
            first = [list(state.to(kind).unflatten(1, (clients, -1))) for state in states]
        last: list[list[Tensor]] = [[] for _ in first]
        x = x.contiguous()
        for number in range(0, len(weights), directions):
            if number and self.training and self.dropout:
                x = F.dropout(x, self.dropout)
            outputs = []
            for at in range(number, number + directions):
                c0 = first[1][at] if cell == "lstm" else None
                y, h, c = recurrent(cell, x, weights[at], first[0][at], c0, reverse=at > number)
                outputs.append(y)
                for ends, state in zip(last, (h, c), strict=False):
                    ends.append(cast(Tensor, state))
            x = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
        x = x.transpose(1, 2) if self.batch_first else x.transpose(0, 1)
        # [K, B, T, H] or [T, K, B, H]
        x = x.flatten(0, 1) if self.batch_first else x.flatten(1, 2)
        return x, [torch.stack(states).flatten(1, 2) for states in last]

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """Return the outputs and the last hidden state of a layer with one state."""
        y, (h,) = self.outputs_and_states(input, None if hx is None else (hx,))
        return y, h


class StackedLSTM(_StackedRecurrent, nn.LSTM):
    """`nn.LSTM` with weights [K, ...]."""

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, (h, c) = self.outputs_and_states(input, hx)
        return y, (h, c)


class StackedGRU(_StackedRecurrent, nn.GRU):  # type: ignore[misc]  # of its overloads
    """`nn.GRU` with weights [K, ...]."""


class StackedRNN(_StackedRecurrent, nn.RNN):  # type: ignore[misc]  # of its overloads
    """`nn.RNN` with weights [K, ...]."""


class StackedMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with weights [K, ...]; self or cross attention."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.ndim != 3:
            raise TypeError("stacked attention takes batches of sequences")
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        is_self = query is key and key is value
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        projected = self._project_self(query) if is_self else self._project(query, key, value)
        heads = [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected]
        # as torch has it, the hint replaces the mask where nothing else needs one
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = self._mask(None if causal else attn_mask, key_padding_mask, heads[0])
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            q, k, v = heads
            scores = q * q.shape[-1] ** -0.5 @ k.mT
            scores = scores if mask is None else scores + mask
            weights = F.dropout(scores.softmax(-1), dropout)
            mixed = weights @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            mixed = _attention(heads, mask, dropout, causal)
        y = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return (y if self.batch_first else y.transpose(0, 1)), weights

    def _project_self(self, x: Tensor) -> Sequence[Tensor]:
        if not self._qkv_same_embed_dim:
            return self._project(x, x, x)
        rows = x.reshape(len(self.in_proj_weight), -1, x.shape[-1]).to(self.in_proj_weight.dtype)
        y = products(rows, self.in_proj_weight, self.in_proj_bias)
        return y.view(*x.shape[:-1], -1).chunk(3, dim=-1)

    def _project(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Return query, key and value; each has its own weight, or a third of a common one."""
        if self._qkv_same_embed_dim:
            weights: Sequence[Tensor] = self.in_proj_weight.chunk(3, dim=1)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases: Sequence[Any] = [None] * 3
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias[:, None].chunk(3, dim=-1)
        results = []
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            rows = x.reshape(len(weight), -1, x.shape[-1]).to(weight.dtype)
            y = torch.bmm(rows, weight.mT)
            y = y if bias is None else y + bias
            results.append(y.view(*x.shape[:-1], -1))
        return results

    def _mask(self, mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """Return what is added to the scores: of [L, S] or [N * heads, L, S], and of [N, S]."""
        if mask is not None:
            mask = _added(mask, like)
            mask = mask.unflatten(0, (-1, self.num_heads)) if mask.ndim == 3 else mask
        if padding is not None:
            padding = _added(padding, like)[:, None, None]
            return padding if mask is None else mask + padding
        return mask


def _attention(
    heads: Sequence[Tensor], mask: Tensor | None, dropout: float, causal: bool
) -> Tensor:
    """Return the attention of q, k and v [N, heads, T, D]; plain where bits must repeat."""
    q, k, v = heads
    plain = q.is_cuda and torch.are_deterministic_algorithms_enabled()
    with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as what is added to scores: -inf where a truth value excludes."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill(mask, -torch.inf)


class StackedTransformerEncoderLayer(nn.TransformerEncoderLayer):
    """A layer whose parts are stacked; without the fused kernel of evaluation."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        attention = self.self_attn
        time_first = not attention.batch_first
        x = src.transpose(0, 1) if time_first else src

        def attend(x: Tensor) -> Tensor:
            x = x.transpose(0, 1) if time_first else x
            masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
            y = attention(x, x, x, **masks, need_weights=False, is_causal=is_causal)[0]
            return cast(Tensor, self.dropout1(y.transpose(0, 1) if time_first else y))

        if self.norm_first:
            x = x + attend(self.norm1(x))
            x = x + self._ff_block(self.norm2(x))
        else:
            x = self.norm1(x + attend(x))
            x = self.norm2(x + self._ff_block(x))
        return x.transpose(0, 1) if time_first else x


class StackedTransformerEncoder(nn.TransformerEncoder):
    """A sequence of stacked layers; without nested tensors, and masks are not read on the host."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        time_first = False
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, is_causal=is_causal is True)
            time_first = not layer.self_attn.batch_first
        if self.norm is None:
            return src
        if time_first:
            return cast(Tensor, self.norm(src.transpose(0, 1)).transpose(0, 1))
        return cast(Tensor, self.norm(src))


STACKED_SEQUENCE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: StackedEmbedding,
    nn.LayerNorm: StackedLayerNorm,
    nn.LSTM: StackedLSTM,
    nn.GRU: StackedGRU,
    nn.RNN: StackedRNN,
    nn.MultiheadAttention: StackedMultiheadAttention,
}
# Layers without weights of their own, whose forward must be that of the stacked parts.
STACKED_CONTAINERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.TransformerEncoderLayer: StackedTransformerEncoderLayer,
    nn.TransformerEncoder: StackedTransformerEncoder,
}
