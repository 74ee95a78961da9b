"""What a trained model writes, shown at the end of its run."""

from __future__ import annotations

from jaxpar.sample import Choice, Sampler
from jaxpar.state import TrainState
from jaxpar.train.job import Job

_TEMPERATURE = 0.8
"""A small model's own odds are wide enough to hide what it knows."""

_SHOWN = 120
"""Characters of the prompt that are shown."""


def continuation(job: Job, state: TrainState) -> tuple[str, str]:
    """The end of a held-out text, and what the model writes after it."""
    config, tokenizer = job.config, job.dataset.tokenizer
    sampler = Sampler(
        config.model,
        job.par.mesh,
        state.params,
        precision=config.precision,
        vocab=tokenizer.vocab,
    )
    first = job.dataset.heldout.batch(0)
    prompt = first["tokens"][0]
    if "segments" in first:
        prompt = prompt[first["segments"][0] == 1]
    end = tokenizer.end
    choice = Choice(temperature=_TEMPERATURE)
    [out] = sampler.generate(
        [prompt], config.sample_tokens, choice=choice, seed=config.seed, end=end
    )
    text = tokenizer.decode([int(t) for t in prompt if t != end])
    return text[-_SHOWN:], tokenizer.decode(out)
