"""The evaluate run: a pair on a task, speculative beside autoregressive, into one record.

For every temperature: gamma is chosen on the validation split; the test examples are decoded both
ways in interleaved repeats; alpha is measured on what the target generated; the round's parts are
timed on their own for the two predictions. `record.json`, the predictions and `report.html` are
written to the output folder.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from speculative import pair as pairs
from speculative import records
from speculative.analysis import estimation
from speculative.data import tasks
from speculative.decoding.autoregressive import autoregressive
from speculative.decoding.round import ENDED_BY_EOS
from speculative.errors import ConfigError
from speculative.models.config import T5Config
from speculative.models.language_model import T5LanguageModel
from speculative.models.weights import bytes_per_step
from speculative.reports import page, tables, terminal
from speculative.runs import measure, outputs, progress
from speculative.runs.bench import Bench, alpha_of, choose_gamma


@dataclasses.dataclass(frozen=True)
class Model:
    """Where a model comes from.

    Attributes:
      checkpoint_path: a T5X checkpoint: a model directory (latest step) or a step directory.
      config: its configuration; None reads it off the checkpoint.
      name: for tables and records; None takes the directory's name.
      dtype: of activations where `config` is None.
      weights_dtype: that the matrices are kept in; None as activations are. With bfloat16 a draft
        costs half the memory traffic; the output's law is the target's whatever the draft is.
    """

    checkpoint_path: str
    config: T5Config | None = None
    name: str | None = None
    dtype: str = "float32"
    weights_dtype: str | None = None

    def load(self) -> pairs.LoadedModel:
        """Read the checkpoint (CheckpointError: one line on what is wrong with it)."""
        return pairs.load_model(
            self.checkpoint_path,
            config=self.config,
            name=self.name,
            dtype=self.dtype,
            weights_dtype=self.weights_dtype,
        )


def evaluate(
    *,
    target: Model,
    draft: Model,
    mixture_or_task_name: str,
    task_feature_lengths: dict[str, int],
    output_dir: str,
    vocabulary_path: str | None = None,
    split: str = "test",
    num_examples: int | None = 96,
    batch_size: int = 1,
    temperatures: Sequence[float] = (0.0, 1.0),
    top_k: int = 0,
    top_p: float = 1.0,
    gammas: Sequence[int] = (3, 5, 7, 11),
    validation_split: str = "validation",
    validation_examples: int = 8,
    repeats: int = 5,
    buckets: Sequence[int] | None = (24, 32, 40, 48, 64),
    traces: int = 4,
    seed: int = 0,
    mixture_or_task_module: str | None = None,
) -> records.Record:
    """Evaluate a pair on a task.

    Args:
      target, draft: the models (`Model`).
      mixture_or_task_name: a SeqIO task.
      task_feature_lengths: most tokens of `inputs` and `targets`; the latter is the budget.
      output_dir: gets record.json, report.html and `<task>-temperature<T>.jsonl`.
      vocabulary_path: a SentencePiece model; None takes the task's own.
      split, num_examples: what to evaluate; None takes all of the split.
      batch_size: rows decoded together.
      temperatures: one setting each; 0 is greedy.
      top_k, top_p: 0 and 1 are off.
      gammas: candidates; the fastest on `validation_examples` of `validation_split` is used.
      repeats: interleaved pairs of repeats behind the speed-up's interval.
      buckets: widths of padded inputs, to compile few shapes and pad little.
      traces: examples whose rounds are shown in the report.
      seed: of the draws.
      mixture_or_task_module: a module to import first, because it registers the task.

    Returns:
      The record, as written.

    Raises:
      UserError: what is wrong with a checkpoint, vocabulary, task or setting, in one line.
    """
    _check(locals())
    gammas = sorted(set(gammas))
    tasks.import_module(mixture_or_task_module)
    task = tasks.get_task(mixture_or_task_name, vocabulary=vocabulary_path)
    tasks.check_prepared(task, split)
    loaded = (target.load(), draft.load())
    vocabulary = pairs.vocabularies.load(outputs.vocabulary_path(task))
    pairs.check_vocabulary(vocabulary, loaded)
    bench = Bench(
        pair=pairs.Pair(loaded[0], loaded[1], vocabulary),
        task=task,
        lengths=task_feature_lengths,
        batch_size=batch_size,
        buckets=tuple(buckets) if buckets else None,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
        positions=task_feature_lengths["targets"] + max(gammas) + 1,
    )
    bandwidth = measure.read_bandwidth()
    test = bench.batches(split, num_examples)
    validation = bench.batches(validation_split, validation_examples) if len(gammas) > 1 else []
    settings = []
    for temperature in temperatures:
        setting = _evaluate_setting(
            bench,
            float(temperature),
            split=split,
            test=test,
            validation=validation,
            validation_split=validation_split,
            gammas=gammas,
            repeats=repeats,
            bandwidth=bandwidth,
            traces=traces,
            output_dir=output_dir,
        )
        settings.append(setting)
    config = epath.Path(output_dir) / "config.gin"  # The launcher's, if it was launched.
    record = records.Record(
        run_mode="evaluate",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        provenance=records.provenance(
            seed=seed,
            devices=[str(d) for d in jax.devices()],
            config_text=config.read_text() if config.exists() else None,
        ),
        target=_model_record(loaded[0]),
        settings=tuple(settings),
    )
    records.write_record(record, f"{output_dir}/record.json")
    page.write_page(record, f"{output_dir}/report.html")
    terminal.print_traces(record)
    tables.print_tables(record)
    return record


# Samples of the round's parts, taken between the timed decodes.
_PART_SAMPLES = 20

_EXPECTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "task_feature_lengths": (
        lambda v: set(v) == {"inputs", "targets"} and all(n >= 1 for n in v.values()),
        "tokens, 1 or more, for 'inputs' and 'targets'",
    ),
    "num_examples": (lambda v: v is None or v >= 1, "1 or more, or None for all"),
    "batch_size": (lambda v: v >= 1, "1 or more"),
    "temperatures": (
        lambda v: v and len(set(v)) == len(v) and all(0 <= t < math.inf for t in v),
        "one or more, each 0 or more and there once",
    ),
    "top_k": (lambda v: v >= 0, "0 or more"),
    "top_p": (lambda v: 0 <= v <= 1, "0 to 1"),
    "gammas": (
        lambda v: v and all(int(g) == g and g >= 1 for g in v),
        "one or more, each 1 or more",
    ),
    "validation_examples": (lambda v: v >= 1, "1 or more"),
    "repeats": (lambda v: v >= 1, "1 or more"),
    "traces": (lambda v: v >= 0, "0 or more"),
    "seed": (lambda v: 0 <= v < 2**32, "0 to 2**32 - 1"),
}


def _check(settings: Mapping[str, Any]) -> None:
    for name, (fine, expected) in _EXPECTED.items():
        if not fine(settings[name]):
            raise ConfigError(f"evaluate.{name}", expected=expected, found=settings[name])


def _model_record(loaded: pairs.LoadedModel) -> records.Model:
    return records.Model(
        loaded.name, loaded.parameters, loaded.checkpoint, loaded.model.weights_dtype
    )


def _memory_record(
    model: T5LanguageModel, bandwidth: float, loop_s: float, steps: int
) -> records.Memory:
    """How much of the bandwidth (bytes per second) `steps` target steps in `loop_s` seconds use."""
    kept = model.weights_dtype
    itemsize = jnp.dtype(kept or model.config.dtype).itemsize
    step_bytes = bytes_per_step(model.config, itemsize, logits_itemsize=itemsize if kept else 4)
    share = None
    if loop_s > 0:  # Else too short to say: the encoders alone took as long.
        share = step_bytes * steps / loop_s / bandwidth
    return records.Memory(bandwidth / 1e9, share, step_bytes)


def _evaluate_setting(
    bench: Bench,
    temperature: float,
    *,
    split: str,
    test,
    validation,
    validation_split: str,
    gammas,
    repeats: int,
    bandwidth: float,
    traces: int,
    output_dir: str,
) -> records.Setting:
    pair = bench.pair
    gamma, search = choose_gamma(bench, temperature, gammas, validation, validation_split)
    decoder = bench.decoder(gamma, temperature)
    requests = [bench.request(batch, temperature) for batch in test]
    compile_s = measure.warm_up((autoregressive(decoder), decoder), pair.weights, requests)
    widths = [r.inputs.shape[1] for r in requests]
    typical = requests[widths.index(max(set(widths), key=widths.count))]
    timer = measure.PartTimer(decoder, pair.weights, typical)
    total = repeats * len(requests)
    turns = itertools.count(1)
    with progress.bar(f"decode at temperature {temperature:g}, gamma {gamma}", total) as bar:

        def after_each():
            bar.advance()
            # As often as it takes to have all the samples at the end, and spread over the run.
            turn = next(turns)
            for _ in range(turn * _PART_SAMPLES // total - (turn - 1) * _PART_SAMPLES // total):
                timer.sample()

        times = measure.repeats(decoder, pair.weights, requests, repeats, after_each)
    done = outputs.collect(test, times, pair.vocabulary)
    alpha = alpha_of(bench, temperature, done)
    part = timer.parts()

    counts = outputs.totals(times.speculative)
    speedup = estimation.ratio_of_medians(times.baseline_s, times.speculative_s, bench.seed)
    c = estimation.ratio_of_medians(
        [t / gamma for t in part.propose_all], part.step_all, bench.seed
    )
    encoder_s = float(np.median(times.encoder_s))
    baseline_s = float(np.median(times.baseline_s))
    speculative_s = float(np.median(times.speculative_s))
    runs = counts.loop_runs
    draft_s, verify_s = runs * part.propose, runs * part.verify
    emitted_baseline = sum(int(o.lengths.sum()) for o in times.baseline)
    config = pair.target.model.config
    verify_ratio = part.verify / part.step
    # The baseline's loop: all of it that is not encoders.
    loop_s = baseline_s - float(np.median(times.baseline_encoder_s))
    steps = outputs.totals(times.baseline).loop_runs
    outputs.write_predictions(bench.task, temperature, done, output_dir)
    shown = [
        outputs.trace(decoder, pair, batch, request)
        for batch, request in list(zip(test, requests, strict=True))[:traces]
    ]
    return records.Setting(
        task=bench.task.name,
        split=split,
        num_examples=len(done),
        draft=_model_record(pair.draft),
        verifier=type(decoder.verifier).__name__,
        exact=decoder.verifier.exact,
        temperature=temperature,
        top_k=bench.top_k,
        top_p=bench.top_p,
        gamma=gamma,
        batch_size=bench.batch_size,
        dtype=config.dtype,
        precision=str(jax.config.jax_default_matmul_precision or "default"),
        alpha=records.Alpha(*alpha),
        acceptance_of_drafted=counts.accepted / counts.proposed if counts.proposed else None,
        tokens_per_target_run=counts.emitted / counts.target_runs,
        accepted_per_position=counts.accepted_per_position,
        c=records.Interval(*c[:3]),
        verify_ratio=verify_ratio,
        walltime=records.Walltime(
            autoregressive_s=baseline_s,
            speculative_s=speculative_s,
            per_token_ms=records.PerToken(
                autoregressive=1e3 * baseline_s / emitted_baseline,
                speculative=1e3 * speculative_s / counts.emitted,
            ),
            repeats=repeats,
            speedup=speedup.estimate,
            low=speedup.low,
            high=speedup.high,
            compile_s=compile_s,
            encoder_s=encoder_s,
            draft_s=draft_s,
            verify_s=verify_s,
            other_s=speculative_s - encoder_s - draft_s - verify_s,
            examples=len(done),
            tokens=counts.emitted,
        ),
        step_times=records.StepTimes(part.step, part.propose / gamma, part.verify),
        predicted_iid=estimation.predicted_iid(alpha.estimate, gamma, c.estimate, verify_ratio),
        predicted_parts=estimation.predicted_parts(
            baseline_s, encoder_s, runs, gamma, part.propose / gamma, part.verify
        ),
        identical_outputs=outputs.identical(bench, done, temperature),
        quality=outputs.quality(bench.task, done),
        emitted=counts.emitted,
        accepted=counts.accepted,
        proposed=counts.proposed,
        target_runs=counts.target_runs,
        draft_runs=counts.draft_runs,
        ended_on_draft=counts.ended_on_draft,
        ends=records.Ends(
            eos=sum(int((o.end_reason == ENDED_BY_EOS).sum()) for o in times.speculative),
            budget=len(done)
            - sum(int((o.end_reason == ENDED_BY_EOS).sum()) for o in times.speculative),
        ),
        memory=_memory_record(pair.target.model, bandwidth, loop_s, steps),
        gamma_search=search,
        examples=tuple(shown),
        note=outputs.note(bench.task),
    )
