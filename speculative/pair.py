"""The Python door: load a target and a draft, generate.

    import speculative
    pair = speculative.load_pair()  # the shipped pair
    for generation in pair.generate(["In the beginning God created the heaven and the earth."]):
        print(generation.text, generation.tokens_per_target_run)

Text is tokenised by SentencePiece alone: no TensorFlow, SeqIO or gin is needed.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from speculative import sampling
from speculative.checkpoints import t5x as t5x_checkpoints
from speculative.data import vocabulary as vocabularies
from speculative.decoding import loop
from speculative.decoding.autoregressive import autoregressive
from speculative.decoding.round import ENDED_BY_EOS, Decoder, Request
from speculative.drafts.model import ModelDraft
from speculative.errors import ConfigError, VocabularyError
from speculative.models.config import (
    T5Config,
    config_from_shapes,
    parameter_count,
    parameter_shapes,
)
from speculative.models.language_model import T5LanguageModel

ASSETS = pathlib.Path(__file__).resolve().parent / "assets"
SHIPPED = "kjv_web"
# Inputs are padded to a multiple of this, so that texts of similar length share a compilation.
_INPUT_STEP = 32
# What matrices may be kept in.
WEIGHTS_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its weights on the device.

    Attributes:
      name: for tables and records.
      model: static, hashable.
      weights: prepared for this backend.
      parameters: how many.
      checkpoint: where they came from.
    """

    name: str
    model: T5LanguageModel
    weights: Any
    parameters: int
    checkpoint: str


def read_parameters(
    checkpoint: str | os.PathLike[str], config: T5Config | None = None, *, dtype: str = "float32"
) -> tuple[T5Config, dict[str, Any]]:
    """A T5X checkpoint's configuration and its parameters, a float32 tree.

    Args and errors as in `load_model`.
    """
    if config is None:
        infos = t5x_checkpoints.tensor_shapes(checkpoint)
        config = config_from_shapes({k: v.shape for k, v in infos.items()}, dtype=dtype)
    params = t5x_checkpoints.read(checkpoint, shapes=parameter_shapes(config), dtype="float32")
    return config, params


def load_model(
    checkpoint: str | os.PathLike[str],
    *,
    config: T5Config | None = None,
    name: str | None = None,
    dtype: str = "float32",
    layout: str | None = None,
    weights_dtype: str | None = None,
) -> LoadedModel:
    """Read a T5X checkpoint and lay its weights out for decoding.

    Args:
      checkpoint: a model directory (its latest step) or a step directory.
      config: of the model; None reads it off the checkpoint's shapes.
      name: for tables and records; None takes the directory's.
      dtype: of activations and weights where `config` is None, else `config.dtype` holds.
      layout: see `models.weights`; None takes what suits the backend.
      weights_dtype: that matrices are kept in (see `models.weights.prepare`); None as activations.

    Raises:
      CheckpointError: absent, unfinished, damaged, or of another shape than `config`.
    """
    config, params = read_parameters(checkpoint, config, dtype=dtype)
    if weights_dtype is not None and weights_dtype not in WEIGHTS_DTYPES:
        raise ConfigError(
            f"weights_dtype of {os.fspath(checkpoint)}",
            expected=f"one of {', '.join(WEIGHTS_DTYPES)}",
            found=weights_dtype,
        )
    model = T5LanguageModel(config, layout, weights_dtype)
    return LoadedModel(
        name=name or pathlib.Path(os.fspath(checkpoint)).name,
        model=model,
        weights=model.prepare(params),
        parameters=parameter_count(config),
        checkpoint=os.fspath(checkpoint),
    )


