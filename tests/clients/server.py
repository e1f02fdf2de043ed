"""`qjax` with a model that follows scripts.

The embedded model has 1 M parameters and knows the tools of its training only: it cannot work with the tools of an agent client. So
here, and only here, the choice of a token is taken from it: where a script (script.py) stands in the prompt, the next token is the
script's. Every row is still forwarded by the engine, and rendering, alignment, caches, parsing and streaming are the server's own.
Where no script stands (titles, summaries) the tokens are the model's.

python -m tests.clients.server serve ...
"""

import dataclasses
import sys

import qjax.generation
from qjax import cli
from qjax.engine import Engine
from qjax.generation import Generation
from qjax.sampling import Sampling, sample
from tests.clients.script import answer
from tests.serving.talk import spell

PIECE = 7
"""Characters of the pieces that a script is encoded in. So its tokens are others than the client's copy of the answer would be encoded
in, as a model's own are: what is not taken from the rows of the answer does not match them."""


@dataclasses.dataclass(frozen=True)
class Scripted(Sampling):
    """script: the answer's tokens, the one that ends it with them."""

    script: tuple[int, ...] = ()


_generate = Engine.generate


def generate(engine: Engine, tokens, *args, sampling: Sampling | None = None, **options) -> Generation:
    tokenizer = engine.model.tokenizer
    text = answer(tokenizer.decode(tokens))
    if text is not None:
        script = (*spell(text, [PIECE]), tokenizer.special["<|im_end|>"])
        sampling = Scripted(**dataclasses.asdict(sampling or Sampling()), script=script)
    return _generate(engine, tokens, *args, sampling=sampling, **options)


def choose(logits, sampling: Sampling, history, draw: int, allowed: int) -> int:
    if isinstance(sampling, Scripted) and draw < len(sampling.script):
        return sampling.script[draw]
    return sample(logits, sampling, history, draw, allowed)


if __name__ == "__main__":
    Engine.generate, qjax.generation.sample = generate, choose
    sys.exit(cli.entry())
