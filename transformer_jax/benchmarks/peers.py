"""The systems that ours is measured beside; packages of the `bench` extra.

All of them hold a MarianMT with our weights (`marian.make_marian`) and run on CPUs.
"""

import contextlib
import importlib.util
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from transformer_jax.benchmarks.canvas import CANVAS_SYSTEMS
from transformer_jax.benchmarks.marian import NEVER
from transformer_jax.benchmarks.ours import KIND_SYSTEMS
from transformer_jax.benchmarks.report import cores
from transformer_jax.benchmarks.shape import Sources, Symbols
from transformer_jax.benchmarks.timing import Decoding
from transformer_jax.config import remedy

PACKAGES = {
    "jax": (),
    **dict.fromkeys([*KIND_SYSTEMS, *CANVAS_SYSTEMS], ()),
    "transformers": ("torch", "transformers"),
    "ctranslate2": ("torch", "transformers", "ctranslate2"),
    "ctranslate2-int8": ("torch", "transformers", "ctranslate2"),
    "torch": ("torch", "transformers"),
    "torch-compile": ("torch", "transformers"),
}


def why_missing(system: str) -> str | None:
    """Say in one line why a system cannot be measured here; None if it can."""
    packages = PACKAGES[system]
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        return f"{system}: {' and '.join(absent)} not installed: {remedy('bench')}"
    if packages and jax.default_backend() != "cpu":
        return f"{system}: measured on CPUs only, here is {jax.default_backend()}"
    return None


class TransformersDecoder:
    """`generate` of PyTorch's MarianMT: eager, float32, with a cache."""

    def __init__(self, model: Any, symbols: Symbols, max_length: int) -> None:
        import torch

        torch.set_num_threads(cores())
        self._model, self._symbols = model.eval(), symbols
        self._max_length = max_length
        self._end_bias = model.final_logits_bias[0, symbols.end_id].item()

    def prepare(self, sources: Sources, beam_size: int, natural: bool) -> Decoding:
        """Return the call that decodes these sources."""
        import torch
        import transformers

        settings = transformers.GenerationConfig(
            max_new_tokens=self._max_length,
            num_beams=beam_size,
            do_sample=False,
            length_penalty=1.0,
            pad_token_id=self._symbols.pad_id,
            eos_token_id=self._symbols.end_id,
            decoder_start_token_id=self._symbols.bos_id,
        )
        ids = torch.from_numpy(sources.ids.astype(np.int64))
        mask = torch.arange(ids.shape[1]) < torch.from_numpy(sources.lengths)[:, None]

        # Not by min_new_tokens, after which `generate` does not renormalise.
        end_bias = self._end_bias if natural else NEVER

        def call() -> Any:
            with torch.inference_mode():
                self._model.final_logits_bias[0, self._symbols.end_id] = end_bias
                return self._model.generate(
                    ids, attention_mask=mask.long(), generation_config=settings
                )

        return Decoding(call, lambda result: self._cut(result.tolist()))

    def _cut(self, rows: list[list[int]]) -> list[list[int]]:
        """Leave out what begins an output, and END and what stands behind it."""
        ends = {self._symbols.end_id, self._symbols.pad_id}
        outputs = []
        for row in rows:
            stop = next((n for n, t in enumerate(row[1:], 1) if t in ends), len(row))
            outputs.append(row[1:stop])
        return outputs


class CTranslate2Decoder:
    """CTranslate2's own runtime, converted from MarianMT."""

    def __init__(self, model: Any, max_length: int, compute_type: str) -> None:
        """Convert in a folder that is gone afterwards: the weights are in memory."""
        import ctranslate2

        with tempfile.TemporaryDirectory() as folder:
            _converter(model).convert(folder, force=True)
            self._translator = ctranslate2.Translator(
                folder,
                device="cpu",
                compute_type=compute_type,
                inter_threads=1,
                intra_threads=cores(),
            )
        self._max_length = max_length

    def prepare(self, sources: Sources, beam_size: int, natural: bool) -> Decoding:
        """Return the call that decodes these sources."""
        pairs = zip(sources.ids.tolist(), sources.lengths, strict=True)
        rows = [[str(i) for i in ids[:length]] for ids, length in pairs]

        def call() -> Any:
            return self._translator.translate_batch(
                rows,
                beam_size=beam_size,
                length_penalty=1.0,
                max_decoding_length=self._max_length,
                min_decoding_length=0 if natural else self._max_length,
            )

        return Decoding(
            call, lambda results: [[*map(int, r.hypotheses[0])] for r in results]
        )


class _Tokens:
    """The vocabulary as a tokenizer: every id's own digits, PAD last."""

    def __init__(self, config: Any) -> None:
        self.eos_token, self.unk_token, self.bos_token = "0", "1", None
        self.pad_token = "<pad>"
        self._count = config.vocab_size - 1

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return {**{str(n): n for n in range(self._count)}, self.pad_token: self._count}

    def convert_ids_to_tokens(self, number: int) -> str:
        """Return the token of an id."""
        return self.pad_token if number == self._count else str(number)


def _converter(model: Any) -> Any:
    """CTranslate2's converter of MarianMT, for a model in memory."""
    from ctranslate2.converters.converter import Converter
    from ctranslate2.converters.transformers import MarianMTLoader

    class InMemory(Converter):
        def _load(self) -> Any:
            return MarianMTLoader()(model, _Tokens(model.config))

    return InMemory()


class TorchTrainer:
    """A training step of PyTorch's MarianMT: AdamW, clipping, label smoothing."""

    def __init__(
        self,
        model: Any,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        clip: float,
        label_smoothing: float,
        compiled: bool,
    ) -> None:
        import torch

        torch.set_num_threads(cores())
        self._model, self._clip, self._smoothing = model.train(), clip, label_smoothing
        self._loss = torch.compile(self._eager_loss) if compiled else self._eager_loss
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=learning_rate,
            betas=betas,
            weight_decay=0.0,
            fused=True,
        )

    def prepare(self, source: Any, inputs: Any, labels: Any) -> Callable[[], float]:
        """Return the call that makes one update on int arrays `[B, S]`, `[B, T]`."""
        import torch

        batch = [
            torch.from_numpy(np.array(array, np.int64))
            for array in (source, inputs, labels)
        ]

        def call() -> float:
            self._optimizer.zero_grad(set_to_none=True)
            loss = self._loss(*batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
            self._optimizer.step()
            return loss.item()

        return call

    def _eager_loss(self, source: Any, inputs: Any, labels: Any) -> Any:
        import torch

        logits = self._model(
            input_ids=source, decoder_input_ids=inputs, use_cache=False
        ).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=self._smoothing
        )


class _OverTime(BaseException):
    """Passes through compilers, which take an Exception for a reason to give up."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the time is over."""

    def stop(*_: Any) -> None:
        raise _OverTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    except _OverTime:
        raise TimeoutError(f"took longer than {seconds} s") from None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