@dataclasses.dataclass(frozen=True)
class Generation:
    """One output.

    Attributes:
      text: decoded up to the end of sequence.
      tokens: emitted ids, EOS included.
      ended: `eos` or `budget`.
      target_runs, accepted, proposed: what it took (accepted and proposed are 0 autoregressively).
    """

    text: str
    tokens: tuple[int, ...]
    ended: str
    target_runs: int
    accepted: int
    proposed: int

    @property
    def tokens_per_target_run(self) -> float:
        """Emitted tokens per run of the target."""
        return len(self.tokens) / max(self.target_runs, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A target and a draft with one vocabulary."""

    target: LoadedModel
    draft: LoadedModel
    vocabulary: vocabularies.Vocabulary

    @property
    def weights(self) -> Mapping[str, Any]:
        """What the decoding functions take."""
        return {"target": self.target.weights, "draft": self.draft.weights}

    def decoder(self, *, gamma: int, max_length: int, mode: str) -> Decoder:
        """A decoder of this pair; gamma 0 is autoregressive."""
        return Decoder(
            target=self.target.model,
            draft=ModelDraft(self.draft.model) if gamma else None,
            gamma=gamma,
            max_length=max_length,
            mode=mode,
            eos_id=self.vocabulary.eos_id,
        )

    def generate(
        self,
        texts: Sequence[str],
        *,
        max_length: int = 96,
        gamma: int = 7,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        bias: Mapping[int, float] | None = None,
        forbidden_ids: Sequence[int] = (),
        seed: int = 0,
        speculative: bool = True,
    ) -> list[Generation]:
        """Decode all texts in one batch.

        Args:
          texts: inputs; the end of sequence is added.
          max_length: most tokens of an output.
          gamma: drafted tokens per target run.
          temperature: 0 is greedy; top_k, top_p, min_p, bias, forbidden_ids as in `sampling`.
          seed: of the draws. Row i draws from the key of example i: the output of a text depends
            on its place in `texts` and on the seed, not on the other texts.
          speculative: False decodes autoregressively; the law of the outputs is the same.

        Returns:
          One generation per text, in order.
        """
        if isinstance(texts, str):
            raise ConfigError("generate(texts)", expected="a list of texts", found="one string")
        if gamma < 1:
            raise ConfigError(
                "generate(gamma)",
                expected="1 or more",
                found=gamma,
                mend="speculative=False decodes autoregressively",
            )
        if not texts:
            return []
        mode = "greedy" if temperature == 0 else "sampled"
        decoder = self.decoder(gamma=gamma, max_length=max_length, mode=mode)
        if not speculative:
            decoder = autoregressive(decoder)
        request = make_request(
            pad_inputs([self.vocabulary.encode(text, add_eos=True) for text in texts]),
            max_length=max_length,
            settings=sampling.make(
                len(texts),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                bias=dict(bias) if bias else None,
                forbidden_ids=forbidden_ids,
                vocab_size=self.target.model.vocab_size,
            ),
            seed=seed,
        )
        output = loop.decode(decoder, self.weights, request)
        counts = output.statistics
        generations = []
        for i, length in enumerate(output.lengths):
            tokens = tuple(int(t) for t in output.tokens[i, :length])
            generations.append(
                Generation(
                    text=self.vocabulary.decode(tokens),
                    tokens=tokens,
                    ended="eos" if output.end_reason[i] == ENDED_BY_EOS else "budget",
                    target_runs=int(counts.target_runs[i]),
                    accepted=int(counts.accepted[i]),
                    proposed=int(counts.proposed[i]),
                )
            )
        return generations


def pad_inputs(rows: Sequence[Sequence[int]], multiple: int = _INPUT_STEP) -> np.ndarray:
    """[B, S] int32, padded with 0 to a multiple of `multiple`."""
    longest = max(max((len(r) for r in rows), default=1), 1)
    width = -(-longest // multiple) * multiple
    padded = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def make_request(
    inputs,
    *,
    max_length: int,
    settings: sampling.Sampling,
    seed: int = 0,
    example_ids=None,
    sample_index: int = 0,
) -> Request:
    """A request for a batch of padded inputs [B, S], every row with the whole budget."""
    batch = len(inputs)
    ids = jnp.arange(batch) if example_ids is None else jnp.asarray(example_ids)
    return Request(
        inputs=jnp.asarray(inputs, jnp.int32),
        budgets=jnp.full((batch,), max_length, jnp.int32),
        sampling=settings,
        keys=sampling.row_keys(
            sampling.base_key(seed),
            ids.astype(jnp.int32),
            jnp.full((batch,), sample_index, jnp.int32),
        ),
    )


def check_vocabulary(vocabulary: vocabularies.Vocabulary, models: Sequence[LoadedModel]) -> None:
    """Refuse a vocabulary that a model has no row for, or that is far smaller than the model's,
    and models (the target first) of different widths.

    T5's public models have 32,128 rows for 32,100 ids: rows up to the next multiple of 128 are
    padding; more than that means that the model was trained with another vocabulary.
    """
    for loaded in models:
        width = loaded.model.vocab_size
        if vocabulary.size > width or width - vocabulary.size >= 128:
            raise VocabularyError(
                f"The vocabulary {vocabulary.path} does not fit {loaded.name}",
                expected=f"{max(width - 127, 1)} to {width} ids",
                found=vocabulary.size,
                mend="Give the vocabulary that the checkpoint was trained with",
            )
    target, *drafts = (loaded.model.vocab_size for loaded in models)
    if any(width != target for width in drafts):
        raise ConfigError(
            "The draft's vocabulary",
            expected=f"the target's width {target}",
            found=", ".join(map(str, drafts)),
            mend="Use a draft with the target's vocabulary",
        )


def load_pair(
    target: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    vocabulary: str | os.PathLike[str] | None = None,
    *,
    target_config: T5Config | None = None,
    draft_config: T5Config | None = None,
    dtype: str = "float32",
    draft_weights_dtype: str | None = None,
) -> Pair:
    """Load a pair of T5X checkpoints; without arguments, the one that the package ships.

    Args:
      target, draft: checkpoints; both or neither.
      vocabulary: a SentencePiece model; needed with checkpoints of your own.
      target_config, draft_config: None reads them off the checkpoints.
      dtype: of activations and weights where no configuration is given.
      draft_weights_dtype: that the draft's matrices are kept in; None as activations are, and for
        the shipped draft as its checkpoint has them, in bfloat16.

    Raises:
      CheckpointError, VocabularyError, ConfigError: one line each.
    """
    if (target is None) != (draft is None) or (target is not None and vocabulary is None):
        raise ConfigError(
            "load_pair",
            expected="target, draft and vocabulary together, or none of them (the shipped pair)",
            found=f"target={target!r}, draft={draft!r}, vocabulary={vocabulary!r}",
        )
    if target is None:
        target, draft = ASSETS / SHIPPED / "target", ASSETS / SHIPPED / "draft"
        vocabulary = vocabulary or vocabularies.EMBEDDED_PATH
        draft_weights_dtype = draft_weights_dtype or "bfloat16"
    words = vocabularies.load(vocabulary)
    models = [
        load_model(target, config=target_config, name="target", dtype=dtype),
        load_model(
            draft,
            config=draft_config,
            name="draft",
            dtype=dtype,
            weights_dtype=draft_weights_dtype,
        ),
    ]
    check_vocabulary(words, models)
    return Pair(models[0], models[1], words)
