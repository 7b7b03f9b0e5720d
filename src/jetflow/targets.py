"""Target: the frozen model, with everything that jetflow needs of it behind one small interface.

Dimension key: B batch, S sequence, V vocabulary, H hidden size, k tapped layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from jetflow.caches import TreeCache
from jetflow.chat import chat_ids
from jetflow.paged_cache import PagedTreeCache, PagePool
from jetflow.target_checks import check_supported, checked_attention


class Target:
    """A frozen causal language model of transformers.

    Args:
        model: decoder-only model with attention layers only. Its config, mode and gradients flags are left as they are.
        tokenizer: needed for text prompts and text results only.
        attention: transformers' attention implementation for prefill and plain passes (`"sdpa"`, `"eager"`,
            `"flash_attention_2"`); the model's own when absent. Tree passes use jetflow's, in plain PyTorch, or its Triton
            kernel with `"triton"`; prompts then run through the model's own.

    Raises:
        ValueError: the model is recurrent, hybrid, an encoder-decoder or split over devices, uses a setting that tree
            passes do not cover, or `attention` is not installed.

    Example:
        >>> target = Target.from_pretrained("models/tiny/target")  # doctest: +SKIP
        >>> target.num_layers  # doctest: +SKIP
        6
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, attention: str | None = None):
        check_supported(model)
        self.model = model
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        own = self.config._attn_implementation
        if attention == "triton" and find_spec("triton") is None:
            raise ValueError("attention='triton' needs the triton package: pip install 'jetflow[triton]'")
        self.tree_kernel = "triton" if attention == "triton" else "torch"
        self.attention = checked_attention(attention) if attention not in (None, "triton") else own
        self.decoder = model.get_decoder()
        self._input_weight = cast(Tensor, model.get_input_embeddings().weight)
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        attention: str = "sdpa",
    ) -> Target:
        """Loads model and tokenizer from a local folder or from the hub.

        Args:
            name_or_path: folder or hub name.
            dtype: dtype of the weights; that of the checkpoint when absent.
            device: where to put the model; the CPU when absent.
            attention: see the class.

        Raises:
            ValueError: as for the class.
            OSError: nothing loadable is found under the name.
        """
        model = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            dtype=dtype or "auto",
            attn_implementation="sdpa" if attention == "triton" else checked_attention(attention),
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        except (OSError, ValueError):
            # A folder without tokenizer files is fine for token-id prompts; text prompts then raise.
            tokenizer = None
        cast(torch.nn.Module, model).to(device or "cpu").eval()
        return cls(model, tokenizer, attention=attention)

    @property
    def vocab_size(self) -> int:
        """Rows V of the output embedding."""
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width H of the hidden states."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_hidden_layers

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._input_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._input_weight.dtype

    @property
    def max_positions(self) -> int:
        """Most tokens that the model is made for."""
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, from the generation config or else the config; empty when there are none."""
        generation = getattr(self.model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        eos = self.config.eos_token_id if eos is None else eos
        if eos is None:
            return ()
        return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)

    def chat_ids(self, text: str) -> list[int]:
        """Returns the token ids of a chat with one user turn, ready for the answer.

        Raises:
            ValueError: there is no tokenizer, or it has no chat template.
        """
        return chat_ids(self.tokenizer, [{"role": "user", "content": text}])

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the input embeddings [..., H] of `token_ids` int64 [...]."""
        return self.model.get_input_embeddings()(token_ids)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., V] of final-normed hidden states [..., H]."""
        return self.model.get_output_embeddings()(hidden)

    def output_rows(self, token_ids: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """Returns weight [R, H] and bias [R] or None of the output embedding for `token_ids` int64 [R], without gradients."""
        module = self.model.get_output_embeddings()
        bias = getattr(module, "bias", None)
        return module.weight.detach()[token_ids], None if bias is None else bias.detach()[token_ids]

    def new_cache(self, batch_size: int, capacity: int) -> TreeCache:
        """Returns an empty cache for this model."""
        return TreeCache(batch_size=batch_size, capacity=capacity, **self._cache_sizes())

    def new_page_pool(self, num_pages: int, page_size: int = 16) -> PagePool:
        """Returns memory for paged caches of this model: `num_pages` pages of `page_size` tokens.

        Raises:
            ValueError: a number is below 1.
        """
        return PagePool(num_pages=num_pages, page_size=page_size, **self._cache_sizes())

    def _cache_sizes(self) -> dict[str, Any]:
        config = self.config
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "dtype": self.dtype,
            "device": self.device,
        }

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raises ValueError where a tapped layer does not exist."""
        wrong = [tap for tap in taps if not 0 <= tap < self.num_layers]
        if wrong:
            raise ValueError(f"taps={list(taps)}: layer {wrong[0]} must be in [0, {self.num_layers})")

    @torch.no_grad()
    def features(self, token_ids: Tensor, taps: Sequence[int], document_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Runs whole sequences without a cache, as training needs it.

        Args:
            token_ids: int64 [B, S].
            taps: tapped layers; layer L means the output of decoder layer L, before any final norm.
            document_ids: int64 [B, S], equal within a document, for rows that hold several; documents do not see each
                other and each starts at position 0.

        Returns:
            The tapped outputs, concatenated [B, S, k * H], and the final-normed hidden states [B, S, H], whose `lm_head`
            gives the logits.

        Raises:
            ValueError: a tap is outside the target.
        """
        self.check_taps(taps)
        arguments: dict[str, Any] = {}
        if document_ids is not None:
            # transformers reads the borders of documents off positions that start again.
            arguments["position_ids"] = _document_positions(document_ids)
        with _capture(self.decoder.layers, taps) as captured, self._attention(self.attention):
            final = self.decoder(input_ids=token_ids, use_cache=False, **arguments).last_hidden_state
        if not taps:
            return final.new_zeros(*token_ids.shape, 0), final
        return torch.cat([captured[tap] for tap in taps], dim=-1), final

    def forward(
        self,
        token_ids: Tensor,
        *,
        taps: Sequence[int] = (),
        cache: TreeCache | PagedTreeCache | None = None,
        attention: str | None = None,
        **model_arguments: Any,
    ) -> tuple[Tensor, Tensor]:
        """One pass of the model: `token_ids` int64 [B, S] to logits [B, kept, V] and features [B, S, k * H].

        `model_arguments` are those of the model's own forward (positions, masks, `logits_to_keep`).
        """
        self.check_taps(taps)
        if cache is not None:
            model_arguments = {self._cache_argument: cache, "use_cache": True, **model_arguments}
        with _capture(self.decoder.layers, taps) as captured, self._attention(attention or self.attention):
            logits = self.model(input_ids=token_ids, **model_arguments).logits
        if not taps:
            return logits, logits.new_zeros(*token_ids.shape, 0)
        return logits, torch.cat([captured[tap] for tap in taps], dim=-1)

    @contextmanager
    def _attention(self, implementation: str) -> Iterator[None]:
        """Sets the attention of the model for one pass, so that the user's config stays as it was."""
        before = self.config._attn_implementation
        if before == implementation:
            yield
            return
        self.config._attn_implementation = implementation
        try:
            yield
        finally:
            self.config._attn_implementation = before


def _document_positions(document_ids: Tensor) -> Tensor:
    """Position of each token within its document, int64 [B, S]."""
    places = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - torch.where(starts, places, 0).cummax(dim=1).values


@contextmanager
def _capture(layers: nn.ModuleList, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collects the outputs of the tapped layers for one pass; the hooks are gone afterwards."""
    captured: dict[int, Tensor] = {}

    def hook_for(tap: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            captured[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[tap].register_forward_hook(hook_for(tap)) for tap in dict.fromkeys(taps)]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
