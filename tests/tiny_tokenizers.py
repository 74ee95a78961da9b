"""Tokenizers small enough to train in a test."""

from __future__ import annotations

import io
import json
from pathlib import Path

TEXT = "".join(
    f"def f{i}(x):\n    return x * {i} + {i * i}  # naïve, né en été {i}\n" for i in range(300)
)


def hugging_face(folder: Path, *, end: str | None = "<|endoftext|>", vocab: int = 400) -> Path:
    """A byte-level BPE as GPT-2's, saved as tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[end] if end else [],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    inner.save(str(path))
    return path


def name_end(folder: Path, token: object) -> None:
    """Write the tokenizer_config.json that names the end token."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))


def sentence_piece(folder: Path, **options: object) -> Path:
    """A unigram model, saved as tokenizer.model."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        vocab_size=200,
        minloglevel=2,
        byte_fallback=False,
        **options,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path
